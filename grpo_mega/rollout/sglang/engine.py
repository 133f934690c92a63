"""An SGLang server as the engine for `rollout.tp` neighbouring ranks, on their devices.

The first rank, the leader, starts, calls and stops the server. The other ranks release memory for it and fill their
sync buckets. The server's first failure is stored in `failure`, with the phase and the last lines in the server's log.
It is never raised, because other ranks wait for this one; they see it at the next rendezvous. After a failure, calls do
nothing until `restart`. The job's store only counts the prompts, because the engine's ranks have a separate group
(EngineRanks).

In a sync each rank describes the bucket that it has filled for its device. The leader gathers these descriptions and
posts them as one request. A bucket is filled again when its request is acknowledged. There are three buffers: one
bucket is loaded while the next is received and the one after it is packed. After the last bucket, the checksums in the
buckets are compared with the server's parameters. FP8 blocks are compared after each bucket, before the server can
process them. Their differences are also reported at the end.
"""

from __future__ import annotations

import json
import math
import queue
import time
from collections.abc import Callable, Collection, Coroutine
from concurrent.futures import Future
from typing import Any

import torch
from torch import Tensor

from grpo_mega.distributed.rendezvous import EngineRanks, Rendezvous
from grpo_mega.errors import EngineError
from grpo_mega.rollout.engine import Engine, Receiver, RolloutRequest, Schedule, schedule_of
from grpo_mega.rollout.sglang.buckets import AdapterUpdate, DeviceBuckets, HostBuckets, padded, parameters, payload
from grpo_mega.rollout.sglang.client import ServerClient
from grpo_mega.rollout.sglang.loader import NUM_BUFFERS, report_path
from grpo_mega.rollout.sglang.server import EngineSettings, Server
from grpo_mega.rollout.sglang.turns import Turns, samples_of
from grpo_mega.types import Group
from grpo_mega.weights.apply import Bucket, Entry
from grpo_mega.weights.layout import ShardLayout

WEIGHTS, CACHE, GRAPHS = "weights", "kv_cache", "cuda_graph"  # parts of a server's memory that sleep separately
LOOK_S = 0.2  # interval between checks that the server is alive
STOP_LOOK_S = 0.05  # interval between checks whether the phase stops
Posted = tuple[int, Future[Any] | None]  # request number; its response, only on the leader


class SGLangEngine(Engine):
    is_server = True

    def __init__(
        self,
        settings: EngineSettings,
        shard_layout: ShardLayout,
        rendezvous: Rendezvous,
        buckets: HostBuckets | DeviceBuckets,
        server: Server | None = None,
    ) -> None:
        """Launch the server if this rank is the leader, without waiting for it. A running `server` needs no launch."""
        super().__init__(shard_layout)
        self._settings, self._rollout, self._rendezvous, self._buckets = settings, settings.rollout, rendezvous, buckets
        self._peers = EngineRanks(rendezvous, settings.tp_rank, settings.rollout.tp, settings.leader_deadline_s)
        self._has_weights = False
        self._num_phases = self._num_requests = 0
        self._opened: dict[int, object] = {}  # buffer that the server has opened, by slot
        # The current sync's state:
        self._posted: list[Posted] = []  # request of each bucket
        self._num_loaded = 0
        self._checksums: list[Entry] = []
        self._differing: list[str] = []  # differences in FP8 blocks that the server has reported, only on the leader
        self._session: ServerClient | None = None  # only on the leader, once the server is ready
        self._is_cold = True  # the server has not finished a phase since its start
        self._adapter: AdapterUpdate | None = None
        if settings.lora is not None:
            dtype, device = getattr(torch, settings.dtype), torch.device(settings.device_type)
            self._adapter = AdapterUpdate(settings.lora, dtype, settings.rollout.tp, device, self._load_adapter)
        self._server = server
        if settings.tp_rank == 0 and server is None:
            self._server = Server(settings)
            self._server.start()

    def wait_until_ready(self) -> None:
        """Wait for the server's start. Raise EngineError on the leader if it fails. A second call does nothing."""
        if self._server and self._session is None:
            self._server.wait_until_healthy()
            self._session = ServerClient(
                self._server.url,
                self._server.headers,
                num_connections=self._rollout.max_concurrent,
                is_seeded=self._settings.is_seeded,
                routers=self._settings.routers,
            )

    def restart(self, failed: Collection[int]) -> None:
        if self._settings.leader not in failed:
            return
        self.version, self._has_weights, self._is_cold = -1, False, True
        self._opened.clear()
        if self._server:
            self._stop()
            self.failure, self._server = None, Server(self._settings)
            try:
                self._server.start()
                self.wait_until_ready()
            except EngineError as error:
                self._fail(str(error))

    @property
    def adapter(self) -> Receiver:
        assert self._adapter is not None, "the server does not serve an adapter"
        return self._adapter

    @property
    def _stall_deadline_s(self) -> float:
        return self._settings.stall_deadline_s(is_cold=self._is_cold)

    def close(self) -> None:
        self._stop()
        self._buckets.close()

    def _stop(self) -> None:
        if self._session:
            self._session.close()
        self._session = None
        if self._server:
            self._server.stop()

    def generate(self, request: RolloutRequest) -> dict[int, Group]:
        """Generate on the leader. Take at most an equal share at once, so no engine takes all groups.

        All engines share a group counter. Each engine takes the next group while its schedule wants one, so no engine
        is idle while groups wait, and a slow engine takes fewer. When the phase stops, running samples are aborted, and
        the server is idle with an empty cache. If the server fails, even during the abort, only its complete groups are
        returned.
        """
        self._check_lengths(request)
        self._num_phases += 1
        server, session = self._server, self._session
        if server is None:
            return {}
        counter = f"prompts/{self._num_phases}"
        if self._settings.rank == 0:  # no rank reads the previous phase's counter any more
            self._rendezvous.delete(f"prompts/{self._num_phases - 1}")
        equal_share = math.ceil(len(request.groups) / self._settings.num_engines)
        schedule = schedule_of(request, self._rollout.max_concurrent, equal_share)
        if self.failure is None:
            assert session is not None, "wait_until_ready was not called"
            with samples_of(request, session) as source:
                self._run_phase(request, schedule, source, server, counter)
        if self.failure is not None:
            return schedule.complete_groups()
        self._is_cold = False
        return schedule.finish()

    def _run_phase(
        self, request: RolloutRequest, schedule: Schedule, source: ServerClient | Turns, server: Server, counter: str
    ) -> None:
        """Generate until no group is left, the engine fails, or the phase stops."""
        phase, indices, has_more = f"generating in step {request.step}", list(request.groups), True
        started_at = heard = time.monotonic()
        while self.failure is None:
            if request.stop is not None and request.stop.is_met():
                self._abort(request, schedule, source)
                return
            while has_more and schedule.wants_group:
                number = self._rendezvous.fetch_add(counter)
                has_more = number < len(indices)
                if has_more:
                    schedule.add(indices[number])
            for prompt_index, samples in schedule.take().items():
                source.generate(prompt_index, samples, request.sampling, request.step)
            if not schedule.num_running:
                break
            try:
                event = source.next_event(LOOK_S if request.stop is None else STOP_LOOK_S)
            except queue.Empty:
                heard = self._check_alive(phase, heard, started_at, server)
                continue
            heard = time.monotonic()
            if event.sample is not None:
                schedule.ended(event.prompt_index, event.sample)
                request.usage.num_retracted += event.was_retracted
            else:
                self._fail(f"{phase}: {event.error}")

    def _check_lengths(self, request: RolloutRequest) -> None:
        """Raise EngineError if a prompt and its longest response exceed the context length, before sending anything."""
        for prompt in (group.prompt for group in request.groups.values()):
            longest = len(prompt.token_ids) + request.sampling.max_response_length
            if longest > self._settings.context_length:
                raise EngineError(
                    f"prompt {prompt.id} of {len(prompt.token_ids)} tokens and a response of"
                    f" {request.sampling.max_response_length} exceed the engine's {self._settings.context_length};"
                    " lower data.max_prompt_length"
                )

    def _check_alive(self, phase: str, heard: float, started_at: float, server: Server) -> float:
        """Check that the server is alive, and check its health if there was no event since `heard` for too long.

        Return the time when the server was last known to be healthy. Set `failure` if it is dead, hangs, or exceeds the
        phase's deadline. Times are from time.monotonic.
        """
        now, deadline = time.monotonic(), self._stall_deadline_s
        if not server.is_alive():
            self._fail(f"{server.url} died, {phase}")
        elif now - started_at > self._rollout.phase_deadline_s:
            self._fail(f"{server.url} is not done after {now - started_at:.0f} s, {phase}")
        elif now - heard > deadline:
            if self._await(
                f"{phase}, asked for its health", self._start(lambda session: session.is_healthy(deadline / 2))
            ):
                return time.monotonic()
            self._fail(f"{server.url} hangs, {phase}: nothing for {now - heard:.0f} s, and not healthy")
        return heard

    def _abort(self, request: RolloutRequest, schedule: Schedule, source: ServerClient | Turns) -> None:
        """Abort the running samples and return them to the schedule with their tokens. Conversations lose theirs."""
        session, phase, started_at = self._session, f"aborting stragglers in step {request.step}", time.monotonic()
        assert session is not None
        session.is_aborting = schedule.num_running > 0
        if session.is_aborting and request.conversations is not None:
            request.conversations.abort()
        while schedule.num_running and self.failure is None:
            # Repeat the call, because a request may reach the server after an abort.
            self._post(phase, "/abort_request", {"abort_all": True})
            pause_ends = time.monotonic() + LOOK_S
            while schedule.num_running and (seconds := pause_ends - time.monotonic()) > 0:
                try:
                    event = source.next_event(seconds)
                except queue.Empty:
                    break
                if event.error is not None:
                    self._fail(f"{phase}: {event.error}")
                    break
                if event.sample is not None:
                    schedule.ended(event.prompt_index, event.sample)
                else:
                    schedule.left_over(event.prompt_index, event.aborted or ())
            if schedule.num_running and time.monotonic() - started_at > self._stall_deadline_s:
                self._fail(f"{phase}: {schedule.num_running} samples do not end")
        if session.is_aborting:
            self._flush_when_idle(phase)
        session.is_aborting = False

    def sleep(self) -> None:
        """Wait until the server is idle, then make it sleep. A busy server would end itself.

        With overlapped scheduling the server stays busy for about one decode step after the last sample.
        """
        if self._settings.has_memory_saver:
            self._flush_when_idle("waiting until it is idle")
            self._post("going to sleep", "/release_memory_occupation", {"tags": [WEIGHTS, CACHE, GRAPHS]})
            self._peers.broadcast("going to sleep", "")

    def wake_weights(self) -> None:
        if self._settings.has_memory_saver:
            self._post("waking its weights", "/resume_memory_occupation", {"tags": [WEIGHTS]})
            self._peers.broadcast("waking its weights", "")

    def wake_cache(self) -> None:
        if self._settings.has_memory_saver:
            self._post("waking its cache", "/resume_memory_occupation", {"tags": [CACHE, GRAPHS]})
            self._post("flushing its cache", "/flush_cache", {})
            self._peers.broadcast("waking its cache", "")

    def start_update(self) -> list[str]:
        self._posted, self._num_loaded, self._checksums, self._differing = [], 0, [], []
        self._post("starting an update", "/begin_weight_update")
        if self._has_weights:
            return []
        shards = self.shard_layout.rank_shards(self._settings.rank)
        blocks = self.shard_layout.quantised_shards(self._settings.rank) if self._settings.holds_blocks else {}
        wanted = parameters(shards, blocks, getattr(torch, self._settings.dtype))
        problems = self._request({"action": "check", "parameters": wanted, "padded": padded(shards)})
        self._has_weights = not problems and self.failure is None
        return problems

    def allocate(self, index: int, num_bytes: int) -> Tensor:
        self._wait_until_loaded(index - NUM_BUFFERS)
        return self._buckets.allocate(index, num_bytes)

    def load(self, bucket: Bucket) -> None:
        if self._settings.verify:
            self._checksums += [entry for entry in bucket.entries if not entry.is_quantised]
        slot = bucket.index % NUM_BUFFERS
        buffer, description, handle = self._buckets.finish(slot)
        is_opened = self._opened.get(slot) is buffer
        self._opened[slot] = buffer
        request = (description if not is_opened else {}) | {
            "action": "fill",
            "slot": slot,
            "opens": not is_opened,
            "entries": bucket.entries,
            "used_bytes": bucket.values.nbytes,
            "dtype": str(bucket.dtype),
            "verify": self._settings.verify,
        }
        self._posted.append(self._send(request, torch.empty(0) if is_opened else handle))

    def end_update(self, version: int) -> list[str]:
        """Wait for all buckets and verify them. Return the tensors that differ, with their tensor-parallel rank."""
        self._wait_until_loaded(len(self._posted) - 1)
        return self._verify(version)

    def _load_adapter(self, request: Callable[[], dict[str, Any]], problems: list[str], version: int) -> list[str]:
        """Load an adapter that arrived with these problems, and unload the previous one. Verify the base again, because
        its copy in host memory may be damaged while the server sleeps (torch_memory_saver#71).
        """
        if self._session is not None and not problems:
            name, last = f"version-{version}.{self._num_requests}", self._session.adapter
            self._post("loading an adapter", "/load_lora_adapter_from_tensors", {"lora_name": name} | request())
            if last is not None:
                self._post("unloading an adapter", "/unload_lora_adapter", {"lora_name": last})
            self._session.adapter = name
        self._differing = problems
        self._post("starting an update", "/begin_weight_update")
        found = self._verify(version)
        if found and not problems:
            found[0] = f"its base changed since it was sent (if that repeats, set sync.lora=merged): {found[0]}"
        return found

    def _verify(self, version: int) -> list[str]:
        """Compare weight checksums, and set the version if they are equal."""
        problems = self._request({"action": "verify", "entries": self._checksums}, version=str(version))
        self._post("ending an update", "/end_weight_update")
        if not problems and self.failure is None:
            self.version = version
        return problems

    def _wait_until_loaded(self, index: int) -> None:
        """Wait until the server has read the sync's buckets up to `index`."""
        phase = "loading a bucket"
        while self._num_loaded <= index:
            problems, has_failed = self._reports(phase, self._posted[self._num_loaded])
            if has_failed:
                self._fail(f"{phase}: {'; '.join(problems)}")
            self._differing += problems
            self._peers.broadcast(phase, "")
            self._num_loaded += 1

    def _request(self, request: dict[str, Any], version: str | None = None) -> list[str]:
        """Send a request to all server processes. Return their problems, identical on all engine ranks."""
        phase = f"at {request['action']}"
        found, _ = self._reports(phase, self._send(request, torch.empty(0), version))
        problems: list[str] = json.loads(
            self._peers.broadcast(phase, json.dumps([] if self.failure else self._differing + found))
        )
        return problems

    def _send(self, request: dict[str, Any], handle: Tensor, version: str | None = None) -> Posted:
        """Send this rank's request part to the leader. The leader posts all ranks' parts.

        With `version` the server flushes cached prefixes and reports this version with its later samples.
        """
        self._num_requests += 1
        request |= {"number": self._num_requests, "tp_rank": self._settings.tp_rank}
        payloads = self._peers.gather("gathering a bucket", payload(json.dumps(request), handle))
        body: dict[str, Any] = {"serialized_named_tensors": payloads, "load_format": self._settings.weight_loader}
        body |= {"flush_cache": False} if version is None else {"flush_cache": True, "weight_version": version}
        return self._num_requests, self._start(lambda session: session.post("/update_weights_from_tensor", body))

    def _reports(self, phase: str, posted: Posted) -> tuple[list[str], bool]:
        """Await a request. Return the problems that the server's processes reported, and True if a process failed.

        Only the leader returns problems.
        """
        number, response = posted
        self._await(phase, response)
        problems, has_failed = list[str](), False
        if self._server and self.failure is None:
            for tp_rank in range(self._rollout.tp):
                report = json.loads(report_path(self._server.private_folder, number, tp_rank).read_text())
                assert report["number"] == number, "a report of another request"
                problems += [f"{problem} (tensor-parallel rank {tp_rank})" for problem in report["problems"]]
                has_failed = has_failed or report["has_failed"]
        return problems, has_failed

    def _fail(self, reason: str) -> None:
        if self.failure is None and self._server:
            self.failure = f"{reason}; {self._server.tail()}"

    def _post(self, phase: str, path: str, body: dict[str, Any] | None = None) -> None:
        """Call a server endpoint and await its response."""
        self._await(phase, self._start(lambda session: session.post(path, body)))

    def _flush_when_idle(self, phase: str) -> None:
        self._await(phase, self._start(lambda session: session.flush_cache_when_idle()))

    def _start(self, call: Callable[[ServerClient], Coroutine[Any, Any, Any]]) -> Future[Any] | None:
        """Start a call to the server. Return None if the server has failed before, or this rank is not the leader."""
        if self.failure is not None or self._session is None:
            return None
        return self._session.start(call(self._session))

    def _await(self, phase: str, response: Future[Any] | None) -> Any:
        """Return a call's result. If it fails, or the server dies or stalls, set `failure` and return None."""
        deadline_s = self._stall_deadline_s
        until = time.monotonic() + deadline_s
        while response is not None and self.failure is None and self._server:
            url = self._server.url
            try:
                return response.result(timeout=LOOK_S)
            except TimeoutError:
                if response.done():  # the session's deadline for the call has passed
                    self._fail(f"{url} did not answer in time, {phase}")
                elif not self._server.is_alive():
                    self._fail(f"{url} died, {phase}")
                elif time.monotonic() > until:
                    response.cancel()
                    self._fail(f"{url} gave no answer for {deadline_s:.0f} s, {phase}")
            except Exception as error:  # the session may raise any error
                self._fail(f"{url} failed, {phase} ({error})")
        return None
