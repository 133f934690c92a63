"""An exported policy keeps the multi-token prediction layers and the vision tower of its start model. Other extra
layers are refused.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from grpo_mega.checkpoint_io.convert import convert_hf_to_mcore
from grpo_mega.checkpoint_io.reader import open_reader
from grpo_mega.cli.checks.model import check_weights
from grpo_mega.errors import WeightMappingError
from grpo_mega.weights.architecture import shape_of
from grpo_mega.weights.families import family_of
from grpo_mega.weights.layout import hf_rank_shards
from grpo_mega.weights.spec import read_config
from tests.checkpoint_io.families import CASES, assert_same_folder, save, tensors_of
from tests.helpers.exports import export_alone


@pytest.mark.parametrize(
    ("name", "extra"), [("deepseek_v3", ".layers.5."), ("qwen3_5", ".visual."), ("qwen3_5_moe", ".visual.")]
)
@pytest.mark.parametrize("is_converted", [False, True])
def test_an_exported_policy_keeps_extra_parts_bit_for_bit(
    tmp_path: Path, is_converted: bool, name: str, extra: str
) -> None:
    source = model = save(CASES[name], tmp_path / "hf")
    if is_converted:
        model = tmp_path / "megatron"
        convert_hf_to_mcore(source, model, show_progress=False)
    shape = shape_of(read_config(model))
    family = family_of(shape.model_type)
    check_weights(model, shape)
    shards = hf_rank_shards(family, shape)
    with open_reader(model, family, shape) as reader:
        tensors = {name: reader.read(local.pieces[0].box) for name, local in shards.items()}
    export_alone(tensors, model, tmp_path / "out", max_shard_bytes=50_000)
    assert_same_folder(tmp_path / "out", source)
    assert sum(extra in name for name in tensors_of(tmp_path / "out")) >= 6
    theirs, ours = (AutoModelForCausalLM.from_pretrained(folder).state_dict() for folder in (source, tmp_path / "out"))
    assert theirs.keys() == ours.keys() and all(torch.equal(ours[name], tensor) for name, tensor in theirs.items())


def test_an_extra_layer_of_the_usual_kind_is_refused(tmp_path: Path) -> None:
    folder = save(CASES["deepseek_v2"], tmp_path / "hf")
    tensors = tensors_of(folder)
    one = "model.layers.{}.self_attn.o_proj.weight"
    save_file(
        tensors | {one.format(5): tensors[one.format(4)].clone()},
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )
    with pytest.raises(WeightMappingError, match=r"model\.layers\.5\.self_attn"):
        check_weights(folder, shape_of(read_config(folder)))
