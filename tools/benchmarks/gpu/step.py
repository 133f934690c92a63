"""Measure a whole GRPO step by phase: run `grpo-mega train` on a random model of a known shape and read its
metrics.jsonl.

A step has 64 prompts x 8 samples of at most 1,024 tokens of a random Qwen2.5-1.5B, with a reference. Trainer and SGLang
server share one GPU and take turns in its memory (rollout.sleep=always). A random model hardly ever ends a response, so
nearly all have 1,024 tokens. Figures are medians over all steps except the first.
"""

from __future__ import annotations

import importlib.util
import json
import random
import statistics
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from grpo_mega.tracking.progress import FreeMemory
from grpo_mega.yaml_text import dump_yaml
from tools.benchmarks import harness
from tools.benchmarks.gpu.engine import write_config
from tools.benchmarks.gpu.rank import Figure, Options

PREFIX = "seconds/"


def run(options: Options) -> list[Figure]:
    return figures(*measured(options))


def measured(options: Options, **model: Any) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return the lines of metrics.jsonl and the config. `model` has more keys of that section."""
    with tempfile.TemporaryDirectory(prefix="bench_gpu_") as name:
        folder = Path(name)
        settings = settings_of(options, folder)
        settings["model"] |= model
        write_inputs(folder, "tiny" if options.tiny else "qwen2.5-1.5b")
        (folder / "config.yaml").write_text(dump_yaml(settings))
        return harness.train(folder / "config.yaml", folder / "run", {}), settings


def settings_of(options: Options, folder: Path) -> dict[str, Any]:
    """Return the run's config. Without a GPU or SGLang it uses the embedded engine."""
    has_server = torch.cuda.is_available() and importlib.util.find_spec("sglang") is not None
    if not has_server:
        options.say("step: no GPU or no SGLang here: the embedded engine samples, and nothing sleeps")
    prompts, samples, longest = (2, 2, 8) if options.tiny else (16, 8, 256) if options.quick else (64, 8, 1024)
    return {
        "run_dir": str(folder / "run"),
        "steps": 2 if options.tiny else 4,
        "model": {"path": str(folder / "model"), "init": "random", "dtype": "bfloat16"},
        "data": {"train": str(folder / "train.jsonl"), "max_prompt_length": 64},
        "rollout": {
            "engine": "sglang" if has_server else "embedded",
            "sleep": "always",
            "max_response_length": longest,
            "memory_fraction": 0.5,
            "mismatch_stop": None,
        },
        "algorithm": {"group_size": samples, "kl_beta": 0.001},
        "rewards": {"functions": [{"name": "accuracy"}, {"name": "format"}], "num_workers": 1 if options.tiny else 4},
        "batch": {"prompts_per_step": prompts, "tokens_per_micro_batch": max(1088, 8 * (longest + 64))},
        "log": {"progress": False},
    }


def write_inputs(folder: Path, model: str) -> None:
    """Write a model folder without weights, with a tokenizer of one token per byte, and prompts of sums."""
    sys.path.append(str(harness.ROOT / "examples"))
    from tiny_random_model import make_tokenizer

    write_config(model, folder / "model")
    make_tokenizer().save_pretrained(folder / "model", save_jinja_files=False)
    path = folder / "model" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"eos_token_id": 1, "pad_token_id": 0}))
    rng = random.Random(0)
    pairs = [(rng.randint(10, 99), rng.randint(10, 99)) for _ in range(512)]
    rows = [json.dumps({"prompt": f"{a}+{b}=?", "answer": str(a + b)}) for a, b in pairs]
    (folder / "train.jsonl").write_text("\n".join(rows) + "\n")


def figures(rows: list[dict[str, Any]], settings: dict[str, Any]) -> list[Figure]:
    """Return the medians of the phases over all steps except the first, longest phase first."""
    rows = [row for row in rows if f"{PREFIX}step" in row][1:]
    assert rows, "the first step is not measured, so a run needs two"
    names = sorted({name for row in rows for name in row if name.startswith(PREFIX) and name != f"{PREFIX}idle"})
    medians = {name.removeprefix(PREFIX): statistics.median(row.get(name, 0.0) for row in rows) for name in names}
    samples = settings["batch"]["prompts_per_step"] * settings["algorithm"]["group_size"]
    case = f"{samples} samples of {settings['rollout']['max_response_length']}, {settings['rollout']['engine']}"
    ordered = sorted(medians.items(), key=lambda item: (item[0] != "step", -item[1]))
    found = [Figure("step", case, "whole step" if name == "step" else name, value, "s") for name, value in ordered]
    return [*found, *free_memory(rows, case)]


def free_memory(rows: list[dict[str, Any]], case: str) -> Iterator[Figure]:
    """Yield the lowest free memory of the device in each phase. A plan that promises more is wrong."""
    for phase in FreeMemory.PHASES:
        measured = [row[name] for row in rows if (name := f"memory/free_{phase}_gib") in row]
        if measured:
            planned = rows[-1].get(f"memory/planned_free_{phase}_gib")
            yield Figure("step", case, f"free memory, {phase}", min(measured), "GiB", planned, "more")
