"""Fused and split tensors of the table equal mbridge's, an independent converter between Hugging Face and Megatron.

mbridge uses Transformer Engine's parameter names, so names with fused norms are compared too.
"""

from __future__ import annotations

import importlib
import importlib.util
import warnings
from typing import Any

import pytest
import torch

from grpo_mega.weights.families import family_of
from grpo_mega.weights.layout import MegatronLayout
from grpo_mega.weights.spec import ModelShape
from tests.helpers.mapping import filled, megatron_side, numbered
from tests.helpers.models import make_config

# fewer kv heads than heads, unusual head and ffn widths, an explicit head_dim, as many kv heads as heads
SHAPES = [
    {"num_key_value_heads": 4, "num_attention_heads": 8, "intermediate_size": 20},
    {"num_key_value_heads": 4, "num_attention_heads": 12, "hidden_size": 60, "head_dim": 10},
    {"num_key_value_heads": 4, "num_attention_heads": 4, "head_dim": 14},
    {"num_key_value_heads": 2, "num_attention_heads": 4, "head_dim": 6},  # fewer than tp=4
]


@pytest.fixture(scope="module")
def mbridge_core() -> Any:
    if importlib.util.find_spec("mbridge") is None or importlib.util.find_spec("einops") is None:
        pytest.skip("needs mbridge==0.15.1 and einops")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Megatron warns about each missing optional package
        importlib.import_module("grpo_mega.megatron")  # import its patches before Megatron
        models = importlib.import_module("mbridge.models")
        states = importlib.import_module("mbridge.core.parallel_states")
    return {
        "llama": models.LLaMABridge,
        "qwen2": models.Qwen2Bridge,
        "qwen3": models.Qwen3Bridge,
    }, states.ParallelStates


@pytest.mark.filterwarnings("ignore:full scope is deprecated")
@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("changes", SHAPES)
@pytest.mark.parametrize("family_name", ["llama", "qwen2", "qwen3"])  # families of mbridge
def test_every_local_tensor_equals_mbridges_in_both_directions(
    mbridge_core: Any, family_name: str, changes: dict[str, int], tp: int
) -> None:
    bridges, parallel_states = mbridge_core
    hf_config = make_config(family_name, **changes)
    bridge = bridges[family_name](hf_config, dtype=torch.int64, parallel_states=parallel_states())
    shape, family = ModelShape.from_hf_config(hf_config.to_dict()), family_of(family_name)
    tensors = numbered(family, shape)
    side = megatron_side(family, shape, MegatronLayout(tp=tp), fused_norms=True)
    ranks = filled(side, tensors)
    seen: set[str] = set()
    for local_name, local in side[0].items():
        name = local_name.removeprefix("chunk0.")
        hf_names = bridge._weight_name_mapping_mcore_to_hf(name)
        whole = bridge._weight_to_mcore_format(name, [tensors[n] for n in hf_names])
        if "word_embeddings" in name or "output_layer" in name:  # padded by their users' rules
            whole = torch.cat((whole, whole.new_zeros(tp * local.shape[0] - len(whole), shape.hidden)))
        else:
            back = bridge._weight_to_hf_format(name, whole)
            assert list(back[0]) == list(hf_names)
            assert all(torch.equal(tensors[n], w) for n, w in zip(*back, strict=True)), name
        parts = bridge._weight_split_across_tp(name, whole, ranks[0][local_name], tp)
        for rank, part in enumerate(parts):
            assert torch.equal(ranks[rank][local_name], part), f"{name} of tp rank {rank}"
        seen.update(hf_names)
    assert seen == tensors.keys()
