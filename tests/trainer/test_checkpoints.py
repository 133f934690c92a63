"""Checkpoints that a run keeps, and the checkpoint from which it resumes. The tests create the folders by hand."""

from __future__ import annotations

import json
import re
import shutil
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import pytest

from grpo_mega import config as configs
from grpo_mega.checkpoint_io.checkpoints import (
    FORMAT,
    Manifest,
    check_model,
    clean,
    find,
    latest,
    publish,
    read_manifest,
)
from grpo_mega.errors import ResumeError
from grpo_mega.trainer.folder import lock_run_dir

MODEL = {"kind": "a", "size": 4, "tied": True, "window": 0}


@dataclass(frozen=True)
class Shape:
    """The sizes of a model."""

    kind: str
    size: int
    tied: bool
    window: int = 0


def old(folder: Path, step: int, age_s: float, name: str | None = None) -> Path:
    """Make a checkpoint that was written `age_s` ago."""
    path = folder / (name or f"step-{step:06d}")
    (path / "state").mkdir(parents=True)
    manifest = Manifest(
        step, 7, "00c0ffee", "tp=1", MODEL, 3, {"common.pt": "ab"}, step, {}, written_at=time.time() - age_s
    )
    (path / "checkpoint.json").write_text(json.dumps({"format": FORMAT} | asdict(manifest)))
    return path


def change_manifest(checkpoint: Path, **values: object) -> None:
    """Set these values in a manifest. Remove values that are None."""
    content = json.loads((checkpoint / "checkpoint.json").read_text()) | values
    content = {name: value for name, value in content.items() if name not in values or value is not None}
    (checkpoint / "checkpoint.json").write_text(json.dumps(content))


def save(folder: Path, step: int, keep: int) -> None:
    (folder / f".step-{step:06d}.partial" / "state").mkdir(parents=True)
    publish(folder, Manifest(step, 7, "00c0ffee", "tp=1", MODEL, 3, {"common.pt": "ab"}, step, {}), keep)


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()} - {"latest"}


def test_a_run_that_went_back_drops_abandoned_steps_and_keeps_new_ones(tmp_path: Path) -> None:
    for step, age in ((4, 300), (6, 200), (8, 100)):
        old(tmp_path, step, age)
    (tmp_path / "latest").write_text("step-000004\n")
    save(tmp_path, 5, keep=1)
    assert names(tmp_path) == {"step-000005"}
    assert (tmp_path / "latest").read_text() == "step-000005\n"
    for step in (3, 6):
        old(tmp_path, step, age_s=50)
    save(tmp_path, 4, keep=2)  # resumed again, from step 3
    assert names(tmp_path) == {"step-000003", "step-000004"}


def test_a_step_that_is_written_again_replaces_the_abandoned_one(tmp_path: Path) -> None:
    for step, age in ((4, 300), (6, 200)):
        (old(tmp_path, step, age) / "state" / "first").touch()
    (tmp_path / "latest").write_text("step-000004\n")
    save(tmp_path, 6, keep=2)
    assert names(tmp_path) == {"step-000004", "step-000006"}
    assert not (tmp_path / "step-000006" / "state" / "first").exists()


def test_files_that_a_run_did_not_write_are_never_removed(tmp_path: Path) -> None:
    outside = old(tmp_path / "elsewhere", 3, 0)
    folder = tmp_path / "checkpoints"
    old(folder, 1, 900)
    old(folder, 2, 800, "step-000002-good")
    old(folder, 3, 700, "step-best")
    old(folder, 2, 700, "step-000007")  # this name belongs to another step
    (folder / "step-000003").symlink_to(outside)
    (folder / "step-000004").mkdir()  # it has no manifest
    (folder / "step-000004" / "notes.txt").touch()
    (folder / "step-000005").write_text("a file")
    others = {"step-000002-good", "step-best", "step-000007"}
    for step in (8, 9):
        save(folder, step, keep=1)
    assert names(folder) == others | {"step-000003", "step-000004", "step-000005", "step-000009"}
    for step in (3, 4, 5):
        save(folder, step, keep=1)
    assert names(folder) == others | {"step-000003.other", "step-000004.other", "step-000005.other", "step-000005"}
    assert (folder / "step-000003.other").resolve() == outside and outside.is_dir()
    assert (folder / "step-000004.other" / "notes.txt").exists()


def test_a_clock_set_back_does_not_make_a_new_checkpoint_old(tmp_path: Path) -> None:
    old(tmp_path, 2, age_s=-5000)  # the clock of the node was ahead
    save(tmp_path, 3, keep=1)
    assert names(tmp_path) == {"step-000003"}
    save(tmp_path, 4, keep=2)
    assert names(tmp_path) == {"step-000003", "step-000004"}
    assert latest(tmp_path) == tmp_path / "step-000004"


def test_without_latest_a_run_resumes_from_the_newest_complete_checkpoint(tmp_path: Path) -> None:
    for step, age in ((9, 300), (4, 200), (6, 100)):
        old(tmp_path, step, age)
    old(tmp_path, 12, 0, "step-000012-good")
    (tmp_path / ".step-000007.partial").mkdir()
    (tmp_path / "step-000008").mkdir()
    assert latest(tmp_path) == find(tmp_path, None) == tmp_path / "step-000006"


def test_without_latest_renamed_copies_are_refused_by_name(tmp_path: Path) -> None:
    old(tmp_path, 3, 20, "step-000003-good")
    old(tmp_path, 4, 10, "best")
    with pytest.raises(
        ResumeError, match=re.escape(f"{tmp_path}/latest is missing, but best exists; write that name into it")
    ):
        latest(tmp_path)
    (tmp_path / "latest").write_text("best\n")
    assert latest(tmp_path) == tmp_path / "best"


def test_without_latest_a_checkpoint_moved_and_linked_is_still_found(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    old(folder, 2, 20)
    (folder / "step-000004").symlink_to(old(tmp_path / "larger-disk", 4, 10))
    assert latest(folder) == folder / "step-000004"


def test_remains_of_interrupted_saves_are_no_checkpoints(tmp_path: Path) -> None:
    for name in (".step-000001.partial", ".step-000001.removed"):
        shutil.copytree(old(tmp_path / name, 1, 0), tmp_path / name, dirs_exist_ok=True)
    assert latest(tmp_path) is None
    clean(tmp_path)
    assert names(tmp_path) == set()


@pytest.mark.parametrize("text", ["step-000008\n", "", "step-000005"])
def test_a_pointer_to_nothing_is_refused_before_anything_is_erased(tmp_path: Path, text: str) -> None:
    config = configs.validate({"run_dir": tmp_path / "run", "steps": 9, "model": {"path": "m"}, "data": {"train": "t"}})
    with lock_run_dir(config, resume=False, command=["train"]):
        (tmp_path / "run" / "metrics.jsonl").write_text('{"step": 6}\n')
    folder = tmp_path / "run" / "checkpoints"
    for step, age in ((4, 200), (6, 100)):
        old(folder, step, age)
    (folder / "step-000005").mkdir()
    (folder / "latest").write_text(text)
    with pytest.raises(ResumeError, match=re.escape("missing or incomplete; write step-000006 into it and resume")):
        lock_run_dir(config, resume=True, command=["train"]).__enter__()
    assert (tmp_path / "run" / "metrics.jsonl").read_text() == '{"step": 6}\n'


@pytest.mark.parametrize(("number", "shown"), [(None, "none"), (FORMAT + 1, str(FORMAT + 1)), ("1", "'1'")])
def test_a_checkpoint_of_another_format_is_refused_in_one_line(number: object, shown: str, tmp_path: Path) -> None:
    """The reader and a resuming run refuse it, with and without `latest`."""
    folder = tmp_path / "run" / "checkpoints"
    config = configs.validate({"run_dir": tmp_path / "run", "steps": 9, "model": {"path": "m"}, "data": {"train": "t"}})
    with lock_run_dir(config, resume=False, command=["train"]):
        change_manifest(checkpoint := old(folder, 5, 0), format=number)
    line = (
        f"{checkpoint}/checkpoint.json: format={shown}: must be {FORMAT}; use the version of grpo_mega that wrote this "
        "checkpoint, or export the policy with that version and start a new run from it"
    )
    with pytest.raises(ResumeError, match=f"^{re.escape(line)}$"):
        read_manifest(checkpoint)
    with pytest.raises(ResumeError, match=f"^{re.escape(line)}$"):
        lock_run_dir(config, resume=True, command=["train"]).__enter__()
    (folder / "latest").write_text("step-000005\n")
    with pytest.raises(ResumeError, match=f"^{re.escape(line)}$"):
        lock_run_dir(config, resume=True, command=["train"]).__enter__()


def test_a_model_is_compared_by_its_sizes(tmp_path: Path) -> None:
    saved = read_manifest(old(tmp_path, 3, age_s=0))
    check_model(tmp_path, saved, Shape("a", 4, True), None)
    with pytest.raises(ResumeError, match=r"of another model \(size=4 instead of 5\); set model.path"):
        check_model(tmp_path, saved, Shape("a", 5, True), None)
    with pytest.raises(ResumeError, match=r"window=0 instead of 8"):
        check_model(tmp_path, saved, Shape("a", 4, True, window=8), None)


@pytest.mark.parametrize("model", ["m", "Shape(size=open('x'))", "Shape(4", "3"])
def test_a_manifest_whose_model_is_no_shape_is_refused_in_one_line(model: str, tmp_path: Path) -> None:
    checkpoint = old(tmp_path, 3, age_s=0)
    change_manifest(checkpoint, model=model)
    with pytest.raises(ResumeError, match=r"checkpoint.json cannot be read \(.*resume from another"):
        read_manifest(checkpoint)
