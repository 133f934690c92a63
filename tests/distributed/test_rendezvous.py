"""The ranks of one engine meet in a separate store, in any combination of process groups."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from threading import Event
from time import sleep
from typing import Any

import pytest
from torch.distributed import TCPStore

from grpo_mega.distributed import rendezvous
from grpo_mega.distributed.rendezvous import EngineRanks, Rendezvous
from grpo_mega.errors import EngineError

TEXT = "\u2028 a line\nof \ud800 its own"


def as_ranks(
    ranks: range, act: Callable[[EngineRanks, int], Any], *, leader: int, size: int, deadline_s: float = 60.0
) -> Any:
    """Return the result of `act` on each rank, and the number of keys left in the job's store."""
    job = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(minutes=1))
    num_keys = job.num_keys()

    # The leader's store must outlive the other ranks.
    deadlines = {rank: deadline_s + 3 * (rank == leader) for rank in ranks}
    peers = {rank: EngineRanks(Rendezvous(job, rank, 9), rank - leader, size, deadlines[rank]) for rank in ranks}
    with ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(act, peers.values(), peers)), job.num_keys() - num_keys


def test_all_have_the_texts_of_all_in_order_and_the_leaders() -> None:
    def act(peers: EngineRanks, rank: int) -> tuple[list[str], list[str]]:
        said = [peers.broadcast("saying", f"{rank}, {turn}") for turn in range(3)]
        return peers.gather("gathering", f"{rank}{TEXT}"), said

    found, num_left = as_ranks(range(4, 7), act, leader=4, size=3)
    assert found == [([f"{rank}{TEXT}" for rank in (4, 5, 6)], ["4, 0", "4, 1", "4, 2"])] * 3
    assert num_left == 0


def test_one_alone_needs_no_store() -> None:
    found, _ = as_ranks(
        range(2, 3), lambda peers, rank: [*peers.gather("g", "x"), peers.broadcast("b", "y")], leader=2, size=1
    )
    assert found == [["x", "y"]]


@pytest.mark.parametrize("when", ["before", "during"])
def test_a_leader_that_has_gone_is_named(when: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error comes in seconds, not after the deadline of an hour."""
    monkeypatch.setattr(rendezvous, "RECONNECT_TIMEOUT", timedelta(seconds=0.1))
    has_read, is_gone = Event(), Event()

    def act(peers: EngineRanks, rank: int) -> str:
        peers.gather("gathering", "")
        if rank == 4:
            assert peers._met is not None
            has_read.wait()
            store = peers._met[1]
            while when == "during" and not store.check(["gather/3/count"]):
                sleep(0.01)
            del store
            peers._met = None
            is_gone.set()
            return ""
        has_read.set()
        if when == "before":
            is_gone.wait()
        with pytest.raises(EngineError) as error:
            peers.gather("gathering", "")
        return str(error.value)

    (_, said), _ = as_ranks(range(4, 6), act, leader=4, size=2, deadline_s=3600.0)
    assert said.startswith("rank 4, the leader of an engine, is gone: gathering (")


@pytest.mark.parametrize(
    ("ranks", "missing"), [(range(4, 6), "rank 6 in meeting"), (range(5, 6), "the store of rank 4;")]
)
def test_a_rank_that_does_not_come_is_named(ranks: range, missing: str) -> None:
    """The error names the rank by its number in the job."""

    def act(peers: EngineRanks, rank: int) -> str:
        with pytest.raises(EngineError) as error:
            peers.gather("gathering", "")
        return str(error.value)

    found, _ = as_ranks(ranks, act, leader=4, size=3, deadline_s=2.0)
    assert all(" timed out after " in said for said in found) and missing in found[-1], found
