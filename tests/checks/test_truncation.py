"""Truncated sampling: every command that trains refuses it, and commands that only sample allow it."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from grpo_mega import cli
from grpo_mega.cli.commands.train import check_config
from grpo_mega.config import load
from tests.helpers.models import make_model, save_checkpoint
from tests.helpers.runs import write_small

pytestmark = pytest.mark.pool


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    save_checkpoint(make_model("qwen2"), Path("model"))
    return write_small(Path())


@pytest.mark.parametrize(
    ("key", "says"),
    [
        ("top_p=0.75", "rollout.top_p=0.75 conflicts with a training step, whose log-probs are over all tokens"),
        ("top_k=7", "rollout.top_k=7 conflicts with a training step, whose log-probs are over all tokens"),
        ("temperature=0", "rollout.temperature=0: must be above 0"),
    ],
)
def test_truncated_sampling_is_refused_by_all_that_train(
    key: str, says: str, config: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A run that was started before the rule is refused too."""
    raw, (name, value) = yaml.safe_load(config.read_text()), key.split("=")
    raw["rollout"][name] = yaml.safe_load(value)
    config.write_text(yaml.safe_dump(raw))
    Path("run").mkdir()
    Path("run/config.yaml").write_text(yaml.safe_dump(raw))
    for words in (
        *("train config.yaml", "train --resume run/config.yaml"),
        *("plan config.yaml", "plan --gpu h100 config.yaml", "check --layouts pp=1 config.yaml"),
    ):
        assert cli.main(words.split()) == 2, words
        output = capfd.readouterr()
        text = " ".join((output.err + output.out).split())
        assert text.count(says) == 1, (words, text)
    assert {path.name for path in Path("run").iterdir()} == {"config.yaml"}


def test_a_command_that_only_samples_may_truncate(config: Path) -> None:
    truncated = load(config, ["rollout.top_p=0.75", "rollout.top_k=7", "eval.top_p=0.5"])
    checked = check_config(truncated, trains=False)
    assert (checked.rollout.top_p, checked.rollout.top_k, checked.eval.top_p) == (0.75, 7, 0.5)
    assert check_config(load(config, ["eval.top_p=0.5"])).eval.top_p == 0.5
