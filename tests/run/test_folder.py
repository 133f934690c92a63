"""Settings that a run's folder accepts as the same run."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import pytest
import yaml

from grpo_mega import config as configs
from grpo_mega.errors import ResumeError
from grpo_mega.paths import CONFIG_FILE
from grpo_mega.run.folder import adopt, claim, trim


def config(folder: Path, **algorithm: Any) -> configs.Config:
    raw = {"run_dir": str(folder), "steps": 2, "model": {"path": "m"}, "data": {"train": "t"}, "algorithm": algorithm}
    return configs.validate(raw)


def started(folder: Path) -> None:
    with claim(config(folder), resume=False, argv=["train"]):
        pass


def test_a_run_goes_on_though_a_setting_was_not_known_when_it_began(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    started(folder)
    recorded = yaml.safe_load((folder / CONFIG_FILE).read_text())
    del recorded["algorithm"]["kl_clamp"]
    (folder / CONFIG_FILE).write_text(yaml.safe_dump(recorded))
    with claim(config(folder), resume=True, argv=["train"]):
        pass


def test_a_setting_with_another_value_than_the_runs_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    started(folder)
    with (
        pytest.raises(ResumeError, match=r"algorithm.std_eps=0.1 differs from the run's 1e-06; give the run's value"),
        claim(config(folder, std_eps=0.1), resume=True, argv=["train"]),
    ):
        pass
    assert (folder / CONFIG_FILE).read_text() == configs.dump(config(folder))


def test_what_keeps_a_run_healthy_may_change_when_it_goes_on_and_each_change_is_told_once(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    started(folder)
    raw = config(folder, kl_beta=0.05, ratio_clip_eps_high=0.28, correction={"importance": "icepop"}).model_dump(mode="json")
    raw["optimizer"] |= {"lr": 1e-7, "min_lr": 1e-8, "schedule": "cosine", "warmup_steps": 5, "clip_grad": 0.3}
    raw |= {"max_nonfinite_steps": 9}
    changed = configs.validate(raw)
    with claim(changed, resume=True, argv=["train"]):
        pass  # a start that fails before it logs anything
    with claim(changed, resume=True, argv=["train"]):
        assert sorted(adopt(changed)) == [
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
    with claim(changed, resume=True, argv=["train"]):
        assert adopt(changed) == []
    # Adam's own come from the checkpoint, so that another value would be ignored.
    raw["optimizer"]["betas"] = [0.9, 0.99]
    with pytest.raises(ResumeError, match=r"optimizer\.betas"), claim(configs.validate(raw), resume=True, argv=["train"]):
        pass


def test_what_was_logged_after_the_checkpoint_is_taken_out(tmp_path: Path) -> None:
    for name in ("metrics.jsonl", "samples.jsonl", "messages.jsonl"):
        (tmp_path / name).write_text('{"step": 0}\n{"step": 2}\n{"step": 3}\n{"step": 3, "ha')
    for step in (0, 3):
        (tmp_path / f"heldout-{step:06d}.jsonl").touch()
    trim(tmp_path, 2)
    for name in ("metrics.jsonl", "samples.jsonl", "messages.jsonl"):
        assert (tmp_path / name).read_text() == '{"step": 0}\n{"step": 2}\n'
    assert [path.name for path in tmp_path.glob("heldout-*")] == ["heldout-000000.jsonl"]


def test_the_machine_is_described_at_the_start(tmp_path: Path) -> None:
    started(tmp_path / "run")
    (start,) = json.loads((tmp_path / "run" / "run.json").read_text())["starts"]
    assert start["machine"]["cores"] >= 1 and start["machine"]["memory_gib"] >= 1 and start["machine"]["gpus"] is not None


@pytest.mark.skipif(os.geteuid() != 0, reason="needs the right to become another user (run as root)")
def test_a_new_runs_folder_is_closed_to_other_users() -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as above:
        os.chmod(above, 0o755)
        run = Path(above, "runs", "mine")
        started(run)
        assert run.stat().st_mode & 0o777 == 0o700
        ids = {"user": 65534, "group": 65534}  # a user without any rights
        assert subprocess.run(["ls", str(run.parent)], capture_output=True, **ids).returncode == 0
        looked = subprocess.run(["ls", str(run)], capture_output=True, text=True, **ids)
        assert looked.returncode != 0 and "Permission denied" in looked.stderr
