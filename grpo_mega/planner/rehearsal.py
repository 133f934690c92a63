"""Compare the plan's arithmetic with real Megatron on chosen ranks of the layout, without the other ranks and without a GPU.

`grpo_mega.megatron.rehearsal` builds and runs each rank in a process that allocates no memory for tensors. The comparison
covers parameters, buffers, communication by kind and the activations that autograd keeps, for a few micro-batches of full
length. It verifies the formulas of Megatron's local layers, but not the formulas of Transformer Engine's layers. Every expert
of an MoE model gets the same number of tokens, so the compared plan assumes no imbalance.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from grpo_mega.config import OptimizerConfig, PrecisionConfig
from grpo_mega.errors import ConfigError, PlanError
from grpo_mega.planner.activations import activations
from grpo_mega.planner.batch import batch
from grpo_mega.planner.communication import communication, groups
from grpo_mega.planner.figures import Number, TracedNumber
from grpo_mega.planner.job import PlannedJob
from grpo_mega.planner.memory import device_memory

TOLERANCE = {"parameters": 0.0, "communication": 0.03, "activations": 0.10}  # relative to the rehearsed number
SEGMENTS = 8  # samples of equal length per micro-batch
AXES = {
    "tensor parallel": ("tp",),
    "context parallel": ("cp",),
    "pipeline": ("pp",),
    "experts": ("ep",),
    "gradients and weights": ("dp", "edp"),
}


@dataclass(frozen=True)
class Comparison:
    rank: int
    label: str
    planned: float
    rehearsed: float
    tolerance: float

    @property
    def difference(self) -> float:
        """Return the difference relative to the rehearsed number."""
        return abs(self.planned - self.rehearsed) / max(abs(self.rehearsed), 1.0)

    @property
    def agrees(self) -> bool:
        return self.difference <= self.tolerance


def default_ranks(setup: PlannedJob) -> list[int]:
    """Return one rank each of the first, the middle and the last pipeline stage."""
    stages = sorted({0, setup.layout.pp // 2, setup.layout.pp - 1})
    places = {setup.layout.place(rank): rank for rank in range(setup.layout.world_size)}
    return [places[0, stage, 0] for stage in stages]


def rehearse(cases: Sequence[tuple[PlannedJob, Sequence[int], Mapping[str, Any]]]) -> list[list[Comparison]]:
    """Return the comparisons of each setup's ranks. A case is (setup, ranks, fields of config.json).

    Raise ConfigError or PlanError.
    """
    local = [(_local(setup), ranks, fields) for setup, ranks, fields in cases]
    requests = [request_of(setup, rank, fields) for setup, ranks, fields in local for rank in ranks]
    process = subprocess.run(
        [sys.executable, "-m", "grpo_mega.megatron.rehearsal"],
        input="".join(json.dumps(request) + "\n" for request in requests),
        capture_output=True,
        text=True,
    )
    answers = iter([json.loads(line) for line in process.stdout.splitlines() if line.startswith("{")])
    try:
        return [[c for rank in ranks for c in _compare(setup, rank, next(answers))] for setup, ranks, _ in local]
    except StopIteration:
        last = (process.stderr.strip().splitlines() or ["it wrote nothing"])[-1]
        raise PlanError(f"the rehearsal ended with code {process.returncode}: {last}; plan without --rehearse") from None


def _local(setup: PlannedJob) -> PlannedJob:
    """Return the setup with Megatron's local layers, without Transformer Engine's features, and with balanced experts."""
    config = setup.config.model_copy(update={"precision": PrecisionConfig(), "optimizer": OptimizerConfig()})
    return replace(setup, config=config, uses_te=False, assumed=replace(setup.assumed, expert_imbalance=1.0))


def request_of(setup: PlannedJob, rank: int, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the request to megatron/rehearsal.py for a rank. Raise ConfigError if the rank does not exist."""
    size = setup.layout.world_size
    if not 0 <= rank < size:
        trains = " that train" if setup.is_separate else ""
        raise ConfigError(f"--ranks={rank} is none of the {size} ranks{trains}; name some from 0 to {size - 1}")
    config = setup.config.model_dump(mode="json")
    config["layout"] |= {"dp": setup.layout.dp, "engine_ranks": 0}
    config["rollout"]["placement"] = "colocated"
    return {
        "config": config,
        "model": dict(fields),
        "rank": rank,
        "world_size": size,
        "num_batches": num_batches(setup),
        "num_tokens": setup.micro_batch_tokens,
        "segment": -(-setup.micro_batch_tokens // SEGMENTS),
    }


def num_batches(setup: PlannedJob) -> int:
    """Return enough micro-batches to fill the pipeline. Interleaved stages start more than one round before the first ends."""
    return setup.layout.pp * (2 if setup.layout.vpp > 1 else 1)


def _compare(setup: PlannedJob, rank: int, found: Mapping[str, Any]) -> Iterator[Comparison]:
    _, pp_rank, _ = setup.layout.place(rank)
    state = device_memory(setup)[pp_rank].state
    yield Comparison(rank, "parameters", state.num_parameters, found["num_parameters"], TOLERANCE["parameters"])
    yield Comparison(rank, "weights", state.weights, found["weights"], TOLERANCE["parameters"])
    yield Comparison(rank, "gradients", state.gradients, found["gradients"], TOLERANCE["parameters"])
    kept = sum(part.value for part in activations(setup, pp_rank, padding=1.0).kept)  # segments of equal length need no padding
    yield Comparison(rank, "activations kept", kept, found["kept"], TOLERANCE["activations"])
    links = {link.kind: link.sent for link in communication(setup, batch(setup), state)}
    for kind, axes in AXES.items():
        if kind in links:
            mine = {group for axis in axes for group in groups(setup.layout, axis) if rank in group}
            # Two stages send in one direction over a group of all ranks, so both directions overlap. Experts may be spread over
            # all data-parallel ranks.
            only = {"pipeline": "isend", "experts": "all_to_all_single"}.get(kind)
            sent = sum(
                size
                # The same group of ranks may also reduce gradients.
                for ranks, name, size, is_context in found["sent"]
                if (name == only if only else tuple(ranks) in mine and name != "all_to_all_single")
                and is_context == (kind == "context parallel")
            )
            yield Comparison(rank, kind, _sent(setup, kind, links[kind], pp_rank), sent, TOLERANCE["communication"])


def _sent(setup: PlannedJob, kind: str, figure: TracedNumber, pp_rank: int) -> float:
    """Return the result of the plan's formula for a rehearsal's micro-batches on this stage."""
    layout = setup.layout
    tokens = setup.micro_batch_tokens * num_batches(setup)
    once: dict[str, Number] = {"tokens": tokens, "updates": 1, "forwards": 0, "optimizer_steps": 1}
    if "layers" in figure.inputs:
        once["layers"] = setup.num_layers(pp_rank)
    if "moe_layers" in figure.inputs:
        once["moe_layers"] = setup.num_moe_layers(pp_rank)
    if "ends" in figure.inputs:
        once["ends"] = (pp_rank == 0) + (pp_rank == layout.pp - 1)
    sent = figure.at(**{name: value for name, value in once.items() if name in figure.inputs})
    if kind == "pipeline" and pp_rank in (0, layout.pp - 1):  # the first and last stage have one neighbour only
        sent -= sent / (2 * layout.vpp)
    return sent


def render(setup: PlannedJob, comparisons: Sequence[Comparison]) -> str:
    """Return the comparisons as a table for a terminal of 100 columns."""
    lines = [
        f"Rehearsal ({num_batches(setup)} micro-batches of {setup.micro_batch_tokens:,} tokens, Megatron's local layers)",
        f"  {'rank':>4}  {'':26}{'planned':>18}{'rehearsed':>18}{'off by':>9}",
    ]
    for c in comparisons:
        verdict = "" if c.agrees else f"  more than {c.tolerance:.0%}"
        lines.append(f"  {c.rank:>4}  {c.label:26}{c.planned:>18,.0f}{c.rehearsed:>18,.0f}{c.difference:>9.1%}{verdict}")
    return "\n".join(lines)
