"""Measure all-reduces within each node and between neighbours, and name the nodes below a floor.

Run it once on every node of a Slurm job: `srun --ntasks-per-node=1 python tools/check_allreduce.py --ranks 8
--node-floor 200 --network-floor 100`. It takes the node's place in the job from Slurm's variables. Rates are bus
bandwidths in GB/s, defined as in nccl-tests: 2 (n - 1) / n times the bytes per rank, divided by the time. The nodes
form a ring, and all ranks of two neighbours take part in a measurement. A node is slow if both of its pairs are slow.
--out gets the names of slow nodes, one per line. The exit code is 1 if any node is slow or a rank fails. If more than
one node and more than a quarter of all nodes are slow, the floor is wrong: the measured rates go to a file `floor` in
the folder of --out, and no name is written. With gloo on CPUs use a floor of 0, to check only that all-reduces work.
"""

from __future__ import annotations

import argparse
import math
import os
import subprocess
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist

from grpo_mega.distributed.environment import library_environment
from grpo_mega.paths import user_path
from grpo_mega.text import filter_output

SECONDS = 120  # timeout of a collective
MIB = {"cuda": 256, "cpu": 1}
REPEATS = {"cuda": 20, "cpu": 2}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, required=True, help="ranks per node")
    parser.add_argument("--node-floor", type=float, default=0.0, help="GB/s")
    parser.add_argument("--network-floor", type=float, default=0.0, help="GB/s")
    parser.add_argument("--out", type=user_path, help="file for the names of slow nodes")
    options = parser.parse_args()
    floors = options.node_floor, options.network_floor
    floor_file = options.out.with_name("floor") if options.out else None
    if "RANK" not in os.environ:
        code = start_ranks(options.ranks)
        has_names = options.out is not None and options.out.exists() and options.out.read_text() != ""
        return code or int(has_names or (floor_file is not None and floor_file.exists()))
    within, between = measure(options.ranks)
    slow = slow_nodes(within, between, *floors)
    names = names_of_nodes(options.ranks)
    if dist.get_rank() == 0 and is_floor_to_blame(len(slow), len(names)):
        reason = blame(within, between, len(slow), *floors)
        print(reason, flush=True)
        if floor_file:
            floor_file.write_text(f"{reason}\n")
    elif dist.get_rank() == 0 and slow:
        for number, reason in slow.items():
            print(f"node {names[number]}: {reason}", flush=True)
        if options.out:
            with options.out.open("a") as file:
                file.writelines(f"{names[number]}\n" for number in slow)
    elif dist.get_rank() == 0:
        rates = ", ".join(f"{name} {rate:.1f}" for name, rate in zip(names, within, strict=True))
        neighbours = ", ".join(f"{rate:.1f}" for rate in between) or "none"
        print(f"all-reduce, GB/s: within {rates}; between neighbours {neighbours}", flush=True)
    dist.barrier()
    dist.destroy_process_group()
    return 0


def start_ranks(num_ranks: int) -> int:
    environ = os.environ
    command = [sys.executable, "-m", "grpo_mega.distributed.rendezvous", f"--nnodes={environ['SLURM_NNODES']}"]
    command += [f"--node-rank={environ['SLURM_NODEID']}", f"--nproc-per-node={num_ranks}"]
    command += [f"--master-addr={environ['MASTER_ADDR']}", f"--master-port={environ['MASTER_PORT']}", *sys.argv]
    return subprocess.run(command).returncode


def measure(ranks_per_node: int) -> tuple[list[float], list[float]]:
    """Return the rates in GB/s within each node, and between nodes i and i + 1 of the ring."""
    os.environ.update(library_environment(os.environ))
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    # Training uses both backends, and gloo across nodes before anything else.
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, timeout=timedelta(seconds=SECONDS))
    dist.all_reduce(torch.ones(1))
    num_nodes = dist.get_world_size() // ranks_per_node
    values = torch.ones(MIB[device.type] * 2**18, device=device)
    within = timed([[node] for node in range(num_nodes)], ranks_per_node, values)
    pairs = [[i, (i + 1) % num_nodes] for i in range(num_nodes if num_nodes > 2 else num_nodes - 1)]
    # A node is in one pair per turn. An odd ring needs a third turn for the last pair.
    last = len(pairs) - (len(pairs) % 2 if len(pairs) > 1 else 0)
    between = [0.0] * len(pairs)
    for turn in (slice(0, last, 2), slice(1, last, 2), slice(last, None)):
        if pairs[turn]:
            between[turn] = timed(pairs[turn], ranks_per_node, values)
    return within, between


def timed(groups: list[list[int]], ranks_per_node: int, values: torch.Tensor) -> list[float]:
    """Return the GB/s of an all-reduce in each group of nodes, all groups at once. Collective."""
    members = [[node * ranks_per_node + i for node in nodes for i in range(ranks_per_node)] for nodes in groups]
    handles = [dist.new_group(ranks) for ranks in members]
    mine = next((number for number, ranks in enumerate(members) if dist.get_rank() in ranks), None)
    rate = math.inf
    if mine is not None:
        repeats, size = REPEATS[values.device.type], len(members[mine])
        dist.all_reduce(values, group=handles[mine])  # the first call opens the connections
        synchronize(values)
        started_at = time.perf_counter()
        for _ in range(repeats):
            dist.all_reduce(values, group=handles[mine], op=dist.ReduceOp.MAX)
        synchronize(values)
        seconds = (time.perf_counter() - started_at) / repeats
        rate = 2 * (size - 1) / size * values.numel() * values.element_size() / seconds / 1e9
    rates = [math.inf] * dist.get_world_size()
    dist.all_gather_object(rates, rate)
    return [min(rates[rank] for rank in ranks) for ranks in members]


def synchronize(values: torch.Tensor) -> None:
    if values.is_cuda:
        torch.cuda.synchronize()


def slow_nodes(within: list[float], between: list[float], node_floor: float, network_floor: float) -> dict[int, str]:
    """Return the reason for each slow node, keyed by node number."""
    slow = {
        node: f"all-reduce within the node runs at {rate:.1f} GB/s, below {node_floor:g}"
        for node, rate in enumerate(within)
        if rate < node_floor
    }
    num_nodes = len(within)
    for node in range(num_nodes):
        pairs = [between[i] for i in range(len(between)) if node in (i, (i + 1) % num_nodes)]
        if pairs and max(pairs) < network_floor and node not in slow:
            rates = " and ".join(f"{rate:.1f}" for rate in pairs)
            slow[node] = f"all-reduce with its neighbours runs at {rates} GB/s, below {network_floor:g}"
    return slow


def is_floor_to_blame(num_slow: int, num_nodes: int) -> bool:
    """Return True if so many nodes are slow that the floor is probably wrong."""
    return num_slow > max(1, num_nodes / 4)


def blame(within: list[float], between: list[float], num_slow: int, node_floor: float, network_floor: float) -> str:
    measured = {"within nodes": (within, node_floor), "between neighbours": (between, network_floor)}
    rates = [
        f"{place} {min(values):.1f} to {max(values):.1f} GB/s (floor {floor:g})"
        for place, (values, floor) in measured.items()
        if values
    ]
    return (
        f"{num_slow} of {len(within)} nodes are below the floor, so no node is to blame: all-reduce {', '.join(rates)};"
        " set ALLREDUCE_FLOOR_GBPS and NETWORK_FLOOR_GBPS to rates that this network reaches, or repair it"
    )


def names_of_nodes(ranks_per_node: int) -> list[str]:
    names = [""] * dist.get_world_size()
    dist.all_gather_object(names, os.environ.get("SLURMD_NODENAME") or os.uname().nodename)
    return names[::ranks_per_node]


if __name__ == "__main__":
    filter_output()
    sys.exit(main())
