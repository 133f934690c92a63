"""Sampling through the engine's own path, `drive` and the client, from the server that all files here share."""

from __future__ import annotations

import itertools
import os
import re
import signal
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from servers import LOADER, START_DEADLINE_S, Tree, make_settings

from grpo_mega.errors import EngineError, SyncError
from grpo_mega.rollout.engine import Sampling
from grpo_mega.rollout.exchange import check_versions
from grpo_mega.rollout.sglang.api import Api
from grpo_mega.rollout.sglang.engine import Options, SGLangEngine
from grpo_mega.rollout.sglang.generation import drive
from grpo_mega.rollout.sglang.link import Call, Limits, ServerLink
from grpo_mega.rollout.sglang.server import Server
from grpo_mega.rollout.sglang.shared import HostBuckets, payload
from grpo_mega.rollout.sglang.update import Place
from grpo_mega.types import Group, Prompt, Sample
from grpo_mega.weights.sides import Side

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


def test_samples_are_of_the_version_that_the_server_was_last_given_and_another_is_an_error(
    link: ServerLink, tmp_path: Path
) -> None:
    def update(version: str) -> Call:
        async def send(api: Api) -> None:
            await api.begin_update()
            await api.load([payload(str(tmp_path / "names"), torch.empty(0))], LOADER, version, True)
            await api.end_update()

        return send

    for version in (3, 4):
        link.attempt("updating", update(str(version)))
        assert link.failure is None
        numbers = itertools.count()
        groups = drive(link, PROMPTS, SAMPLING, 0, take=numbers.__next__, most_groups=8, on_sample=lambda _: None)
        assert len(groups) == len(PROMPTS)
        assert {sample.policy_version for group in groups.values() for sample in group.samples} == {version}
        check_versions(list(groups.values()), version)
    with pytest.raises(SyncError, match="sample 0 of prompt 100 was made by policy version 4, not 5"):
        check_versions(list(groups.values()), 5)


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
    board: Any = None
    engine = SGLangEngine(make_settings(model, tmp_path), options, lent, Side(((), ())), board, HostBuckets())
    fits = replace(PROMPTS[0], token_ids=(5,) * (512 - SAMPLING.max_response_length))
    assert engine.generate({0: fits}, SAMPLING, step=0, on_sample=lambda _: None) == {}
    too_long = replace(fits, token_ids=(*fits.token_ids, 5))
    with pytest.raises(EngineError, match=r"prompt 100 of 497 tokens and a response of 16 exceed the engine's 512; lower data"):
        engine.generate({0: fits, 1: too_long}, SAMPLING, step=0, on_sample=lambda _: None)
