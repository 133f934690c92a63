"""Hypothesis strategies: random small models with matching random layouts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, get_args

from hypothesis import strategies as st

from grpo_mega.weights.boxes import RankShards
from grpo_mega.weights.families import FAMILIES, family_of
from grpo_mega.weights.layout import (
    EngineLayout,
    MegatronLayout,
    RankOrder,
    ShardLayout,
    engine_shards,
    hf_rank_shards,
    hf_shards,
    megatron_shards,
)
from grpo_mega.weights.spec import Family, ModelShape


@dataclass(frozen=True)
class Case:
    """A small model with matching layouts of trainer and engines."""

    shape: ModelShape
    layouts: tuple[MegatronLayout, ...]
    fused_norms: bool
    engine: EngineLayout
    num_idle: int  # ranks that neither train in the first layout nor serve

    @property
    def family(self) -> Family:
        return family_of(self.shape.model_type)

    @property
    def world_size(self) -> int:
        return max(self.layouts[0].world_size, self.engine.world_size) + self.num_idle

    def trainer(self, index: int = 0) -> ShardLayout:
        return megatron_shards(self.family, self.shape, self.layouts[index], fused_norms=self.fused_norms)

    def servers(self) -> ShardLayout:
        return engine_shards(self.family, self.shape, self.engine, self.world_size)

    def embedded(self) -> ShardLayout:
        """Return shards of embedded engines on the first few ranks."""
        return hf_shards(self.family, self.shape, min(4, self.world_size))

    def side(self, index: int) -> list[RankShards]:
        return shards_by_rank(self.trainer(index))

    def engines(self, holds: Sequence[bool]) -> list[RankShards]:
        """Return whole tensors on the ranks where `holds` is true, nothing on other ranks."""
        return [hf_rank_shards(self.family, self.shape) if is_engine else {} for is_engine in holds]


def shards_by_rank(side: ShardLayout) -> list[RankShards]:
    """Return the shards of each rank, listed per tensor."""
    return [side.rank_shards(rank) for rank in range(side.world_size)]


@st.composite
def layouts(draw: st.DrawFn) -> MegatronLayout:
    pp = draw(st.sampled_from([1, 2, 4]))
    dp = draw(st.sampled_from([1, 2, 4] if pp < 4 else [1, 2]))
    cp = draw(st.sampled_from([1, 1, 2, 3]))
    order = draw(st.sampled_from(get_args(RankOrder)))
    tp = draw(st.sampled_from([1, 2, 4]))
    if order == "tp-dp-pp" or pp == 1:
        etp = draw(st.sampled_from([n for n in (1, 2, 4) if tp % n == 0]))
        ep = draw(st.sampled_from([n for n in (1, 2, 4) if tp * dp * cp // etp % n == 0]))
    else:  # Megatron supports only tp-dp-pp if experts are distributed over stages
        etp = draw(st.sampled_from([n for n in (1, 2, 4) if tp % n == 0]))
        ep = tp // etp
    return MegatronLayout(
        tp=tp,
        pp=pp,
        vpp=draw(st.sampled_from([1, 2])) if pp > 1 else 1,
        dp=dp,
        order=order,
        ep=ep,
        cp=cp,
        etp=etp,
    )


@st.composite
def cases(draw: st.DrawFn, num_layouts: int = 1) -> Case:
    """Draw a model. Query heads and ffn are divisible by tp. KV heads may be fewer, layers and vocabulary need not
    divide.
    """
    chosen = [draw(layouts()) for _ in range(num_layouts)]
    engine_tp = draw(st.sampled_from([1, 2, 4]))
    engine_ep = draw(st.sampled_from([n for n in (1, 2, 4) if n <= engine_tp]))
    engine = EngineLayout(engine_tp, draw(st.integers(1, 3)), engine_ep)
    tp = max(engine.tp, *(layout.tp for layout in chosen))  # tp is a power of 2
    kv_heads = draw(st.sampled_from([n for n in (1, 2, 4, 8) if n <= 2 * tp]))
    head_dim = draw(st.integers(1, 3)) * max(1, tp // kv_heads)
    num_heads = max(tp, kv_heads) * draw(st.integers(1, 3))
    most_chunks = max(layout.num_chunks for layout in chosen)
    num_layers = draw(st.integers(most_chunks, most_chunks + 3))
    model_type = draw(st.sampled_from(sorted(FAMILIES)))
    is_mixture = any(row.where == "expert" for row in family_of(model_type).rows)
    latent: dict[str, Any] = {}
    if model_type.startswith("qwen3_5"):
        kv_heads, head_dim = tp * draw(st.integers(1, 2)), draw(st.integers(1, 3))
        num_heads, k_heads = kv_heads * draw(st.integers(1, 3)), tp * draw(st.integers(1, 2))
        latent = {
            "linear_layers": tuple(sorted(draw(st.sets(st.integers(0, num_layers - 1), min_size=1)))),
            "linear_k_heads": k_heads,
            "linear_v_heads": k_heads * draw(st.integers(1, 2)),
            "linear_k_dim": draw(st.integers(1, 3)),
            "linear_v_dim": draw(st.integers(1, 3)),
            "linear_conv": draw(st.integers(2, 4)),
            "shared_ffn": tp * draw(st.integers(1, 2)) if is_mixture else 0,
        }
    if model_type.startswith("deepseek") or model_type == "glm4_moe_lite":
        kv_heads = num_heads
        latent = {
            "num_dense": draw(st.integers(0, num_layers - 1)),
            "shared_ffn": tp * draw(st.integers(1, 2)),
            "kv_lora": draw(st.integers(1, 3)),
            "q_lora": draw(st.integers(0, 2)),
            "rope_dim": draw(st.integers(1, head_dim)),
            "v_dim": draw(st.integers(1, 3)),
        }
    shape = ModelShape(
        model_type=model_type,
        num_layers=num_layers,
        hidden=draw(st.integers(1, 5)),
        ffn=tp * draw(st.integers(1, 3)),
        num_heads=num_heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        vocab=draw(st.integers(1, 17) | st.integers(60, 140)),
        tied=draw(st.booleans()),
        num_experts=max(engine.ep, *(layout.ep for layout in chosen)) * draw(st.integers(1, 2)) if is_mixture else 0,
        moe_ffn=tp * draw(st.integers(1, 2)) if is_mixture else 0,
        **latent,
    )
    divided = tuple(
        replace(layout, layers_per_chunk=draw(st.none() | divisions(num_layers, layout))) for layout in chosen
    )
    return Case(shape, divided, fused_norms=draw(st.booleans()), engine=engine, num_idle=draw(st.integers(0, 2)))


@st.composite
def divisions(draw: st.DrawFn, num_layers: int, layout: MegatronLayout) -> tuple[int, ...]:
    """Draw the number of layers per chunk, at least 1."""
    places = st.integers(1, num_layers - 1) if num_layers > 1 else st.nothing()
    cuts = sorted(draw(st.sets(places, min_size=layout.num_chunks - 1, max_size=layout.num_chunks - 1)))
    return tuple(b - a for a, b in pairwise([0, *cuts, num_layers]))
