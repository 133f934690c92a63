"""Cards and assumptions: every number of the planner that does not come from the config or the model.

Peaks are from NVIDIA's data sheets (dense, without sparsity). The assumptions are estimates. `--explain` lists them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, fields

from grpo_mega.errors import ConfigError


@dataclass(frozen=True)
class Card:
    """One GPU in a node of eight. Rates are per GPU and direction."""

    name: str
    title: str
    capability: tuple[int, int]  # CUDA's compute capability
    memory_gib: float  # size that CUDA reports; smaller than the nominal size
    bf16_flops: float  # FLOP/s
    fp8_flops: float  # FLOP/s; 0 if the card has no FP8
    hbm_bytes: float  # bytes per second
    nvlink_bytes: float
    network_bytes: float  # bytes per second between nodes
    host_bytes: float  # bytes per second to host memory
    node_memory_gib: float  # host memory of a typical node of eight GPUs


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


def cpu_device(cores: int, memory_gib: float) -> Card:
    """Return a CPU as a device of the planner. Its rates are rough: they only choose how many samples a step has."""
    title = f"a CPU with {cores} cores and {memory_gib:.0f} GiB"
    flops, memory, link = 80e9 * cores, 10e9, 1e9
    return Card("cpu", title, (0, 0), memory_gib, flops, 0.0, memory, link, link, link, memory_gib)


def _assume(value: float, why: str) -> float:
    return field(default=value, metadata={"why": why})


@dataclass(frozen=True)
class Assumptions:
    # Achieved shares of a peak.
    matmul_share: float = _assume(
        0.60, "share of the bf16 peak in a layer's matrix products; communication counts separately"
    )
    fp8_matmul_share: float = _assume(0.45, "share of the fp8 peak, including casts and scales")
    attention_share: float = _assume(0.40, "share of the bf16 peak in packed causal flash attention")
    logprob_share: float = _assume(0.50, "share of the bf16 peak in tiles of logits")
    hbm_share: float = _assume(0.75, "share of the memory's rate in optimizer steps")
    nvlink_share: float = _assume(0.70, "share of NVLink's rate in large collectives")
    network_share: float = _assume(0.80, "share of the network's rate in large collectives")
    host_share: float = _assume(0.80, "share of the link to pinned host memory, with all GPUs of a node at once")
    overlap_share: float = _assume(0.80, "hidden share of data-parallel communication that overlaps with compute")
    # Lengths.
    response_fill: float = _assume(0.50, "mean response length as a share of rollout.max_response_length")
    prompt_fill: float = _assume(0.25, "mean prompt length as a share of data.max_prompt_length")
    packing_fill: float = _assume(0.95, "share of a micro-batch's token budget that samples fill")
    # Memory of a device.
    context_gib: float = _assume(0.55, "a CUDA context with its loaded kernels, for trainer and engine each")
    communicator_gib: float = _assume(0.25, "NCCL's buffers for one communicator of several ranks")
    graph_gib: float = _assume(2.0, "the engine's CUDA graphs and workspaces; they stay while it sleeps")
    slack_share: float = _assume(0.10, "share of temporary training memory lost to fragmentation")
    workspace_gib: float = _assume(0.50, "the trainer's cuBLAS, Transformer Engine and optimizer workspaces")
    expert_imbalance: float = _assume(1.25, "tokens on the busiest rank's experts relative to the mean")
    # Host.
    rank_host_gib: float = _assume(4.0, "other host memory of a trainer rank")
    engine_host_gib: float = _assume(5.0, "host memory of an engine's process on a rank")
    worker_host_gib: float = _assume(0.4, "host memory of a reward worker")
    # Decoding: fitted to published figures of SGLang on H100s (tests/planner/test_decoding.py).
    decode_step_s: float = _assume(2.5e-3, "scheduling and sampling of a decoding step that is not hidden")
    decode_layer_s: float = _assume(
        65e-6, "a layer's kernel overhead in a CUDA graph, without memory reads and products"
    )
    decode_hbm_share: float = _assume(0.95, "share of the memory's rate when weights and cache are read")
    all_reduce_s: float = _assume(8e-6, "latency of one all-reduce within a node")
    embedded_layer_s: float = _assume(6e-4, "a layer in the transformers model, without CUDA graphs")
    prefill_share: float = _assume(0.50, "share of the peak of the engine's precision in prefill and decoding")
    step_overhead_s: float = _assume(2.0, "remainder of a step: last rewards, packing, logs, sleeping and waking")

    def rows(self) -> Iterator[tuple[str, float, str]]:
        """Yield each assumption's name, value and reason."""
        for one in fields(self):
            yield one.name, getattr(self, one.name), one.metadata["why"]


ASSUMED = Assumptions()
