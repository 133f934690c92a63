"""Train small models of five kinds on one set of package versions, resume them on another, and compare state and
numbers.

    python tests/helpers/resumed_kinds.py FOLDER one         # trains FOLDER/KIND/one for each kind
    python tests/helpers/resumed_kinds.py FOLDER two one     # resumes a copy of `one` as `two`, on this Python's set
    python tests/helpers/resumed_kinds.py FOLDER back two    # resumes a copy of `two` as `back`

A resumed run first saves what it loaded. This checkpoint must equal the copied one: weights, masters, moments, counters
and backlog, bit for bit. torch's reader reads both, so the comparison shares no code with the loader. The next steps
must have the numbers of the first run: the same bits for a dense model and on the set that trained it, and otherwise
within TOLERANCES. Exit code 1 unless all kinds are right.
"""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from grpo_mega.paths import CHECKPOINTS, LATEST, MANIFEST, STATE, read_json
from tests.helpers import preloaded
from tools.benchmarks import kills

# By kind: family and fields of the model, and settings of the run.
KINDS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "dense": ("qwen2", {"num_hidden_layers": 3, "tied": True}, {}),
    "moe": ("qwen3_moe", {"num_hidden_layers": 2, "num_experts": 5}, {}),
    "mla": ("deepseek_v3", {"num_hidden_layers": 3, "q_lora_rank": 10}, {"router": {"bias_update_rate": 0.05}}),
    "hybrid": ("qwen3_5_text", {"num_hidden_layers": 4, "seed": 4}, {}),
    "lora": ("llama", {"num_hidden_layers": 3}, {"lora": {"rank": 3, "alpha": 24.0, "targets": ["q", "o", "up"]}}),
}
TOLERANCES = {"dense": 0.0, "moe": 2e-6, "mla": 4e-6, "hybrid": 4e-6, "lora": 2e-6}
SAVED, LAST = 2, 5  # a resumed run starts after step SAVED and ends after step LAST
SAME = ("step", "optimizer_step", "fingerprint", "layout", "model", "seed", "draws", "inputs", "kl_beta", "adapter")
COMMON_STATE = "common_state/shard_0_1"  # key of the values that Megatron 0.16 writes to common.pt


def main(folder: str, name: str, source: str = "") -> int:
    """Train or resume all kinds, two at once. Return the exit code."""
    root = Path(folder).resolve()
    if not source:
        write_inputs(root)
    python = preloaded.python()  # imports everything heavy only once

    def problems_of(kind: str) -> list[str]:
        if source:
            copy_run(root / kind / source, root / kind / name)
        train = ["train", str(root / kind / "config.json"), "--set", f"run_dir={root / kind / name}"]
        arguments = [python, __file__, "--run", *train, *(["--resume"] if source else [])]
        done = subprocess.run(arguments, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if done.returncode:
            return [f"ended with code {done.returncode}:\n{done.stdout}"]
        return list(differences(kind, root / kind, name, source, done.stdout)) if source else []

    with ThreadPoolExecutor(2) as pool:
        found = dict(zip(KINDS, pool.map(problems_of, KINDS), strict=True))
    for kind, problems in found.items():
        print(f"{kind}: {'; '.join(problems) or ('state and numbers agree' if source else 'trained')}", flush=True)
    return int(any(found.values()))


def write_inputs(root: Path) -> None:
    """Write data, models and configs."""
    from transformers.utils.logging import disable_progress_bar

    from tests.helpers.models import make_model, save_checkpoint

    disable_progress_bar()
    root.mkdir(parents=True)
    config = json.loads(kills.write_inputs(root, "tp=1", kills.PARTIAL).read_text())
    config |= {"steps": LAST, "device": "cpu", "eval": {"interval": LAST}, "checkpoint": {"interval": 1, "keep": LAST}}
    for kind, (family, fields, settings) in KINDS.items():
        model = save_checkpoint(make_model(family, **fields), root / kind / "model")
        section = config["model"] | {"path": str(model), "init": "checkpoint"} | settings
        (root / kind / "config.json").write_text(json.dumps(config | {"model": section}))


def copy_run(source: Path, target: Path) -> None:
    """Copy a run as it was after step SAVED."""
    later = [f"step-{step:06d}" for step in range(SAVED + 1, LAST + 1)]
    shutil.copytree(source, target, ignore=shutil.ignore_patterns(*later))
    (target / CHECKPOINTS / LATEST).write_text(f"step-{SAVED:06d}\n")


def run(*arguments: str) -> int:
    """Run grpo-mega. A run that resumes first writes its checkpoint again, from memory."""
    from grpo_mega import cli
    from grpo_mega.trainer.job import TrainingJob

    resume = TrainingJob.resume

    def resume_and_save(self: TrainingJob) -> int:
        step = resume(self)
        if step:
            self.checkpoints.saved_step = None
            self.save(step)
            self.checkpoints.finish()
        return step

    TrainingJob.resume = resume_and_save  # type: ignore[method-assign]
    return cli.main(list(arguments))


def differences(kind: str, folder: Path, name: str, source: str, output: str) -> Iterator[str]:
    """Yield what differs between a resumed run, the run that it continues, and the first run, and what it did not
    say.
    """
    ours, theirs, first = (folder / run / CHECKPOINTS / f"step-{SAVED:06d}" for run in (name, source, "one"))
    ours_set, their_set, first_set = (read_json(path / MANIFEST)["versions"] for path in (ours, theirs, first))
    change = f"the checkpoint is from versions of set {their_set}, and this is set {ours_set}"
    if (change in output) != (ours_set != their_set):
        yield f"the change of versions is missing in its output, or wrong:\n{output}"
    yield from (f"checkpoint: {problem}" for problem in state_differences(ours, theirs))
    if len(waiting_samples(theirs / STATE / "backlog.safetensors")) < 3:
        yield "no backlog"
    yield from number_differences(folder / name, folder / "one", TOLERANCES[kind] if ours_set != first_set else 0.0)


def state_differences(ours: Path, theirs: Path) -> Iterator[str]:
    """Yield the parts of two checkpoints that are not the same, bit for bit."""
    found, expected = (read_json(checkpoint / MANIFEST) for checkpoint in (ours, theirs))
    yield from (key for key in SAME if found[key] != expected[key])
    if found["written_at"] == expected["written_at"]:
        yield "it is a copy, not what was loaded"
    found, expected = (waiting_samples(checkpoint / STATE / "backlog.safetensors") for checkpoint in (ours, theirs))
    if found != expected:
        yield f"backlog {found} instead of {expected}"
    found, expected = (values_of(checkpoint / STATE) for checkpoint in (ours, theirs))
    if found.keys() != expected.keys() or sum("exp_avg_sq" in key for key in expected) < 5:
        yield f"keys {sorted(found.keys() ^ expected.keys())} of {len(expected)}"
    yield from (key for key in found.keys() & expected.keys() if found[key] != expected[key])


def waiting_samples(backlog: Path) -> dict[str, Any]:
    """Return the parts of a backlog, if any: texts of its header, whose order varies, and bytes of its arrays."""
    from safetensors import safe_open

    if not backlog.exists():
        return {}
    with safe_open(backlog, "numpy") as file:
        arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # a file is not a mapping
        return file.metadata() | {name: (str(a.dtype), a.shape, a.tobytes()) for name, a in arrays.items()}


def values_of(state: Path) -> dict[str, Any]:
    """Return the values of a Megatron checkpoint by key, tensors as (dtype, shape, bytes). torch reads it."""
    import torch
    from torch.distributed.checkpoint import FileSystemReader
    from torch.distributed.checkpoint._nested_dict import flatten_state_dict
    from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
    from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

    found: dict[str, Any] = {}
    planner = _EmptyStateDictLoadPlanner()
    _load_state_dict(found, storage_reader=FileSystemReader(state), planner=planner, no_dist=True)
    [common] = [torch.load(state / "common.pt")] if (state / "common.pt").exists() else found.pop(COMMON_STATE)
    for group in common["optimizer"]["optimizer"]["param_groups"]:
        del group["lr"]  # the schedule sets it before each step
    found["common"] = repr(common)  # floats have all digits

    def plain(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return str(value.dtype), tuple(value.shape), value.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        return value.getvalue() if hasattr(value, "getvalue") else value

    return {key: plain(value) for key, value in flatten_state_dict(found)[0].items()}


def number_differences(ours: Path, theirs: Path, tolerance: float) -> Iterator[str]:
    """Yield the metrics and weights of two finished runs that differ by more than `tolerance`, relative to 1 or to the
    value if it is larger. Metrics may also differ by rounding in float64: Python 3.12 sums floats in another way.
    """
    from safetensors.torch import load_file

    found, expected = ([without_times(row) for row in kills.read_metrics(run)] for run in (ours, theirs))
    if len(found) != len(expected) or expected[-1]["step"] != LAST:
        yield f"{len(found)} rows instead of {len(expected)}"
    for a, b in zip(found, expected, strict=False):
        wrong = [key for key in sorted(a.keys() | b.keys()) if not is_close(a.get(key), b.get(key), tolerance + 1e-15)]
        yield from (f"step {b['step']}: {key}={a.get(key)} instead of {b.get(key)}" for key in wrong)
    weights, others = (load_file(run / "hf" / "model.safetensors") for run in (ours, theirs))
    for key in sorted(weights.keys() | others.keys()):
        if key not in weights or key not in others or float((weights[key] - others[key]).abs().max()) > tolerance:
            yield f"weight {key}"


def without_times(row: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in row.items() if not key.startswith(("seconds/", "memory/"))}


def is_close(a: Any, b: Any, tolerance: float) -> bool:
    if isinstance(a, float) and isinstance(b, float):
        return math.isclose(a, b, rel_tol=tolerance, abs_tol=tolerance)
    return bool(a == b)


if __name__ == "__main__":
    sys.exit(run(*sys.argv[2:]) if sys.argv[1] == "--run" else main(*sys.argv[1:]))
