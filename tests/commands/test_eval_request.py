"""`grpo-mega eval` before any rank starts: the request for a run or a config, and one-line errors."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from grpo_mega import cli
from grpo_mega import config as configs
from grpo_mega.checkpoint_io.checkpoints import find_policy
from grpo_mega.cli.commands.eval import make_request
from grpo_mega.cli.commands.options import EvalOptions, PlanOptions, add_options, read_options
from grpo_mega.config import EvalConfig
from grpo_mega.distributed.versions import installed_set
from grpo_mega.errors import ConfigError, ResumeError, UserError
from tests.checkpoint_io.families import write_manifest

OURS = installed_set().record
RAW: dict[str, Any] = {
    "run_dir": "somewhere",
    "steps": 7,
    "model": {"path": "model", "dtype": "float32"},
    "layout": {"tp": 2},
    "data": {"train": ["a.jsonl", "b.jsonl"], "heldout": "h.jsonl", "pass_rates": "r.jsonl", "min_pass_rate": 0.1},
    "rollout": {"temperature": 0.7},
    "eval": {"num_prompts": 5, "samples": 16, "ks": [16]},
    "log": {"wandb": True},
}


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    return write(tmp_path / "c.yaml")


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """Return the folder of a run with checkpoints of steps 2 and 4."""
    folder = tmp_path / "run"
    for step in (2, 4):
        (folder / f"checkpoints/step-00000{step}").mkdir(parents=True)
        write_manifest(folder / f"checkpoints/step-00000{step}", step, written_at=float(step), versions=OURS)
    (folder / "checkpoints/latest").write_text("step-000004\n")
    write(folder / "config.yaml")
    return folder


def write(path: Path, **data: Any) -> Path:
    path.write_text(yaml.safe_dump(RAW | ({"data": data} if data else {})))
    return path


def test_a_run_is_evaluated_at_its_newest_checkpoint_or_at_a_step(run_dir: Path) -> None:
    assert make_request(EvalOptions(run_dir)).checkpoint == run_dir / "checkpoints/step-000004"
    found = make_request(EvalOptions(run_dir, step=2))
    assert found.checkpoint == run_dir / "checkpoints/step-000002"
    assert found.config.model.init == "random"  # the run's start weights may be gone
    assert make_request(EvalOptions(run_dir, model=Path("hf"))).checkpoint is None


@pytest.mark.parametrize(
    ("exported", "written_at", "expected"),
    [
        (7, 5.0, 7),  # the run finished at step 7 with checkpoint.interval=0
        (2, 3.0, 4),  # the run finished at step 2, and continued to step 4
        (4, 5.0, 4),  # the checkpoint of the same step has full precision
        (9, 3.0, 4),  # the run finished at step 9, and was repeated from an earlier step
    ],
)
def test_the_newer_of_checkpoint_and_exported_policy_is_taken(
    run_dir: Path, exported: int, written_at: float, expected: int
) -> None:
    (run_dir / "hf").mkdir()
    record = {"step": exported, "written_at": written_at, "versions": OURS}
    (run_dir / "hf/grpo_mega.json").write_text(json.dumps(record))
    found = make_request(EvalOptions(run_dir))
    assert found.step == expected
    if expected == exported == 7:
        assert (found.checkpoint, found.config.model.path) == (None, run_dir / "hf")
        note = f"{run_dir} has an older checkpoint, of step 4: taking {run_dir / 'hf'}, the policy after step 7"
        assert found.note == note
        assert find_policy(run_dir, 7).path == run_dir / "hf"
    else:
        assert found.checkpoint == run_dir / f"checkpoints/step-00000{expected}"
        assert found.note == f"evaluating {found.checkpoint}, the policy after step {expected}"
    assert find_policy(run_dir, 2).path == run_dir / "checkpoints/step-000002"
    (run_dir / "hf/grpo_mega.json").write_text('{"step": null}')
    with pytest.raises(ResumeError, match=r"grpo_mega\.json cannot be read"):
        make_request(EvalOptions(run_dir))


def test_a_config_is_evaluated_with_its_model_or_another_one(config_file: Path) -> None:
    found = make_request(EvalOptions(config_file)).config
    assert (found.model.path, found.model.init) == (Path("model"), "checkpoint")
    assert make_request(EvalOptions(config_file, model=Path("hf"))).config.model.path == Path("hf")


def test_only_held_out_prompts_are_loaded_if_they_are_a_separate_set(config_file: Path, tmp_path: Path) -> None:
    found = make_request(EvalOptions(config_file))
    assert [source.path for source in found.config.data.train] == ["h.jsonl"]
    assert (found.set_names, found.config.eval.num_prompts, found.config.data.pass_rates) == (("",), 5, None)
    several = write(
        tmp_path / "d.yaml", train="a", heldout_sets={"x": "x.jsonl", "y": {"path": "y", "prompt_column": "q"}}
    )
    found = make_request(EvalOptions(several))
    assert found.set_names == ("x", "y")
    assert [(source.path, source.prompt_column) for source in found.config.data.train] == [
        ("x.jsonl", None),
        ("y", "q"),
    ]


def test_prompts_split_off_from_the_training_data_are_split_off_again(tmp_path: Path) -> None:
    found = make_request(EvalOptions(write(tmp_path / "d.yaml", train="a", heldout_size=3)))
    assert found.set_names is None
    assert (found.config.data.train[0].path, found.config.data.heldout_size) == ("a", 3)


def test_the_whole_training_set_is_evaluated_despite_pass_rates(config_file: Path) -> None:
    found = make_request(EvalOptions(config_file, train_set=True, samples=8))
    assert [source.path for source in found.config.data.train] == ["a.jsonl", "b.jsonl"]
    assert found.config.data.heldout is None
    assert (found.config.data.pass_rates, found.config.data.min_pass_rate) == (None, None)
    assert found.config.eval.num_prompts is None


def test_settings_come_from_the_config_unless_given(config_file: Path) -> None:
    assert make_request(EvalOptions(config_file)).config.eval.all_ks == (16,)
    found = make_request(
        EvalOptions(config_file, samples=8, temperature=0.6, top_p=0.9, greedy=False, prompts=2)
    ).config.eval
    assert (found.samples, found.all_ks, found.temperature, found.top_p) == (8, (1, 2, 4, 8), 0.6, 0.9)
    assert (found.greedy, found.num_prompts) == (False, 2)
    assert make_request(EvalOptions(config_file, samples=8, ks=[3])).config.eval.all_ks == (3,)
    assert make_request(EvalOptions(config_file, overrides=["layout.tp=1"])).config.layout.tp == 1
    assert not make_request(EvalOptions(config_file)).config.log.wandb


def test_the_options_are_read_from_the_command_line() -> None:
    """Ranks create the request from the same arguments as their launcher."""
    parser = argparse.ArgumentParser()
    add_options(parser, EvalOptions)
    assert read_options(EvalOptions, parser.parse_args(["run"])) == EvalOptions(Path("run"))
    given = (
        "run --set layout.tp=1 --set seed=3 --step 2 --model hf --data d --train-set --prompts 5 --samples 8 --k 1 8"
    )
    arguments = f"{given} --temperature 0.5 --top-p 0.9 --no-greedy --out rows.jsonl".split()
    assert read_options(EvalOptions, parser.parse_args(arguments)) == EvalOptions(
        target=Path("run"),
        overrides=("layout.tp=1", "seed=3"),
        step=2,
        model=Path("hf"),
        data="d",
        train_set=True,
        prompts=5,
        samples=8,
        ks=(1, 8),
        temperature=0.5,
        top_p=0.9,
        greedy=False,
        out=Path("rows.jsonl"),
    )


def test_the_options_of_plan_are_read_from_the_command_line() -> None:
    parser = argparse.ArgumentParser()
    add_options(parser, PlanOptions)
    assert read_options(PlanOptions, parser.parse_args(["c.yaml"])) == PlanOptions(Path("c.yaml"))
    given = (
        "c.yaml --set seed=3 --gpu h200 --world-size 64 --gpus-per-node 4 --model-config m.json --model name --json"
        " --suggest"
    )
    arguments = f"{given} --mean-prompt 9 --mean-response 8.5".split()
    assert read_options(PlanOptions, parser.parse_args(arguments)) == PlanOptions(
        config=Path("c.yaml"),
        overrides=("seed=3",),
        gpu="h200",
        world_size=64,
        gpus_per_node=4,
        model_config=Path("m.json"),
        model="name",
        mean_prompt=9.0,
        mean_response=8.5,
        is_json=True,
        suggests=True,
    )


@pytest.mark.parametrize(("samples", "ks"), [(0, ()), (1, (1,)), (6, (1, 2, 4)), (8, (1, 2, 4, 8))])
def test_ks_are_powers_of_two_up_to_the_samples(samples: int, ks: tuple[int, ...]) -> None:
    assert EvalConfig(samples=samples).all_ks == ks


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"step": 3}, "has no checkpoint of step 3; there are: step-000002, step-000004"),
        ({"step": 2, "model": Path("hf")}, "--model hf and --step 2 name two policies; give one of them"),
        ({"data": "d", "train_set": True}, "--data d and --train-set name two sets; give one of them"),
        ({"samples": 4, "ks": [2, 8]}, "eval.ks=[2, 8] has 8, above eval.samples=4; raise samples"),
        (
            {"samples": 0, "greedy": False},
            "eval.greedy=false needs eval.samples > 0, because nothing is left to evaluate",
        ),
        ({"temperature": 0.0}, "eval.temperature=0.0: must be above 0; raise it"),
        ({"top_p": 1.5}, "eval.top_p=1.5: must be at most 1; lower it"),
        ({"samples": -1}, "eval.samples=-1: must be at least 0; raise it"),
        ({"out": Path("none/rows.jsonl")}, "--out none/rows.jsonl: there is no folder none; make it first"),
        ({"out": Path(__file__)}, "test_eval_request.py exists; name a file that does not"),
        (
            {"overrides": ["data.heldout=null"]},
            "has no held-out prompts; name a dataset by --data, or give --train-set",
        ),
    ],
)
def test_an_invalid_request_is_a_one_line_error(run_dir: Path, options: dict[str, Any], problem: str) -> None:
    with pytest.raises(UserError) as caught:
        make_request(EvalOptions(run_dir, **options))
    assert problem in str(caught.value) and "\n" not in str(caught.value)


def test_a_target_that_is_neither_run_nor_config_is_a_one_line_error(config_file: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"holds no config\.yaml; name the run_dir of a run, a config file"):
        make_request(EvalOptions(tmp_path))
    (tmp_path / "config.json").touch()
    with pytest.raises(ConfigError, match="is a model without a run; name a dataset by --data, or give --prompt"):
        make_request(EvalOptions(tmp_path))
    with pytest.raises(ConfigError, match=r"--step 2 is an option for a run, but .*c\.yaml is none; name its folder"):
        make_request(EvalOptions(config_file, step=2))
    with pytest.raises(ConfigError, match="No such file or directory; name an existing YAML file"):
        make_request(EvalOptions(tmp_path / "none.yaml"))


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--set", "model.path=/none", "--set", "log.progress=false"], "model.path=/none is not a folder"),
        (["--prompts", "0"], "--prompts 0 leaves nothing to evaluate"),
    ],
)
def test_the_command_ends_with_code_2_and_leaves_nothing(
    run_dir: Path, tmp_path: Path, arguments: list[str], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    before = sorted(tmp_path.rglob("*"))
    assert cli.main(["eval", str(run_dir), "--out", str(tmp_path / "rows.jsonl"), *arguments]) == 2
    output = capsys.readouterr()
    assert output.out == "" and sum(problem in line for line in output.err.splitlines()) == 1
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (
            {"heldout": "h", "heldout_sets": {"x": "x"}},
            "data.heldout.path=h conflicts with data.heldout_sets=x; give one of them",
        ),
        ({"heldout_sets": {"a b": "x"}}, "data.heldout_sets has the name 'a b'; use letters, digits"),
        (
            {"heldout_sets": {"x": {"path": "x", "wait": 1}}},
            "unknown key 'data.heldout_sets.x.wait'; did you mean 'path'?",
        ),
    ],
)
def test_bad_names_of_held_out_sets_are_a_one_line_error(data: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError) as caught:
        configs.validate(RAW | {"data": {"train": "a", **data}})
    assert str(caught.value).startswith(problem)
