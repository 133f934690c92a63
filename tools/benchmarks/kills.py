"""Kill training runs with SIGKILL at random moments, resume them, and count the runs that end like an uninterrupted
run.

`python tools/benchmarks/kills.py --kills 20 [--layout tp=2] [--partial | --separate | --agent] [--lora] [--engine
sglang] [--jobs 2] [--seed 0]`: each trial starts a new small run, kills the launcher (its ranks die with it) at a
random moment, mostly between first step and end, resumes, and compares every metric (except times) and every exported
weight with an uninterrupted run. With engine ranks that generate ahead (--separate), or with servers, runs are not
reproducible. Then no token may be older than allowed, each step must train its groups, and the ledger must balance
exactly in every step.
The last line is JSON with kills, identical or sound, before_checkpoint (killed before anything was saved) and seconds.
Exit code 1 unless all runs are identical or sound.

Other benchmarks and the tests use `write_inputs`, `start` and `finish` for their small runs."""

from __future__ import annotations

import hashlib
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # to run this file as a script

from tools.benchmarks import harness

CONFIG = {
    "steps": 16,
    "seed": 3,
    "model": {"init": "random", "dtype": "float32"},
    "data": {"max_prompt_length": 32},
    "rollout": {"max_response_length": 16},
    "algorithm": {"group_size": 4, "kl_beta": 0.01},
    "rewards": {"functions": [{"name": "tools.benchmarks.kills.share_of_vowels"}], "num_workers": 1},
    "batch": {"prompts_per_step": 4, "mini_batches": 2, "tokens_per_micro_batch": 256},
    "optimizer": {"lr": 1e-3, "schedule": "linear", "warmup_steps": 2},
    "checkpoint": {"interval": 1},
    "eval": {"interval": 4},
    "log": {"progress": False},
}

LENGTHS = {"max_response_length": 40, "stop_token_ids": [*range(3, 60, 4)]}
PARTIAL = {"partial": True, "oversample": 1.75, **LENGTHS}
SEPARATE = {"placement": "separate", "max_staleness": 1, **LENGTHS}


@dataclass(frozen=True)
class End:
    """The end of a finished run: its metrics without times, and a checksum of its weights."""

    metrics: tuple[str, ...]
    weights: str


AGENT = """
async def run(chat, prompt):
    messages = list(prompt.messages)
    for number in range(3):  # the answer to a turn that is cut starts another row
        message = await chat(messages, **({"max_tokens": 5} if number == 1 else {}))
        text = message["content"] or ""
        chat.reward(len(text) % 3)
        messages += [message, {"role": "user", "content": str(len(text))}]
    return sum(c in "aeiou" for c in text) / max(1, len(text))
"""


def share_of_vowels(prompt: str, response: str, answer: str, extras: dict[str, object]) -> float:
    """Return the share of vowels, a reward that varies even if the model is untrained."""
    return sum(c in "aeiou" for c in response) / max(1, len(response))


@harness.benchmark
def main(arguments: list[str] | None) -> int:
    parser = harness.Parser(__doc__)
    parser.add_argument("--kills", type=int, default=4)
    parser.add_argument("--layout", default="tp=1", help="for example tp=2 or pp=2,dp=2")
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument("--partial", action="store_true", help="with partial rollouts")
    kind.add_argument("--separate", action="store_true", help="with an engine that generates ahead, on separate ranks")
    kind.add_argument("--agent", action="store_true", help="with conversations of an agent function")
    parser.add_argument("--lora", action="store_true", help="train an adapter")
    parser.add_argument("--engine", choices=("embedded", "sglang"), default="embedded")
    parser.add_argument("--jobs", type=int, default=2, help="trials at once")
    parser.add_argument("--seed", type=int, default=0, help="seed of the moments")
    options = parser.parse(arguments, kills=1, jobs=1)
    started_at = time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        rollout = PARTIAL if options.partial else SEPARATE if options.separate else {}
        layout = options.layout + (",engine_ranks=1" if options.separate else "")
        if options.agent:
            (folder / "agent.py").write_text(AGENT)
            rollout = {"agent": f"{folder}/agent.py:run", "max_turns": 3, **LENGTHS}
        config = write_inputs(folder, layout, rollout | {"engine": options.engine})
        if options.lora:
            raw = json.loads(config.read_text())
            raw["model"]["lora"] = {"rank": 4}
            config.write_text(json.dumps(raw))
        is_same = not options.separate and options.engine == "embedded"
        expected, start_s, train_s = whole_run(config, folder / "whole")
        total = f"{start_s:.1f} s to its first step and {train_s:.1f} s after it"
        print(f"an uninterrupted run takes {total}; killing {options.kills} runs at random moments", flush=True)
        moments = random.Random(options.seed)
        trials = [(folder / f"run-{i}", moments.uniform(-0.1 * train_s, train_s)) for i in range(options.kills)]
        with ThreadPoolExecutor(options.jobs) as pool:
            killed = (pool.submit(killed_run, config, *trial, expected if is_same else None) for trial in trials)
            outcomes = [trial.result() for trial in list(killed)]
    wanted = "identical" if is_same else "sound"
    num_right = sum(is_right for is_right, _ in outcomes)
    result = {
        "kills": options.kills,
        wanted: num_right,
        "before_checkpoint": sum(step == 0 for _, step in outcomes),
        "seconds": round(time.monotonic() - started_at, 1),
    }
    rows = [(name, str(value)) for name, value in result.items()]
    wrong = [f"{options.kills - num_right} runs are not {wanted}"] if num_right < options.kills else []
    return harness.report(rows, result, problems=wrong)


def write_inputs(
    folder: Path, layout: str, rollout: Mapping[str, object] = MappingProxyType({}), **model: object
) -> Path:
    """Write model, data and config. `rollout` has keys of that section, `model` fields of config.json."""
    subprocess.run(
        [sys.executable, str(harness.ROOT / "examples" / "tiny_random_model.py"), str(folder / "model")], check=True
    )
    fields = folder / "model" / "config.json"
    fields.write_text(json.dumps(json.loads(fields.read_text()) | model))
    words = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]
    rows = [{"prompt": f"Say {word}.", "answer": word} for word in words]
    for name, part in (("train", rows[:8]), ("heldout", rows[8:])):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
    config = json.loads(json.dumps(CONFIG))
    config["model"]["path"] = str(folder / "model")
    config["data"] |= {name: str(folder / f"{name}.jsonl") for name in ("train", "heldout")}
    config["rollout"] |= rollout
    config["layout"] = {key: int(value) for key, value in (part.split("=") for part in layout.split(","))}
    path = folder / "config.json"  # JSON is YAML
    path.write_text(json.dumps(config))
    return path


def start(
    config: Path, run_dir: Path, arguments: list[str], output: int | None = None, name: str = "train"
) -> subprocess.Popen[str]:
    """Start a run by the command `name`. Its output goes to `output`, or to log_of(run_dir)."""
    command = [sys.executable, "-m", "grpo_mega.cli", name, str(config), "--set", f"run_dir={run_dir}", *arguments]
    environment = os.environ | {"PYTHONPATH": str(harness.ROOT), "OMP_NUM_THREADS": "1"}
    with log_of(run_dir).open("a") as log:
        to = log if output is None else output
        return subprocess.Popen(command, stdout=to, stderr=subprocess.STDOUT, env=environment, text=True)


def log_of(run_dir: Path) -> Path:
    return run_dir.with_name(run_dir.name + ".log")


def whole_run(config: Path, run_dir: Path) -> tuple[End, float, float]:
    """Return the end, the seconds until the first step was logged, and the seconds after it."""
    started_at, process = time.monotonic(), start(config, run_dir, [])
    wait_for_first_step(process, run_dir)
    trains = time.monotonic()
    finish(process, run_dir)
    return read_end(run_dir), trains - started_at, time.monotonic() - trains


def wait_for_first_step(process: subprocess.Popen[str], run_dir: Path) -> None:
    path = run_dir / "metrics.jsonl"
    while process.poll() is None and not (path.exists() and "loss/total" in path.read_text()):
        time.sleep(0.02)


def killed_run(config: Path, run_dir: Path, moment: float, expected: End | None) -> tuple[bool, int]:
    """Kill a run and resume it. Return True if it ended as expected, and the step from which it resumed.

    If `expected` is None, the run must be sound. `moment` is in seconds after the first step was logged. If it is
    negative, its absolute value counts from the start of the run.
    """
    process = start(config, run_dir, [])
    if moment >= 0:
        wait_for_first_step(process, run_dir)
    try:
        process.wait(timeout=abs(moment))
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    latest = run_dir / "checkpoints" / "latest"
    step = int(latest.read_text().strip().removeprefix("step-")) if latest.exists() else 0
    finish(start(config, run_dir, ["--resume"] if (run_dir / "run.json").exists() else []), run_dir)
    is_right = is_sound(run_dir) if expected is None else read_end(run_dir) == expected
    verdict = ("sound" if expected is None else "identical") if is_right else "DIFFERS"
    print(f"killed {moment:.1f} s after its first step, resumed after step {step}: {verdict}", flush=True)
    return is_right, step


def is_sound(run_dir: Path) -> bool:
    """Return True if every step trained its groups, no token was older than allowed, and the ledger balances."""
    steps = [row for row in read_metrics(run_dir) if "loss/total" in row]
    config = json.loads((run_dir.parent / "config.json").read_text())
    wanted, allowed = config["batch"]["prompts_per_step"], config["rollout"].get("max_staleness", 0)
    return len(steps) == config["steps"] and all(
        closes(row)
        and row["step"] == number
        and row.get("staleness/max", 0) <= allowed
        and row.get("ledger/trained_groups", wanted * number) == wanted * number
        for number, row in enumerate(steps, 1)
    )


def closes(row: Mapping[str, float]) -> bool:
    """Return True if the ledger in a step's metrics accounts for all groups and tokens that were started."""
    for unit in ("groups", "tokens"):
        parts = {name: value for name, value in row.items() if re.match(rf"ledger/\w+_{unit}\b", name)}
        if parts.pop(f"ledger/begun_{unit}", 0) != sum(parts.values()):
            return False
    return True


def finish(process: subprocess.Popen[str], run_dir: Path) -> None:
    if process.wait() != 0:
        sys.exit(f"{run_dir} ended with code {process.returncode}:\n{log_of(run_dir).read_text()}")


def read_metrics(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").open(encoding="utf-8")]


def read_end(run_dir: Path) -> End:
    is_time = re.compile("seconds/|memory/").match
    kept = [json.dumps({k: v for k, v in row.items() if not is_time(k)}) for row in read_metrics(run_dir)]
    return End(tuple(kept), hashlib.sha256((run_dir / "hf" / "model.safetensors").read_bytes()).hexdigest())


if __name__ == "__main__":
    harness.start(main)
