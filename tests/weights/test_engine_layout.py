"""SGLang's layout against an oracle that follows its rules with torch.chunk and cat; and sizes that cannot be split."""

from __future__ import annotations

import importlib
import math
import re
from dataclasses import replace
from typing import Any

import pytest
import torch

from grpo_mega.errors import WeightMappingError
from grpo_mega.weights.families import FAMILIES, family_of
from grpo_mega.weights.layout import (
    EngineLayout,
    MegatronLayout,
    engine_layout_problems,
    engine_shards,
    hf_rank_shards,
    megatron_layout_problems,
    megatron_shards,
)
from grpo_mega.weights.spec import ModelShape
from tests.helpers.mapping import Tensors, filled, numbered
from tests.helpers.random_layouts import shards_by_rank

SERVED = FAMILIES.keys() - {"qwen3_5_text", "qwen3_5_moe_text"}
MIXTURES = sorted(name for name in SERVED if any(row.where == "expert" for row in FAMILIES[name].rows))
DENSE = sorted(SERVED - set(MIXTURES))
EXPERTS = {"num_experts": 12, "moe_ffn": 8}  # heads and rows divide by 4
LATENT = {"num_dense": 1, "shared_ffn": 16, "kv_lora": 3, "rope_dim": 1, "v_dim": 3}


def shape_of(family: str, *, num_kv_heads: int, tied: bool = False, vocab: int = 70, q_lora: int = 0) -> ModelShape:
    experts = EXPERTS if family in MIXTURES else {}
    if "deepseek" in family or family == "glm4_moe_lite":
        experts, num_kv_heads = experts | LATENT | {"q_lora": q_lora}, 8
    sizes = {"num_layers": 2, "hidden": 6, "ffn": 24, "num_heads": 8, "head_dim": 2}
    return ModelShape(model_type=family, num_kv_heads=num_kv_heads, vocab=vocab, tied=tied, **sizes, **experts)


def column_parallel(whole: torch.Tensor, tp: int) -> list[torch.Tensor]:
    return list(whole.chunk(tp, dim=0))


def row_parallel(whole: torch.Tensor, tp: int) -> list[torch.Tensor]:
    return list(whole.chunk(tp, dim=1))


def vocab_parallel(whole: torch.Tensor, tp: int) -> list[torch.Tensor]:
    multiple = 64 if math.ceil(len(whole) / 64) * 64 % tp == 0 else 64 * tp
    padding = whole.new_zeros(-len(whole) % multiple, whole.shape[1])
    return column_parallel(torch.cat((whole, padding)), tp)


def qkv_parallel(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, tp: int, num_kv_heads: int) -> list[torch.Tensor]:
    def shards(kv: torch.Tensor) -> list[torch.Tensor]:
        if tp <= num_kv_heads:
            return column_parallel(kv, tp)
        return [head for head in column_parallel(kv, num_kv_heads) for _ in range(tp // num_kv_heads)]

    return [torch.cat(parts) for parts in zip(column_parallel(q, tp), shards(k), shards(v), strict=True)]


def merged(gate: torch.Tensor, up: torch.Tensor, tp: int) -> list[torch.Tensor]:
    return [torch.cat(parts) for parts in zip(column_parallel(gate, tp), column_parallel(up, tp), strict=True)]


def sglang_model(tensors: Tensors, shape: ModelShape, tp: int, ep: int = 1) -> list[Tensors]:
    """Return every parameter of SGLang's model per tensor-parallel rank, experts as [num_experts / ep, ...]."""
    shards: dict[str, list[torch.Tensor]] = {}
    for name, whole in tensors.items():
        if name in ("model.embed_tokens.weight", "lm_head.weight"):
            shards[name] = vocab_parallel(whole, tp)
        elif shape.kv_lora and ".self_attn." in name and "o_proj" not in name:
            if "_a_proj" in name and shape.q_lora:  # SGLang merges both into one tensor
                block = name[: name.index("self_attn.") + len("self_attn.")]
                parts = [tensors[f"{block}{x}.weight"] for x in ("q_a_proj", "kv_a_proj_with_mqa")]
                shards[f"{block}fused_qkv_a_proj_with_mqa.weight"] = [torch.cat(parts)] * tp
            else:
                shards[name] = [whole] * tp if "_a_" in name else column_parallel(whole, tp)
        elif ".q_proj." in name:
            k, v = (tensors[name.replace("q_proj", x)] for x in ("k_proj", "v_proj"))
            shards[name.replace("q_proj", "qkv_proj")] = qkv_parallel(whole, k, v, tp, shape.num_kv_heads)
        elif name.endswith(("o_proj.weight", "mlp.down_proj.weight", "shared_experts.down_proj.weight")):
            shards[name] = row_parallel(whole, tp)
        elif name.endswith(("mlp.gate_proj.weight", "shared_experts.gate_proj.weight")):
            up = tensors[name.replace("gate_proj", "up_proj")]
            shards[name.replace("gate_proj", "gate_up_proj")] = merged(whole, up, tp)
        elif name.endswith(("norm.weight", ".gate.weight", "e_score_correction_bias")):
            shards[name] = [whole] * tp
        elif ".experts.0." in name and name.endswith(("gate_proj.weight", "w1.weight")):
            gate, up, down = ("w1", "w3", "w2") if "w1" in name else ("gate_proj", "up_proj", "down_proj")
            block = name[: name.index(".experts.") + len(".experts.")]
            pairs = [[tensors[f"{block}{e}.{x}.weight"] for x in (gate, up)] for e in range(shape.num_experts)]
            downs = [row_parallel(tensors[f"{block}{e}.{down}.weight"], tp // ep) for e in range(shape.num_experts)]
            w13 = [merged(*pair, tp // ep) for pair in pairs]
            for parameter, cut in (("w13_weight", w13), ("w2_weight", downs)):
                whole_ones = [torch.stack([one[part] for one in cut]).chunk(ep) for part in range(tp // ep)]
                shards[block + parameter] = [whole_ones[r % (tp // ep)][r // (tp // ep)] for r in range(tp)]
        else:
            assert any(x in name for x in ("k_proj", "v_proj", "up_proj", ".experts.")), name
    if (
        shape.tied and shape.num_experts and shape.model_type not in ("deepseek_v2", "deepseek_v3")
    ):  # SGLang ties only these
        shards["lm_head.weight"] = shards["model.embed_tokens.weight"]
    return [{name: parts[rank] for name, parts in shards.items()} for rank in range(tp)]


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(("tp", "num_kv_heads"), [(1, 2), (2, 2), (4, 2), (4, 4), (4, 8), (2, 8), (8, 1)])
@pytest.mark.parametrize("family_name", [*DENSE, *MIXTURES])
def test_every_parameter_of_a_server_is_cut_as_sglang_cuts_it(
    family_name: str, tp: int, num_kv_heads: int, tied: bool
) -> None:
    family = family_of(family_name)
    shape = shape_of(family_name, num_kv_heads=num_kv_heads, tied=tied)
    tensors = numbered(family, shape)
    side = engine_shards(family, shape, EngineLayout(tp, num_engines=2), 2 * tp + 1)
    found, expected = filled(shards_by_rank(side), tensors), sglang_model(tensors, shape, tp)
    assert found[-1] == {}
    for rank in range(2 * tp):
        ours, theirs = together(found[rank]), expected[rank % tp]
        assert ours.keys() == theirs.keys()
        for name in ours:
            assert torch.equal(ours[name], theirs[name]), f"{name} of rank {rank}"


def together(tensors: Tensors) -> Tensors:
    """Stack "name[0]", "name[1]", ... into "name"."""
    parts: dict[str, dict[int, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        if "[" in name:
            parts.setdefault(name.split("[")[0], {})[int(name.split("[")[1][:-1])] = tensor
    stacked = {name: torch.stack([p[e] for e in range(len(p))]) for name, p in parts.items()}
    return {name: t for name, t in tensors.items() if "[" not in name} | stacked


@pytest.mark.parametrize(("tp", "ep"), [(2, 2), (4, 2), (4, 4), (8, 4)])
@pytest.mark.parametrize(("family_name", "q_lora"), [*((name, 0) for name in MIXTURES), ("deepseek_v3", 5)])
def test_the_experts_of_a_server_are_spread_over_ranks_and_then_cut(
    family_name: str, q_lora: int, tp: int, ep: int
) -> None:
    family, shape = family_of(family_name), shape_of(family_name, num_kv_heads=2, q_lora=q_lora)
    tensors = numbered(family, shape)
    assert not list(engine_layout_problems(shape, tp, ep))
    found = filled(shards_by_rank(engine_shards(family, shape, EngineLayout(tp, 1, ep), tp)), tensors)
    for rank, theirs in enumerate(sglang_model(tensors, shape, tp, ep)):
        ours = together(found[rank])
        assert ours.keys() == theirs.keys()
        for name in ours:
            assert torch.equal(ours[name], theirs[name]), f"{name} of rank {rank}"


def test_experts_that_cannot_be_spread_are_refused_with_a_remedy() -> None:
    shape = shape_of("qwen3_moe", num_kv_heads=2)
    problems = {
        "ep=8 does not divide the 12 experts of a layer; use a divisor of them": (shape, 8, 8),
        "ep=2 spreads experts, but the model is dense; use ep=1": (shape_of("llama", num_kv_heads=2), 2, 2),
        "tp=4 is no multiple of ep=3; use 3, 6": (replace(shape, num_heads=6, num_kv_heads=6), 4, 3),
    }
    for problem, (model, tp, ep) in problems.items():
        assert problem in engine_layout_problems(model, tp, ep)


@pytest.mark.parametrize("vocab", [1, 63, 64, 65, 130, 192])
@pytest.mark.parametrize("tp", [1, 2, 3, 4, 8])
def test_the_vocabulary_is_padded_to_64_or_if_needed_to_64_per_rank(vocab: int, tp: int) -> None:
    shape = replace(shape_of("llama", num_kv_heads=8, vocab=vocab), num_heads=24, num_kv_heads=24)
    family = family_of("llama")
    tensors = numbered(family, shape)
    side = engine_shards(family, shape, EngineLayout(tp), tp)
    found = [rank["lm_head.weight"] for rank in filled(shards_by_rank(side), tensors)]
    assert [t.tolist() for t in found] == [t.tolist() for t in vocab_parallel(tensors["lm_head.weight"], tp)]


@pytest.mark.parametrize(
    ("changes", "tp", "message"),
    [
        ({}, 3, "^tp=3 does not divide the model's 8 attention heads; use 1, 2, 4, 8$"),
        ({}, 16, "^tp=16 does not divide the model's 8 attention heads; use 1, 2, 4, 8$"),
        ({"ffn": 12}, 8, "^tp=8 does not divide the model's 12 rows of the MLP; use 1, 2, 4$"),
        (
            {"num_heads": 24, "num_kv_heads": 4},
            6,
            "^tp=6 is neither a multiple nor a divisor of .* 4 key-value heads; use",
        ),
        ({"num_experts": 2, "moe_ffn": 6}, 4, "^tp=4 does not divide the model's 6 rows of an expert; use 1, 2$"),
    ],
)
def test_a_size_that_does_not_fit_is_refused_with_sizes_that_fit(
    changes: dict[str, int], tp: int, message: str
) -> None:
    [problem] = engine_layout_problems(replace(shape_of("llama", num_kv_heads=2), **changes), tp)
    assert re.search(message, problem)


def test_sizes_that_fit_the_engine_alone_are_not_named_for_training() -> None:
    shape = replace(shape_of("llama", num_kv_heads=2), num_heads=6, head_dim=8, ffn=24)
    assert not list(engine_layout_problems(shape, 6))
    [problem] = megatron_layout_problems(shape, MegatronLayout(tp=6))
    assert re.search(r"^tp=6 does not divide the 80 fused rows of .*; use 1, 2$", problem)


def test_sizes_that_fit_are_accepted() -> None:
    for tp, num_kv_heads in ((1, 8), (2, 1), (4, 2), (4, 8)):
        assert not list(engine_layout_problems(shape_of("llama", num_kv_heads=num_kv_heads), tp))


@pytest.mark.parametrize(
    "layout",
    [
        MegatronLayout(tp=2, pp=2, dp=4, ep=2),
        MegatronLayout(tp=2, pp=2, dp=4, ep=4, etp=2),
        MegatronLayout(tp=4, pp=2, dp=1, ep=2, etp=2),
        MegatronLayout(tp=4, pp=2, dp=2, ep=4, order="tp-pp-dp"),
        MegatronLayout(tp=1, pp=3, dp=4, ep=2),
        MegatronLayout(tp=2, pp=1, dp=4, ep=2, order="tp-pp-dp"),
        MegatronLayout(tp=2, pp=2, dp=1, ep=2, cp=2),
        MegatronLayout(tp=2, pp=2, dp=4, ep=2, cp=3),
        MegatronLayout(tp=2, pp=1, dp=2, ep=4, cp=2, order="tp-pp-dp"),
    ],
)
def test_the_ranks_of_every_axis_are_megatrons(layout: MegatronLayout) -> None:
    importlib.import_module("grpo_mega.megatron")  # import its patches before Megatron
    parallel_state = importlib.import_module("megatron.core.parallel_state")
    order = {"tp-dp-pp": "tp-cp-ep-dp-pp", "tp-pp-dp": "tp-cp-ep-pp-dp"}[layout.order]
    sizes = {"tp": layout.etp, "ep": layout.ep, "dp": layout.num_expert_replicas, "pp": layout.pp, "cp": 1}
    dense = {"tp": layout.tp, "ep": 1, "dp": layout.dp, "pp": layout.pp, "cp": layout.cp}
    found: dict[int, dict[str, int]] = {rank: {} for rank in range(layout.world_size)}
    names = {axis: axis for axis in ("tp", "cp", "dp", "pp")}
    for axis_sizes, axes in ((dense, names), (sizes, {"ep": "ep", "tp": "etp"})):
        for axis, name in axes.items():
            for group in parallel_state.RankGenerator(**axis_sizes, order=order).get_ranks(axis):
                for index, rank in enumerate(group):
                    found[rank][name] = index
    for rank, index in found.items():
        tp_rank, pp_rank, dp_rank = layout.place(rank)
        dense_ranks = {"tp": tp_rank, "cp": layout.cp_rank(rank), "dp": dp_rank, "pp": pp_rank}
        assert index == dense_ranks | {"ep": layout.ep_rank(rank), "etp": layout.etp_rank(rank)}


def test_a_trainer_rank_holds_a_run_of_the_experts_and_the_whole_router() -> None:
    shape = replace(shape_of("mixtral", num_kv_heads=2), num_experts=4)
    layout = MegatronLayout(tp=2, dp=2, ep=2, etp=2)
    held = megatron_shards(family_of("mixtral"), shape, layout).rank_shards(3)  # tp rank 1, ep rank 1
    experts = {name: local for name, local in held.items() if "layers.1.mlp.experts" in name}
    assert list(experts) == [
        f"chunk0.decoder.layers.1.mlp.experts.local_experts.{e}.linear_fc{n}.weight" for e in (0, 1) for n in (1, 2)
    ]
    gate, up = experts["chunk0.decoder.layers.1.mlp.experts.local_experts.1.linear_fc1.weight"].pieces
    assert (gate.box.tensor, gate.box.start, gate.offset) == (
        "model.layers.1.block_sparse_moe.experts.3.w1.weight",
        (4, 0),
        (0, 0),
    )
    assert (up.box.tensor, up.box.start, up.offset) == (
        "model.layers.1.block_sparse_moe.experts.3.w3.weight",
        (4, 0),
        (4, 0),
    )
    assert held["chunk0.decoder.layers.1.mlp.router.weight"].shape == (4, 6)


def moe_config(**changes: Any) -> dict[str, Any]:
    config = {
        "model_type": "qwen3_moe",
        "num_hidden_layers": 2,
        "hidden_size": 8,
        "intermediate_size": 96,
        "moe_intermediate_size": 24,
        "num_experts": 16,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "vocab_size": 10,
    }
    return {name: value for name, value in (config | changes).items() if value is not None}


def test_experts_are_read_under_both_names_and_dense_models_have_none() -> None:
    shape = ModelShape.from_hf_config(moe_config())
    assert (shape.num_experts, shape.moe_ffn) == (16, 24)
    assert ModelShape.from_hf_config(moe_config(num_experts=None, num_local_experts=16)) == shape
    mixtral = ModelShape.from_hf_config(moe_config(model_type="mixtral", num_experts=None, num_local_experts=8))
    assert (mixtral.num_experts, mixtral.moe_ffn) == (8, 96)
    dense = ModelShape.from_hf_config(moe_config(model_type="llama"))
    assert (dense.num_experts, dense.moe_ffn) == (0, 0)
    names = family_of("qwen3_moe").hf_tensors(shape)
    assert names["model.layers.1.mlp.experts.15.down_proj.weight"] == (8, 24)
    assert names.keys() == hf_rank_shards(family_of("qwen3_moe"), shape).keys()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_experts": None}, "no field 'num_experts'"),
        ({"moe_intermediate_size": None}, "no field 'moe_intermediate_size'"),
        ({"decoder_sparse_step": 2}, "decoder_sparse_step=2; only 1 is supported"),
        ({"mlp_only_layers": [0]}, r"mlp_only_layers=\[0\]; only \[\] is supported"),
    ],
)
def test_a_mixture_with_unknown_layers_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(WeightMappingError, match=message):
        ModelShape.from_hf_config(moe_config(**changes))
