"""Cards and assumptions: every number of the planner that comes from neither the config nor the model.

Peaks are the makers' data sheets (dense, without sparsity). The assumptions are judgements; `--explain` lists them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, fields

from grpo_mega.errors import ConfigError


@dataclass(frozen=True)
class Card:
    """One GPU, and its share of a node of eight. Rates are per GPU and direction."""

    name: str
    title: str
    capability: tuple[int, int]  # CUDA's compute capability
    memory_gib: float  # as CUDA reports it, which is less than what is sold
    bf16_flops: float
    fp8_flops: float  # 0: it has none
    hbm_bytes: float  # per second
    nvlink_bytes: float
    network_bytes: float  # between nodes
    host_bytes: float  # to host memory
    node_memory_gib: float  # host memory of a usual node of eight


CARDS = {
    card.name: card
    for card in (
        Card("a100", "A100 80GB SXM", (8, 0), 79.15, 312e12, 0.0, 2.04e12, 300e9, 25e9, 25e9, 1024),
        Card("h100", "H100 80GB SXM", (9, 0), 79.1, 989e12, 1979e12, 3.35e12, 450e9, 50e9, 50e9, 2048),
        Card("h200", "H200 141GB SXM", (9, 0), 139.8, 989e12, 1979e12, 4.8e12, 450e9, 50e9, 50e9, 2048),
        Card("b200", "B200 180GB SXM", (10, 0), 178.3, 2250e12, 4500e12, 7.7e12, 900e9, 50e9, 50e9, 2048),
    )
}


def card_of(name: str) -> Card:
    if name not in CARDS:
        raise ConfigError(f"--gpu {name} is not known; known are {', '.join(CARDS)}")
    return CARDS[name]


def _assume(value: float, why: str) -> float:
    return field(default=value, metadata={"why": why})


@dataclass(frozen=True)
class Assumptions:
    # Shares of a peak that are reached.
    matmul_share: float = _assume(0.60, "of the bf16 peak, in a layer's products; communication is counted beside it")
    fp8_matmul_share: float = _assume(0.45, "of the fp8 peak, casts and scales included")
    attention_share: float = _assume(0.40, "of the bf16 peak, in packed causal flash attention")
    logprob_share: float = _assume(0.50, "of the bf16 peak, in tiles of logits")
    hbm_share: float = _assume(0.75, "of the memory's rate, in optimizer steps")
    nvlink_share: float = _assume(0.70, "of NVLink's rate, in large collectives")
    network_share: float = _assume(0.80, "of the network's rate, in large collectives")
    host_share: float = _assume(0.80, "of the link to pinned host memory; all GPUs of a node at once")
    overlap_share: float = _assume(0.80, "of data-parallel communication hidden where it overlaps")
    # Lengths.
    response_fill: float = _assume(0.50, "mean response, of rollout.max_response_length")
    prompt_fill: float = _assume(0.25, "mean prompt, of data.max_prompt_length")
    packing_fill: float = _assume(0.95, "of a micro-batch's token budget that samples fill")
    # Memory of a device.
    context_gib: float = _assume(0.55, "a CUDA context with its loaded kernels; the trainer's and the engine's")
    communicator_gib: float = _assume(0.25, "NCCL's buffers for one communicator of several ranks")
    graph_gib: float = _assume(2.0, "the engine's CUDA graphs and workspaces, which stay while it sleeps")
    slack_share: float = _assume(0.10, "of what comes and goes while training, lost to fragmentation")
    workspace_gib: float = _assume(0.50, "the trainer's cuBLAS, Transformer Engine and optimizer workspaces")
    expert_imbalance: float = _assume(1.25, "tokens on the busiest rank's experts, to the mean")
    # Host.
    rank_host_gib: float = _assume(4.0, "host memory of a trainer's rank besides what is listed")
    engine_host_gib: float = _assume(5.0, "host memory of an engine's process on a rank")
    worker_host_gib: float = _assume(0.4, "host memory of a reward worker")
    # Decoding: fitted to published figures of SGLang on H100s (tests/planner/test_decoding.py).
    decode_step_s: float = _assume(2.5e-3, "scheduling and sampling of a decoding step, not hidden")
    decode_layer_s: float = _assume(65e-6, "a layer's kernels beyond what they read and multiply, in a CUDA graph")
    decode_hbm_share: float = _assume(0.95, "of the memory's rate, while weights and cache are read")
    all_reduce_s: float = _assume(8e-6, "latency of one all-reduce within a node")
    embedded_layer_s: float = _assume(6e-4, "a layer in transformers' own model, without CUDA graphs")
    prefill_share: float = _assume(0.50, "of the peak of the engine's precision, in prefill and decoding")
    step_overhead_s: float = _assume(2.0, "a step's remainder: rewards still under way, packing, logs, sleeping and waking")

    def rows(self) -> Iterator[tuple[str, float, str]]:
        """Yield each assumption's name, value and reason."""
        for one in fields(self):
            yield one.name, getattr(self, one.name), one.metadata["why"]


ASSUMED = Assumptions()
