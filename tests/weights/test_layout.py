"""Layers per chunk, by hand; random initial weights; and required fields of a config.json."""

from __future__ import annotations

import math

import pytest
import torch

from grpo_mega.checkpoint_io.reader import random_reader
from grpo_mega.errors import WeightMappingError
from grpo_mega.weights.boxes import Box
from grpo_mega.weights.families import family_of
from grpo_mega.weights.layout import MegatronLayout
from grpo_mega.weights.spec import ModelShape
from tests.helpers.models import make_config


def layers(layout: MegatronLayout, num_layers: int) -> list[list[list[int]]]:
    """Return layer numbers by stage and chunk."""
    return [[list(layout.layers_of(num_layers, p, v)) for v in range(layout.vpp)] for p in range(layout.pp)]


def test_chunks_go_round_the_stages() -> None:
    assert layers(MegatronLayout(pp=2), 4) == [[[0, 1]], [[2, 3]]]
    assert layers(MegatronLayout(pp=2, vpp=2), 8) == [[[0, 1], [4, 5]], [[2, 3], [6, 7]]]


def test_remaining_layers_go_to_the_first_chunks_unless_given_per_chunk() -> None:
    assert layers(MegatronLayout(pp=4), 6) == [[[0, 1]], [[2, 3]], [[4]], [[5]]]
    assert layers(MegatronLayout(pp=2, vpp=2, layers_per_chunk=(1, 2, 1, 3)), 7) == [[[0], [3]], [[1, 2], [4, 5, 6]]]


def test_ranks_are_numbered_along_the_axes_in_their_order() -> None:
    by_default = MegatronLayout(tp=2, pp=2, dp=2)
    assert [by_default.place(rank) for rank in (1, 2, 4)] == [(1, 0, 0), (0, 0, 1), (0, 1, 0)]
    stages_near = MegatronLayout(tp=2, pp=2, dp=2, order="tp-pp-dp")
    assert [stages_near.place(rank) for rank in (1, 2, 4)] == [(1, 0, 0), (0, 1, 0), (0, 0, 1)]
    for layout in (by_default, stages_near):
        assert len({layout.place(rank) for rank in range(8)}) == 8


def test_random_weights_depend_on_tensor_and_seed_but_not_on_the_slice() -> None:
    tensors = {"a.weight": (40, 30), "b.weight": (40, 30), "q_norm.weight": (8,), "q_proj.bias": (8,)}
    read = random_reader(tensors, seed=1, std=0.05)
    whole = read(Box("a.weight", (0, 0), (40, 30)))
    assert torch.equal(read(Box("a.weight", (3, 10), (9, 11))), whole[3:9, 10:11])
    assert whole.std().item() == pytest.approx(0.05, rel=5 / math.sqrt(2 * whole.numel()))
    assert not torch.equal(read(Box("b.weight", (0, 0), (40, 30))), whole)
    assert not torch.equal(random_reader(tensors, seed=2, std=0.05)(Box("a.weight", (0, 0), (40, 30))), whole)
    assert read(Box("q_norm.weight", (2,), (5,))).tolist() == [1, 1, 1]
    assert read(Box("q_proj.bias", (2,), (5,))).tolist() == [0, 0, 0]


def test_a_missing_field_and_an_unknown_family_are_refused_by_name() -> None:
    config = make_config("qwen3").to_dict()
    shape = ModelShape.from_hf_config(config)
    assert (shape.q, shape.kv, shape.head_dim, shape.tied) == (64, 32, 16, False)
    with pytest.raises(WeightMappingError, match="no field 'intermediate_size'"):
        ModelShape.from_hf_config(config | {"intermediate_size": None})
    with pytest.raises(WeightMappingError, match=r"'gpt2' .*qwen2"):
        family_of("gpt2")
