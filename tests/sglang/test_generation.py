"""Generation on the server shared by these files, through the engine and its session."""

from __future__ import annotations

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
from torch.distributed import HashStore, Store

from grpo_mega.distributed.rendezvous import Rendezvous
from grpo_mega.errors import EngineError, SyncError
from grpo_mega.rollout.engine import RolloutRequest, Sampling, StopCondition
from grpo_mega.rollout.rollouts import check_versions
from grpo_mega.rollout.sglang.buckets import HostBuckets, payload
from grpo_mega.rollout.sglang.client import ServerClient
from grpo_mega.rollout.sglang.engine import SGLangEngine
from grpo_mega.rollout.sglang.server import Server
from grpo_mega.types import Group, Prompt, Sample
from grpo_mega.weights.apply import Bucket
from grpo_mega.weights.layout import ShardLayout
from tests.helpers.servers import LOADER, Tree, make_settings

pytestmark = pytest.mark.sglang

SAMPLING = Sampling(group_size=4, temperature=1.0, max_response_length=16, stop_token_ids=frozenset({1}))
PROMPTS = {key: Prompt(id=100 + key, text="", token_ids=(5, 6, 7 + key), answer="") for key in range(12)}


@pytest.fixture
def engine(server: Server, model: Path, tmp_path: Path) -> Iterator[SGLangEngine]:
    with connected(server, model, tmp_path) as one:
        yield one


@contextmanager
def connected(
    server: Server, model: Path, folder: Path, *, rank: int = 0, store: Store | None = None, **rollout: Any
) -> Iterator[SGLangEngine]:
    """Yield an engine with the shared server. The server keeps running when the engine closes.

    With `store` the engine of `rank` shares the prompts with another engine.
    """
    world_size = 1 if store is None else 2
    settings = replace(make_settings(model, folder, **rollout), rank=rank, world_size=world_size)
    rendezvous = Rendezvous(store or HashStore(), rank, world_size)
    engine = SGLangEngine(settings, ShardLayout(((),)), rendezvous, HostBuckets(), server)
    engine.wait_until_ready()
    try:
        yield engine
    finally:
        session_of(engine).close()


def session_of(engine: SGLangEngine) -> ServerClient:
    assert engine._session is not None
    return engine._session


def generate(
    engine: SGLangEngine,
    prompts: Mapping[int, Prompt] = PROMPTS,
    sampling: Sampling = SAMPLING,
    step: int = 0,
    *,
    max_concurrent: int = 12 * 16,
    earlier: Mapping[int, Group] | None = None,
    **others: Any,
) -> dict[int, Group]:
    """Generate at most `max_concurrent` samples at once. The session's connections are limited by the engine's
    settings.
    """
    engine._rollout = engine._rollout.model_copy(update={"max_concurrent": max_concurrent})
    groups = {key: (earlier or {}).get(key) or Group(prompt, []) for key, prompt in prompts.items()}
    return engine.generate(RolloutRequest(groups, sampling, step, **others))


def divided(groups: Mapping[int, Group], sampling: Sampling) -> tuple[dict[int, Group], dict[int, Group]]:
    """Return the complete groups, and the incomplete groups."""
    whole = {key: group for key, group in groups.items() if group.is_complete(sampling.group_size)}
    return whole, {key: group for key, group in groups.items() if key not in whole}


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


def test_two_replicas_share_one_counter_and_the_fast_one_does_more_work(
    server: Server, model: Path, tmp_path: Path
) -> None:
    store = HashStore()
    found: dict[str, dict[int, Group]] = {}
    heard: list[Sample] = []

    def replica(rank: int, name: str, seconds_a_sample: float) -> None:
        def on_sample(sample: Sample, _: Group) -> None:
            heard.append(sample)
            time.sleep(seconds_a_sample)

        with connected(server, model, tmp_path / name, rank=rank, store=store) as engine:
            found[name] = generate(engine, max_concurrent=2 * SAMPLING.group_size, on_sample=on_sample)
            assert engine.failure is None

    slow = threading.Thread(target=replica, args=(0, "slow", 0.5))
    fast = threading.Thread(target=replica, args=(1, "fast", 0.0))
    slow.start()
    fast.start()
    fast.join()
    # The fast replica stops when no prompt is waiting.
    assert Rendezvous(store, 1, 2).fetch_add("prompts/1", 0) > len(PROMPTS)
    slow.join()
    assert sorted([*found["slow"], *found["fast"]]) == sorted(PROMPTS)
    assert len(found["fast"]) > len(found["slow"])
    assert len(heard) == len(PROMPTS) * SAMPLING.group_size
    check_whole(found["slow"] | found["fast"])


def update_to(engine: SGLangEngine, version: int, file: Path, *, flush_cache: bool = True) -> None:
    """Update the server to a version. What note_names does with `file` depends on its suffix."""
    names = [payload(str(file), torch.empty(0))]
    body = {
        "serialized_named_tensors": names,
        "load_format": LOADER,
        "weight_version": str(version),
        "flush_cache": flush_cache,
    }
    engine._post("updating", "/begin_weight_update")
    engine._post("updating", "/update_weights_from_tensor", body)
    engine._post("updating", "/end_weight_update")
    assert engine.failure is None


def test_samples_have_the_last_synced_version_and_others_are_an_error(engine: SGLangEngine, tmp_path: Path) -> None:
    for version in (3, 4):
        update_to(engine, version, tmp_path / "names")
        groups = generate(engine, max_concurrent=8 * SAMPLING.group_size)
        assert len(groups) == len(PROMPTS)
        assert {sample.policy_version for group in groups.values() for sample in group.samples} == {version}
        check_versions(list(groups.values()), version, version)
    with pytest.raises(SyncError, match="sample 0 of prompt 100 was made by policy version 4, not 5"):
        check_versions(list(groups.values()), 5, 5)


def enough(wanted: int) -> StopCondition:
    return StopCondition(Rendezvous(HashStore(), rank=0, world_size=1), wanted)


def load_of(server: Server) -> tuple[int, int]:
    """Return the number of requests that the server runs, and the number that it queues."""
    request = urllib.request.Request(f"{server.url}/v1/loads", headers=server.headers)
    with urllib.request.urlopen(request, timeout=30) as answer:
        [load] = json.load(answer)["loads"]
    return load["num_running_reqs"], load["num_waiting_reqs"]


def test_after_stragglers_are_aborted_the_server_updates_and_samples(
    server: Server, engine: SGLangEngine, tmp_path: Path
) -> None:
    """Aborted requests include queued ones, because the server runs only a third of them at once."""
    endless = replace(SAMPLING, group_size=16, max_response_length=500, stop_token_ids=frozenset())
    for wanted, spacing in ((3, 20), (1, 9)):
        sampling = replace(endless, stop_token_ids=frozenset(range(1, 256, spacing)))
        stop = enough(wanted)
        heard: list[Sample] = []
        found = generate(
            engine, sampling=sampling, on_sample=lambda sample, _, heard=heard: heard.append(sample), stop=stop
        )
        assert engine.failure is None, engine.failure
        assert load_of(server) == (0, 0)
        groups, aborted = divided(found, sampling)
        assert wanted <= len(groups) < len(PROMPTS)
        check_whole(groups, sampling)
        assert sorted(found) == sorted(PROMPTS)
        assert any(0 < s.response_len < 500 and not s.is_finished for group in aborted.values() for s in group.samples)
        assert {id(s) for group in found.values() for s in group.samples if s.is_finished} == {id(s) for s in heard}
        assert session_of(engine).events.empty() and not session_of(engine).is_aborting
    # As if another replica had just finished the last wanted group when this replica starts.
    stop = enough(1)
    threading.Timer(0.3, stop.done, [99]).start()
    found = generate(engine, sampling=endless, stop=stop)
    assert engine.failure is None and load_of(server) == (0, 0)
    assert sorted(found) == sorted(PROMPTS) and divided(found, endless)[0] == {}
    update_to(engine, 6, tmp_path / "names")
    groups = generate(engine, max_concurrent=8 * SAMPLING.group_size)
    assert engine.failure is None and sorted(groups) == sorted(PROMPTS)
    check_whole(groups)
    check_versions(list(groups.values()), 6, 6)


def test_aborted_samples_continue_after_an_update_with_right_log_probs(engine: SGLangEngine, tmp_path: Path) -> None:
    """Run phases until all groups are complete. Version spans match the phases, and no token is repeated or lost."""
    sampling = replace(SAMPLING, group_size=3, max_response_length=150, stop_token_ids=frozenset(range(1, 256, 40)))
    groups: dict[int, Group] = {key: Group(prompt, []) for key, prompt in PROMPTS.items()}
    version = 6
    while todo := {key: PROMPTS[key] for key, group in groups.items() if not group.is_complete(sampling.group_size)}:
        version += 1
        update_to(engine, version, tmp_path / "names")
        stop = enough(2) if len(todo) > 2 else None
        found = generate(engine, todo, sampling, version, stop=stop, earlier=groups)
        assert engine.failure is None, engine.failure
        for key, group in found.items():
            there = {sample.index: sample for sample in groups[key].samples}
            for sample in group.samples:
                before = there.pop(sample.index, None)
                assert before is None or sample.response_ids[: before.response_len] == before.response_ids
            assert not there
        groups |= found
    check_whole(groups, sampling)
    samples = [sample for group in groups.values() for sample in group.samples]
    for sample in samples:
        ends = [0, *(span.end for span in sample.spans)]
        assert [span.start for span in sample.spans] == ends[:-1] and ends[-1] == sample.response_len
        versions = [span.version for span in sample.spans]
        assert versions == sorted(set(versions)) and versions[-1] <= version
    assert max(len(sample.spans) for sample in samples) > 2
    for sample in sorted(samples, key=lambda s: -len(s.spans))[:6]:  # compare with one prefill of prompt and response
        whole = [*sample.prompt.token_ids, *sample.response_ids]
        engine._post("flushing", "/flush_cache")
        assert sample.rollout_logprobs == pytest.approx(
            session_of(engine).run(session_of(engine).logprobs(whole, sample.response_len)), abs=1e-5
        )


def test_probes_come_first_and_aborted_groups_continue_to_their_end(engine: SGLangEngine) -> None:
    sampling = replace(
        SAMPLING, max_response_length=60, stop_token_ids=frozenset(range(1, 256, 12)), longest_first=True
    )
    heard: list[int] = []
    groups = generate(
        engine, sampling=sampling, max_concurrent=7, on_sample=lambda s, _: heard.append(s.index), stop=enough(3)
    )
    assert engine.failure is None, engine.failure
    assert heard[:6] == [0] * 6 and len(heard) > 12  # at most 6 other samples run when the last of 12 probes starts
    whole, aborted = divided(groups, sampling)
    assert len(whole) >= 3 and any(not sample.is_finished for group in aborted.values() for sample in group.samples)
    lengths = {(key, s.index): s.response_len for key, group in aborted.items() for s in group.samples}
    todo = {key: PROMPTS[key] for key in aborted}
    rest = generate(engine, todo, sampling, max_concurrent=7, earlier=groups)
    check_whole(whole | rest, sampling)
    assert sorted(whole | rest) == sorted(PROMPTS)
    assert all(rest[key].samples[index].response_len >= length for (key, index), length in lengths.items())


def test_a_hang_during_an_abort_is_noticed_and_finished_groups_are_kept(
    server: Server, model: Path, tmp_path: Path
) -> None:
    (scheduler,) = Tree.of(server).named("sglang::scheduler")

    class ThenStopped(StopCondition):
        def done(self, key: int, clock: int = 0) -> None:
            super().done(key, clock)
            if len(self.clocks) == 2:
                os.kill(scheduler, signal.SIGSTOP)

    stop = ThenStopped(Rendezvous(HashStore(), rank=0, world_size=1), 2)
    long = replace(SAMPLING, group_size=2, max_response_length=400, stop_token_ids=frozenset(range(1, 256, 40)))
    with connected(server, model, tmp_path, stall_deadline_s=5, start_deadline_s=5) as engine:
        try:
            groups = generate(engine, sampling=long, stop=stop)
        finally:
            os.kill(scheduler, signal.SIGCONT)
        # At least two; also groups whose last samples the server had sent before it was stopped.
        assert 2 <= len(groups) < len(PROMPTS) and sorted(groups) == sorted(stop.clocks)
        check_whole(groups, long)
        assert re.search(r"aborting stragglers in step 0", engine.failure or "")


def test_a_hang_is_noticed_in_time_while_all_connections_are_in_use(
    server: Server, model: Path, tmp_path: Path
) -> None:
    """A server that is only slow is not reported as hanging."""
    (scheduler,) = Tree.of(server).named("sglang::scheduler")
    greedy = replace(SAMPLING, group_size=1, temperature=0.0, max_response_length=400, stop_token_ids=frozenset())
    limits = {"max_concurrent": len(PROMPTS), "stall_deadline_s": 2, "start_deadline_s": 2}
    with connected(server, model, tmp_path, **limits) as engine:
        groups = generate(engine, sampling=greedy)
        assert engine.failure is None, engine.failure
        check_whole(groups, greedy)
    with connected(server, model, tmp_path, **limits) as engine:
        os.kill(scheduler, signal.SIGSTOP)
        try:
            started_at = time.monotonic()
            groups = generate(engine, sampling=greedy)
            assert time.monotonic() - started_at < 30
        finally:
            os.kill(scheduler, signal.SIGCONT)
        assert groups == {}
        assert re.match(
            r"http://127.0.0.1:\d+ hangs, generating in step 0: nothing for 2 s, and not healthy; ",
            engine.failure or "",
        )


def test_a_refused_request_is_reported_and_not_retried(engine: SGLangEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "_check_lengths", lambda request: None)
    prompts = {0: replace(PROMPTS[0], token_ids=(5,) * 600)}
    started_at = time.monotonic()
    groups = generate(engine, prompts, step=2)
    assert groups == {} and time.monotonic() - started_at < 15
    assert re.match(
        r"generating in step 2: the server at http://\S+ (refused a request \(400|could not generate)",
        engine.failure or "",
    )


def test_a_prompt_without_room_for_its_response_is_refused_unsent(model: Path, tmp_path: Path) -> None:
    settings = replace(make_settings(model, tmp_path, tp=2), rank=1, world_size=2)  # this rank has no server
    rendezvous: Any = None
    engine = SGLangEngine(settings, ShardLayout(((), ())), rendezvous, HostBuckets())
    fits = replace(PROMPTS[0], token_ids=(5,) * (512 - SAMPLING.max_response_length))
    assert generate(engine, {0: fits}) == {}
    too_long = replace(fits, token_ids=(*fits.token_ids, 5))
    with pytest.raises(
        EngineError, match=r"prompt 100 of 497 tokens and a response of 16 exceed the engine's 512; lower data"
    ):
        generate(engine, {0: fits, 1: too_long})


def test_a_buffer_is_reopened_only_by_a_new_server_or_when_it_has_grown(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # This rank has no server.
    settings = replace(make_settings(model, tmp_path, tp=2), rank=1, world_size=2, verify=False)
    rendezvous: Any = None
    engine = SGLangEngine(settings, ShardLayout(((), ())), rendezvous, HostBuckets())
    opened: list[tuple[int, bool]] = []

    def send(request: dict[str, Any], handle: torch.Tensor) -> tuple[int, None]:
        assert ("file" in request) == request["opens"]
        opened.append((request["slot"], request["opens"]))
        return 1, None

    monkeypatch.setattr(engine, "_send", send)
    monkeypatch.setattr(engine, "_wait_until_loaded", lambda index: None)
    for index, num_bytes in ((0, 300), (1, 70), (2, 5), (3, 300), (4, 71), (5, 5), (6, 10)):
        engine.load(Bucket(index, engine.allocate(index, num_bytes), (), 0, torch.float32))
    assert opened == [(0, True), (1, True), (2, True), (0, False), (1, True), (2, False), (0, False)]
    engine.restart([0])
    engine.load(Bucket(7, engine.allocate(7, 10), (), 0, torch.float32))
    assert opened[-1] == (1, True)
    engine.close()
