"""The machines of a job: cards, with the planner's assumptions, ranks and packages.

Peaks of cards are from NVIDIA's data sheets (dense, without sparsity). The assumptions are estimates. Every number
of the planner that does not come from the config or the model is here; `plan --json` lists them.
"""

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from importlib.util import find_spec
from pathlib import Path

from grpo_mega.config import LayoutConfig
from grpo_mega.distributed.environment import cuda_compiler
from grpo_mega.distributed.kernels import (
    FUSED_PACKED,
    Version,
    cuda_version,
    flash_attention_version,
    transformer_engine_version,
)
from grpo_mega.errors import ConfigError

CPU = "cpu"  # value of --gpu for ranks on this machine's cores; cli/planner/this_machine.py measures their rates


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
    link: str = "NVLink"  # link between the ranks of a node

    @property
    def is_cpu(self) -> bool:
        """Return True if a rank computes on a share of this machine's cores and memory, without a GPU."""
        return self.name == CPU


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
        raise ConfigError(f"--gpu {name} is not known; known are {', '.join([*CARDS, CPU])}")
    return CARDS[name]


def _assume(value: float, why: str) -> float:
    return field(default=value, metadata={"why": why})


@dataclass(frozen=True)
class Assumptions:
    # Achieved shares of a peak.
    pass_share: float = _assume(
        0.41, "share of the bf16 peak in passes over a step; measured on an H100, with the optimizer step"
    )
    fp8_speed: float = _assume(1.12, "speed of a pass in FP8 relative to bf16; measured on an H100, tensorwise")
    link_share: float = _assume(0.75, "share of a link's rate: NVLink, network, and host memory")
    cpu_adam_bytes: float = _assume(2e10, "bytes per second that a rank's Adam reads and writes in host memory")
    # Lengths.
    response_fill: float = _assume(0.50, "mean response length as a share of rollout.max_response_length")
    prompt_fill: float = _assume(0.25, "mean prompt length as a share of data.max_prompt_length")
    packing_fill: float = _assume(0.95, "share of a micro-batch's token budget that samples fill")
    # Memory of a device.
    context_gib: float = _assume(0.55, "a CUDA context with its loaded kernels, for trainer and engine each")
    communicator_gib: float = _assume(0.25, "NCCL's buffers for one communicator of several ranks")
    graph_gib: float = _assume(1.5, "the engine's CUDA graphs; they sleep with the KV cache")
    engine_workspace_gib: float = _assume(0.5, "the engine's workspaces, which stay while it sleeps")
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


@dataclass(frozen=True)
class CpuAssumptions(Assumptions):
    """Assumptions for ranks without a GPU. Rates are measured, so their shares are of a short measured product."""

    pass_share: float = _assume(0.60, "share of the measured product's rate in passes over a step")
    link_share: float = _assume(1.0, "share of the assumed rate of gloo, and of the measured copy's rate")
    packing_fill: float = _assume(0.90, "share of a micro-batch's token budget that samples fill")
    context_gib: float = _assume(0.45, "a process with torch, transformers and Megatron-core imported")
    communicator_gib: float = _assume(0.0, "gloo's buffers")
    graph_gib: float = _assume(0.0, "a CPU has no graphs")
    engine_workspace_gib: float = _assume(1.5, "the processes of an SGLang server, without weights and cache, per rank")
    workspace_gib: float = _assume(0.0, "workspaces of the products")
    worker_host_gib: float = _assume(0.1, "memory of a reward worker that it does not share with its parent")
    decode_hbm_share: float = _assume(0.80, "share of the measured copy's rate when weights and cache are read")
    decode_layer_s: float = _assume(0.0, "a layer's overhead in a decoding step: decode_layer_calls at measured time")
    embedded_layer_s: float = _assume(0.0, "the same in the transformers model")
    prefill_share: float = _assume(0.50, "share of the measured product's rate in prefill and decoding")
    step_overhead_s: float = _assume(0.3, "remainder of a step: last rewards, packing, logs")
    # Overheads, in calls of a small operation. The time of a call is measured, because it depends on machine and load.
    decode_layer_calls: float = _assume(250, "calls in a decoding step of a layer")
    decode_step_calls: float = _assume(800, "calls in a decoding step besides the layers")
    gloo_s: float = _assume(3e-4, "time of a small all-reduce of gloo between the ranks of a machine")
    gloo_bytes: float = _assume(1e9, "rate of gloo between the ranks of a machine, bytes per second")


CPU_ASSUMED = CpuAssumptions()


@dataclass(frozen=True)
class Machine:
    """The machines of a job. Packages are the ones installed here, because no others are known."""

    world_size: int
    ranks_per_node: int
    card: Card | None = (
        None  # GPU of a job that is planned for other machines; None: it runs here, and ranks ask their GPU
    )
    transformer_engine: str | None = field(default_factory=transformer_engine_version)
    flash_attention: str | None = field(default_factory=flash_attention_version)
    cuda: str | None = field(default_factory=cuda_version)
    has_sglang: bool = field(default_factory=lambda: find_spec("sglang") is not None)
    compiler: Path | None = field(default_factory=lambda: cuda_compiler(os.environ))

    @property
    def is_here(self) -> bool:
        return self.card is None

    def gpu(self, device: str) -> tuple[Version | None, str]:
        """Return the GPU's compute capability, None if it is not known, and its name. The ranks check theirs."""
        if self.card is not None:
            return self.card.capability, self.card.title
        return (FUSED_PACKED if device == "cuda" else None), "cuda"


def this_machine(layout: LayoutConfig, ranks: Mapping[str, str] | None = None) -> Machine:
    """Return this machine with the ranks that torchrun started, by its environment `ranks`, or else with the layout's
    ranks.
    """
    if ranks is None:
        return Machine(layout.world_size, layout.world_size)
    return Machine(int(ranks["WORLD_SIZE"]), int(ranks.get("LOCAL_WORLD_SIZE", ranks["WORLD_SIZE"])))
