"""Adapters are reported as adapters and never copied. Named chat templates are kept. Prefixes of larger models are
named.
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import convert_hf_to_mcore
import convert_mcore_to_hf
import pytest
import torch
from safetensors.torch import save_file

from grpo_mega import cli
from grpo_mega.checkpoint_io import adapter
from grpo_mega.checkpoint_io.convert import convert_hf_to_mcore as convert
from grpo_mega.cli.checks.model import check_model_files
from grpo_mega.config import ModelConfig
from grpo_mega.errors import ConfigError
from grpo_mega.weights.families import family_of
from grpo_mega.weights.spec import ModelShape, read_config
from tests.checkpoint_io.families import CASES, save, tensors_of
from tests.helpers.exports import export_alone

BASE = "org/other\u2028base"
FULL = (
    r"holds adapter_config\.json next to full weights, so libraries load base_model_name_or_path='org/other\\u2028base'"
)
ALONE = r"is an adapter of org/other.{1,6}base, not a model; merge it into its base first, and name the merged folder"
TEMPLATES = {
    "additional_chat_templates/tool_use.jinja": "{# T\u2028 #}",
    "chat_template.jinja": "{{ messages[0].content }}",
}


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(CASES["qwen3"], tmp_path_factory.mktemp("sound") / "hf")


def test_an_adapter_of_one_expert_is_merged_into_its_part_of_the_stack(tmp_path: Path) -> None:
    base = save(CASES["qwen3_5_moe"], tmp_path / "base")
    model = ModelConfig.model_validate({"path": base, "dtype": "bfloat16", "lora": {"rank": 3, "alpha": 6}})
    shape = ModelShape.from_hf_config(read_config(base))
    layer, generator = "model.language_model.layers.1.mlp.experts.", torch.Generator().manual_seed(1)
    a, b = (torch.randn(size, generator=generator) for size in ((3, 32), (22, 3)))
    tensors = {f"{layer}3.up_proj.lora_A.weight": a, f"{layer}3.up_proj.lora_B.weight": b}
    adapter._merge(tmp_path / "out", model, family_of(shape.model_type), shape, tensors)
    before, found = tensors_of(base), tensors_of(tmp_path / "out")
    expected = before[layer + "gate_up_proj"].float()
    expected[3, 22:] += 2 * b @ a
    assert torch.equal(found[layer + "gate_up_proj"], expected.bfloat16())
    others = before.keys() - {layer + "gate_up_proj"}
    assert found.keys() == before.keys() and all(torch.equal(found[name], before[name]) for name in others)


def add_adapter(folder: Path) -> None:
    (folder / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": BASE, "peft_type": "LORA"}))
    save_file({"base_model.model.q_proj.lora_A.weight": torch.ones(3, 5)}, folder / "adapter_model.safetensors")


@pytest.mark.parametrize("weights", ["safetensors", "index", "bin", "bin index", "none"])
def test_a_folder_with_an_adapter_config_is_refused(
    weights: str, sound: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = shutil.copytree(sound, tmp_path / "hf")
    add_adapter(folder)
    if weights != "safetensors":
        (folder / "model.safetensors").unlink()
    if weights == "index":
        (folder / "model.safetensors.index.json").write_text('{"weight_map": {}}')
    elif weights == "bin":
        torch.save(tensors_of(sound), folder / "pytorch_model.bin")
    elif weights == "bin index":
        (folder / "pytorch_model.bin.index.json").write_text('{"weight_map": {}}')
    says = re.compile(ALONE if weights == "none" else FULL, re.DOTALL)
    with pytest.raises(ConfigError, match=says):
        check_model_files(ModelConfig(path=folder))
    config = {
        "run_dir": str(tmp_path / "run"),
        "steps": 1,
        "model": {"path": str(folder)},
        "data": {"train": "t.jsonl"},
    }
    (tmp_path / "config.yaml").write_text(json.dumps(config))
    for command in ("train", "plan"):
        assert cli.main([command, str(tmp_path / "config.yaml")]) == 2
        printed = capsys.readouterr()
        words = " ".join((printed.err if command == "train" else printed.out).split())  # the plan wraps lines
        assert says.search(words), (command, words)
    assert convert_hf_to_mcore.main([str(folder), str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert says.search(error) and error.count("\n") == 1
    assert {path.name for path in tmp_path.iterdir()} == {"hf", "config.yaml"}


@pytest.mark.parametrize("text", ["", "[]", "{", "[" * 100_000, '{"base_model_name_or_path": null}'], ids=len)
def test_an_adapter_config_that_cannot_be_read_is_refused_too(text: str, tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text(text)
    with pytest.raises(ConfigError, match=r"^model\.path=\S+ .*; merge it"):
        check_model_files(ModelConfig(path=tmp_path))


def test_neither_a_conversion_nor_an_export_copies_an_adapter(sound: Path, tmp_path: Path) -> None:
    """An adapter was added next to a Megatron checkpoint or next to a start model that was valid when the run
    started.
    """
    convert(sound, tmp_path / "mcore", show_progress=False)
    add_adapter(tmp_path / "mcore")
    assert convert_mcore_to_hf.main([str(tmp_path / "mcore"), str(tmp_path / "back")]) == 2
    (tmp_path / "mcore/adapter_config.json").unlink()
    assert convert_mcore_to_hf.main([str(tmp_path / "mcore"), str(tmp_path / "back")]) == 0
    source = shutil.copytree(sound, tmp_path / "hf")
    add_adapter(source)
    assert convert_mcore_to_hf.main([str(tmp_path / "mcore"), str(tmp_path / "side"), "--config", str(source)]) == 0
    export_alone(tensors_of(source), source, tmp_path / "export")
    for out in ("back", "side", "export"):
        names = {path.name for path in (tmp_path / out).iterdir()}
        assert "config.json" in names and "tokenizer.json" in names
        assert not [name for name in names if name.startswith("adapter")], out


def test_named_chat_templates_are_kept_by_conversion_and_export(sound: Path, tmp_path: Path) -> None:
    source = shutil.copytree(sound, tmp_path / "hf")
    (source / "additional_chat_templates").mkdir()
    (source / "additional_chat_templates/notes.txt").write_text("mine")
    for name, text in TEMPLATES.items():
        (source / name).write_text(text, encoding="utf-8")
    convert(source, tmp_path / "mcore", show_progress=False)
    assert convert_mcore_to_hf.main([str(tmp_path / "mcore"), str(tmp_path / "back")]) == 0
    export_alone(tensors_of(source), source, tmp_path / "export")
    for out in ("mcore", "back", "export"):
        for name, text in TEMPLATES.items():
            assert (tmp_path / out / name).read_text(encoding="utf-8") == text, (out, name)
        assert [path.name for path in (tmp_path / out / "additional_chat_templates").iterdir()] == ["tool_use.jinja"]


@pytest.mark.parametrize("prefix", ["model.language_model.", "language_model.model.", "base_model.model.model."])
def test_the_name_prefix_of_a_larger_model_is_reported(
    prefix: str, sound: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = shutil.copytree(sound, tmp_path / "hf")
    tensors = {prefix + name.removeprefix("model."): tensor for name, tensor in tensors_of(sound).items()}
    save_file(tensors, folder / "model.safetensors")
    assert convert_hf_to_mcore.main([str(folder), str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    for message in (error, refusal_of(folder)):
        assert f"prefix {prefix!r}" in message
        assert "incomplete" not in message
        assert message.strip().endswith("save its language model alone, and name that folder")


def refusal_of(folder: Path) -> str:
    with pytest.raises(Exception, match=r"\A[^\n]+\Z") as caught:
        check_model_files(ModelConfig(path=folder))
    return str(caught.value)
