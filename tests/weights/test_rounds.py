"""Rounds: within their limit, complete, in the same order at both ends of any two ranks, and with work for all
stages.
"""

from __future__ import annotations

from collections import defaultdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_mega.weights.families import family_of
from grpo_mega.weights.layout import EngineLayout, MegatronLayout, engine_shards, megatron_shards
from grpo_mega.weights.plan import Rounds, TransferPlan, plan_transfers
from grpo_mega.weights.spec import ModelShape
from grpo_mega.weights.transfers import Transfer
from tests.helpers.mapping import assert_equal, blank, filled, numbered, simulate
from tests.helpers.random_layouts import Case, cases, shards_by_rank


def loads(rounds: Rounds, world_size: int) -> list[tuple[dict[int, int], dict[int, int], list[Transfer]]]:
    """Return per round: elements that each rank sends, elements that it receives or keeps, and each transfer once."""
    found = []
    for index in range(len(rounds)):
        sent: dict[int, int] = defaultdict(int)
        received: dict[int, int] = defaultdict(int)
        transfers = []
        for rank in range(world_size):
            for t in rounds.of(index, rank):
                assert rank in (t.source_rank, t.target_rank)
                if t.target_rank == rank:
                    received[rank] += t.box.size
                    transfers.append(t)
                else:
                    sent[rank] += t.box.size
        found.append((sent, received, transfers))
    return found


@settings(max_examples=40, deadline=None)
@given(cases(), st.sampled_from([1, 7, 30, 200, 100_000]))
def test_rounds_bring_everything_once_and_keep_the_limit(case: Case, capacity: int) -> None:
    trainer, servers = case.trainer(), case.servers()
    made = plan_transfers(trainer, servers, ranks_per_node=4)
    tensors = numbered(case.family, case.shape)
    start, targets = filled(shards_by_rank(trainer), tensors), shards_by_rank(servers)
    found = blank(targets)
    rounds = made.rounds(capacity)
    for sent, received, transfers in loads(rounds, made.world_size):
        assert transfers
        simulate(transfers, start, found)
        if max([*sent.values(), *received.values()]) > capacity:
            [alone] = transfers
            assert alone.box.stop[0] - alone.box.start[0] == 1
    assert_equal(found, filled(targets, tensors))


@settings(max_examples=20, deadline=None)
@given(cases(), st.sampled_from([7, 200]))
def test_both_ends_of_any_two_ranks_have_their_transfers_in_the_same_order(case: Case, capacity: int) -> None:
    made = plan_transfers(case.trainer(), case.servers(), ranks_per_node=4)
    rounds = made.rounds(capacity)
    for index in range(min(len(rounds), 50)):
        of_rank = [rounds.of(index, rank) for rank in range(made.world_size)]
        for rank, transfers in enumerate(of_rank):
            for peer in {t.target_rank for t in transfers} - {rank}:
                assert [t for t in transfers if t.target_rank == peer] == [
                    t for t in of_rank[peer] if t.source_rank == rank
                ]


LLAMA = ModelShape(
    "llama", num_layers=16, hidden=64, ffn=256, num_heads=16, num_kv_heads=8, head_dim=4, vocab=512, tied=False
)
MIXTURE = ModelShape(
    "qwen3_moe",
    16,
    hidden=64,
    ffn=8,
    num_heads=8,
    num_kv_heads=4,
    head_dim=8,
    vocab=512,
    tied=False,
    num_experts=8,
    moe_ffn=64,
)


def plan_for(shape: ModelShape, layout: MegatronLayout) -> TransferPlan:
    family = family_of(shape.model_type)
    engines = EngineLayout(tp=4, num_engines=layout.world_size // 4)
    return plan_transfers(
        megatron_shards(family, shape, layout),
        engine_shards(family, shape, engines, layout.world_size),
        ranks_per_node=4,
    )


@pytest.mark.parametrize("shape", [LLAMA, MIXTURE], ids=lambda s: s.model_type)
@pytest.mark.parametrize("vpp", [1, 2])
def test_in_every_round_all_stages_send_and_few_rounds_are_needed(shape: ModelShape, vpp: int) -> None:
    layout = MegatronLayout(tp=2, pp=4, vpp=vpp, dp=2, ep=2 if shape.num_experts else 1)
    made = plan_for(shape, layout)
    capacity = 20_000
    found = loads(made.rounds(capacity), made.world_size)
    totals: dict[tuple[str, int], int] = defaultdict(int)
    for sent, received, _ in found:
        for way, sizes in (("out", sent), ("in", received)):
            for rank, size in sizes.items():
                totals[way, rank] += size
    for sent, received, _ in found[:-1]:
        assert {layout.place(rank)[1] for rank in sent} == set(range(layout.pp))
        assert len(received) == made.world_size
    assert 10 < len(found) < 1.4 * max(totals.values()) / capacity


def test_rounds_are_made_once_for_a_limit() -> None:
    made = plan_for(LLAMA, MegatronLayout(tp=2, pp=2))
    assert made.rounds(1000) is made.rounds(1000)
    assert len(made.rounds(2000)) < len(made.rounds(1000))


def test_a_plan_without_transfers_has_no_rounds() -> None:
    assert len(TransferPlan((), world_size=4, ranks_per_node=4).rounds(10)) == 0
