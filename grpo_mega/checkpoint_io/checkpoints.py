"""The checkpoints of a run: find the newest, publish a new one, remove old ones. Needs no torch.

    step-000012/             Megatron's files and the backlog below `state`, and the manifest; has this name only once
                             complete
    latest                   the name of the checkpoint from which the run resumes
    .step-000012.partial     a save in progress, or the remains of a killed save
    .step-000012.removed     a checkpoint that is being removed

A run removes only its own checkpoints: real folders whose name matches the step in their manifest. Copies under other
names, links and folders without a manifest belong to the user.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from grpo_mega.errors import ResumeError
from grpo_mega.paths import CHECKPOINTS, EXPORT_DIR, EXPORT_FILE, LATEST, MANIFEST, read_json, read_name, sync_to_disk

FORMAT = 2  # format number of a run's checkpoints; increase it with every change that readers must handle
_CLOCK_TICK_S = 1e-3


@dataclass(frozen=True)
class Manifest:
    """The description of a run's checkpoint, stored in it as JSON together with its format number."""

    step: int  # number of finished steps; also the version of the policy
    optimizer_step: int
    fingerprint: str  # fingerprint of the weights, see Policy.fingerprint
    layout: str
    model: dict[str, Any]  # model sizes by field of ModelShape
    seed: int
    checksums: dict[str, str]  # sha256 by file below STATE
    draws: int  # number of prompt batches drawn from the data so far
    inputs: dict[str, str]  # digests of model and data, see trainer/inputs.py
    kl_beta: float | None = None  # KL coefficient of the next step if algorithm.kl_target adapts it
    kl_beta_from: float | None = None  # value of algorithm.kl_beta from which kl_beta was adapted
    adapter: dict[str, Any] | None = None  # model.lora; the state is then an adapter of the model in `inputs`
    written_at: float = 0.0  # seconds since the epoch; set by publish
    versions: str = "one"  # the writer's set of package versions (distributed/versions.py); old checkpoints name none


def read_manifest(checkpoint: Path) -> Manifest:
    """Return the manifest. Raise ResumeError if the folder is not a checkpoint, or has another format number."""
    path = checkpoint / MANIFEST
    try:
        values = read_json(path)
        if not isinstance(values, dict):
            raise ValueError(f"it holds a JSON {type(values).__name__}, not an object")
        number = values.pop("format", None)
        if number == FORMAT:
            if not isinstance(values["model"], dict):
                raise ValueError(f"model={values['model']!r} is not a model's sizes")
            return Manifest(**values)
    except (OSError, ValueError, TypeError, LookupError) as error:
        raise ResumeError(f"{path} cannot be read ({error}); resume from another step-N folder") from None
    raise ResumeError(
        f"{path}: format={'none' if number is None else repr(number)}: must be {FORMAT}; use the version of grpo_mega"
        " that wrote this checkpoint, or export the policy with that version and start a new run from it"
    )


@dataclass(frozen=True)
class SavedPolicy:
    """A policy of a run: a checkpoint, or RUN_DIR/hf."""

    path: Path
    step: int
    versions: str  # the writer's set of package versions, as in Manifest
    note: str | None = None  # says why RUN_DIR/hf was taken; None: a checkpoint


def newer_export(run_dir: Path, last: Manifest | None) -> SavedPolicy | None:
    """Return RUN_DIR/hf if it has a newer policy than the run's last checkpoint, described by `last`.

    A run writes RUN_DIR/hf when it finishes. It is newer if checkpoint.interval is 0, or if the run has gone back to an
    older checkpoint since. Raise ResumeError if its step cannot be read.
    """
    folder = run_dir / EXPORT_DIR
    path = folder / EXPORT_FILE
    if not path.is_file():
        return None
    try:
        values = read_json(path)
        versions = values.get("versions", "one")
        step, written_at = int(values["step"]), float(values["written_at"])
    except (OSError, ValueError, TypeError, LookupError) as error:
        raise ResumeError(
            f"{path} cannot be read ({error!r}); remove {folder}, and write the policy again with --resume"
        ) from None
    if last is not None and (step == last.step or written_at <= last.written_at):
        return None
    reason = "has no checkpoints" if last is None else f"has an older checkpoint, of step {last.step}"
    return SavedPolicy(folder, step, versions, f"{run_dir} {reason}: taking {folder}, the policy after step {step}")


def check_model(checkpoint: Path, manifest: Manifest, shape: Any, lora: dict[str, Any] | None) -> None:
    """Raise ResumeError unless the saved sizes equal `shape`, a dataclass, and model.lora equals `lora`."""
    saved, ours = manifest.model, json.loads(json.dumps(asdict(shape)))  # JSON has lists in the place of tuples
    different = [
        f"{name}={saved.get(name)!r} instead of {value!r}" for name, value in ours.items() if saved.get(name) != value
    ]
    if different:
        raise ResumeError(
            f"checkpoint {checkpoint} is of another model ({', '.join(different)}); set model.path to that model"
        )
    if manifest.adapter != lora:
        raise ResumeError(
            f"checkpoint {checkpoint} has model.lora={manifest.adapter} instead of {lora}; set that value"
        )


def latest(folder: Path) -> Path | None:
    """Return the checkpoint from which the run resumes, or None if there is none.

    The file `latest` names it. If that file is missing, for example after a kill during the first save, it is the
    checkpoint written last. Interrupted saves are ignored. Raise ResumeError if `latest` does not name a checkpoint, or
    if `latest` is missing and the folder has only copies or only unreadable checkpoints.
    """
    pointer = folder / LATEST
    whole = _whole(folder)
    named = [path for _, step, path in whole if path.name == step_name(step)]
    copies = [path for _, _, path in whole if path not in named]
    if not pointer.exists():
        if copies and not named:
            raise ResumeError(f"{pointer} is missing, but {copies[-1].name} exists; write that name into it and resume")
        if not named and (unreadable := sorted(folder.glob(f"step-*/{MANIFEST}"))):
            read_manifest(unreadable[-1].parent)  # this call raises the error
        return named[-1] if named else None
    try:
        found = folder / read_name(pointer)
    except (OSError, ValueError) as error:
        raise ResumeError(
            f"{pointer} cannot be read ({error}); write the name of a checkpoint's folder into it and resume"
        ) from None
    if found == folder or not (found / MANIFEST).is_file():
        candidates = named or copies
        remedy = (
            f"write {candidates[-1].name} into it" if candidates else "write the name of a checkpoint's folder into it"
        )
        raise ResumeError(f"{pointer} names {found.name!r}, which is missing or incomplete; {remedy} and resume")
    return found


def tell_latest(folder: Path) -> str:
    """Return a line that names the checkpoint to resume from."""
    try:
        found = latest(folder)
    except ResumeError as error:
        return str(error)
    return f"the last good checkpoint is {found}: continue with --resume" if found else "there is no checkpoint yet"


def find(folder: Path, step: int | None) -> Path:
    """Return the checkpoint of a step, or the newest. Raise ResumeError if there is none."""
    found = latest(folder) if step is None else folder / step_name(step)
    if found is None or not (found / MANIFEST).is_file():
        names = sorted(p.name for p in folder.glob("step-*"))
        there = ", ".join(names) or "none, because a run saves them only with a checkpoint.interval above 0"
        raise ResumeError(f"{folder} has no checkpoint{'' if step is None else f' of step {step}'}; there are: {there}")
    return found


def find_policy(run_dir: Path, step: int | None) -> SavedPolicy:
    """Return the policy of a step, or the newest: the run's last checkpoint or RUN_DIR/hf. Raise ResumeError if there
    is none.
    """
    folder = run_dir / CHECKPOINTS
    has_checkpoint = step is not None and (folder / step_name(step) / MANIFEST).is_file()
    last = None if has_checkpoint else latest(folder)
    manifest = None if last is None else read_manifest(last)
    export = None if has_checkpoint else newer_export(run_dir, manifest)
    if export is not None and step in (None, export.step):
        return export
    if export is not None and manifest is None:
        raise ResumeError(
            f"--step {step}: {run_dir} has no checkpoints; leave --step out to take {export.path}, the policy after"
            f" step {export.step}"
        )
    checkpoint = find(folder, step)
    manifest = read_manifest(checkpoint)
    return SavedPolicy(checkpoint, manifest.step, manifest.versions)


def export_record(folder: Path, step: int, versions: str) -> dict[str, bytes | Path]:
    """Return the file that records RUN_DIR/hf after `step`, by its name. It counts as newer than all checkpoints."""
    newest = max((when for when, _, _ in _written(folder)), default=0.0)
    values = {"step": step, "written_at": max(time.time(), newest + _CLOCK_TICK_S), "versions": versions}
    return {EXPORT_FILE: json.dumps(values).encode() + b"\n"}


def step_name(step: int) -> str:
    return f"step-{step:06d}"


def partial_name(step: int) -> str:
    return f".{step_name(step)}.partial"


def surplus(folder: Path, keep: int) -> list[Path]:
    """Return the checkpoints beyond the `keep` newest, but never the one named by `latest`.

    A run that resumed from an older step abandoned the later steps. So a checkpoint counts as older than all others if
    one of the same or an earlier step was written after it.
    """
    written = _written(folder)
    is_given_up = {
        path: any(later <= step for _, later, _ in written[i:]) for i, (_, step, path) in enumerate(written, 1)
    }
    # Stable sort: within both parts, the oldest come first.
    given_up_first = sorted(is_given_up, key=lambda path: not is_given_up[path])
    with suppress(ResumeError):
        return [path for path in given_up_first[:-keep] if path != latest(folder)]
    return given_up_first[:-keep]


def publish(folder: Path, manifest: Manifest, keep: int) -> None:
    """Rename the finished `.step-N.partial`, point `latest` to it, and remove checkpoints beyond `keep`."""
    partial, final = folder / partial_name(manifest.step), folder / step_name(manifest.step)
    written = _written(folder)
    newest = max((when for when, _, _ in written), default=0.0)
    # If the clock of this node is behind, its checkpoints must still count as newer.
    manifest = replace(manifest, written_at=max(time.time(), newest + _CLOCK_TICK_S))
    (partial / MANIFEST).write_text(json.dumps({"format": FORMAT} | asdict(manifest), indent=1) + "\n")
    sync_to_disk(partial / MANIFEST)
    sync_to_disk(partial)
    if any(path == final for _, _, path in written):
        remove(final)
    elif os.path.lexists(final):
        number, other = 1, folder / f"{final.name}.other"
        while os.path.lexists(other):
            number, other = number + 1, folder / f"{final.name}.other-{number}"
        os.rename(final, other)
    os.rename(partial, final)
    sync_to_disk(folder)
    pointer = folder / f".{LATEST}"
    pointer.write_text(final.name + "\n")
    sync_to_disk(pointer)
    os.replace(pointer, folder / LATEST)
    sync_to_disk(folder)
    for old in surplus(folder, keep):
        remove(old)


def remove(checkpoint: Path) -> None:
    """Remove a checkpoint. A kill during the removal leaves no part of it under its name."""
    gone = checkpoint.with_name(f".{checkpoint.name}.removed")
    shutil.rmtree(gone, ignore_errors=True)
    with suppress(OSError):  # remains only take disk space
        os.rename(checkpoint, gone)
        shutil.rmtree(gone)


def clean(folder: Path) -> None:
    """Create the folder, and remove the remains of killed saves and removals."""
    folder.mkdir(parents=True, exist_ok=True)
    for pattern in (".step-*.partial", ".step-*.removed"):
        for remains in folder.glob(pattern):
            shutil.rmtree(remains)


def _written(folder: Path) -> list[tuple[float, int, Path]]:
    """Return the checkpoints from `_whole` that a run wrote in this folder."""
    return [
        (when, step, path)
        for when, step, path in _whole(folder)
        if path.name == step_name(step) and not path.is_symlink()
    ]


def _whole(folder: Path) -> list[tuple[float, int, Path]]:
    """Return (time of writing, step, path) of all complete checkpoints, including copies and links, in this order."""
    checkpoints = []
    for file in folder.glob(f"[!.]*/{MANIFEST}"):
        with suppress(ResumeError):
            manifest = read_manifest(file.parent)
            checkpoints.append((manifest.written_at, manifest.step, file.parent))
    return sorted(checkpoints)
