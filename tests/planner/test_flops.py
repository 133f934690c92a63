"""Floating-point operations, compared with counts by hand and with torch's counter on transformers models."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from grpo_mega.distributed.versions import installed_set
from grpo_mega.errors import ConfigError
from grpo_mega.weights.architecture import layer_weights
from grpo_mega.weights.spec import ModelShape
from tests.helpers.models import make_config, make_model
from tools.benchmarks.flops import count_flops

# Llama-3.1-8B: 32 heads of 128, 8 key-value heads.
LLAMA = ModelShape("llama", 32, 4096, 14336, 32, 8, 128, 128256, False)
# Qwen2.5-1.5B: tied embeddings, 12 heads of 128, 2 key-value heads.
QWEN2 = ModelShape("qwen2", 28, 1536, 8960, 12, 2, 128, 151936, True)
# Qwen3-30B-A3B: 8 of 128 experts per token; queries of size 4096 from a hidden size of 2048.
MIXTURE = ModelShape("qwen3_moe", 48, 2048, 6144, 32, 4, 128, 151936, False, 128, 768)


def test_a_llama_with_grouped_queries_counts_as_by_hand() -> None:
    layer = 4096 * 4096 + 2 * 4096 * 1024 + 4096 * 4096 + 3 * 4096 * 14336
    assert layer == 218_103_808
    found = count_flops(LLAMA, [4096])
    assert found.linear == 2 * 4096 * 32 * layer
    assert found.attention == 32 * 4 * 4096 * (4096 * 4097 // 2)
    assert found.output == 2 * 4096 * 4096 * 128256
    # 7.5e9 weights in products, 6 operations each, and 6% more for attention.
    assert found.training / 4096 == pytest.approx(6 * 7.505e9 + 3 * 32 * 4 * 4096 * 4097 / 2, rel=1e-4)


def test_a_tied_output_layer_counts_once_and_the_lookup_is_free() -> None:
    layer = 1536 * (1536 + 2 * 256) + 1536 * 1536 + 3 * 1536 * 8960
    found = count_flops(QWEN2, [1])
    assert found.linear == 2 * 28 * layer and found.output == 2 * 1536 * 151936
    assert found.attention == 28 * 4 * 1536
    assert found.linear + found.output == 2 * (1_543_714_304 - 57_344 - 87_552)  # all parameters minus biases and norms


def test_a_mixture_counts_its_router_and_the_chosen_experts() -> None:
    layer = 2048 * (4096 + 2 * 512) + 4096 * 2048 + 2048 * 128 + 8 * 3 * 2048 * 768
    found = count_flops(MIXTURE, [10], experts_per_token=8)
    assert found.linear == 2 * 10 * 48 * layer
    assert found.attention == 48 * 4 * 4096 * 55
    assert (found.linear + found.output) / 20 == pytest.approx(3.03e9, rel=0.01)  # "A3B" is 3.3e9 with the embedding


def test_a_mixture_without_its_number_of_chosen_experts_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"experts_per_token=0: must be in 1 \.\. 128 for an MoE model"):
        count_flops(MIXTURE, [10])


def test_a_backward_pass_is_two_forward_passes_and_segments_add_up() -> None:
    both, one, two = (count_flops(QWEN2, lengths) for lengths in ([5, 9], [5], [9]))
    assert both.training == 3 * both.forward == one.training + two.training


def test_a_window_counts_the_pairs_of_a_query_and_the_keys_that_it_sees() -> None:
    windows = (0, 5, *(7,) * 26)
    shape, lengths = replace(QWEN2, windows=windows), [1, 4, 5, 6, 40]
    pairs = sum(int(torch.ones(n, n).tril().triu(1 - (w or n)).sum()) for w in windows for n in lengths)
    assert count_flops(shape, lengths).attention == pytest.approx(4 * 1536 * pairs, rel=1e-12)
    assert count_flops(shape, [4]) == count_flops(QWEN2, [4])


def test_the_experts_of_a_hybrid_model_have_the_count_of_transformers() -> None:
    """The shared expert and its gate count for every token."""
    config, n = make_config("qwen3_5_moe_text"), 24
    shape, block = ModelShape.from_hf_config(config.to_dict()), make_model("qwen3_5_moe_text").model.layers[0].mlp
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        block(torch.randn(1, n, shape.hidden))
    without = replace(shape, num_experts=0, ffn=0)
    weights = layer_weights(shape, config.num_experts_per_tok) - layer_weights(without)
    assert counter.get_total_flops() == round(2 * n * weights)


def test_the_output_layer_counts_for_the_tokens_that_need_it() -> None:
    few, none = count_flops(QWEN2, [100], num_outputs=7), count_flops(QWEN2, [100], num_outputs=0)
    assert few.forward - none.forward == 7 * 2 * 1536 * 151936 and none.output == 0


@pytest.mark.parametrize(
    ("family", "tied"),
    [
        ("llama", False),
        ("qwen2", True),
        ("qwen3", False),
        ("qwen3_moe", False),
        ("deepseek_v2", False),
        ("deepseek_v3", False),
    ],
)
def test_the_forward_pass_of_transformers_has_the_same_count(family: str, tied: bool) -> None:
    """Eager attention in transformers computes n x n pairs. transformers 5.12 also computes rotary angles by a matrix
    product.
    """
    n = 24
    hf_config = make_config(family, tied=tied)
    shape = ModelShape.from_hf_config(hf_config.to_dict())
    model = make_model(family, tied=tied)
    model.set_attn_implementation("eager")
    if shape.num_experts:
        model.set_experts_implementation("eager")
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(torch.arange(n)[None] % shape.vocab)
    expected = count_flops(shape, [n], experts_per_token=hf_config.num_experts_per_tok if shape.num_experts else 0)
    angles = 2 * ((shape.rope_dim or shape.head_dim) // 2) * n  # [head_dim / 2, 1] times [1, n]
    rotary = angles if installed_set().record == "one" else 0
    all_pairs = expected.attention * 2 * n // (n + 1)
    assert counter.get_total_flops() == round(expected.linear + expected.output + all_pairs + rotary)
