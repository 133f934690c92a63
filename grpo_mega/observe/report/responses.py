"""samples.jsonl and heldout-*.jsonl as the page shows them, within size limits.

If not everything fits, the page says so. It then shows the first and the last step with samples and evenly spaced steps between
them, held-out evaluations chosen in the same way, and the first prompts. Files are scanned for their steps, and only displayed
lines are parsed.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

from grpo_mega.json_lines import parse_json_line, read_json_lines
from grpo_mega.paths import heldout_files

MAX_SAMPLE_BYTES = 6 << 20  # maximum size of the samples in the page
MAX_SAMPLE_STEPS = 200
MAX_EVALUATIONS = 8
MAX_HELDOUT_PROMPTS = 300
MAX_TEXT = 20_000  # maximum number of characters of a held-out answer

T = TypeVar("T")
_STEP = re.compile(rb'\{"step": (-?\d+),')


def samples(path: Path) -> dict[str, Any]:
    """Return {"steps": [{"step", "groups": [{"prompt_id", "prompt", "answer", "samples"}]}], "note"}."""
    lines = _lines_by_step(path)
    steps = sorted(lines)
    if not steps:
        return {"steps": [], "note": ""}
    shown = [step for step in _even(steps, MAX_SAMPLE_STEPS) if lines[step]]
    while len(shown) > 2 and sum(size for step in shown for _, size in lines[step]) > MAX_SAMPLE_BYTES:
        shown = _even(shown, max(2, len(shown) * 3 // 4))
    found = []
    num_bytes = num_left_out = 0
    with path.open("rb") as file:
        for step in shown:
            records: list[dict[str, Any]] = []
            for start, size in lines[step]:
                if num_bytes + size > MAX_SAMPLE_BYTES and records:
                    num_left_out += 1
                    continue
                file.seek(start)
                record = parse_json_line(file.read(size))
                if record is not None:
                    records.append(record)
                num_bytes += size
            if records:
                found.append({"step": step, "groups": _groups(records)})
    notes = [f"{len(shown)} of {len(steps)} steps with samples"] if len(shown) < len(steps) else []
    notes += [f"{num_left_out} samples left out"] if num_left_out else []
    return {"steps": found, "note": f"in this page: {', '.join(notes)}; all are in samples.jsonl" if notes else ""}


def heldout(run_dir: Path) -> dict[str, Any]:
    """Return {"steps", "rows": [{"prompt", "answers": [{"ok", "scores", "response"} or None by step]}], "note"}."""
    files = heldout_files(run_dir)
    steps = _even(sorted(files), MAX_EVALUATIONS)
    rows: dict[Any, dict[str, Any]] = {}
    num_prompts: set[Any] = set()
    for place, step in enumerate(steps):
        seen: dict[Any, int] = defaultdict(int)
        for _, record in read_json_lines(files[step]):
            if record is None:
                continue
            name = (record.get("set"), record.get("id"))
            key = (name, seen[name])
            seen[name] += 1
            num_prompts.add(key)
            if key not in rows and len(rows) == MAX_HELDOUT_PROMPTS:
                continue
            head = {"prompt": str(record.get("prompt", "")), "gold": str(record.get("gold", "")), "set": record.get("set")}
            row = rows.setdefault(key, head | {"answers": [None] * len(steps)})
            row["answers"][place] = _answer(record)
    notes = [f"{len(steps)} of {len(files)} evaluations"] if len(steps) < len(files) else []
    notes += [f"{len(rows)} of {len(num_prompts)} answers"] if len(rows) < len(num_prompts) else []
    note = f"in this page: {', '.join(notes)}; all are in heldout-*.jsonl" if notes else ""
    return {"steps": steps, "rows": list(rows.values()), "note": note}


def _answer(record: dict[str, Any]) -> dict[str, Any]:
    """Return a greedy answer, or how many sampled answers were correct. `ok` is the share of correct answers, from 0 to 1."""
    scores, num_samples = record.get("scores") or {}, record.get("samples")
    marks = [v for v in scores.values() if isinstance(v, int | float)]
    ok = float(bool(marks) and min(marks) >= 1.0)
    solved = record.get("solved")
    if "response" not in record:
        ok = solved / num_samples if num_samples and solved is not None else 0.0
    text = str(record["response"])[:MAX_TEXT] if "response" in record else None
    return {"ok": ok, "scores": scores, "response": text, "solved": f"{solved}/{num_samples}" if num_samples else None}


def _lines_by_step(path: Path) -> dict[int, list[tuple[int, int]]]:
    """Return (offset, length) of the lines of each step. Skip a half-written last line."""
    found: dict[int, list[tuple[int, int]]] = defaultdict(list)
    if not path.exists():
        return found
    start = 0
    with path.open("rb") as file:
        for line in file:
            match = _STEP.match(line)
            if match and line.endswith(b"\n"):
                found[int(match[1])].append((start, len(line)))
            start += len(line)
    return found


def _groups(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    groups: dict[Any, dict[str, Any]] = {}
    for record in records:
        key = (record.get("group"), record.get("prompt_id"))
        head = {"prompt_id": record.get("prompt_id")} | {name: str(record.get(name) or "") for name in ("prompt", "answer")}
        groups.setdefault(key, head | {"samples": []})["samples"].append(_sample(record))
    return list(groups.values())


def _sample(record: dict[str, Any]) -> dict[str, Any]:
    """Return a sample as samples.js reads it, with the texts of tokens instead of their ends."""
    response, ends = str(record.get("response", "")), record.get("token_ends")
    tokens = [response[start:end] for start, end in zip([0, *ends], ends, strict=False)] if ends else None
    return {
        "index": record.get("index"),
        "version": record.get("policy_version"),
        "finish": record.get("finish_reason"),
        "reward": record.get("reward"),
        "rewards": record.get("rewards") or {},
        "verdicts": record.get("verdicts") or {},
        "a": record.get("advantages") or record.get("advantage"),
        "lp": record.get("rollout_logprobs"),
        "mm": record.get("mismatch"),
        "t": tokens,
        "response": None if tokens else response,
    }


def _even(items: Sequence[T], count: int) -> list[T]:
    """Return at most `count` of the items, evenly spaced, including the first and the last."""
    if len(items) <= count:
        return list(items)
    return [items[round(i * (len(items) - 1) / (count - 1))] for i in range(count)]
