"""How ranks meet: the job's store, and the process groups of the two sides of a job with ranks that only generate.

The store listens only on the address that its ranks need. torch's TCPStore listens on all addresses, for any host
argument, unless it gets a bound socket. On one machine the socket is bound to 127.0.0.1. On several machines it is
bound to the address of MASTER_ADDR. A store that torchrun has opened is used unchanged. `python -m
grpo_mega.distributed.agent` is torchrun with a bound store.

Megatron uses the default process group as its world. So the trainer ranks have one default group, and the engine ranks
after them have another one. A third group has all ranks, for weight syncs and the exchange of samples. One store serves
all ranks.
"""

from __future__ import annotations

import errno
import os
import socket
import sys
from collections import Counter
from collections.abc import Mapping
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore, distributed_c10d

from grpo_mega.distributed.environment import LOOPBACKS, is_one_machine, outside_addresses
from grpo_mega.errors import ConfigError

EVERYONE = "everyone"  # name and description of the group of both sides; it stays when Megatron's groups are destroyed
LOOPBACK = "127.0.0.1"
EVERYWHERE = ""  # all addresses of this machine
_opened: dict[int, TCPStore] = {}  # stores of this process by port; other ranks may still use them
_num_asked: Counter[int] = Counter()  # number of job_store calls by port


def join_sides(
    backend: str, store: Store, rank: int, world_size: int, num_trainers: int, timeout: timedelta
) -> dist.ProcessGroup:
    """Join this rank to the group of its side, by the job's `store`. Return the group of all ranks."""
    trains = rank < num_trainers
    first, size = (0, num_trainers) if trains else (num_trainers, world_size - num_trainers)
    side = PrefixStore("trainers" if trains else "engines", store)
    dist.init_process_group(backend, store=side, rank=rank - first, world_size=size, timeout=timeout)
    # The public `new_group` only creates groups within the default group.
    group, _ = distributed_c10d._new_process_group_helper(
        world_size,
        rank,
        [],
        backend,
        PrefixStore(EVERYONE, store),
        group_name=EVERYONE,  # type: ignore[arg-type]  # a NewType of str
        timeout=timeout,
        group_desc=EVERYONE,
    )
    # `dist` looks up this map from ranks of the default group to ranks of this group. The ranks of the other side get
    # numbers that the default group does not have, because messages between two ranks need a number for each.
    others = [i for i in range(world_size) if not first <= i < first + size]
    distributed_c10d._world.pg_group_ranks[group] = dict(enumerate([*range(first, first + size), *others]))
    return group


def job_store(rank: int, timeout: timedelta) -> Store:
    """Return the store at MASTER_ADDR and MASTER_PORT. Rank 0 opens it, unless torchrun has opened it.

    A process may call this several times, equally often on all ranks, and gets separate keys each time. Raise
    ConfigError if the port is taken.
    """
    host = LOOPBACK if is_one_machine(os.environ) else os.environ["MASTER_ADDR"]
    port = int(os.environ["MASTER_PORT"])
    _num_asked[port] += 1
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        # The agent's store waits for this number of workers.
        store = TCPStore(host, port, int(os.environ["WORLD_SIZE"]), is_master=False, timeout=timeout)
    elif rank == 0:
        store = _opened.get(port) or open_store(address_to_bind(os.environ), port, timeout)
        _opened[port] = store
    else:
        store = TCPStore(host, port, is_master=False, timeout=timeout)
    return PrefixStore(f"default_pg/{_num_asked[port]}", store)


def open_store(address: str, port: int, timeout: timedelta, num_workers: int | None = None) -> TCPStore:
    """Open a store in this process that listens on `address`. With port 0 it chooses a free port and stores it as
    `port`.

    With `num_workers`, wait until this number of processes has connected.
    """
    listener = bound_socket(address, port)
    port = listener.getsockname()[1]
    return TCPStore(
        address or LOOPBACK,
        port,
        num_workers,
        is_master=True,
        timeout=timeout,
        wait_for_workers=num_workers is not None,
        master_listen_fd=listener.detach(),
    )


def bound_socket(address: str, port: int) -> socket.socket:
    """Return a listening socket. If this machine does not have `address`, warn and listen on all addresses."""
    try:
        return _listener(address, port)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise ConfigError(
                f"MASTER_PORT={port}: must be free on {address or 'all addresses'}; choose another port"
            ) from None
        if error.errno != errno.EADDRNOTAVAIL:
            raise
    _warn(f"{address} is not an address of this machine")
    return _listener(EVERYWHERE, port)


def address_to_bind(environ: Mapping[str, str]) -> str:
    """Return the address where rank 0 or its torchrun must listen."""
    if is_one_machine(environ):
        return LOOPBACK
    host = environ["MASTER_ADDR"]
    if host in LOOPBACKS:
        return "::1" if ":" in host else LOOPBACK
    if outside := outside_addresses(host):
        return outside[0]
    # Debian and Ubuntu map a machine's name to 127.0.1.1, and other machines cannot reach that address.
    _warn(f"MASTER_ADDR={host} has no address that other machines can reach")
    return EVERYWHERE


def _listener(address: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # allow a port with recently closed connections
        listener.bind((address, port))
        listener.listen(socket.SOMAXCONN)
    except BaseException:
        listener.close()
        raise
    return listener


def _warn(reason: str) -> None:
    print(
        f"grpo-mega: warning: {reason}, so the job's store listens on all addresses; set MASTER_ADDR to an address of"
        " this node that other nodes can reach, or in Slurm jobs NETWORK_INTERFACE to its interface",
        file=sys.stderr,
        flush=True,
    )
