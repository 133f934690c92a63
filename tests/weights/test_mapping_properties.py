"""Properties of every family and layout: coverage, bit-exact round trips, and plans without an extra byte."""

from __future__ import annotations

from collections import defaultdict

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_mega.errors import WeightMappingError
from grpo_mega.weights.boxes import Box, LocalTensor, Piece, RankShards, region
from grpo_mega.weights.spec import round_up
from tests.helpers.mapping import (
    Tensors,
    assert_equal,
    blank,
    filled,
    lower_bound,
    numbered,
    plan,
    simulate,
    slice_of,
    transfers_of,
)
from tests.helpers.random_layouts import Case, cases

few = settings(max_examples=40, deadline=None)


def counts_of(case: Case, side: list[RankShards]) -> Tensors:
    """Count how often each element of each Hugging Face tensor occurs on all ranks together."""
    counts = {name: torch.zeros(shape, dtype=torch.int64) for name, shape in case.family.hf_tensors(case.shape).items()}
    for holding in side:
        for local in holding.values():
            for piece in local.pieces:
                slice_of(counts, piece.box).add_(1)
    return counts


@few
@given(cases())
def test_the_ranks_of_a_replica_hold_every_element_exactly_once(case: Case) -> None:
    side, [layout] = case.side(0), case.layouts
    for name, counts in counts_of(case, side).items():
        copies = layout.num_expert_replicas if ".experts." in name else layout.num_replicas
        if name.endswith("norm.weight") or "gate." in name or "_a_proj" in name:  # whole on every rank
            copies *= layout.tp
        if case.shape.tied and name == "model.embed_tokens.weight" and layout.pp > 1:
            copies *= 2  # the last stage's output layer
        assert (counts == copies).all(), f"{name}: {counts.unique().tolist()} instead of {copies}"


@few
@given(cases())
def test_pieces_fill_a_local_tensor_once_except_vocabulary_padding(case: Case) -> None:
    [layout], shape = case.layouts, case.shape
    for rank, holding in enumerate(case.side(0)):
        for name, local in holding.items():
            counts = torch.zeros(local.shape, dtype=torch.int64)
            for piece in local.pieces:
                assert piece.local == name
                counts[region(piece.offset, piece.box.shape)] += 1
            is_vocabulary = name.endswith(("word_embeddings.weight", "output_layer.weight"))
            if is_vocabulary:
                assert local.shape == (round_up(shape.vocab, layout.tp) // layout.tp, shape.hidden)
            real_rows = shape.vocab - layout.place(rank)[0] * local.shape[0] if is_vocabulary else local.shape[0]
            assert (counts[: max(0, real_rows)] == 1).all(), name
            assert (counts[max(0, real_rows) :] == 0).all(), name


@few
@given(cases())
def test_all_replicas_hold_the_same(case: Case) -> None:
    side, [layout] = case.side(0), case.layouts
    of_dense: dict[tuple[int, int], RankShards] = {}
    of_experts: dict[tuple[int, int, int], RankShards] = {}
    for rank, holding in enumerate(side):
        tp_rank, pp_rank, _ = layout.place(rank)
        experts = {name: tensor for name, tensor in holding.items() if ".mlp.experts." in name}
        dense = {name: tensor for name, tensor in holding.items() if name not in experts}
        assert of_dense.setdefault((tp_rank, pp_rank), dense) == dense
        assert of_experts.setdefault((layout.etp_rank(rank), layout.ep_rank(rank), pp_rank), experts) == experts
    assert len(of_dense) == layout.tp * layout.pp
    assert len(of_experts) == layout.etp * layout.ep * layout.pp


@few
@given(cases(num_layouts=2))
def test_from_one_layout_to_another_and_back_changes_no_bit(case: Case) -> None:
    first, second = case.side(0), case.side(1)
    tensors = numbered(case.family, case.shape)
    start, there, back = filled(first, tensors), blank(second), blank(first)
    simulate(transfers_of(plan(first, second)), start, there)
    assert_equal(there, filled(second, tensors))
    simulate(transfers_of(plan(second, first)), there, back)
    assert_equal(back, start)


@few
@given(cases(), st.lists(st.booleans(), min_size=1, max_size=5))
def test_engines_and_writer_get_whole_tensors_and_the_way_back_is_exact(case: Case, holds: list[bool]) -> None:
    holds = [*holds, True]  # at least one engine, not always on the first rank
    trainer, engines = case.side(0), case.engines(holds)
    tensors = numbered(case.family, case.shape)
    start, there, back = filled(trainer, tensors), blank(engines), blank(trainer)
    simulate(transfers_of(plan(trainer, engines)), start, there)
    assert_equal(there, [tensors if is_engine else {} for is_engine in holds])
    simulate(transfers_of(plan(engines, trainer)), there, back)
    assert_equal(back, start)


@few
@given(cases(num_layouts=2), st.booleans(), st.lists(st.booleans(), min_size=1, max_size=5))
def test_a_plan_moves_only_the_elements_that_each_rank_lacks(case: Case, to_engines: bool, holds: list[bool]) -> None:
    sources, targets = case.side(0), case.engines(holds) if to_engines else case.side(1)
    tensors = numbered(case.family, case.shape)
    received: dict[int, int] = defaultdict(int)
    for t in transfers_of(plan(sources, targets)):
        received[t.target_rank] += t.box.size if t.source_rank != t.target_rank else 0
    for rank, target in enumerate(targets):
        source = sources[rank] if rank < len(sources) else {}
        assert received[rank] == lower_bound(source, target, tensors)


def whole(name: str, size: int) -> RankShards:
    return {name: LocalTensor((size,), (Piece(Box(name, (0,), (size,)), name, (0,)),))}


def test_replicas_share_the_sending() -> None:
    """Three ranks hold 12 tensors. Three other ranks hold none and need all."""
    held: RankShards = {}
    for i in range(12):
        held |= whole(f"t{i}", 5)
    sent: dict[int, int] = defaultdict(int)
    for t in transfers_of(plan([held] * 3 + [{}] * 3, [{}] * 3 + [held] * 3)):
        sent[t.source_rank] += t.box.size
    assert sent == {0: 60, 1: 60, 2: 60}


def test_a_target_takes_its_part_from_itself_and_the_rest_from_others() -> None:
    middle = {"a": LocalTensor((4,), (Piece(Box("t", (3,), (7,)), "a", (0,)),))}
    wide = {"b": LocalTensor((10,), (Piece(Box("t", (0,), (10,)), "b", (0,)),))}
    moved = [(t.source_rank, t.box.start[0], t.box.stop[0]) for t in transfers_of(plan([wide, middle], [{}, wide]))]
    assert sorted(moved) == [(0, 0, 3), (0, 7, 10), (1, 3, 7)]


def test_a_plan_for_a_tensor_that_no_rank_holds_is_refused_by_name() -> None:
    with pytest.raises(WeightMappingError, match=r"'u'.* rank 1 "):
        plan([whole("t", 4)], [whole("t", 4), whole("u", 4)])


@given(st.data())
def test_subtracting_a_box_leaves_disjoint_boxes_that_cover_the_rest(data: st.DataObject) -> None:
    shape = data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=3))
    starts = [data.draw(st.integers(0, n - 1)) for n in shape]
    stops = [data.draw(st.integers(a + 1, n)) for a, n in zip(starts, shape, strict=True)]
    outer, inner = Box("t", (0,) * len(shape), tuple(shape)), Box("t", tuple(starts), tuple(stops))
    counts = torch.zeros(shape, dtype=torch.int64)
    for rest in outer.subtract(inner):
        assert rest.intersect(inner) is None
        slice_of({"t": counts}, rest).add_(1)
    slice_of({"t": counts}, inner).add_(1)
    assert (counts == 1).all()
