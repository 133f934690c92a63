"""Plans for ranks on this machine's cores, and violations on its memory, which every command lists."""

from __future__ import annotations

import json
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from grpo_mega import cli
from grpo_mega import config as configs
from grpo_mega.cli import checks
from grpo_mega.cli.checks.model import model_of
from grpo_mega.cli.planner import this_machine
from grpo_mega.cli.planner.plan import Plan
from grpo_mega.config import Config
from grpo_mega.processes import GIB, HostRoom
from tests.helpers.models import make_tokenizer

ROOM = HostRoom(24 * GIB, 20 * GIB)
# The 134.5M parameters of SmolLM-135M.
SMALL = {
    "model_type": "llama",
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "vocab_size": 49152,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
}
RATES = this_machine.Rates(flops=50e9, copied_bytes=10e9, call_s=1e-6)


@pytest.fixture(autouse=True)
def room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(this_machine, "host_room", lambda: ROOM)


def write_config(folder: Path, fields: dict[str, Any] = SMALL, **changes: Any) -> Path:
    """Write a model without weights, prompts and a config with `changes` by section."""
    make_tokenizer().save_pretrained(folder / "model", save_jinja_files=False)
    (folder / "model/config.json").write_text(json.dumps(fields))
    rows = [json.dumps({"prompt": f"{i}", "answer": "1"}) for i in range(64)]
    (folder / "train.jsonl").write_text("\n".join(rows) + "\n")
    raw: dict[str, Any] = {
        "run_dir": str(folder / "run"),
        "steps": 3,
        "device": "cpu",
        "model": {"path": str(folder / "model"), "init": "random", "dtype": "float32"},
        "layout": {"dp": 2},
        "data": {"train": str(folder / "train.jsonl"), "max_prompt_length": 64},
        "rollout": {"max_response_length": 128, "max_concurrent": 32},
        "rewards": {"functions": [{"name": "accuracy"}]},
        "algorithm": {"group_size": 8, "kl_beta": 0.001},
        "batch": {"prompts_per_step": 8, "mini_batches": 2, "tokens_per_micro_batch": 1024},
    }
    for section, values in changes.items():
        raw[section] |= values
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(raw))
    return path


def plan_of(config: Config, rates: this_machine.Rates = RATES) -> Plan:
    return Plan(this_machine.plan_here(config, model_of(SMALL), checks.this_machine(config.layout), rates))


def lines_of(code: int, output: str) -> list[str]:
    """Return the problems that a command printed."""
    assert code == 2, output
    lines = [line for line in output.splitlines() if not line.startswith("grpo-mega: note: ")]
    text = " ".join(" ".join(lines).split())
    for lead in ("grpo-mega: error: ", "- "):
        text = text.replace(f" {lead}", "\n").replace(lead, "\n")
    return sorted(line.strip() for line in text.split("note: ")[0].splitlines()[1:] if line.strip())


def test_all_commands_list_the_same_findings(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_config(
        tmp_path,
        SMALL | {"intermediate_size": 1537},
        layout={"tp": 2, "dp": 1},
        rewards={"functions": [{"name": "no_such_package.score"}]},
        data={"train": str(tmp_path / "none.jsonl")},
    )
    found = []
    for arguments in (
        ["train", str(path)],
        ["check", str(path), "--layouts", "tp=2"],
        ["plan", str(path), "--gpu", "cpu"],
    ):
        code = cli.main(arguments)
        output = capsys.readouterr()
        found.append(lines_of(code, output.out if arguments[0] == "plan" else output.err))
    assert found[0] == found[1] == found[2]
    text = "\n".join(found[0])
    assert len(found[0]) == 3
    code = cli.main(["check", str(path), "--layouts", "tp=two tp=2"])
    assert set(found[0]) < set(lines_of(code, capsys.readouterr().err)), "a bad layout must not hide other problems"
    assert all(part in text for part in ("no_such_package", "none.jsonl", "tp=2"))


def test_a_job_that_cannot_fit_is_refused_and_a_tight_one_gets_a_note(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_config(tmp_path)
    config = configs.load(path)
    machine = checks.this_machine(config.layout)
    need = plan_of(config).host.peak

    def findings_with(room: HostRoom) -> checks.Violations:
        monkeypatch.setattr(this_machine, "host_room", lambda: room)
        return this_machine.find_all(config, machine)

    enough = findings_with(HostRoom(int(need), int(1.01 * need)))
    assert enough.violations == [] and enough.notes == []
    tight = findings_with(HostRoom(int(need), int(0.99 * need), "the cgroup /job"))
    assert tight.violations == []
    (note,) = tight.notes
    assert note.startswith(f"memory: the ranks of this machine may need {need.gib:.1f} GiB") and "/job" in note
    refused = findings_with(HostRoom(int(need / 1.3), int(need / 1.3)))
    (line,) = refused.violations
    assert line.startswith(f"memory: 2 ranks on this machine need about {need.gib:.1f} GiB, but it has ")
    for arguments in (["train", str(path)], ["check", str(path), "--layouts", "dp=2"]):
        assert cli.main(arguments) == 2
        assert line in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
    monkeypatch.setattr(this_machine, "measure_rates", lambda *_: RATES)
    assert cli.main(["plan", str(path), "--gpu", "cpu"]) == 1
    output = " ".join(capsys.readouterr().out.split())
    assert not [word for word in ("NVLink", "per GPU", "HBM", "CUDA context") if word in output]
    assert f"DOES NOT FIT: {line.removeprefix('memory: ')}" in output


def test_memory_and_time_follow_the_layout_and_the_rates(tmp_path: Path) -> None:
    config = configs.load(write_config(tmp_path))
    plan = plan_of(config)
    state = {figure.label: float(figure) for figure in plan.worst.phases["update"]}
    parameters = 134_515_008
    assert state["weights"] == pytest.approx(4 * parameters, rel=1e-3)
    assert state["optimizer state"] == pytest.approx(4 * parameters, rel=1e-3)  # half of two moments
    assert state["reference"] == pytest.approx(8 * parameters, rel=1e-3)
    assert plan.host.peak > 2 * plan.worst.peak
    without = config.model_copy(update={"algorithm": config.algorithm.model_copy(update={"kl_beta": 0.0})})
    assert plan.worst.peak - plan_of(without).worst.peak == pytest.approx(8 * parameters, rel=1e-3)
    faster = plan_of(config, replace(RATES, flops=2 * RATES.flops, copied_bytes=2 * RATES.copied_bytes, call_s=5e-7))
    assert plan.timing.step / 2 < faster.timing.step < 0.7 * plan.timing.step


def test_rates_are_measured_for_the_share_of_a_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = configs.load(write_config(tmp_path))
    monkeypatch.setattr(this_machine, "num_cores", lambda: 2)
    run, measured = subprocess.run, list[Any]()

    def run_once(*arguments: Any, **options: Any) -> Any:
        measured.extend([run(*arguments, **options)] * (not measured))
        return measured[0]

    monkeypatch.setattr(subprocess, "run", run_once)
    rates = {ranks: this_machine.measure_rates(config, model_of(SMALL).shape, ranks) for ranks in (1, 2, 8)}
    assert 1e9 < rates[2].flops < 1e13
    assert 1e8 < rates[2].copied_bytes < 1e12
    assert 1e-7 < rates[2].call_s < 1e-4
    assert rates[1].flops / rates[2].flops == pytest.approx(2)
    assert rates[2].flops / rates[8].flops == pytest.approx(4)
    assert rates[8].call_s / rates[2].call_s == pytest.approx(4)
