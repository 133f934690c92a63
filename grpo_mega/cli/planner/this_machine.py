"""Plans for ranks on this machine's cores (`--gpu cpu`), and the violations that need the memory of this machine.

`find_all` is the list of every command for a job that runs here: the rules of cli/checks/, and whether its ranks fit
into memory. An estimate may be off, so a job is refused only if it would not fit even with a fifth less. A job that
needs more than is free gets a note.

Rates are measured by a short program in another process: a matrix product of the model's sizes in its dtype, a copy,
and calls of a small operation. It measures CPU time of one thread, so a busy machine gives the same rates, and the plan
is for a machine without other work.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from grpo_mega.cli.checks import Machine, Violations, job_problems, start_notes
from grpo_mega.cli.checks import find_all as find_broken_rules
from grpo_mega.cli.checks.machine import CARDS, CPU, CPU_ASSUMED, Card, CpuAssumptions
from grpo_mega.cli.checks.model import Model, read_model, read_teachers
from grpo_mega.cli.planner.job import PlannedJob, plan_on
from grpo_mega.cli.planner.memory import host_memory
from grpo_mega.cli.planner.plan import Plan
from grpo_mega.config import Config
from grpo_mega.distributed.environment import uses_gpu
from grpo_mega.distributed.launch import num_cores
from grpo_mega.errors import ConfigError
from grpo_mega.processes import GIB, HostRoom, host_room
from grpo_mega.weights.architecture import experts_per_token
from grpo_mega.weights.spec import ModelShape

MEMORY = "memory"  # start of the violations on memory
SURELY_TOO_MUCH = 1.25  # share of the machine's memory; estimates may be 25% too high
MOST_ROWS = 2048  # largest number of rows in the measured product
SECONDS_TO_MEASURE = 120.0
_MEASURE = """
import json, sys, time
import torch
dtype, rows, inner, columns = sys.argv[1:]
torch.set_num_threads(1)
a = torch.randn(int(rows), int(inner)).to(getattr(torch, dtype))
b = torch.randn(int(columns), int(inner)).to(getattr(torch, dtype))
source, target, small = torch.ones(1 << 24), torch.ones(1 << 24), torch.ones(1, 64)
def seconds(act, number):
    act()
    start = time.thread_time()
    times = []
    while len(times) < 3 or time.thread_time() < start + 0.2:
        before = time.thread_time()
        for _ in range(number):
            act()
        times.append((time.thread_time() - before) / number)
    return sorted(times)[len(times) // 2]
with torch.no_grad():
    print(json.dumps({
        "flops": 2 * a.numel() * b.shape[0] / seconds(lambda: a @ b.T, 1),
        "copied_bytes": 2 * 4 * source.numel() / seconds(lambda: target.copy_(source), 1),
        "call_s": seconds(lambda: small.mul(small), 1000),
    }))
"""


@dataclass(frozen=True)
class Rates:
    """Rates of one rank."""

    flops: float = 1.0  # FLOP/s of a matrix product
    copied_bytes: float = 1.0  # bytes per second that a copy reads and writes
    call_s: float = 0.0  # seconds of a call of a small operation


def find_all(config: Config, machine: Machine, read: Callable[[Config], Model] = read_model) -> Violations:
    """Return everything wrong with a job that runs here: broken rules, and too little memory."""
    violations = find_broken_rules(config, machine, read)
    violations.notes += start_notes(config)
    model = violations.model
    if model is None or any(job_problems(config, model.shape, machine)):
        return violations  # there are no ranks to count the memory of
    room, is_cpu = host_room(), not uses_gpu(config.device, os.environ)
    # Without a GPU the card's rates do not matter; with one, host memory does not depend on the card.
    setup = plan_here(config, model, machine, Rates()) if is_cpu else plan_on(CARDS["h100"], config, model, machine)
    setup = replace(setup, teachers=read_teachers(config, []))
    peak = host_memory(setup).peak
    if is_cpu and peak > SURELY_TOO_MUCH * room.total:
        violations.take([f"{MEMORY}: {Plan(setup).host_shortfall}"])
    elif peak > room.available:
        violations.notes.append(
            f"{MEMORY}: the ranks of this machine may need {peak.gib:.1f} GiB, but {room.available / GIB:.1f} of"
            f" {room.total / GIB:.1f} are free in {room.limit}; the kernel kills a rank if memory runs out"
        )
    return violations


def free_on_gpu(
    config: Config,
    shape: ModelShape,
    fields: dict[str, Any],
    world_size: int,
    ranks_per_node: int,
    memory_gib: float,
    uses_te: bool,
) -> dict[str, float]:
    """Return the memory in GiB that a run leaves free in each phase on this machine's GPUs of `memory_gib`."""
    card = replace(CARDS["h100"], memory_gib=memory_gib)  # the card's rates do not matter here
    model = Model(shape, experts_per_token(fields) if shape.num_experts else 0, fields)
    setup = plan_on(card, config, model, Machine(world_size, ranks_per_node))
    setup = replace(setup, teachers=read_teachers(config, []), uses_te=uses_te)
    return Plan(setup).free_gib


def plan_here(config: Config, model: Model, machine: Machine, rates: Rates) -> PlannedJob:
    """Return the job on this machine's cores, with assumed mean lengths."""
    ranks = min(machine.world_size, machine.ranks_per_node)
    return replace(plan_on(cpu_card(ranks, host_room(), rates), config, model, machine), assumed=cpu_assumptions(rates))


def measure_rates(config: Config, shape: ModelShape, ranks: int) -> Rates:
    """Measure the rates of each of `ranks` ranks. Raise ConfigError if torch cannot be started."""
    print("measuring a matrix product of the model's sizes", file=sys.stderr, flush=True)
    rows = min(MOST_ROWS, config.batch.tokens_per_micro_batch)
    columns = max(1, (shape.moe_ffn or shape.ffn) // config.layout.tp)
    arguments = [config.model.resolved_dtype, *map(str, (rows, shape.hidden, columns))]
    try:
        measured = subprocess.run(
            [sys.executable, "-c", _MEASURE, *arguments],
            capture_output=True,
            text=True,
            check=True,
            timeout=SECONDS_TO_MEASURE,
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise ConfigError(f"--gpu cpu: torch cannot measure a matrix product here ({error}); repair torch") from None
    found = json.loads(measured.stdout)
    threads = max(1, num_cores() // ranks)  # rank_environments gives each rank so many
    share = min(1.0, num_cores() / ranks)  # share of a core that a rank gets if there are more ranks than cores
    return Rates(found["flops"] * threads * share, found["copied_bytes"] * share, found["call_s"] / share)


def cpu_card(ranks: int, room: HostRoom, rates: Rates) -> Card:
    """Return a rank's share of this machine."""
    memory = room.total / GIB / ranks
    cores = num_cores()
    return Card(
        name=CPU,
        title=f"this machine's {cores} core{'s' if cores > 1 else ''}",
        capability=(0, 0),
        memory_gib=memory,
        bf16_flops=rates.flops,
        fp8_flops=0.0,
        hbm_bytes=rates.copied_bytes,
        nvlink_bytes=CPU_ASSUMED.gloo_bytes,
        network_bytes=CPU_ASSUMED.gloo_bytes,
        host_bytes=rates.copied_bytes,
        node_memory_gib=8 * memory,
        link="loopback",
    )


def cpu_assumptions(rates: Rates) -> CpuAssumptions:
    """Return the assumptions, with overheads of this machine."""
    a = CPU_ASSUMED
    return replace(
        a,
        embedded_layer_s=a.decode_layer_calls * rates.call_s,
        decode_layer_s=a.decode_layer_calls * rates.call_s,
        decode_step_s=a.decode_step_calls * rates.call_s,
        all_reduce_s=a.gloo_s,
    )
