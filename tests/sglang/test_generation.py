"""Sampling through the engine's own path, `drive` and the client, from the server that all files here share."""

from __future__ import annotations

import itertools
import json
import os
import re
import signal
import threading
import time
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from servers import LOADER, START_DEADLINE_S, Tree, make_settings
from torch.distributed import HashStore

from grpo_mega.distributed.rendezvous import Rendezvous
from grpo_mega.errors import EngineError, SyncError
from grpo_mega.rollout.engine import Sampling
from grpo_mega.rollout.exchange import check_versions
from grpo_mega.rollout.phase import Enough
from grpo_mega.rollout.sglang.api import Api
from grpo_mega.rollout.sglang.buckets import HostBuckets, payload
from grpo_mega.rollout.sglang.dispatch import drive
from grpo_mega.rollout.sglang.engine import Options, SGLangEngine
from grpo_mega.rollout.sglang.link import Call, Limits, ServerLink
from grpo_mega.rollout.sglang.server import Server
from grpo_mega.rollout.sglang.update import Place
from grpo_mega.types import Group, Prompt, Sample
from grpo_mega.weights.layout import ShardLayout

pytestmark = pytest.mark.sglang

SAMPLING = Sampling(group_size=4, temperature=1.0, max_response_length=16, stop_token_ids=frozenset({1}))
PROMPTS = {key: Prompt(id=100 + key, text="", token_ids=(5, 6, 7 + key), answer="") for key in range(12)}
LIMITS = Limits(max_concurrent=64, start_deadline_s=START_DEADLINE_S, stall_deadline_s=30)


@pytest.fixture
def link(server: Server, model: Path, tmp_path: Path) -> Iterator[ServerLink]:
    with linked(server, model, tmp_path) as one:
        yield one


@contextmanager
def linked(server: Server, model: Path, folder: Path, limits: Limits = LIMITS) -> Iterator[ServerLink]:
    """A replica's hold on the shared server, which stays when it ends."""
    link = ServerLink(make_settings(model, folder), limits, is_seeded=False)
    link.server = server
    link.wait_until_ready(lambda _: None)
    try:
        yield link
    finally:
        link.client.close()


def check_whole(groups: Mapping[int, Group], sampling: Sampling = SAMPLING) -> None:
    for key, group in groups.items():
        assert group.prompt is PROMPTS[key]
        assert [sample.index for sample in group.samples] == list(range(sampling.group_size))
        for sample in group.samples:
            assert len(sample.rollout_logprobs) == sample.response_len <= sampling.max_response_length
            assert all(logprob <= 0 for logprob in sample.rollout_logprobs)
            ended_by_itself = sample.response_ids[-1] in sampling.stop_token_ids
            assert sample.finish_reason == ("stop" if ended_by_itself else "length")
            assert ended_by_itself or sample.response_len == sampling.max_response_length


def test_two_replicas_share_one_counter_and_a_slow_one_leaves_most_of_the_work_to_the_other(
    server: Server, model: Path, tmp_path: Path
) -> None:
    counter, lock = itertools.count(), threading.Lock()
    found: dict[str, dict[int, Group]] = {}
    heard: list[Sample] = []

    def take() -> int:
        with lock:
            return next(counter)

    def replica(name: str, seconds_a_sample: float) -> None:
        def on_sample(sample: Sample) -> None:
            heard.append(sample)
            time.sleep(seconds_a_sample)

        with linked(server, model, tmp_path / name) as link:
            found[name] = drive(link, PROMPTS, SAMPLING, 0, take=take, most_groups=2, on_sample=on_sample)
            assert link.failure is None

    slow = threading.Thread(target=replica, args=("slow", 0.5))
    fast = threading.Thread(target=replica, args=("fast", 0.0))
    slow.start()
    fast.start()
    fast.join()
    assert next(counter) > len(PROMPTS)  # it ends when no prompt waits any more
    slow.join()
    assert sorted([*found["slow"], *found["fast"]]) == sorted(PROMPTS)
    assert len(found["fast"]) > len(found["slow"])
    assert len(heard) == len(PROMPTS) * SAMPLING.group_size
    check_whole(found["slow"] | found["fast"])


def update_to(version: str, folder: Path) -> Call:
    async def send(api: Api) -> None:
        await api.begin_update()
        await api.load([payload(str(folder / "names"), torch.empty(0))], LOADER, version, True)
        await api.end_update()

    return send


def test_samples_are_of_the_version_that_the_server_was_last_given_and_another_is_an_error(
    link: ServerLink, tmp_path: Path
) -> None:
    for version in (3, 4):
        link.attempt("updating", update_to(str(version), tmp_path))
        assert link.failure is None
        numbers = itertools.count()
        groups = drive(link, PROMPTS, SAMPLING, 0, take=numbers.__next__, most_groups=8, on_sample=lambda _: None)
        assert len(groups) == len(PROMPTS)
        assert {sample.policy_version for group in groups.values() for sample in group.samples} == {version}
        check_versions(list(groups.values()), version)
    with pytest.raises(SyncError, match="sample 0 of prompt 100 was made by policy version 4, not 5"):
        check_versions(list(groups.values()), 5)


def enough(wanted: int) -> Enough:
    return Enough(Rendezvous(HashStore(), rank=0, world_size=1), wanted)


def load_of(server: Server) -> tuple[int, int]:
    """Requests that the server runs, and that wait."""
    with urllib.request.urlopen(f"{server.url}/v1/loads", timeout=30) as answer:
        [load] = json.load(answer)["loads"]
    return load["num_running_reqs"], load["num_waiting_reqs"]


def test_stragglers_are_aborted_and_the_server_is_idle_and_takes_new_weights_and_samples_on(
    server: Server, link: ServerLink, tmp_path: Path
) -> None:
    """Also those that wait in its queue, as it runs a third of them at once."""
    endless = replace(SAMPLING, group_size=16, max_response_length=500, stop_token_ids=frozenset())
    for wanted, spacing in ((3, 20), (1, 9)):
        sampling = replace(endless, stop_token_ids=frozenset(range(1, 256, spacing)))
        until, numbers = enough(wanted), itertools.count()
        heard: list[Sample] = []
        groups = drive(link, PROMPTS, sampling, 0, take=numbers.__next__, most_groups=12, on_sample=heard.append, until=until)
        assert link.failure is None, link.failure
        assert load_of(server) == (0, 0)
        assert wanted <= len(groups) < len(PROMPTS)
        check_whole(groups, sampling)
        assert sorted([*groups, *until.lengths]) == sorted(PROMPTS)
        assert {len(lengths) for lengths in until.lengths.values()} == {16}
        assert max(map(max, until.lengths.values())) > 0
        assert {id(s) for group in groups.values() for s in group.samples} <= {id(s) for s in heard}
        assert link.client.events.empty() and not link.client.is_ending
    # As when another replica has finished all that is wanted just after this one has begun.
    until, numbers = enough(1), itertools.count()
    threading.Timer(0.3, until.done, [99]).start()
    assert drive(link, PROMPTS, endless, 0, take=numbers.__next__, most_groups=12, on_sample=lambda _: None, until=until) == {}
    assert link.failure is None and load_of(server) == (0, 0)
    assert sorted(until.lengths) == sorted(PROMPTS)
    link.attempt("updating", update_to("6", tmp_path))
    numbers = itertools.count()
    groups = drive(link, PROMPTS, SAMPLING, 0, take=numbers.__next__, most_groups=8, on_sample=lambda _: None)
    assert link.failure is None and sorted(groups) == sorted(PROMPTS)
    check_whole(groups)
    check_versions(list(groups.values()), 6)


def test_a_server_that_hangs_while_it_aborts_is_noticed_and_what_was_finished_is_kept(
    server: Server, model: Path, tmp_path: Path
) -> None:
    (scheduler,) = Tree.of(server).named("sglang::scheduler")

    class ThenStopped(Enough):
        def done(self, key: int, clock: int = 0) -> None:
            super().done(key, clock)
            if len(self.clocks) == 2:
                os.kill(scheduler, signal.SIGSTOP)

    until = ThenStopped(Rendezvous(HashStore(), rank=0, world_size=1), 2)
    long = replace(SAMPLING, group_size=2, max_response_length=400, stop_token_ids=frozenset(range(1, 256, 20)))
    with linked(server, model, tmp_path, replace(LIMITS, stall_deadline_s=2)) as link:
        try:
            numbers = itertools.count()
            groups = drive(link, PROMPTS, long, 0, take=numbers.__next__, most_groups=12, on_sample=lambda _: None, until=until)
        finally:
            os.kill(scheduler, signal.SIGCONT)
        assert len(groups) == 2 and sorted(groups) == sorted(until.clocks) and until.lengths == {}
        assert re.search(r"aborting stragglers in step 0", link.failure or "")


def test_a_server_that_hangs_is_noticed_in_time_though_all_its_connections_are_in_use(
    server: Server, model: Path, tmp_path: Path
) -> None:
    """And one that only takes long is not taken for hung."""
    (scheduler,) = Tree.of(server).named("sglang::scheduler")
    greedy = replace(SAMPLING, group_size=1, temperature=0.0, max_response_length=400, stop_token_ids=frozenset())
    limits = replace(LIMITS, max_concurrent=len(PROMPTS), stall_deadline_s=2)
    with linked(server, model, tmp_path, limits) as link:
        numbers = itertools.count()
        groups = drive(link, PROMPTS, greedy, 0, take=numbers.__next__, most_groups=12, on_sample=lambda _: None)
        assert link.failure is None, link.failure
        check_whole(groups, greedy)
    with linked(server, model, tmp_path, limits) as link:
        numbers = itertools.count()
        os.kill(scheduler, signal.SIGSTOP)
        try:
            began = time.monotonic()
            groups = drive(link, PROMPTS, greedy, 0, take=numbers.__next__, most_groups=12, on_sample=lambda _: None)
            assert time.monotonic() - began < 10
        finally:
            os.kill(scheduler, signal.SIGCONT)
        assert groups == {}
        assert re.match(
            r"http://127.0.0.1:\d+ hangs, sampling in step 0: nothing for 2 s, and not healthy; ", link.failure or ""
        )


def test_what_the_server_refuses_is_said_and_not_tried_again(link: ServerLink) -> None:
    prompts = {0: replace(PROMPTS[0], token_ids=(5,) * 600)}
    began = time.monotonic()
    numbers = itertools.count()
    groups = drive(link, prompts, SAMPLING, 2, take=numbers.__next__, most_groups=1, on_sample=lambda _: None)
    assert groups == {} and time.monotonic() - began < 5
    assert re.match(
        r"sampling in step 2: the server at http://\S+ (refused a request \(400|could not sample)", link.failure or ""
    )


def test_a_prompt_that_leaves_no_room_for_its_response_is_refused_before_anything_is_sent(model: Path, tmp_path: Path) -> None:
    options = Options(LIMITS, num_engines=1, prove=True, on_wait=lambda _: None)
    lent = Place(engine=0, tp_rank=1, tp=2, rank=1)  # a rank that starts no server and sends nothing
    rendezvous: Any = None
    engine = SGLangEngine(make_settings(model, tmp_path), options, lent, ShardLayout(((), ())), rendezvous, HostBuckets())
    fits = replace(PROMPTS[0], token_ids=(5,) * (512 - SAMPLING.max_response_length))
    assert engine.generate({0: fits}, SAMPLING, step=0, on_sample=lambda _: None) == {}
    too_long = replace(fits, token_ids=(*fits.token_ids, 5))
    with pytest.raises(EngineError, match=r"prompt 100 of 497 tokens and a response of 16 exceed the engine's 512; lower data"):
        engine.generate({0: fits, 1: too_long}, SAMPLING, step=0, on_sample=lambda _: None)
