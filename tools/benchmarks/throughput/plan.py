"""The peak FLOP/s that benchmarks/throughput divides by for MFU, and the planner's estimate of the same step.

For a known card both use the card's figures (preflight/cards.py). Otherwise the same run measures the machine's rates: a matrix
product while all ranks multiply, a copy, and a broadcast. The planner's shares and constants are still a GPU's, so its times
for a CPU mean little. This module does not import torch.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from grpo_mega.config import Config, LayoutConfig
from grpo_mega.errors import UserError
from grpo_mega.planner.job import PlannedJob
from grpo_mega.planner.plan import Plan, make_plan
from grpo_mega.preflight.cards import CARDS, Card, card_of
from grpo_mega.preflight.model import read_model
from tools.benchmarks.gpu.models import peak_tflops

UNBOUNDED = 1e15  # bytes/s, so high that a transfer takes no time


@dataclass(frozen=True)
class Peak:
    """The FLOP/s of all ranks together, and the source of the figure."""

    total: float
    source: str


def peak_of(raw: Mapping[str, Any], config: Config) -> Peak:
    precision = "fp8" if config.precision.fp8 else "bf16"
    world_size = raw["world_size"]
    if raw["card"] is not None and config.model.dtype == "bfloat16":
        tflops = peak_tflops(raw["card"], precision)
        if tflops is not None:
            return Peak(tflops * 1e12 * world_size, f"{raw['card']}, {tflops:g} TFLOP/s dense in {precision}")
    total = sum(rank["rates"]["matmul"] for rank in raw["ranks"])
    why = "no card" if raw["card"] is None else f"{raw['card']} has no known peak in {config.model.dtype}"
    each = f"{total / world_size / 1e12:.3g} TFLOP/s per rank in {config.model.dtype}"
    return Peak(total, f"{why}: against a matrix product measured here, all ranks at once, {each}")


def card_name(raw: Mapping[str, Any]) -> str | None:
    """Return the planner's name of the card; None for an unknown card."""
    return next((name for name in CARDS if raw["card"] is not None and name.upper() in raw["card"].upper()), None)


def predict(raw: Mapping[str, Any], config: Config, gpu: str | None, *, prompt: float, response: float) -> dict[str, Any]:
    """Return the plan's seconds by row and figures of the step, for the measured mean lengths; None for missing figures.

    `gpu` is a card to plan for instead of this machine's.
    """
    gpu = gpu or card_name(raw)
    try:
        setup = _setup(raw, config, card_of(gpu) if gpu else _measured_card(raw, config), prompt, response, is_card=bool(gpu))
        plan = make_plan(setup)
    except UserError as error:
        return {"source": f"none: {error}", "seconds": {}}
    source = setup.card.title if gpu else f"{setup.card.title}; its shares and constants are a GPU's"
    return {"source": source} | _figures(plan, has_memory=bool(gpu))


def _setup(raw: Mapping[str, Any], config: Config, card: Card, prompt: float, response: float, *, is_card: bool) -> PlannedJob:
    model = read_model(config)
    found = raw["layout"]
    layout = LayoutConfig.model_validate(config.layout.model_dump() | {"dp": found["dp"]})
    return PlannedJob(
        config=config.model_copy(update={"layout": layout}),
        shape=model.shape,
        experts_per_token=model.experts_per_token,
        card=card,
        world_size=raw["world_size"],
        gpus_per_node=raw["ranks_per_node"],
        mean_prompt=prompt,
        mean_response=response,
        uses_te=is_card,
    )


def _measured_card(raw: Mapping[str, Any], config: Config) -> Card:
    def mean(name: str) -> float:
        values = [rank["rates"][name] for rank in raw["ranks"] if rank["rates"][name] is not None]
        return sum(values) / len(values) if values else UNBOUNDED

    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    device = "this CPU" if raw["card"] is None else raw["card"]
    card = Card(
        name="measured",
        title=f"{device} by the rates measured in this run, in {config.model.dtype}",
        capability=(0, 0),
        memory_gib=memory / raw["ranks_per_node"],
        bf16_flops=mean("matmul"),
        fp8_flops=0.0,
        hbm_bytes=mean("copy"),
        nvlink_bytes=mean("link"),
        network_bytes=mean("link"),
        host_bytes=mean("copy"),
        node_memory_gib=memory,
    )
    return replace(card, fp8_flops=card.bf16_flops) if config.precision.fp8 else card


def _figures(plan: Plan, *, has_memory: bool) -> dict[str, Any]:
    setup, timing = plan.setup, plan.timing
    by_label = {figure.label: figure.value for figure in timing.phases}
    forwards = {"logprobs": int(setup.config.needs_old_logprobs), "reference": int(setup.has_reference)}
    each = by_label["log-probs"] / max(1, sum(forwards.values()))
    moves, sync = by_label["offload and onload"], by_label["sync"]
    seconds: dict[str, float | None] = {
        "sample": by_label["sampling"],
        **{name: each if count else None for name, count in forwards.items()},
        "update": by_label["update"],
        "sync": sync or None,
        "sleep/wake": moves or None,
        "pack/exchange/other": by_label["everything else"],
        "step": timing.step.value,
    }
    return {
        "seconds": seconds,
        "tokens_per_second_per_gpu": timing.tokens_per_second_per_gpu.value,
        "update_mfu": timing.model_flops_share.value,
        "bubble": plan.batch.bubble.value,
        "micro_batches": plan.batch.micro_batches.value,
        "padding_waste": 1 - setup.assumed.packing_fill,
        "sync_moved_bytes": plan.sync_traffic.moved,
        "peak_memory_gib": plan.peak_gib if has_memory else None,
    }
