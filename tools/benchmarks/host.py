"""Measure the host's CPU time per step at 64, 512 and 1,024 ranks, on a CPU, part by part. The headline takes a minute.

`python tools/benchmarks/host.py [--ranks 64 512 1024]` imitates one rank of a 70B job. A step has one prompt of 16 samples per
rank, responses of 1,100 tokens on average and at most 3,072, TP4, PP8, and engines of 8 ranks. The parts are:
 rendezvous  a step's exchanges and each engine's requests for prompts, with log.progress off as in slurm/. One thread and
             connection per rank, all to one store in another process. CPU time per rank
 store       CPU time of the store for all ranks
 exchange    packing a rank's samples, unpacking all samples, and the all-reduce that transfers them. Its CPU time is measured
             with two ranks and doubled, because in a large ring every byte passes a rank twice as often
 packing     advantages, token weights, and the micro-batches of one data-parallel rank
 logging     metrics of the rollout, and on rank 0 the rows of samples.jsonl
 planning    the plan of the weight sync, once per start and not part of the sum
The store serves the ranks one after another, so all of its seconds count. The last line is JSON with the sum per step for the
largest number of ranks up to 512, and its share of a step of 80 seconds. Exit code 1 if the share exceeds 1%.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import random
import statistics
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from multiprocessing.connection import Connection

import torch
import torch.distributed as dist

from grpo_mega import console
from grpo_mega.algorithm.advantages import assign_advantages
from grpo_mega.algorithm.token_weights import mini_batch_weights
from grpo_mega.batching import pack as packing
from grpo_mega.config import AlgorithmConfig
from grpo_mega.distributed.launch import free_port
from grpo_mega.distributed.rendezvous import Rendezvous
from grpo_mega.observe.metrics import rollout_metrics
from grpo_mega.observe.samples import SampleRows
from grpo_mega.rollout import exchange
from grpo_mega.types import Group, Prompt, Sample, Span
from grpo_mega.weights.families import family_of
from grpo_mega.weights.layout import EngineLayout, MegatronLayout, engine_shards, megatron_shards
from grpo_mega.weights.plan import plan_transfers
from grpo_mega.weights.spec import ModelShape

GROUP_SIZE, ENGINE_TP, TP, PP = 16, 8, 4, 8
MAX_RESPONSE, MEAN_RESPONSE, PROMPT = 3072, 1200, 200  # tokens
TOKEN_BUDGET = 8192
STEP_S, MAX_SHARE = 80.0, 0.01
LLAMA_70B = ModelShape("llama", 80, 8192, ffn=28672, num_heads=64, num_kv_heads=8, head_dim=128, vocab=128256, tied=False)
# The exchanges of a step: the end of generation, failed engines, start and end of the sync, and failed engines again.
PHASES = ("generation", "generation", "starting a sync", "ending a sync", "weight sync")
COLUMNS = ("rendezvous", "store", "exchange", "packing", "logging")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[512], help="numbers of ranks, each a multiple of 32")
    parser.add_argument("--repeat", type=int, default=3, help="runs of each part; the median counts")
    options = parser.parse_args()
    if any(ranks % (TP * PP) for ranks in options.ranks):
        parser.error(f"--ranks {options.ranks}: must be multiples of {TP * PP}, as TP{TP}.PP{PP} needs; use 64 or 512")
    torch.set_num_threads(1)
    print(f"seconds per step; {'ranks':>5} {'tokens':>12}" + "".join(f"{name:>12}" for name in (*COLUMNS, "sum", "planning")))
    sums = {}
    for ranks in options.ranks:
        groups = make_groups(ranks)
        num_tokens = sum(s.response_len for g in groups for s in g.samples)
        found = rehearse(groups, ranks, options.repeat)
        sums[ranks] = sum(found[name] for name in COLUMNS)
        cells = "".join(f"{found[name]:12.3f}" for name in COLUMNS)
        print(f"{'':17} {ranks:5} {num_tokens:12,}{cells}{sums[ranks]:12.3f}{found['planning']:12.3f}", flush=True)
    ranks = max((r for r in sums if r <= 512), default=min(sums))
    share = sums[ranks] / STEP_S
    line = {"benchmark": "host", "ranks": ranks, "seconds_per_step": round(sums[ranks], 4), "share_of_step": round(share, 5)}
    print(json.dumps(line | {"bound": MAX_SHARE}))
    return int(share > MAX_SHARE)


def rehearse(groups: list[Group], ranks: int, repeat: int) -> dict[str, float]:
    """Return the seconds of each part by column."""
    rendezvous, store = zip(*(rehearse_store(ranks) for _ in range(repeat)), strict=True)
    exchanged, shared = rehearse_exchange(groups, ranks, repeat)
    return {
        "rendezvous": statistics.median(rendezvous),
        "store": statistics.median(store),
        "exchange": exchanged,
        "packing": median(lambda: pack(shared, ranks), repeat),
        "logging": median(lambda: log(shared), repeat),
        "planning": median(lambda: plan(ranks), 1),
    }


def make_groups(ranks: int) -> list[Group]:
    """Return a group per rank, with responses of log-normal lengths."""
    numbers = random.Random(0)
    tokens = [numbers.randrange(128256) for _ in range(MAX_RESPONSE)]
    logprobs = [-numbers.random() for _ in range(MAX_RESPONSE)]
    groups = []
    for i in range(ranks):
        prompt = Prompt(i, "x" * 4 * PROMPT, tuple(tokens[:PROMPT]), "7")
        samples = []
        for index in range(GROUP_SIZE):
            length = max(1, min(MAX_RESPONSE, int(numbers.lognormvariate(6.8, 0.8))))
            reward = float(numbers.random() < 0.5)
            scores: dict[str, float | None] = {"accuracy": reward, "format": 1.0}
            verdicts = {"accuracy": "right" if reward else "wrong"}
            samples.append(
                Sample(
                    prompt,
                    index,
                    tokens[:length],
                    logprobs[:length],
                    "stop",
                    [Span(7, 0, length)],
                    scores,
                    verdicts,
                    reward + 0.2,
                )
            )
        groups.append(Group(prompt, samples))
    return groups


def rehearse_store(ranks: int) -> tuple[float, float]:
    """Return the CPU seconds of one rank, and of the store, for the exchanges of a step."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    port = free_port()
    process = context.Process(target=serve_store, args=(port, theirs), daemon=True)
    process.start()
    assert ours.recv() == "ready"
    with ThreadPoolExecutor(16) as pool:  # each connection resolves a name, so it may take seconds
        parties = list(pool.map(lambda rank: Rendezvous(connect(port), rank, ranks), range(ranks)))
    exchange_once(parties, first=True)  # later exchanges delete keys of the one before, so run one first
    ours.send("begin")
    ours.recv()
    started_at = time.process_time()
    exchange_once(parties)
    seconds = time.process_time() - started_at
    ours.send("end")
    served = ours.recv()
    process.join()
    return seconds / ranks, served


def connect(port: int) -> dist.TCPStore:
    return dist.TCPStore("127.0.0.1", port, None, False, timedelta(seconds=120), wait_for_workers=False)


def exchange_once(parties: list[Rendezvous], *, first: bool = False) -> None:
    """Make the requests of a step for every rank, each in a separate thread."""

    def act(party: Rendezvous) -> None:
        if party.rank % ENGINE_TP == 0 and not first:
            for _ in range(ENGINE_TP + 1):  # one per group of the engine, and one answer that no prompts are left
                party.fetch_add("prompts/1")
        for phase in PHASES:
            reports = [[party.rank + i, 0, GROUP_SIZE, GROUP_SIZE * MEAN_RESPONSE] for i in range(ENGINE_TP)]
            party.all_gather(phase, reports if phase == PHASES[0] and party.rank % ENGINE_TP == 0 else None, 120.0)

    threads = [threading.Thread(target=act, args=(party,)) for party in parties]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def serve_store(port: int, connection: Connection) -> None:
    """Serve the store, and send its CPU time from "begin" to "end"."""
    store = dist.TCPStore("127.0.0.1", port, None, True, wait_for_workers=False)
    connection.send("ready")
    connection.recv()
    started_at = time.process_time()
    connection.send("begun")
    connection.recv()
    connection.send(time.process_time() - started_at)
    del store


def rehearse_exchange(groups: list[Group], ranks: int, repeat: int) -> tuple[float, list[Group]]:
    """Return a rank's CPU seconds for exchanging all samples, and the groups that every rank then holds."""
    parts = [memoryview(exchange.pack({i: group})) for i, group in enumerate(groups)]
    mine = {i: groups[i] for i in range(ENGINE_TP)}  # the groups on an engine's first rank
    prompts = {i: group.prompt for i, group in enumerate(groups)}
    packed = median(lambda: exchange.pack(mine), repeat)
    unpacked = median(lambda: exchange.unpack(parts, prompts, ("right", "wrong")), repeat)
    carried = 2 * reduce_between_two(sum(map(len, parts)), repeat)
    return packed + unpacked + carried, list(exchange.unpack(parts, prompts, ("right", "wrong")).values())


def reduce_between_two(num_bytes: int, repeat: int) -> float:
    """Return the CPU seconds of one rank for an all-reduce of `num_bytes` between two ranks."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    port = free_port()
    processes = [context.Process(target=reduce, args=(rank, port, num_bytes, repeat, theirs)) for rank in range(2)]
    for process in processes:
        process.start()
    seconds = float(ours.recv())
    for process in processes:
        process.join()
    return seconds


def reduce(rank: int, port: int, num_bytes: int, repeat: int, connection: Connection) -> None:
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    torch.set_num_threads(1)
    values = torch.zeros(num_bytes, dtype=torch.uint8)
    dist.all_reduce(values)
    seconds = median(lambda: dist.all_reduce(values), repeat)
    if rank == 0:
        connection.send(seconds)
    dist.barrier()
    dist.destroy_process_group()


def pack(groups: list[Group], ranks: int) -> None:
    config = AlgorithmConfig(group_size=GROUP_SIZE)
    assign_advantages(groups, config, max_response_length=MAX_RESPONSE)
    mini_batches = packing.split(groups, 2)
    weights = mini_batch_weights(mini_batches, config, max_response_length=MAX_RESPONSE)
    packing.pack(
        mini_batches, weights, dp_size=ranks // (TP * PP), dp_rank=0, token_budget=TOKEN_BUDGET, length_multiple=16 * TP
    )


def log(groups: list[Group]) -> None:
    rollout_metrics(groups, lambda group: len({s.reward for s in group.samples}) == 1)
    json.dumps(SampleRows(8).of(3, groups, lambda ids: "ab" * len(ids)))


def plan(ranks: int) -> None:
    family = family_of("llama")
    layout = MegatronLayout(tp=TP, pp=PP, dp=ranks // (TP * PP))
    trainer = megatron_shards(family, LLAMA_70B, layout)
    engine = engine_shards(family, LLAMA_70B, EngineLayout(ENGINE_TP, ranks // ENGINE_TP), ranks)
    plan_transfers(trainer, engine, ranks_per_node=8)


def median(act: Callable[[], object], repeat: int) -> float:
    """Return the median CPU seconds of this process, including its threads."""
    return statistics.median(cpu_seconds(act) for _ in range(repeat))


def cpu_seconds(act: Callable[[], object]) -> float:
    started_at = time.process_time()
    act()
    return time.process_time() - started_at


if __name__ == "__main__":
    console.install()
    sys.exit(main())
