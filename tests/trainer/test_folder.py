"""The run folder: settings that may change on resume, refused starts, and file modes."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import yaml

from grpo_mega import config as configs
from grpo_mega import paths
from grpo_mega.checkpoint_io.checkpoints import FORMAT, Manifest
from grpo_mega.cli.checks import resolve_dtype
from grpo_mega.errors import ConfigError, EngineError, ResumeError
from grpo_mega.paths import CONFIG_FILE
from grpo_mega.trainer.folder import lock_run_dir, merge_changed_settings, recorded_dtype, truncate_logs_after

OF_MANIFEST: Any = (7, "", "", {}, 5, {}, 3, {})  # the fields after `step`


def config(folder: Path, **algorithm: Any) -> configs.Config:
    raw = {"run_dir": str(folder), "steps": 2, "model": {"path": "m"}, "data": {"train": "t"}, "algorithm": algorithm}
    return configs.validate(raw)


def started(folder: Path) -> None:
    with lock_run_dir(config(folder), resume=False, command=["train"]):
        pass


def test_the_dtype_is_recorded_for_a_resume_that_leaves_it_unset(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    assert recorded_dtype(folder) is None
    resolved, _ = resolve_dtype(config(folder), is_gpu=True)
    with lock_run_dir(resolved, resume=False, command=["train"]):
        pass
    assert json.loads((folder / "run.json").read_text())["starts"][0]["dtype"] == "bfloat16"
    assert recorded_dtype(folder) == "bfloat16"
    other, _ = resolve_dtype(config(folder), is_gpu=False)
    with (
        pytest.raises(ResumeError, match=r"model.dtype='float32' differs"),
        lock_run_dir(other, resume=True, command=[]),
    ):
        pass


def test_a_run_resumes_although_a_setting_did_not_exist_when_it_started(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    started(folder)
    recorded = yaml.safe_load((folder / CONFIG_FILE).read_text())
    del recorded["algorithm"]["kl_clamp"]
    (folder / CONFIG_FILE).write_text(yaml.safe_dump(recorded))
    with lock_run_dir(config(folder), resume=True, command=["train"]):
        pass


@pytest.mark.parametrize("interval", [0, 5])
def test_a_resume_without_a_checkpoint_never_trains_finished_steps_unasked(
    interval: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    settings = config(folder).model_copy(update={"checkpoint": configs.CheckpointConfig(interval=interval)})
    with lock_run_dir(settings, resume=False, command=["train"]):
        pass
    (folder / "metrics.jsonl").write_text('{"step": 0, "eval/score": 1}\n{"step": 1}\n{"step": 2}\n')
    if interval:
        with lock_run_dir(settings, resume=True, command=["train"]):
            pass
        assert f"run_dir={folder} has no checkpoint yet, so the run starts again at step 1" in capsys.readouterr().err
    else:
        refused = r"has logged 2 steps and saved none \(checkpoint.interval=0\), so .* name another run_dir"
        with pytest.raises(ResumeError, match=refused), lock_run_dir(settings, resume=True, command=["train"]):
            pass
    (folder / "hf").mkdir()
    (folder / "hf" / "config.json").write_text("{}")
    with pytest.raises(ResumeError, match="is finished and has no checkpoint to continue from"):
        lock_run_dir(settings, resume=True, command=["train"]).__enter__()
    assert len((folder / "metrics.jsonl").read_text().splitlines()) == 3


@pytest.mark.parametrize("epochs", [None, 0.5])
def test_steps_below_the_finished_steps_are_refused(epochs: float | None, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    started(folder)
    state = folder / "checkpoints" / "step-000003"
    state.mkdir(parents=True)
    (state / paths.MANIFEST).write_text(json.dumps({"format": FORMAT} | asdict(Manifest(3, *OF_MANIFEST))))
    before = content(folder)
    fewer = config(folder)
    data = fewer.data.model_copy(update={"epochs": epochs})
    said = r"steps=2, from data.epochs=0.5: is below" if epochs else "steps=2: is below"
    with (
        pytest.raises(
            ResumeError, match=rf"{said} the 3 finished steps of run_dir=\S*; raise it, or export an earlier"
        ),
        lock_run_dir(fewer.model_copy(update={"data": data}), resume=True, command=["train"]),
    ):
        pass
    assert content(folder) == before
    for steps in (3, 4):
        with lock_run_dir(fewer.model_copy(update={"steps": steps}), resume=True, command=["train"]):
            pass
    (state.parent / "latest").write_text("step-000001\n")  # the user goes back
    (state.parent / "step-000001").mkdir()
    (state.parent / "step-000001" / paths.MANIFEST).write_text(
        json.dumps({"format": FORMAT} | asdict(Manifest(1, *OF_MANIFEST)))
    )
    with lock_run_dir(fewer, resume=True, command=["train"]):
        pass


def test_a_setting_with_another_value_than_the_runs_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    started(folder)
    with (
        pytest.raises(ResumeError, match=r"algorithm.std_eps=0.1 differs from the run's 1e-06; use the run's value"),
        lock_run_dir(config(folder, std_eps=0.1), resume=True, command=["train"]),
    ):
        pass
    assert (folder / CONFIG_FILE).read_text() == configs.dump(config(folder))


def test_health_settings_may_change_on_resume_and_are_reported_once(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    started(folder)
    raw = config(folder, kl_beta=0.05, ratio_clip_eps_high=0.28, correction={"importance": "icepop"}).model_dump(
        mode="json"
    )
    raw["optimizer"] |= {"lr": 1e-7, "min_lr": 1e-8, "schedule": "cosine", "warmup_steps": 5, "clip_grad": 0.3}
    raw |= {"max_nonfinite_steps": 9}
    changed = configs.validate(raw)
    with lock_run_dir(changed, resume=True, command=["train"]):
        pass  # a start that fails before it logs anything
    with lock_run_dir(changed, resume=True, command=["train"]):
        assert sorted(merge_changed_settings(changed)) == [
            "from here on algorithm.correction.importance='icepop'; it was 'none'",
            "from here on algorithm.kl_beta=0.05; it was 0.0",
            "from here on algorithm.ratio_clip_eps_high=0.28; it was None",
            "from here on max_nonfinite_steps=9; it was 3",
            "from here on optimizer.clip_grad=0.3; it was 1.0",
            "from here on optimizer.lr=1e-07; it was 1e-06",
            "from here on optimizer.min_lr=1e-08; it was 0.0",
            "from here on optimizer.schedule='cosine'; it was 'constant'",
            "from here on optimizer.warmup_steps=5; it was 0",
        ]
    assert configs.load(folder / CONFIG_FILE) == changed
    with lock_run_dir(changed, resume=True, command=["train"]):
        assert merge_changed_settings(changed) == []
    # Adam's betas come from the checkpoint, so another value would be ignored.
    raw["optimizer"]["betas"] = [0.9, 0.99]
    with (
        pytest.raises(ResumeError, match=r"optimizer\.betas"),
        lock_run_dir(configs.validate(raw), resume=True, command=["train"]),
    ):
        pass


def test_rows_logged_after_the_checkpoint_are_removed(tmp_path: Path) -> None:
    for name in ("metrics.jsonl", "samples.jsonl", "messages.jsonl"):
        (tmp_path / name).write_text('{"step": 0}\n{"step": 2}\n{"step": 3}\n{"step": 3, "ha')
    for step in (0, 3):
        (tmp_path / f"heldout-{step:06d}.jsonl").touch()
    truncate_logs_after(tmp_path, 2)
    for name in ("metrics.jsonl", "samples.jsonl", "messages.jsonl"):
        assert (tmp_path / name).read_text() == '{"step": 0}\n{"step": 2}\n'
    assert [path.name for path in tmp_path.glob("heldout-*")] == ["heldout-000000.jsonl"]


def test_the_machine_is_described_at_the_start(tmp_path: Path) -> None:
    started(tmp_path / "run")
    (start,) = json.loads((tmp_path / "run" / "run.json").read_text())["starts"]
    assert (
        start["machine"]["cores"] >= 1 and start["machine"]["memory_gib"] >= 1 and start["machine"]["gpus"] is not None
    )


def refused(run_dir: Path, logs: tuple[str, ...] = ()) -> None:
    """Start a run that the ranks refuse after they have written their logs."""
    with pytest.raises(ConfigError, match="tp must"), lock_run_dir(config(run_dir), resume=False, command=["train"]):
        for name in logs:
            (run_dir / "logs").mkdir(exist_ok=True)
            with (run_dir / "logs" / name).open("a") as log:
                log.write("tp must divide the heads\n")
        raise ConfigError("tp must divide the heads")


def content(folder: Path) -> dict[str, str | None]:
    return {str(p.relative_to(folder)): p.read_text() if p.is_file() else None for p in folder.rglob("*")}


def test_a_refused_start_leaves_no_files(tmp_path: Path) -> None:
    refused(tmp_path / "runs" / "new", logs=("rank_1.log",))
    assert content(tmp_path) == {"runs": None}


def test_a_refused_start_leaves_a_folder_that_it_did_not_make(tmp_path: Path) -> None:
    run_dir = tmp_path / "mine"
    run_dir.mkdir()
    refused(run_dir, logs=("rank_1.log",))
    assert content(tmp_path) == {"mine": None}
    (run_dir / "logs").mkdir()
    (run_dir / "logs" / "out.txt").write_text("my own log\n")
    (run_dir / "logs" / "rank_1.log").write_text("of an earlier start\n")
    before = content(tmp_path)
    refused(run_dir, logs=("rank_2.log",))
    assert content(tmp_path) == before


def test_the_log_of_a_server_that_did_not_start_is_kept(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    with pytest.raises(EngineError), lock_run_dir(config(run_dir), resume=False, command=["train"]):
        (run_dir / "logs").mkdir()
        (run_dir / "logs" / "server.log").write_text("no memory\n")
        raise EngineError(f"the server did not start; see {run_dir}/logs/server.log")
    assert content(run_dir) == {"logs": None, "logs/server.log": "no memory\n"}


def test_a_folder_with_a_users_own_config_is_not_taken(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("steps: 3  # my notes\n")
    with (
        pytest.raises(ConfigError, match="is not a run's folder"),
        lock_run_dir(config(tmp_path), resume=False, command=["train"]),
    ):
        pass
    assert content(tmp_path) == {"config.yaml": "steps: 3  # my notes\n"}


def test_a_folder_in_use_by_another_process_is_left_as_it_is(tmp_path: Path) -> None:
    with lock_run_dir(config(tmp_path), resume=False, command=["train"]):
        (tmp_path / "run.json").rename(tmp_path / "elsewhere")  # the other process has not written it yet
        (tmp_path / "elsewhere").unlink()
        before = content(tmp_path)
        code = "import sys; from pathlib import Path; sys.path[:0] = sys.argv[2:]\n"
        code += "from test_folder import refused; refused(Path(sys.argv[1]))"
        paths = [str(Path(__file__).parent), str(Path(__file__).parents[2])]
        other = subprocess.run([sys.executable, "-c", code, str(tmp_path), *paths], capture_output=True, text=True)
        assert "is in use by another process" in other.stderr, other.stderr
        assert content(tmp_path) == before


@pytest.mark.parametrize("is_there", [True, False])
def test_a_link_is_followed_and_outlives_a_refused_start(tmp_path: Path, is_there: bool) -> None:
    link, target = tmp_path / "link", tmp_path / "far" / "target"
    link.symlink_to("far/target")
    if is_there:
        target.mkdir(parents=True)
    refused(link, logs=("rank_1.log",))
    assert link.is_symlink() and target.exists() == is_there
    started(link)
    assert (target / "run.json").exists() and link.is_symlink()
    assert is_there or target.stat().st_mode & 0o777 == 0o700
    with lock_run_dir(config(link), resume=True, command=["train"]):
        pass


def test_a_folder_that_cannot_be_created_is_a_one_line_error(tmp_path: Path) -> None:
    (tmp_path / "circle").symlink_to(tmp_path / "circle")
    (tmp_path / "file").touch()
    for name in ("circle", "file", "file/run", "x" * 300):
        with pytest.raises(ConfigError, match=r"run_dir=.*/(circle|file|run|x+) .*; (name|free)") as error:
            started(tmp_path / name)
        assert "\n" not in str(error.value)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["circle", "file"]


def test_a_full_disk_refuses_the_start_in_one_line(full_disk: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"run_dir=.*/run cannot be written \(No space left on device\); free its disk"
    ):
        started(full_disk / "run")
    assert {path.name for path in full_disk.iterdir()} == {"filler"}


def test_a_folder_keeps_its_mode_and_open_access_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as above:
        for mode, is_told in ((0o700, False), (0o750, True), (0o755, True), (0o711, True)):
            os.chmod(above, 0o755)
            run = Path(above, f"{mode:o}")
            run.mkdir()
            run.chmod(mode)
            started(run)
            assert run.stat().st_mode & 0o777 == mode
            assert (f"run_dir={run} has mode {mode:o}: other users can read" in capsys.readouterr().err) == is_told
        os.chmod(above, 0o700)  # also closes the folders below
        with lock_run_dir(config(run), resume=True, command=["train"]):
            pass
        assert capsys.readouterr().err == ""


@pytest.mark.skipif(os.geteuid() != 0, reason="needs the right to become another user (run as root)")
def test_a_new_runs_folder_is_closed_to_other_users() -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as above:
        os.chmod(above, 0o755)
        run = Path(above, "runs", "mine")
        started(run)
        assert run.stat().st_mode & 0o777 == 0o700
        ids = {"user": 65534, "group": 65534}  # the user `nobody`
        assert subprocess.run(["ls", str(run.parent)], capture_output=True, **ids).returncode == 0
        looked = subprocess.run(["ls", str(run)], capture_output=True, text=True, **ids)
        assert looked.returncode != 0 and "Permission denied" in looked.stderr


def test_only_paths_names_the_files_below_run_dir() -> None:
    root = Path(paths.__file__).parent
    joins = [
        (path, node)
        for path in root.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div) and "run_dir" in ast.unparse(node.left)
    ]
    assert len(joins) > 20
    wrong = [(path, node) for path, node in joins if isinstance(node.right, ast.Constant | ast.JoinedStr)]
    assert not wrong, "; ".join(f"{path.relative_to(root)}:{node.lineno} {ast.unparse(node)}" for path, node in wrong)
