"""Test vectors for other trainers: our code agrees, wrong implementations do not, and --write reproduces the committed
file.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from grpo_mega.algorithm.losses import OBJECTIVES
from grpo_mega.config import AlgorithmConfig
from tools.conformance import adapter, check

ROOT = Path(__file__).resolve().parents[2]
CASES = check.loads(check.FILE.read_text())

# Functions of other trainers. The last function is correct but implements only losses.
TRAINER = """
import copy
from tools.conformance import adapter

def plain(kind, inputs, settings):
    return adapter.ours(kind, inputs, settings)

def clips_the_other_side(kind, inputs, settings):
    if kind == "loss" and settings["loss_type"] == "actor":
        settings = settings | {"ratio_clip_eps_low": settings["ratio_clip_eps_high"]}
    return adapter.ours(kind, inputs, settings)

def one_gradient_off(kind, inputs, settings):
    result = copy.deepcopy(adapter.ours(kind, inputs, settings))
    if kind == "loss" and result["gradients"][0]:
        result["gradients"][0][0] += 1e-6
    return result

def gives_nan(kind, inputs, settings):
    result = adapter.ours(kind, inputs, settings)
    return result | {"values": [float("nan")] * len(result["values"])} if kind == "kl" else result

def loses_a_token(kind, inputs, settings):
    result = adapter.ours(kind, inputs, settings)
    return {name: rows[:-1] for name, rows in result.items()} if kind == "correction" else result

def raises(kind, inputs, settings):
    raise RuntimeError("no such loss")

def knows_losses_alone(kind, inputs, settings):
    if kind != "loss":
        raise NotImplementedError
    return adapter.ours(kind, inputs, settings)
"""


@pytest.fixture
def trainer(tmp_path, monkeypatch):
    (tmp_path / "other_trainer.py").write_text(TRAINER)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "other_trainer", raising=False)


def run(capsys, function, *options):
    code = check.main(["--implementation", f"other_trainer:{function}", *options])
    return code, capsys.readouterr().out.splitlines()


def test_the_code_that_trains_agrees_with_every_case(capsys):
    assert check.main([]) == 0
    assert capsys.readouterr().out.startswith(f"{len(CASES)} of {len(CASES)} ")


def test_the_tool_runs_from_any_folder_and_finds_modules_there(tmp_path):
    (tmp_path / "other_trainer.py").write_text(TRAINER)
    command = [
        sys.executable,
        ROOT / "tools/conformance/check.py",
        "--implementation",
        "other_trainer:plain",
        "--only",
        "kl: ",
    ]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.startswith("9 of 9 "), done.stderr


def test_write_reproduces_the_committed_file(tmp_path):
    path = tmp_path / "again.json"
    assert check.main(["--write", "--file", str(path)]) == 0
    again = check.loads(path.read_text())
    assert len(again) == len(CASES)
    for case, committed in zip(again, CASES, strict=True):
        for part in ("name", "kind", "inputs", "settings"):  # compared as text because NaN is not equal to itself
            assert json.dumps(case[part]) == json.dumps(committed[part])
        assert adapter.differences(committed["expected"], case["expected"], 1e-11) == []


def test_a_perturbed_expectation_is_detected(tmp_path, capsys):
    cases = json.loads(check.FILE.read_text())
    case = next(case for case in cases if case["name"] == "loss: gspo, token-mean")
    case["expected"]["loss"] += 1e-6
    path = tmp_path / "perturbed.json"
    path.write_text(json.dumps(cases))
    assert check.main(["--file", str(path)]) == 1
    line, summary = capsys.readouterr().out.splitlines()
    assert line.startswith("loss: gspo, token-mean: loss is ") and "off by 1e-06" in line
    assert summary.startswith(f"{len(CASES) - 1} of {len(CASES)} ")


@pytest.mark.parametrize(
    ("function", "text"),
    [
        ("clips_the_other_side", "loss: actor, token-mean"),
        ("one_gradient_off", "gradients[0][0] is"),
        ("gives_nan", "values[0] is nan, not"),
        ("loses_a_token", "correction: veto: has the shape"),
        ("raises", "raised RuntimeError: no such loss"),
    ],
)
def test_a_wrong_implementation_fails_and_its_cases_are_named(trainer, capsys, function, text):
    code, lines = run(capsys, function)
    assert code == 1 and any(text in line for line in lines)
    agreed, _, total, _ = lines[-1].split()
    assert int(agreed) < int(total) == len(CASES)


def test_missing_parts_of_an_implementation_are_named_and_do_not_agree(trainer, capsys):
    code, lines = run(capsys, "knows_losses_alone")
    num_losses = sum(case["kind"] == "loss" for case in CASES)
    assert code == 1 and lines[-1].startswith(f"{num_losses} of {len(CASES)} ")
    assert lines[-2].startswith("not implemented: kl: kl; kl: abs;")
    assert run(capsys, "knows_losses_alone", "--only", "loss: ")[0] == 0


def test_a_wider_tolerance_lets_small_errors_pass(trainer, capsys):
    assert run(capsys, "one_gradient_off", "--only", "loss: gspo, token-mean", "--tolerance", "1e-4")[0] == 0


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--implementation", "no_such_module:f"], "No module named 'no_such_module'"),
        (["--implementation", "math"], "--implementation math names no function; write package.module:function"),
        (["--implementation", "math:nothing"], "has no attribute 'nothing'"),
        (["--only", "nothing"], "has 'nothing' in its name"),
        (["--file", "no_such_file.json"], "no_such_file.json"),
    ],
)
def test_bad_options_are_a_one_line_error_with_exit_code_2(capsys, options, text):
    assert check.main(options) == 2
    error = capsys.readouterr().err
    assert text in error and error.count("\n") == 1


def test_the_file_is_small_strict_json_and_covers_every_config_name():
    text = check.FILE.read_text()
    assert len(text) < 450_000 and "NaN" not in text and "Infinity" not in text
    names = [case["name"] for case in CASES]
    assert len(set(names)) == len(names)
    used = [case["settings"] for case in CASES]
    for field in ("loss_type", "loss_agg_func", "adv_type", "kl_penalty_type"):
        allowed = set(AlgorithmConfig.model_fields[field].annotation.__args__)
        assert {settings[field] for settings in used if field in settings} == allowed
    assert {settings["loss_type"] for settings in used if "loss_type" in settings} == set(OBJECTIVES)
