"""convert, verify and inspect as commands and as scripts: directions, descriptions, and the dry run."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import Any

import convert_hf_to_mcore
import convert_mcore_to_hf
import inspect_checkpoint
import pytest
import verify_checkpoint

from grpo_mega import cli
from grpo_mega.checkpoint_io.checkpoints import FORMAT
from grpo_mega.checkpoint_io.convert import convert_hf_to_mcore as convert
from tests.checkpoint_io.families import CASES, save, tensors_of, write_manifest
from tools.benchmarks.gpu.models import MODELS


def described(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    assert inspect_checkpoint.main([*arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_a_folder_and_its_conversion_are_described_alike(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = save(CASES["qwen3_moe"], tmp_path / "hf")
    convert(source, tmp_path / "megatron", show_progress=False)
    tensors = tensors_of(source)
    for path, kind in (("hf", "Hugging Face folder"), ("megatron", "Megatron distributed checkpoint")):
        found = described([str(tmp_path / path)], capsys)
        assert found["kind"] == kind and found["family"] == "qwen3_moe" and found["dtype"] == "bfloat16"
        assert found["parameters"] == sum(t.numel() for t in tensors.values()) and found["tensors"] == len(tensors)
        assert (found["layers"], found["experts"], found["step"]) == (4, 4, None)
        assert found["bytes"] > 2 * found["parameters"]
    assert found["layout"].startswith("any ") and "tp=1" in found["layout"] and found["optimizer"] is False
    assert inspect_checkpoint.main([str(tmp_path / "hf")]) == 0
    assert "parameters       " in capsys.readouterr().out
    assert inspect_checkpoint.main([str(tmp_path)]) == 2
    assert "not a checkpoint" in capsys.readouterr().err


def test_a_checkpoint_of_a_run_is_found_with_its_config_step_and_layout(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Find it from the run folder, its checkpoints folder or one checkpoint. config.yaml names the model."""
    source = save(CASES["llama2"], tmp_path / "hf")
    run = tmp_path / "run"
    step = run / "checkpoints/step-000007"
    step.mkdir(parents=True)
    convert(source, tmp_path / "state", show_progress=False)
    (step / "state").mkdir()
    for name in (".metadata", "metadata.json", "common.pt", "__0_0.distcp", "__1_0.distcp"):
        (tmp_path / "state" / name).rename(step / "state" / name)
    (run / "checkpoints/latest").write_text("step-000007\n")
    (run / "config.yaml").write_text(f"model: {{path: {source}}}\n")
    write_manifest(step, 7, optimizer_step=14, layout="tp=2,pp=2,vpp=1,dp=1")
    for path in (run, run / "checkpoints", step, step / "state"):
        found = described([str(path)], capsys)
        assert "training run" in found["kind"]
        assert (found["step"], found["policy_version"], found["optimizer_step"]) == (7, 7, 14)
        assert found["layout"] == "tp=2,pp=2,vpp=1,dp=1" and found["config"] == str(source / "config.json")
    write_manifest(step, 7, format=0)
    capsys.readouterr()
    assert inspect_checkpoint.main([str(run)]) == 2
    assert convert_mcore_to_hf.main([str(run), str(tmp_path / "out")]) == 2
    assert verify_checkpoint.main([str(source), str(run)]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 3
    assert all(f"{step}/checkpoint.json: format=0: must be {FORMAT}; " in line for line in lines)


@pytest.mark.parametrize(
    ("model", "layout", "tensors", "parameters"),
    [
        # 6 tensors per layer, plus embedding, final norm and output layer, on each tp rank
        ("llama-70b", "tp=4,pp=4", (80 * 6 + 3) * 4, "70.554 billion parameters"),
        # 7 tensors per layer without experts, on each of 8 ep ranks; 2 tensors per expert
        ("qwen3-235b", "tp=4,pp=4,ep=8", (94 * 7 + 3) * 8 + 94 * 128 * 2, "235.094 billion parameters"),
    ],
)
def test_the_dry_run_lists_every_slice_of_a_large_model_within_seconds(
    model: str, layout: str, tensors: int, parameters: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MODELS[model]))
    started_at = time.process_time()
    assert convert_hf_to_mcore.main(["--dry", "--layout", layout, "--config", str(tmp_path / "config.json")]) == 0
    assert time.process_time() - started_at < 5
    *lines, last = capsys.readouterr().out.splitlines()
    assert len(lines) == tensors and last.startswith(f"{tensors} tensors of ") and parameters in last
    if model == "llama-70b":
        assert (
            "pp3 tp1 chunk0 decoder.layers.79.mlp.linear_fc1.weight [14336, 8192] <- "
            "model.layers.79.mlp.gate_proj.weight[7168:14336, 0:8192]; "
            "model.layers.79.mlp.up_proj.weight[7168:14336, 0:8192] at 7168,0"
        ) in lines


def test_the_dry_run_names_the_dtype_and_sizes_of_what_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = save(CASES["qwen3_moe"], tmp_path / "hf")
    parameters = sum(t.numel() for t in tensors_of(source).values())
    size = {name: f"{parameters * width / 1e9:.2f} GB" for name, width in (("bfloat16", 2), ("float64", 8))}
    for arguments, dtype in (([], "bfloat16"), (["--dtype", "float64"], "float64")):
        assert cli.main(["convert", str(source), "--dry", "--layout", "tp=2", *arguments]) == 0
        *_, last = capsys.readouterr().out.splitlines()
        assert f" in {dtype}: {size[dtype]} to write, {size[dtype]} to read" in last
    (tmp_path / "config.json").write_text(json.dumps(MODELS["llama-70b"] | {"torch_dtype": "float16"}))
    assert cli.main(["convert", "--dry", "--config", str(tmp_path)]) == 0
    *_, last = capsys.readouterr().out.splitlines()
    assert "70.554 billion" in last and "float16: 141.11 GB" in last


def test_the_command_converts_in_the_direction_that_the_source_needs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = save(CASES["llama2"], tmp_path / "hf")
    assert cli.main(["convert", str(source), str(tmp_path / "megatron")]) == 0
    assert cli.main(["convert", str(tmp_path / "megatron"), str(tmp_path / "back"), "--max-shard-size", "40KB"]) == 0
    written = r"[0-9.]+ GB written in [0-9.]+ s \(\d+ MB/s\); [0-9.]+ GB read back and verified in"
    assert len(re.findall(written, capsys.readouterr().out)) == 2
    assert len(list((tmp_path / "back").glob("*.safetensors"))) > 1
    assert cli.main(["verify", str(source), str(tmp_path / "megatron"), "--no-logits"]) == 0
    assert "the same" in capsys.readouterr().out
    assert cli.main(["inspect", str(tmp_path / "megatron")]) == 0
    assert "Megatron distributed checkpoint" in capsys.readouterr().out
    for arguments, problem in (
        ([str(source)], "SOURCE OUT: must both be given"),
        ([str(source), str(tmp_path / "new"), "--layout", "tp=2"], "--layout=tp=2: must go with --dry"),
        ([str(source), "--dry", "--config", str(source)], "--dry: must have either SOURCE or --config"),
        ([str(tmp_path), str(tmp_path / "new")], f"{tmp_path} is not a checkpoint"),
    ):
        assert cli.main(["convert", *arguments]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith(f"grpo-mega: error: {problem}")
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        ("tp=3", "tp=3 does not divide the model's 64 attention heads; use 1, 2, 4, 8"),
        ("tp", "--layout=tp: 'tp' is not understood; give some of tp, pp, vpp, dp, ep, etp as tp=2"),
        ("ep=2", "ep=2 spreads experts, but the model is dense; use ep=1"),
    ],
)
def test_a_layout_that_does_not_fit_is_refused(
    layout: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MODELS["llama-70b"]))
    assert convert_hf_to_mcore.main(["--dry", "--layout", layout, "--config", str(tmp_path / "config.json")]) == 2
    assert message in capsys.readouterr().err
