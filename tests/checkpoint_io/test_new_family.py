"""The worked example of grpo_mega/weights/README.md, executed as printed."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GenerationConfig, Phi3Config, Phi3ForCausalLM

from grpo_mega.checkpoint_io.convert import convert_hf_to_mcore, convert_mcore_to_hf
from grpo_mega.checkpoint_io.reader import open_reader
from grpo_mega.weights import families
from grpo_mega.weights.boxes import Box
from grpo_mega.weights.spec import ModelShape, read_config
from tests.checkpoint_io.families import assert_same_folder
from tests.helpers.models import make_tokenizer, write_both_generations

README = Path(__file__).resolve().parents[2] / "grpo_mega/weights/README.md"


def example() -> Any:
    section = README.read_text().split("### Adding a family: a worked example")[1]
    code = [line for line in section.splitlines() if not line or line.startswith("    ")]
    names: dict[str, Any] = {"__name__": "example"}
    exec(compile(textwrap.dedent("\n".join(code)), str(README), "exec", dont_inherit=True), names)
    return names["PHI3"]


def test_the_readmes_family_converts_both_ways(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(families.FAMILIES, "phi3", example())
    torch.manual_seed(0)
    config = Phi3Config(
        vocab_size=102,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=1,
    )
    model = Phi3ForCausalLM(config)
    model.generation_config = GenerationConfig(eos_token_id=1, pad_token_id=0)
    model.save_pretrained(tmp_path / "hf")
    write_both_generations(tmp_path / "hf")
    make_tokenizer().save_pretrained(tmp_path / "hf", save_jinja_files=False)
    convert_hf_to_mcore(tmp_path / "hf", tmp_path / "megatron", show_progress=False)
    convert_mcore_to_hf(tmp_path / "megatron", tmp_path / "back", show_progress=False)
    assert_same_folder(tmp_path / "back", tmp_path / "hf")

    shape = ModelShape.from_hf_config(read_config(tmp_path / "hf"))
    with open_reader(tmp_path / "megatron", families.FAMILIES["phi3"], shape) as reader:
        read = reader.read(Box("model.layers.1.self_attn.qkv_proj.weight", (30, 3), (61, 29)))
    assert torch.equal(read, model.model.layers[1].self_attn.qkv_proj.weight[30:61, 3:29])
