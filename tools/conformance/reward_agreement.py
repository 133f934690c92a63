"""Measure how often answer checkers agree with a careful reader, on tests/rewards/corpus.jsonl or on new rows.

    python tools/conformance/reward_agreement.py [--misses ours] [--rows FILE]

The checkers are ours, math-verify (with default settings, and as open-r1 calls it) and TRL's accuracy reward. The table
has the share of rows that get the reader's verdict: of all rows, of right and of wrong answers, and of the batches that
did not exist when our code was written. A gold answer that a checker cannot read is a miss. `--misses NAME` lists the
misses of NAME. The last line is JSON, with the number of wrong answers that each checker pays. A line of FILE has
"gold", "response", "correct" and "kind".
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from grpo_mega.paths import user_path
from grpo_mega.rewards.math.accuracy import accuracy

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # to run this file as a script

from tools.benchmarks import harness

CORPUS = Path(__file__).resolve().parents[2] / "tests" / "rewards" / "corpus.jsonl"


@dataclass(frozen=True)
class Row:
    source: str  # the dataset or model family whose style the row has
    family: str  # the special feature of the row
    gold: str
    response: str
    right: bool  # the verdict of a careful reader
    batch: int  # 1: used to write our code; 2 and 3: held out, scored once, then used for changes


def load_rows(path: Path = CORPUS) -> list[Row]:
    """Read the corpus. Split at newlines only, because a text may contain U+2028."""
    return [Row(**json.loads(line)) for line in path.read_text(encoding="utf-8").split("\n") if line]


def load_fresh_rows(path: Path) -> list[Row]:
    """Read rows in the short form of FILE. Their author should not have read the code."""
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line.strip()]
    return [Row("fresh", line["kind"], str(line["gold"]), line["response"], bool(line["correct"]), 0) for line in lines]


def silence_peers() -> None:
    for name in ("math_verify", "latex2sympy2_extended"):
        logging.getLogger(name).setLevel(logging.CRITICAL)


def by_ours(rows: Sequence[Row]) -> list[float | None]:
    return [accuracy("", row.response, row.gold, {}).value for row in rows]


def by_math_verify(rows: Sequence[Row]) -> list[float | None]:
    from math_verify import parse, verify

    golds = [parse(_boxed(row.gold)) for row in rows]
    return [float(verify(gold, parse(row.response))) if gold else None for gold, row in zip(golds, rows, strict=True)]


def by_open_r1(rows: Sequence[Row]) -> list[float | None]:
    """Call math-verify as open-r1's accuracy reward does: only LaTeX, with boxes first."""
    from latex2sympy2_extended import NormalizationConfig
    from math_verify import LatexExtractionConfig, parse, verify

    normalization = NormalizationConfig(
        nits=False, malformed_operators=False, basic_latex=True, equations=True, boxed="all", units=True
    )
    config = LatexExtractionConfig(
        normalization_config=normalization, boxed_match_priority=0, try_extract_without_anchor=False
    )
    golds = [parse(_boxed(row.gold), extraction_mode="first_match") for row in rows]
    answers = [parse(row.response, extraction_config=[config], extraction_mode="first_match") for row in rows]
    return [float(verify(gold, answer)) if gold else None for gold, answer in zip(golds, answers, strict=True)]


def by_trl(rows: Sequence[Row]) -> list[float | None]:
    from trl.rewards import accuracy_reward

    completions = [[{"role": "assistant", "content": row.response}] for row in rows]
    return list(accuracy_reward(completions, [_boxed(row.gold) for row in rows]))


CHECKERS: dict[str, Callable[[Sequence[Row]], list[float | None]]] = {
    "ours": by_ours,
    "math-verify": by_math_verify,
    "open-r1": by_open_r1,
    "TRL": by_trl,
}


def agreement(rows: Sequence[Row], values: Sequence[float | None]) -> float:
    """Return the percentage of rows that get the reader's verdict."""
    return round(100 * sum(value == row.right for row, value in zip(rows, values, strict=True)) / len(rows), 1)


def _boxed(gold: str) -> str:
    return rf"$\boxed{{{gold}}}$"


@harness.benchmark
def main(arguments: list[str] | None) -> int:
    parser = harness.Parser(__doc__)
    parser.add_argument("--misses", choices=tuple(CHECKERS))
    parser.add_argument("--rows", type=user_path)
    options = parser.parse(arguments)
    harness.require("trl")
    silence_peers()
    rows = load_fresh_rows(options.rows) if options.rows else load_rows()
    parts = {
        "all": rows,
        "right": [row for row in rows if row.right],
        "wrong": [row for row in rows if not row.right],
        "batches 2, 3": [row for row in rows if row.batch > 1],
    }
    parts = {part: some for part, some in parts.items() if some}
    shares: dict[str, dict[str, float]] = {}
    wrong_paid: dict[str, int] = {}
    for name, check in CHECKERS.items():
        values = dict(zip(rows, check(rows), strict=True))  # equal rows have equal values
        shares[name] = {part: agreement(some, [values[row] for row in some]) for part, some in parts.items()}
        wrong_paid[name] = sum(values[row] == 1.0 for row in rows if not row.right)
        for row in rows if name == options.misses else ():
            if values[row] != row.right:
                print(f"gold {row.gold!r}, right {row.right}, {name} {values[row]}: ...{row.response[-100:]!r}")
    table = [("", *(f"{part} ({len(some)})" for part, some in parts.items()))]
    table += [(name, *(f"{share:.1f}%" for share in found.values())) for name, found in shares.items()]
    versions = {package: version(package) for package in ("math-verify", "trl")}
    return harness.report(table, {"agreement": shares, "wrong_paid": wrong_paid, "versions": versions})


if __name__ == "__main__":
    harness.start(main)
