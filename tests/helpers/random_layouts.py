"""Random small models with random layouts that fit them, for hypothesis."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import get_args

from hypothesis import strategies as st
from mapping import megatron_side

from grpo_mega.weights.boxes import Holding
from grpo_mega.weights.families import FAMILIES, family_of
from grpo_mega.weights.layout import MegatronLayout, RankOrder, hf_holding
from grpo_mega.weights.spec import Family, ModelShape


@dataclass(frozen=True)
class Case:
    """A small model and layouts that fit it."""

    shape: ModelShape
    layouts: tuple[MegatronLayout, ...]
    fused_norms: bool

    @property
    def family(self) -> Family:
        return family_of(self.shape.model_type)

    def side(self, index: int) -> list[Holding]:
        return megatron_side(self.family, self.shape, self.layouts[index], fused_norms=self.fused_norms)

    def engines(self, holds: Sequence[bool]) -> list[Holding]:
        """Whole tensors on the ranks that `holds` names, nothing elsewhere."""
        return [hf_holding(self.family, self.shape) if is_engine else {} for is_engine in holds]


@st.composite
def layouts(draw: st.DrawFn) -> MegatronLayout:
    pp = draw(st.sampled_from([1, 2, 4]))
    return MegatronLayout(
        tp=draw(st.sampled_from([1, 2, 4])),
        pp=pp,
        vpp=draw(st.sampled_from([1, 2])) if pp > 1 else 1,
        dp=draw(st.sampled_from([1, 2])),
        order=draw(st.sampled_from(get_args(RankOrder))),
    )


@st.composite
def cases(draw: st.DrawFn, num_layouts: int = 1) -> Case:
    """Any model whose query heads and ffn divide by tp; kv heads may be fewer, layers and vocabulary need not divide."""
    chosen = [draw(layouts()) for _ in range(num_layouts)]
    tp = max(layout.tp for layout in chosen)  # a power of 2
    kv_heads = draw(st.sampled_from([n for n in (1, 2, 4, 8) if n <= 2 * tp]))
    head_dim = draw(st.integers(1, 3)) * max(1, tp // kv_heads)
    most_chunks = max(layout.num_chunks for layout in chosen)
    num_layers = draw(st.integers(most_chunks, most_chunks + 3))
    shape = ModelShape(
        model_type=draw(st.sampled_from(sorted(FAMILIES))),
        num_layers=num_layers,
        hidden=draw(st.integers(1, 5)),
        ffn=tp * draw(st.integers(1, 3)),
        num_heads=max(tp, kv_heads) * draw(st.integers(1, 3)),
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        vocab=draw(st.integers(1, 17)),
        tied=draw(st.booleans()),
    )
    divided = tuple(replace(layout, layers_per_chunk=draw(st.none() | divisions(num_layers, layout))) for layout in chosen)
    return Case(shape, divided, fused_norms=draw(st.booleans()))


@st.composite
def divisions(draw: st.DrawFn, num_layers: int, layout: MegatronLayout) -> tuple[int, ...]:
    """Layers of each chunk, at least one in each."""
    places = st.integers(1, num_layers - 1) if num_layers > 1 else st.nothing()
    cuts = sorted(draw(st.sets(places, min_size=layout.num_chunks - 1, max_size=layout.num_chunks - 1)))
    return tuple(b - a for a, b in pairwise([0, *cuts, num_layers]))
