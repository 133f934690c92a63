"""A run with model.lora: what it writes, its resume, its exports, and what PEFT makes of them.

Starting a run is mostly imports, so tests share runs.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from grpo_mega import cli
from grpo_mega.checkpoint_io.checkpoints import check_model, read_manifest
from grpo_mega.errors import ResumeError
from grpo_mega.weights.spec import ModelShape
from tests.helpers.runs import losses, metrics, run, stop_after
from tools.benchmarks import kills

pytestmark = [pytest.mark.distributed, pytest.mark.usefixtures("preloaded_python")]

LORA = {"rank": 3, "alpha": 24.0, "targets": ["q", "o", "up"]}
STEPS = 20


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = kills.write_inputs(tmp_path_factory.mktemp("lora"), "tp=1", tie_word_embeddings=True)
    torch.manual_seed(5)
    model = path.parent / "model"
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model)).save_pretrained(model)
    config = json.loads(path.read_text())
    config["model"] |= {"lora": LORA, "init": "checkpoint"}
    config["algorithm"] |= {"kl_beta": 0.05}
    config["optimizer"] |= {"lr": 0.002}
    config |= {"steps": STEPS}
    path.write_text(json.dumps(config))
    return path


@pytest.fixture(scope="module")
def finished(inputs: Path) -> Path:
    """Return the folder of a run that was stopped after two steps and resumed."""
    run_dir = inputs.parent / "run"
    stop_after(inputs, run_dir, 2)
    code, output = run(inputs, run_dir, "--resume")
    assert code == 0, output
    return run_dir


def test_only_the_adapter_changes_and_the_engine_follows_it(inputs: Path, finished: Path) -> None:
    base = load_file(inputs.parent / "model" / "model.safetensors")
    merged = load_file(finished / "hf" / "model.safetensors")
    changed = {name for name, weight in base.items() if not torch.equal(weight, merged[name])}
    assert changed == {name for name in base if name.endswith(("q_proj.weight", "o_proj.weight", "up_proj.weight"))}
    steps = [row for row in metrics(finished) if "loss/total" in row]
    assert len(losses(finished)) == STEPS and all(row["mismatch/abs_mean"] < 1e-5 for row in steps)
    assert steps[0]["kl/mean"] < steps[-1]["kl/mean"]  # the reference is the base


def test_a_peft_folder_and_the_merged_folder_give_the_same_logits(inputs: Path, finished: Path) -> None:
    from peft import PeftModel

    out = finished.parent
    assert cli.main(["export", str(finished), str(out / "peft")]) == 0
    assert cli.main(["export", str(finished), str(out / "merged"), "--merged"]) == 0
    for path in ("adapter_config.json", "adapter_model.safetensors"):
        assert (out / "peft" / path).read_bytes() == (finished / "adapter" / path).read_bytes()
    assert "rope_theta" not in json.loads((inputs.parent / "model" / "config.json").read_text())
    for folder in (out / "merged", finished / "hf"):  # with the fields that transformers 4 reads
        assert json.loads((folder / "config.json").read_text())["rope_theta"] == 10000.0
    tokens = torch.arange(3, 40)[None]
    with torch.no_grad():
        base = AutoModelForCausalLM.from_pretrained(inputs.parent / "model", dtype=torch.float32)
        plain = base(tokens).logits
        adapted = PeftModel.from_pretrained(base, out / "peft")(tokens).logits
        for folder in (out / "merged", finished / "hf"):
            found = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(tokens).logits
            assert float((found - adapted).abs().max()) < 1e-6 * float(adapted.abs().max()) * 3
    assert float((plain - adapted).abs().max()) > 1e-3


@pytest.mark.full
def test_a_run_starts_from_a_peft_folder(inputs: Path, finished: Path) -> None:
    run_dir, rate = inputs.parent / "from", ("--set", "optimizer.lr=1e-9")
    code, output = run(inputs, run_dir, "--set", f"model.adapter={finished / 'adapter'}", *rate)
    assert code == 0, output
    ours, theirs = (load_file(folder / "hf" / "model.safetensors") for folder in (run_dir, finished))
    assert all(float((ours[name] - weight).abs().max()) < 1e-6 for name, weight in theirs.items())


def test_sft_trains_an_adapter(inputs: Path) -> None:
    path, run_dir = inputs.parent / "sft.json", inputs.parent / "sft"
    config = json.loads(inputs.read_text())
    rows = [json.loads(line) for line in Path(config["data"]["train"]).read_text().splitlines()]
    config["data"] |= {"train": str(inputs.parent / "rows.jsonl"), "heldout": None, "max_length": 64}
    (inputs.parent / "rows.jsonl").write_text("".join(json.dumps(r | {"completion": r["answer"]}) + "\n" for r in rows))
    path.write_text(json.dumps(config))
    process = kills.start(path, run_dir, [], output=subprocess.PIPE, name="sft")
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0 and losses(run_dir)[-1] < losses(run_dir)[0], output
    assert (run_dir / "adapter" / "adapter_config.json").exists()


def evaluated(run_dir: Path, *arguments: str) -> list[list[int]]:
    """Return the greedy responses of an evaluation."""
    out = run_dir / "eval.json"
    command = [sys.executable, "-m", "grpo_mega.cli", "eval", str(run_dir), "--out", str(out), *arguments]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).resolve().parents[2]), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr
    return responses(out)


def responses(path: Path) -> list[list[int]]:
    return [json.loads(line)["token_ids"] for line in path.read_text().splitlines()]


def test_the_evaluation_of_a_checkpoint_adds_its_adapter(finished: Path) -> None:
    start, end = (responses(finished / f"heldout-{step:06d}.jsonl") for step in (0, STEPS))
    assert evaluated(finished) == end != start


def test_a_random_base_with_separate_engines_is_trained_and_evaluated(
    inputs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = inputs.parent / "separate"
    settings = ["model.init=random", "checkpoint.interval=1", "eval.interval=1", "steps=2"]
    settings += ["rollout.placement=separate", "layout.engine_ranks=1", "rollout.max_staleness=0"]
    code, output = run(inputs, run_dir, *(word for one in settings for word in ("--set", one)))
    assert code == 0, output
    steps = [row for row in metrics(run_dir) if "loss/total" in row]
    assert len(steps) == 2 and all(row["mismatch/abs_mean"] < 1e-5 for row in steps)
    assert evaluated(run_dir, "--step", "1") == responses(run_dir / "heldout-000001.jsonl")
    assert cli.main(["export", str(run_dir), str(inputs.parent / "none"), "--merged", "--step", "1"]) == 2
    assert "--merged: must not be with model.init=random" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda folder: _change(folder, r=4), "r=4"),
        (lambda folder: _change(folder, use_rslora=True), "use_rslora=True"),
        (lambda folder: _change(folder, lora_dropout=0.1), "lora_dropout=0.1"),
        (lambda folder: _drop(folder), "lora_A.weight has shape None"),
        (lambda folder: (folder / "adapter_config.json").unlink(), "is no folder of a PEFT adapter"),
    ],
)
def test_another_adapter_is_refused(
    spoil: Callable[[Path], None],
    words: str,
    inputs: Path,
    finished: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = shutil.copytree(finished / "adapter", tmp_path / "adapter")
    spoil(folder)
    code = cli.main(["train", str(inputs), "--set", f"run_dir={tmp_path / 'run'}", "--set", f"model.adapter={folder}"])
    assert code == 2 and words in capsys.readouterr().err


def test_a_resume_or_export_on_another_base_is_refused(
    inputs: Path, finished: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = inputs.parent / "model" / "model.safetensors"
    content = model.read_bytes()
    weights = load_file(model)
    weights["model.norm.weight"][0] += 1
    save_file(weights, model, metadata={"format": "pt"})
    try:
        for more in ([], ["--merged"]):
            assert cli.main(["export", str(finished), str(inputs.parent / "no"), *more]) != 0
            assert "model.safetensors differs since the checkpoint" in capsys.readouterr().err
        code, output = run(inputs, finished, "--resume", "--set", f"steps={STEPS + 1}")
        assert code != 0 and "model.safetensors differs since the checkpoint" in output, output
    finally:
        model.write_bytes(content)
    assert not (inputs.parent / "no").exists()


def test_a_resume_with_another_adapter_is_refused(finished: Path) -> None:
    checkpoint = max((finished / "checkpoints").glob("step-*"))
    saved = read_manifest(checkpoint)
    shape = ModelShape(**saved.model)
    check_model(checkpoint, saved, shape, LORA)
    for other in (None, LORA | {"alpha": 12.0}):
        with pytest.raises(ResumeError, match=r"model\.lora=.*24"):
            check_model(checkpoint, saved, shape, other)


def test_a_checkpoint_of_an_adapter_is_no_checkpoint_of_a_model(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint = max((finished / "checkpoints").glob("step-*"))
    assert cli.main(["convert", str(checkpoint), str(tmp_path / "out")]) != 0
    assert "holds only an adapter" in capsys.readouterr().err


def _change(folder: Path, **fields: object) -> None:
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def _drop(folder: Path) -> None:
    tensors = load_file(folder / "adapter_model.safetensors")
    tensors.pop(min(tensors))
    save_file(tensors, folder / "adapter_model.safetensors")
