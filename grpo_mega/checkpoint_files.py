"""Where a run's checkpoints lie: found without torch, so that a wrong path is told before anything heavy is imported."""

from __future__ import annotations

from pathlib import Path

from grpo_mega.errors import ResumeError

LATEST = "latest"
MANIFEST = "checkpoint.json"
STATE = "state"  # the folder of Megatron's files within a checkpoint
FINISHED = "hf"  # within a run's folder: the policy after the last step, as a Hugging Face folder


def latest(folder: Path) -> Path | None:
    """The newest whole checkpoint, or None. Remains of interrupted saves are not looked at."""
    pointer = folder / LATEST
    if not pointer.exists():
        return None
    found = folder / pointer.read_text().strip()
    if not (found / MANIFEST).is_file():
        raise ResumeError(
            f"{pointer} names {found.name}, which is not there or not whole; put the name of another step-N into it"
        )
    return found


def find(folder: Path, step: int | None) -> Path:
    """The checkpoint of a step, or the newest. Raises ResumeError if there is none."""
    found = latest(folder) if step is None else folder / f"step-{step:06d}"
    if found is None or not (found / MANIFEST).is_file():
        there = ", ".join(sorted(p.name for p in folder.glob("step-*"))) or "none"
        raise ResumeError(f"{folder} has no checkpoint{'' if step is None else f' of step {step}'}; there are: {there}")
    return found


def find_finished(run_dir: Path, step: int | None) -> Path | None:
    """Return RUN_DIR/hf of a finished run without checkpoints; None where `find` is to be asked.

    Raises ResumeError if such a run is asked for the checkpoint of a step.
    """
    finished = run_dir / FINISHED
    if not (finished / "config.json").is_file() or any((run_dir / "checkpoints").glob(f"step-*/{MANIFEST}")):
        return None
    if step is not None:
        raise ResumeError(
            f"--step {step}: {run_dir} has no checkpoints; leave --step out to take {finished}, the policy after its last step"
        )
    return finished


def without_checkpoints(finished: Path) -> str:
    """Tell in one line that a run's policy was taken from `finished`."""
    return f"{finished.parent} has no checkpoints: taking {finished}, the policy after its last step"
