"""How ranks meet: the job's store, its process groups, and small values exchanged without a pending collective.

The store listens only on the address that its ranks need. torch's TCPStore listens on all addresses, for any host
argument, unless it gets a bound socket. On one machine the socket is bound to 127.0.0.1. On several machines it is
bound to the address of MASTER_ADDR. A store that torchrun has opened is used unchanged.

Megatron uses the default process group as its world. So the trainer ranks have one default group, and the engine ranks
after them have another one. A third group has all ranks, for weight syncs and the exchange of samples. One store serves
all ranks.

A generation phase may last longer than the watchdogs of NCCL and gloo allow, so ranks wait for each other here. Each
rank sends four requests per exchange, for any number of ranks, and waits in the store instead of polling. Every wait
has a deadline. After it EngineError reports the missing ranks and the phase. Values are sealed (messages.py), so values
from other programs are refused, and the error has the key's name. Counters cannot be sealed, so their values are
checked.

`python -m grpo_mega.distributed.rendezvous TORCHRUN-ARGUMENT ...` is torchrun with a store that listens on one address.
Slurm jobs start their ranks with it. The rendezvous must be static, as it is by default.
"""

from __future__ import annotations

import errno
import os
import socket
import sys
from collections import Counter
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import DistError, DistStoreError, PrefixStore, Store, TCPStore, distributed_c10d
from torch.distributed.elastic.rendezvous import static_tcp_rendezvous
from torch.distributed.run import main

from grpo_mega.distributed.environment import LOOPBACKS, is_one_machine, outside_addresses
from grpo_mega.distributed.messages import forged, seal_value, unseal_value
from grpo_mega.errors import ConfigError, EngineError
from grpo_mega.text import filter_output

RECONNECT_TIMEOUT = timedelta(seconds=15)  # torch asks a name server first: twice 5 s if it loses a request
_MAX_NAMED = 8  # maximum number of missing ranks in an error


class Rendezvous:
    """One of `world_size` ranks that exchange values. The ranks are numbered from `first`."""

    def __init__(self, store: Store, rank: int, world_size: int, *, first: int = 0, scope: str = "job") -> None:
        """`scope` distinguishes this store's keys from equal keys in the run's other stores."""
        self._store: Store = store.clone()  # type: ignore[attr-defined]  # a waiting connection serves no other request
        self.rank, self.world_size, self._ranks = rank, world_size, range(first, first + world_size)
        self._scope = scope
        self._num_gathers = self._num_keys = 0

    def all_gather(self, phase: str, value: Any, deadline_s: float) -> list[Any]:
        """Wait until all ranks have called, and return every rank's value. Values are JSON. All ranks call equally
        often.
        """
        self._num_gathers += 1
        prefix = f"gather/{self._num_gathers}"
        values, count, done = f"{prefix}/values", f"{prefix}/count", f"{prefix}/done"
        self._store.append(values, f"{self.rank} {seal_value(self._name(values, self.rank), value)}\n")  # type: ignore[attr-defined]
        num_come = self._add(count, 1)
        if not 1 <= num_come <= self.world_size:
            raise forged(self._name(count))
        if num_come == self.world_size:
            self._store.set(done, "")
            for name in ("values", "count", "done"):  # all ranks have finished the previous call
                self._store.delete_key(f"gather/{self._num_gathers - 1}/{name}")
        elif not self._is_set(done, deadline_s):
            missing = sorted(set(self._ranks) - self._read(values).keys())
            if not missing:
                raise forged(self._name(count))
            more = f" and {len(missing) - _MAX_NAMED} more" if len(missing) > _MAX_NAMED else ""
            names = f"rank{'s'[: len(missing) - 1]} {', '.join(map(str, missing[:_MAX_NAMED]))}{more}"
            raise EngineError(
                f"rank {self.rank}: timed out after {deadline_s:.0f} s; missing {names} in {phase}; see RUN_DIR/logs"
            )
        by_rank = self._read(values)
        if len(by_rank) < self.world_size:
            raise forged(self._name(done))
        return [by_rank[rank] for rank in self._ranks]

    def unique_key(self, kind: str) -> str:
        """Return a new unique key. All ranks call equally often and get the same key."""
        self._num_keys += 1
        return f"{kind}/{self._num_keys}"

    def fetch_add(self, counter: str, count: int = 1, limit: int | None = None) -> int:
        """Add to a counter that all ranks share. It starts at 0. Return its value before the addition.

        Raise EngineError if the ranks cannot have counted to the value, for example because it exceeds `limit`.
        """
        after = self._add(counter, count)
        if after < count or (limit is not None and after > limit):
            raise forged(self._name(counter))
        return after - count

    def set(self, key: str, text: str) -> None:
        self._store.set(key, seal_value(self._name(key), text))

    def get(self, key: str, deadline_s: float) -> str:
        """Wait until a key is set, and return its text. Raise EngineError after the deadline."""
        if not self._is_set(key, deadline_s):
            raise EngineError(f"rank {self.rank}: timed out after {deadline_s:.0f} s; missing {key}; see RUN_DIR/logs")
        return str(unseal_value(self._name(key), self._store.get(key)))

    def try_get(self, key: str) -> str | None:
        """Return the text of a key, or None if it is not set."""
        return str(unseal_value(self._name(key), self._store.get(key))) if self._store.check([key]) else None

    def delete(self, key: str) -> None:
        self._store.delete_key(key)

    def _name(self, key: str, rank: int | None = None) -> str:
        """Return the name to seal a value of this run with."""
        return f"{self._scope}/{key}" if rank is None else f"{self._scope}/{key} of rank {rank}"

    def _read(self, key: str) -> dict[int, Any]:
        """Return the values that ranks have appended to a key so far."""
        by_rank = {}
        for line in self._store.get(key).split(b"\n")[:-1]:
            rank, _, sealed = line.partition(b" ")
            if not rank.isdigit() or int(rank) not in self._ranks:
                raise forged(self._name(key))
            by_rank[int(rank)] = unseal_value(self._name(key, int(rank)), sealed)
        return by_rank

    def _add(self, counter: str, count: int) -> int:
        """Add to a counter. The store closes the connection if the counter is not a number or the store has ended."""
        try:
            return self._store.add(counter, count)
        except DistError as error:
            self._store.set_timeout(RECONNECT_TIMEOUT)  # otherwise torch tries for twice or three times the deadline
            self._store = self._store.clone()  # type: ignore[attr-defined]
            if not self._store.get(counter).removeprefix(b"-").isdigit():
                raise forged(self._name(counter)) from error
            raise

    def _is_set(self, key: str, deadline_s: float) -> bool:
        """Wait until a key is set. Return False after the deadline. Signals are handled when it returns."""
        try:
            self._store.wait([key], timedelta(seconds=deadline_s))
        except DistStoreError:
            return False
        return True


class EngineRanks:
    """The ranks that share one engine, on one node. They exchange texts in a separate store.

    They are `size` consecutive ranks of the job, and this rank is number `index`. All of them call every method
    together. The job's store is one process for all ranks, and a sync of a large model would send it thousands of
    requests per engine. A process group of these ranks does not work. torch names it by the number of groups that a
    rank is in. This number differs between stages of Megatron's pipelines, so the ranks would wait for each other under
    different names.
    """

    def __init__(self, job: Rendezvous, index: int, size: int, deadline_s: float) -> None:
        self._job, self._index, self._size, self._deadline_s = job, index, size, deadline_s
        self._met: tuple[Rendezvous, TCPStore] | None = None  # the leader's store ends with this object

    def gather(self, phase: str, text: str) -> list[str]:
        """Return the texts of all ranks, in rank order. Raise EngineError if one does not arrive before the
        deadline.
        """
        if self._size == 1:
            return [text]
        leader, leads = self._job.rank - self._index, self._index == 0
        try:
            if self._met is None:
                key, timeout = f"the store of rank {leader}", timedelta(seconds=self._deadline_s)
                if leads:
                    store = open_store(LOOPBACK, 0, timeout)
                    self._job.set(key, str(store.port))
                else:
                    port = int(self._job.get(key, self._deadline_s))
                    store = TCPStore(LOOPBACK, port, is_master=False, wait_for_workers=False, timeout=timeout)
                met = Rendezvous(store, self._job.rank, self._size, first=leader, scope=f"engine of rank {leader}")
                met.all_gather("meeting the other ranks of an engine", None, self._deadline_s)
                if leads:
                    self._job.delete(key)
                self._met = met, store
            return self._met[0].all_gather(phase, text, self._deadline_s)
        except DistError as error:
            raise EngineError(
                f"rank {leader}, the leader of an engine, is gone: {phase} ({error}); see its log"
            ) from None

    def broadcast(self, phase: str, text: str) -> str:
        """Return the text of the leader, the first rank."""
        return self.gather(phase, text)[0]


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


def _store(host: str, port: int, world_size: int, is_master: bool, timeout: timedelta, **options: Any) -> TCPStore:
    """Return the store of the agents of `world_size` nodes."""
    if not is_master:
        return TCPStore(host, port, world_size, False, timeout, **options)
    address = address_to_bind(
        os.environ | {"MASTER_ADDR": host, "WORLD_SIZE": str(world_size), "LOCAL_WORLD_SIZE": "1"}
    )
    return open_store(address, port, timeout, world_size)


if __name__ == "__main__":
    filter_output()
    static_tcp_rendezvous.TCPStore = _store  # type: ignore[misc, assignment]  # torchrun opens its store only here
    sys.exit(main())
