"""The common part of the benchmarks: arguments, variants that take turns, medians, a table, a JSON line and the exit
code.

    options = Parser(__doc__).parse(arguments, repeat=1)  # after add_argument("--repeat", ...); it must be at least 1
    found = medians(take_turns({"ours": ours, "peer": peer}, options.repeat, warm_up=1))
    return report(rows, {"ratio": found["ours"]["seconds"] / found["peer"]["seconds"]}, limits={"ratio": 1.2})

A variant is a function that returns its figures by name. Each round runs all variants, every other round in reverse
order, so other work on the machine disturbs all of them alike. The last line of output is a JSON object. The exit code
is 0, or 1 if a figure is above its limit or a result is wrong, or 2 with one line for an error that the user can fix.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NoReturn

from grpo_mega.errors import EXIT_INTERRUPTED, EXIT_USER_ERROR, UserError
from grpo_mega.text import filter_output

ROOT = Path(__file__).resolve().parents[2]
Main = Callable[[list[str] | None], int]
Figures = dict[str, float]


class RunFailed(Exception):
    """A process of a benchmark failed. The message has the reason, or names its place."""


class Parser(argparse.ArgumentParser):
    """A parser whose help is the benchmark's docstring and whose errors are one line."""

    def __init__(self, doc: str | None) -> None:
        super().__init__(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)

    def error(self, message: str) -> NoReturn:
        self.exit(EXIT_USER_ERROR, f"{message}; see --help\n")

    def parse(self, arguments: Sequence[str] | None, **least: int) -> argparse.Namespace:
        """Parse. `least` has the least value of options that have one."""
        options = self.parse_args(arguments)
        for name, low in least.items():
            value = getattr(options, name)
            if value is not None and value < low:
                self.error(f"--{name.replace('_', '-')}={value} must be at least {low}")
        return options


def benchmark(main: Main) -> Callable[..., int]:
    """Wrap a benchmark's main: a UserError becomes its lines and exit code 2, RunFailed its message and exit code 1."""

    @functools.wraps(main)
    def wrapped(arguments: list[str] | None = None) -> int:
        try:
            return main(arguments)
        except UserError as error:
            print(*error.lines, sep="\n", file=sys.stderr)
            return EXIT_USER_ERROR
        except RunFailed as error:
            print(error, file=sys.stderr)
            return 1
        except KeyboardInterrupt:
            return EXIT_INTERRUPTED

    return wrapped


def start(main: Callable[..., int]) -> NoReturn:
    """Run a benchmark as a script."""
    filter_output()
    sys.exit(main())


def require(*packages: str) -> None:
    """Raise UserError if one of the packages of other projects, with which benchmarks compare, is not installed."""
    if missing := [name for name in packages if find_spec(name) is None]:
        raise UserError(f"{', '.join(missing)} must be installed; run .venv/bin/pip install -e '.[peers]'")


def take_turns(
    variants: Mapping[str, Callable[[], Figures]],
    repeat: int,
    *,
    warm_up: int = 0,
    after_round: Callable[[], object] = lambda: None,
) -> dict[str, list[Figures]]:
    """Run each variant once per round. Return the figures of the rounds after the first `warm_up` rounds."""
    found: dict[str, list[Figures]] = {name: [] for name in variants}
    for number in range(-warm_up, repeat):
        for name in list(variants) if number % 2 == 0 else list(variants)[::-1]:
            figures = variants[name]()
            if number >= 0:
                found[name].append(figures)
        after_round()
    return found


def timed(act: Callable[[], object], finish: Callable[[], object] = lambda: None) -> Callable[[], Figures]:
    """Return a variant that measures wall and CPU seconds of `act`. `finish` waits for a device's queued work."""

    def variant() -> Figures:
        finish()
        started_at, cpu = time.perf_counter(), time.process_time()
        act()
        finish()
        return {"seconds": time.perf_counter() - started_at, "cpu_seconds": time.process_time() - cpu}

    return variant


def medians(rounds: Mapping[str, Sequence[Figures]]) -> dict[str, Figures]:
    """Return each variant's median of each figure."""
    return {
        name: {key: statistics.median(one[key] for one in all_) for key in all_[0]} for name, all_ in rounds.items()
    }


def run_child(
    name: str, command: Sequence[object], *, timeout: float | None = None, **environment: str
) -> dict[str, Any]:
    """Run a Python process. Return the JSON of its last line. Its stderr goes to ours. Raises RunFailed."""
    result = subprocess.run(
        [sys.executable, *map(str, command)],
        stdout=subprocess.PIPE,
        text=True,
        timeout=timeout,
        env=os.environ | environment,
    )
    if result.returncode:
        raise RunFailed(f"the process of {name} ended with code {result.returncode}; see above")
    return dict(json.loads(result.stdout.splitlines()[-1]))


def train(
    config: Path, run_dir: Path, settings: Mapping[str, object], *, program: Sequence[object] = ("-m", "grpo_mega.cli")
) -> list[dict[str, Any]]:
    """Train or continue a run in a process. Return the lines of metrics.jsonl. Log to RUN_DIR.log. Raises RunFailed."""
    command = [sys.executable, *map(str, program), "train", str(config)]
    command += [f"--set={key}={value}" for key, value in {"run_dir": run_dir, **settings}.items()]
    command += ["--resume"] if (run_dir / "run.json").exists() else []
    log = run_dir.with_name(f"{run_dir.name}.log")
    with log.open("w") as output:
        environment = os.environ | {"PYTHONPATH": str(ROOT)}  # to import rewards from tools
        code = subprocess.run(command, stdout=output, stderr=subprocess.STDOUT, env=environment).returncode
    if code:
        raise RunFailed(f"the run {run_dir.name} ended with code {code}:\n{log.read_text()[-2000:]}")
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


def table(rows: Sequence[Sequence[str]]) -> str:
    """Align the columns: the first one to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(
            f"{cell:{'>' if i else '<'}{w}}" for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )


def report(
    rows: Sequence[Sequence[str]],
    result: Mapping[str, Any],
    *,
    limits: Mapping[str, float] | None = None,
    footer: Sequence[str] = (),
    problems: Iterable[str] = (),
) -> int:
    """Print the table, the figures of `result` above their limits, the problems, and the JSON. Return the exit code."""
    print("\n".join([table(rows), *(["", *footer] if footer else [])]))
    code = 0
    for name, limit in (limits or {}).items():
        if result[name] is not None and result[name] > limit:
            print(f"{name} is {result[name]:.4g}, above its limit of {limit:g}")
            code = 1
    for problem in problems:
        print(problem, file=sys.stderr)
        code = 1
    print(json.dumps(result), flush=True)
    return code
