"""Writers of experiment trackers: Weights & Biases and TensorBoard, with the real packages."""

import importlib.util
import json
import struct
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from grpo_mega.cli.checks import find_violations, this_machine
from grpo_mega.cli.report.writer import ReportWriter
from grpo_mega.tracking.run_log import Hooks, open_run_log
from grpo_mega.tracking.writers import SAME, other_names, wandb_mode
from tests.helpers.hostile_text import LINE_ENDS, SURROGATES
from tests.tracking.test_writers import METRICS, PROMPT, decode, make_config, make_group, read

HOSTILE, WRITABLE = LINE_ENDS + SURROGATES, LINE_ENDS + "\ufffd\ufffd \ufffd"


def test_wandb_goes_online_only_if_a_key_is_set(tmp_path: Path) -> None:
    home = {"HOME": str(tmp_path)}
    assert wandb_mode(home) == "offline"
    assert wandb_mode({**home, "WANDB_MODE": "online"}) == "offline"
    assert wandb_mode({**home, "WANDB_API_KEY": "k"}) == "online"
    assert wandb_mode({**home, "WANDB_API_KEY": "k", "WANDB_MODE": "offline"}) == "offline"
    assert wandb_mode({**home, "WANDB_MODE": "disabled"}) == "disabled"
    (tmp_path / ".netrc").write_text("machine wandb.example.org login user password k\n")
    assert wandb_mode(home) == "offline"
    assert wandb_mode({**home, "WANDB_BASE_URL": "https://wandb.example.org"}) == "online"


def test_a_run_without_a_key_is_offline_with_names_of_trl_and_verl(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_BASE_URL", "NETRC"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    log = open_run_log(make_config(tmp_path, wandb=True), 0, Hooks(ReportWriter))
    log.log_step(1, METRICS)
    group = make_group(4)
    group.prompt = replace(group.prompt, text=PROMPT + HOSTILE)
    for sample in group.samples:
        sample.prompt = group.prompt
    log.log_samples(1, [group], decode)
    log.warn(f"of a file's name: {HOSTILE}")
    log.close()  # waits until wandb's service has written its file
    (row, *_), (message,) = (read(tmp_path / "run" / f"{name}.jsonl") for name in ("samples", "messages"))
    warning = " ".join(f"of a file's name: {WRITABLE}".split())  # one line
    assert row["prompt"] == PROMPT + WRITABLE and message["text"] == warning
    assert "\ufffd\ufffd \ufffd" in (tmp_path / "run/report.html").read_text(encoding="utf-8")
    (path,) = (tmp_path / "run/wandb").glob("offline-run-*/*.wandb")
    records = list(wandb_records(path))
    defined = {
        one.metric.name or one.metric.glob_name: one.metric.step_metric for one in records if one.HasField("metric")
    }
    assert defined == {"step": "", "*": "step"}, "charts run over the training step, not over log calls"
    logged: dict[str, Any] = {}
    for record in records:
        logged |= {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
    assert logged["reward/mean"] == logged["reward"] == logged["critic/score/mean"] == 1.4231
    assert logged["rewards/accuracy/mean"] == 0.93 and logged["timing_s/gen"] == 101.23
    assert logged["completions/_type"] == "table-file" and logged["completions/nrows"] == 4
    table = json.loads((path.parent / "files" / logged["completions/path"]).read_text())
    assert table["columns"][:4] == ["step", "prompt", "completion", "answer"]
    assert table["data"][0] == [1, PROMPT + WRITABLE, "AB", "2", 1.0, None, 1.0, 0.5, "stop"]
    assert [record.alert.text for record in records if record.HasField("alert")] == [warning]
    summary = {item.key: item.value_json for record in records for item in record.summary.update}
    assert json.loads(summary["warnings"]) == [warning]


def wandb_records(path: Path) -> Iterator[Any]:
    """Read an offline run: a LevelDB log with a header of 7 bytes and records split into blocks of 32 KiB."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, at, record = path.read_bytes(), 7, b""
    while at + 7 <= len(data):
        if (left := 32768 - at % 32768) < 7:
            at += left
            continue
        _, size, kind = struct.unpack_from("<IHB", data, at)
        record += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # a whole record, or its last part
            yield Record.FromString(record)
            record = b""


def test_tensorboard_has_metrics_evaluations_and_warnings_of_all_starts(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for first in (1, 3):  # the second start resumes after a third step that was lost
        log = open_run_log(make_config(tmp_path, tensorboard=True), 0, Hooks())
        log.log_eval(first - 1, {"eval/score": 0.1 * first})
        for step in range(first, first + 3):
            log.log_step(step, METRICS | {"reward/mean": step + 10.0 * first, "kl/mean": float("nan")})
        log.warn(f"a gradient norm jumped in start {first}")
        log.close()
        lines = (tmp_path / "run/metrics.jsonl").read_text().splitlines(keepends=True)
        (tmp_path / "run/metrics.jsonl").write_text("".join(lines[:3]))
    found = EventAccumulator(str(tmp_path / "run/tensorboard")).Reload()
    assert [(one.step, one.value) for one in found.Scalars("reward/mean")] == [
        (1, 11.0),
        (2, 12.0),
        (3, 33.0),
        (4, 34.0),
        (5, 35.0),
    ]
    assert [(one.step, round(one.value, 6)) for one in found.Scalars("eval/score")] == [(0, 0.1), (2, 0.3)]
    assert set(METRICS) < set(found.Tags()["scalars"])
    texts = [one.tensor_proto.string_val[0].decode() for one in found.Tensors("warnings/text_summary")]
    assert texts[-1] == "a gradient norm jumped in start 3"


def test_a_missing_tensorboard_is_one_line_before_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    line = "log.tensorboard=true needs the package tensorboard; pip install 'grpo-mega[trackers]', or leave it out"
    run = make_config(tmp_path, tensorboard=True)
    assert line not in find_violations(run, this_machine(run.layout))
    monkeypatch.setitem(sys.modules, "tensorboard", None)  # the import fails like without the package
    assert line in find_violations(run, this_machine(run.layout))
    assert line not in find_violations(make_config(tmp_path), this_machine(run.layout))
    open_run_log(make_config(tmp_path), 0, Hooks()).close()  # imports no tensorboard


def test_names_of_trl_are_in_its_source() -> None:
    """No metric of ours is overwritten."""
    trl = Path(importlib.util.find_spec("trl").origin).parent / "trainer/grpo_trainer.py"  # type: ignore[union-attr, arg-type]
    source = trl.read_text() + '"loss" "grad_norm" "learning_rate" "step_time"'
    for first, *_ in (names for ours, names in SAME.items() if ours not in ("reward/min", "reward/max")):
        assert f'"{first}"' in source, first
    metrics = {name: float(i) for i, name in enumerate([*SAME, "reward/accuracy", "eval/score", "eval/gsm8k/score"])}
    found = other_names(metrics)
    assert not found.keys() & metrics.keys()
    assert {"val-core/heldout/score/mean@1", "val-core/gsm8k/score/mean@1", "rewards/accuracy/mean"} < found.keys()
