"""Plans between any two layouts: targets get their tensors without an extra byte, and the plan reports its traffic."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from grpo_mega.errors import WeightMappingError
from grpo_mega.weights.boxes import RankShards, region
from grpo_mega.weights.families import family_of
from grpo_mega.weights.layout import EngineLayout, MegatronLayout, ShardLayout, engine_shards, megatron_shards
from grpo_mega.weights.plan import Traffic, TransferPlan, plan_transfers
from grpo_mega.weights.spec import ModelShape
from grpo_mega.weights.transfers import Transfer
from tests.helpers.mapping import assert_equal, blank, filled, lower_bound, numbered, plan, simulate, transfers_of
from tests.helpers.random_layouts import Case, cases, shards_by_rank

few = settings(max_examples=40, deadline=None)
nodes = st.sampled_from([1, 2, 3, 8])  # ranks per node


def traffic_of(transfers: list[Transfer], world_size: int, ranks_per_node: int) -> Traffic:
    """Count transfer by transfer, with 4 bytes per element."""
    sent, received, moved = [0] * world_size, [0] * world_size, {"same_rank": 0, "same_node": 0, "between_nodes": 0}
    for t in transfers:
        is_near = t.source_rank // ranks_per_node == t.target_rank // ranks_per_node
        if t.source_rank == t.target_rank:
            moved["same_rank"] += 4 * t.box.size
        else:
            moved["same_node" if is_near else "between_nodes"] += 4 * t.box.size
            sent[t.source_rank] += 4 * t.box.size
            received[t.target_rank] += 4 * t.box.size
    return Traffic(**moved, sent=tuple(sent), received=tuple(received))


def check(case: Case, sources: ShardLayout, targets: ShardLayout, ranks_per_node: int) -> None:
    tensors = numbered(case.family, case.shape)
    made = plan_transfers(sources, targets, ranks_per_node=ranks_per_node)
    starts, wanted = shards_by_rank(sources), shards_by_rank(targets)
    start, found = filled(starts, tensors), blank(wanted)
    transfers = list(transfers_of(made))
    simulate(transfers, start, found)
    assert_equal(found, filled(wanted, tensors))

    traffic = made.traffic(itemsize=4)
    assert traffic == traffic_of(transfers, made.world_size, ranks_per_node)
    for rank, target in enumerate(wanted):
        source = starts[rank] if rank < len(starts) else {}
        assert traffic.received[rank] == 4 * lower_bound(source, target, tensors)

    generic = list(transfers_of(plan(starts, wanted, ranks_per_node)))
    theirs = traffic_of(generic, made.world_size, ranks_per_node)
    assert (theirs.same_rank, theirs.same_node, theirs.between_nodes, theirs.received) == (
        (traffic.same_rank, traffic.same_node, traffic.between_nodes, traffic.received)
    )
    by_generic = blank(wanted)
    simulate(generic, start, by_generic)
    assert_equal(by_generic, found)


def hard_case(model_type: str, layout: MegatronLayout, *, tied: bool, ep: int = 1) -> Case:
    """Return a case with an engine of four ranks, one key-value head, and a vocabulary that SGLang pads in its last
    ranks.
    """
    num_experts = 4 if model_type in ("mixtral", "qwen3_moe") else 0
    shape = ModelShape(
        model_type, 5, 3, 8, 8, 1, 4, vocab=101, tied=tied, num_experts=num_experts, moe_ffn=2 * num_experts
    )
    return Case(shape, (layout,), fused_norms=False, engine=EngineLayout(4, 2, ep), num_idle=0)


@few
@example(hard_case("qwen2", MegatronLayout(tp=2, pp=2, vpp=2, dp=2), tied=True), 4)
@example(hard_case("llama", MegatronLayout(tp=4, pp=2, order="tp-pp-dp"), tied=False), 3)
@example(hard_case("qwen3_moe", MegatronLayout(tp=2, pp=2, dp=4, ep=2), tied=True), 4)
@example(hard_case("mixtral", MegatronLayout(dp=4, ep=4), tied=True), 2)
@example(hard_case("qwen3_moe", MegatronLayout(tp=2, dp=4, ep=4), tied=True, ep=4), 8)
@example(hard_case("qwen3_moe", MegatronLayout(tp=2, dp=4, ep=4), tied=False, ep=2), 4)
@given(cases(), nodes)
def test_servers_equal_a_direct_fill_and_receive_only_missing_elements(case: Case, ranks_per_node: int) -> None:
    check(case, case.trainer(), case.servers(), ranks_per_node)


@few
@given(cases(), nodes)
def test_embedded_engines_get_whole_tensors_from_missing_elements_only(case: Case, ranks_per_node: int) -> None:
    check(case, case.trainer(), case.embedded(), ranks_per_node)


@few
@given(cases(num_layouts=2), nodes)
def test_another_layout_of_the_trainer_is_a_side_like_others(case: Case, ranks_per_node: int) -> None:
    check(case, case.trainer(0), case.trainer(1), ranks_per_node)


@few
@given(cases())
def test_the_ranks_of_an_engine_hold_every_element_once_per_replica(case: Case) -> None:
    tensors, shape, tp = numbered(case.family, case.shape), case.shape, case.engine.tp
    counts = {name: torch.zeros_like(t) for name, t in tensors.items()}
    side = case.servers()
    for tp_rank in range(tp):
        for name, local in side.rank_shards(tp_rank).items():
            written = torch.zeros(local.shape, dtype=torch.int64)
            for piece in local.pieces:
                counts[piece.box.tensor][region(piece.box.start, piece.box.shape)] += 1
                written[region(piece.offset, piece.box.shape)] += 1
            is_padded = name in ("model.embed_tokens.weight", "lm_head.weight")
            real = max(0, min(local.shape[0], shape.vocab - tp_rank * local.shape[0])) if is_padded else local.shape[0]
            assert (written[:real] == 1).all() and not written[real:].any(), name
    for name, found in counts.items():
        if name.endswith("norm.weight") or "gate." in name or "_a_proj" in name:
            copies = tp
        elif ".k_proj" in name or ".v_proj" in name:
            copies = max(1, tp // shape.num_kv_heads)
        else:
            copies = 2 if name == "model.embed_tokens.weight" and shape.tied and not case.family.engine_ties else 1
        assert (found == copies).all(), f"{name}: {found.unique().tolist()} instead of {copies}"
    for rank in range(side.world_size):
        expected = side.rank_shards(rank % tp) if rank < case.engine.world_size else {}
        assert side.rank_shards(rank) == expected


LLAMA = ModelShape(
    "llama", num_layers=7, hidden=4, ffn=32, num_heads=8, num_kv_heads=8, head_dim=2, vocab=64, tied=False
)
MIXTURE = ModelShape(
    "qwen3_moe",
    4,
    hidden=4,
    ffn=8,
    num_heads=8,
    num_kv_heads=2,
    head_dim=2,
    vocab=64,
    tied=False,
    num_experts=8,
    moe_ffn=8,
)


def plan_for(shape: ModelShape, layout: MegatronLayout, engines: EngineLayout, ranks_per_node: int = 8) -> TransferPlan:
    family = family_of(shape.model_type)
    world_size = max(layout.world_size, engines.world_size)
    return plan_transfers(
        megatron_shards(family, shape, layout),
        engine_shards(family, shape, engines, world_size),
        ranks_per_node=ranks_per_node,
    )


def test_the_nearest_holder_sends() -> None:
    """Each node of four has every stage; two engines of four ranks."""
    made = plan_for(LLAMA, MegatronLayout(pp=4, dp=2, order="tp-pp-dp"), EngineLayout(4, 2), ranks_per_node=4)
    traffic = made.traffic(itemsize=2)
    assert traffic.between_nodes == 0 < traffic.same_node
    by_stage = plan_for(LLAMA, MegatronLayout(pp=4, dp=2), EngineLayout(4, 2), ranks_per_node=4)
    far = by_stage.traffic(itemsize=2)
    assert far.between_nodes > 0
    assert far.same_rank + far.moved == traffic.same_rank + traffic.moved


@pytest.mark.parametrize("num_engines", [1, 3, 8])
@pytest.mark.parametrize("shape", [LLAMA, MIXTURE], ids=lambda s: s.model_type)
def test_replicas_share_the_sending_however_few_the_engines(shape: ModelShape, num_engines: int) -> None:
    """Eight replicas on separate nodes; the engines hold nothing."""
    layout = MegatronLayout(dp=8)
    family = family_of(shape.model_type)
    trainer = megatron_shards(family, shape, layout)
    servers = engine_shards(family, shape, EngineLayout(1, num_engines), num_engines)
    made = plan_transfers(trainer, ShardLayout(((),) * 8 + servers.blocks), ranks_per_node=1)
    sent = made.traffic(itemsize=1).sent[:8]
    assert sum(sent) == num_engines * sum(t.numel() for t in numbered(family, shape).values())
    assert max(sent) < 1.35 * sum(sent) / 8, sent


def test_plans_are_deterministic_and_do_not_grow_with_the_layers() -> None:
    layout, engines = MegatronLayout(tp=2, pp=2, dp=2), EngineLayout(2, 4)
    made, again, deep = (
        plan_for(replace(LLAMA, num_layers=num_layers), layout, engines) for num_layers in (40, 40, 4000)
    )
    assert made == again
    assert len(deep.templates) == len(made.templates)
    assert len(list(transfers_of(made))) > 4 * sum(len(t.transfers) for t in made.templates)


def test_experts_are_planned_together_too() -> None:
    made = plan_for(MIXTURE, MegatronLayout(tp=2, dp=4, ep=4, etp=2), EngineLayout(2, 1))
    assert sum(len(t.transfers) for t in made.templates) < len(list(transfers_of(made))) / 3
    names = {t.target for t in transfers_of(made)}
    assert {f"model.layers.3.mlp.experts.w13_weight[{e}]" for e in range(8)} <= names


def test_a_side_that_lacks_layers_is_refused() -> None:
    shallow = replace(LLAMA, num_layers=6)
    family = family_of("llama")
    targets = engine_shards(family, LLAMA, EngineLayout(), 1)
    with pytest.raises(WeightMappingError, match=r"layers 0 to 6, .* the same model"):
        plan_transfers(megatron_shards(family, shallow, MegatronLayout()), targets, ranks_per_node=1)


def test_holdings_of_a_side_are_those_of_its_layout() -> None:
    side: list[RankShards] = shards_by_rank(megatron_shards(family_of("llama"), LLAMA, MegatronLayout(pp=2)))
    assert "chunk0.decoder.layers.3.mlp.linear_fc2.weight" in side[0]
    assert "chunk0.decoder.layers.3.mlp.linear_fc2.weight" not in side[1]  # three layers, numbered from its first
    [piece] = side[1]["chunk0.decoder.layers.0.mlp.linear_fc2.weight"].pieces
    assert (piece.box.tensor, piece.local) == (
        "model.layers.4.mlp.down_proj.weight",
        "chunk0.decoder.layers.0.mlp.linear_fc2.weight",
    )
