"""verify_checkpoint.py names differing fields, tensors and bits, and the first layer with different outputs."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import verify_checkpoint
from safetensors.torch import save_file

from grpo_mega.checkpoint_io.convert import convert_hf_to_mcore, convert_mcore_to_hf
from tests.checkpoint_io.families import CASES, LLAMA3_ROPE, edit_config, save, tensors_of

pytestmark = pytest.mark.usefixtures("preloaded_python")


def test_a_conversion_agrees_with_its_source_in_every_bit_and_layer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Megatron-core computes the converted model, transformers the source model."""
    for name in ("llama3", "qwen3_moe"):
        save(CASES[name], tmp_path / name)
        convert_hf_to_mcore(tmp_path / name, tmp_path / f"{name}-megatron", show_progress=False)
        assert verify_checkpoint.main([str(tmp_path / name), str(tmp_path / f"{name}-megatron")]) == 0
        out = capsys.readouterr().out
        assert f"{len(tensors_of(tmp_path / name))} tensors equal" in out
        assert "all 4 layers" in out and out.endswith("\nthe same\n")


@pytest.mark.full
def test_the_first_layer_that_differs_is_named_with_its_tensors(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = save(CASES["qwen2"], tmp_path / "a")
    other = save(CASES["qwen2"], tmp_path / "b")
    tensors = tensors_of(other)
    for layer in (2, 3):
        tensors[f"model.layers.{layer}.mlp.down_proj.weight"][5] *= 1.5
    save_file(tensors, other / "model.safetensors", metadata={"format": "pt"})
    assert verify_checkpoint.main([str(source), str(other)]) == 1
    out = capsys.readouterr().out
    assert re.findall("bits differ: (.*)", out) == [f"model.layers.{i}.mlp.down_proj.weight" for i in (2, 3)]
    assert "logits: layer 2 " in out and out.endswith("NOT the same\n")


def test_fields_names_shapes_and_dtypes_that_differ_are_listed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = save(CASES["llama2"], tmp_path / "a")
    other = save(CASES["llama2"], tmp_path / "b")
    tensors = tensors_of(other)
    tensors["model.norm.weight"] = tensors["model.norm.weight"].bfloat16()
    tensors["model.layers.0.self_attn.q_norm.weight"] = tensors.pop("model.layers.0.input_layernorm.weight")
    save_file(tensors, other / "model.safetensors", metadata={"format": "pt"})
    edit_config(other, rms_norm_eps=0.5, transformers_version="1.0")
    assert verify_checkpoint.main([str(source), str(other)]) == 1
    out = capsys.readouterr().out
    assert re.search("config: rms_norm_eps .*1e-06 .*0.5 ", out) and "transformers_version" not in out
    assert "missing in B: model.layers.0.input_layernorm.weight\n" in out
    assert "extra in B: model.layers.0.self_attn.q_norm.weight\n" in out
    assert re.search(r"other: model.norm.weight .*F32 \[32\].* BF16 \[32\]", out)
    assert "logits: not computed" in out


def test_only_the_fields_that_an_export_adds_are_no_difference(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, megatron, back = save(CASES["llama3"], tmp_path / "a"), tmp_path / "megatron", tmp_path / "back"
    mixed = {name: t.float() if name.endswith("norm.weight") else t for name, t in tensors_of(source).items()}
    save_file(mixed, source / "model.safetensors", metadata={"format": "pt"})
    edit_config(source, rope_theta=None, rope_scaling=None, dtype="float16")  # a file of transformers 5
    convert_hf_to_mcore(source, megatron, show_progress=False)
    convert_mcore_to_hf(megatron, back, show_progress=False)
    fields = json.loads((back / "config.json").read_text())
    assert (fields["rope_theta"], fields["dtype"]) == (10000.0, "bfloat16")
    assert fields["rope_scaling"] == {key: value for key, value in LLAMA3_ROPE.items() if key != "rope_theta"}

    def said(a: Path, b: Path) -> str:
        is_same = verify_checkpoint.main([str(a), str(b), "--no-logits"]) == 0
        out = capsys.readouterr().out
        assert out.endswith("\nthe same\n" if is_same else "NOT the same\n")
        return "\n".join(line for line in out.splitlines() if line.startswith("config:"))

    assert not said(source, megatron) and not said(source, back) and not said(back, source)
    edit_config(back, dtype="float16")
    assert re.fullmatch("config: dtype .*'bfloat16' .*'float16' .*", said(source, back))
    edit_config(back, dtype="bfloat16", rope_parameters=None)
    text = said(source, back)
    assert text.startswith("config: rope_parameters ") and f"{fields['rope_parameters']!r}" in text and "None" in text


def test_a_cast_config_names_the_new_dtype_under_each_of_its_names(tmp_path: Path) -> None:
    source = save(CASES["qwen2"], tmp_path / "a")
    edit_config(source, torch_dtype="bfloat16")
    convert_hf_to_mcore(source, tmp_path / "cast", dtype="float32", show_progress=False)
    fields = json.loads((tmp_path / "cast" / "config.json").read_text())
    assert (fields["dtype"], fields["torch_dtype"]) == ("float32", "float32")
