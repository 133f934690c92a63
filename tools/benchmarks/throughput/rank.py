"""One rank of benchmarks/throughput: run the trainer's own steps and measure each of them.

`measure` is `train.run` without evaluation and export: the same job and the same `train_step`. It records the timers'
phases, the step's log and groups, the micro-batches passed to `Policy.update` (`Recorder`), and the time in functions
that wait for other ranks (`Waits`). On a GPU it synchronizes at both ends of every phase, so a phase includes the time
of its own kernels only.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
import torch.distributed as dist

from grpo_mega.checkpoint_io.model import read_tokenizer
from grpo_mega.cli.checks.model import read_model
from grpo_mega.cli.planner.this_machine import free_on_gpu
from grpo_mega.cli.report.writer import ReportWriter
from grpo_mega.config import Config
from grpo_mega.distributed.rendezvous import Rendezvous
from grpo_mega.megatron.compat import transfer_class
from grpo_mega.rewards.scorer import Scorer
from grpo_mega.rollout.engine import Engine
from grpo_mega.tracking.progress import Timers
from grpo_mega.tracking.run_log import Hooks
from grpo_mega.train import train_step
from grpo_mega.trainer.job import Job, open_job
from grpo_mega.trainer.parts import ranks_per_node
from grpo_mega.types import Group, PackedBatch, StepMetrics
from grpo_mega.weights.plan import plan_transfers
from grpo_mega.weights.spec import ModelShape
from tools.benchmarks import harness
from tools.benchmarks.flops import count_flops
from tools.benchmarks.gpu.rank import finish
from tools.benchmarks.throughput.synthetic import Lengths, RandomRewards, SyntheticEngine

SIDES = {"cpu": 1024, "cuda": 8192}  # size of the square matrices that measure a device's FLOP/s
SECONDS_OF_MATMUL = 0.5
BYTES_COPIED, BYTES_SENT = 64 << 20, 8 << 20
GroupLengths = tuple[int, list[int]]  # tokens of the prompt, and of each response


def measure(config: Config, lengths: Lengths | None, *, warmup: int, steps: int) -> dict[str, Any] | None:
    """Measure `steps` steps after `warmup` steps. Return the result on rank 0, otherwise None. Collective."""
    waits = Waits()
    with waits.installed(), open_job(config, hooks=Hooks(ReportWriter, free_on_gpu)) as job:
        if lengths is not None:
            _replace_sampling(job, lengths)
        recorder = Recorder(job, waits)
        waits.start(job.timers, is_cuda=job.runtime.device.is_cuda)
        if job.runtime.device.is_cuda:
            job.timers.watch = _synchronized
        job.colocation.sync_weights(version=0)
        rates = _rates(job)
        job.timers.lap()
        recorder.start()
        found: list[dict[str, Any]] = []
        drawn: list[list[GroupLengths]] = []
        for number in range(warmup + steps):
            train_step(job, number)
            found.append(recorder.take())
            drawn.append([(len(g.prompt.token_ids), [s.response_len for s in g.samples]) for g in recorder.groups])
            job.stops_after(number + 1)
        mine = {"place": job.runtime.layout.place(job.runtime.rank), "rates": rates, "steps": found[warmup:]}
        everyone: list[Any] = [None] * job.runtime.layout.world_size
        dist.all_gather_object(everyone, mine)
        if not job.is_main:
            return None
        experts = read_model(config).experts_per_token
        work = [work_of(job.model.shape, experts, groups) for groups in drawn[warmup:]]
        return _about(job) | {"ranks": everyone, "work": work}


def work_of(shape: ModelShape, experts_per_token: int, groups: Sequence[GroupLengths]) -> dict[str, float]:
    """Return the work of one step over all ranks. FLOPs are the model's.

    prompt_tokens counts a group's prompt once per sample. sample_flops counts it once per group, and all responses.
    forward_flops is one pass over all samples, in which only responses go through the output layer.
    """

    def forward(length: int, num_outputs: int) -> float:
        return count_flops(shape, [length], experts_per_token=experts_per_token, num_outputs=num_outputs).forward

    whole = sum(forward(prompt + response, response) for prompt, responses in groups for response in responses)
    return {
        "samples": sum(len(responses) for _, responses in groups),
        "prompt_tokens": sum(prompt * len(responses) for prompt, responses in groups),
        "response_tokens": sum(sum(responses) for _, responses in groups),
        "sample_flops": whole - sum(forward(prompt, 0) * (len(responses) - 1) for prompt, responses in groups),
        "forward_flops": whole,
    }


class Waits:
    """The seconds in which this rank waited for others at a rendezvous or between pipeline stages.

    Waiting for pipeline neighbours includes the transfer. Waiting inside collectives of tensors, such as the reduction
    of gradients, is not measured, nor are pipeline waits if sends overlap with computation (layout.vpp above 1).
    """

    def __init__(self) -> None:
        self._timers: Timers | None = None
        self._is_cuda = self._is_open = False
        self._seconds: dict[str, float] = {}
        self._events: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Wrap the functions that wait for other ranks. Restore them at the end."""
        doors: list[tuple[Any, str, bool]] = [
            (Rendezvous, "all_gather", False),
            (dist, "all_gather_object", False),
            (dist, "barrier", False),
            (transfer_class(), "_communicate", True),
        ]
        before = [(owner, name, getattr(owner, name)) for owner, name, _ in doors]
        for owner, name, is_transfer in doors:
            setattr(owner, name, self._timed(getattr(owner, name), is_transfer))
        try:
            yield
        finally:
            for owner, name, function in before:
                setattr(owner, name, function)

    def start(self, timers: Timers, *, is_cuda: bool) -> None:
        self._timers, self._is_cuda = timers, is_cuda

    def take(self) -> dict[str, float]:
        """Return the waits by phase since the last call."""
        if self._events:
            torch.cuda.synchronize()
            for phase, first, last in self._events:
                self._add(phase, first.elapsed_time(last) / 1000)
        found, self._seconds, self._events = self._seconds, {}, []
        return found

    def _add(self, phase: str, seconds: float) -> None:
        self._seconds[phase] = self._seconds.get(phase, 0.0) + seconds

    def _timed(self, function: Callable[..., Any], is_transfer: bool) -> Callable[..., Any]:
        """Wrap a function that waits. With a GPU the stream waits for a transfer, not the host, so CUDA events time it.
        A wait inside another wait does not count twice.
        """

        @functools.wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            if self._timers is None or self._is_open:
                return function(*args, **kwargs)
            phase, started_at, self._is_open = self._timers.current()[0], time.monotonic(), True
            first = _recorded_event() if is_transfer and self._is_cuda else None
            try:
                return function(*args, **kwargs)
            finally:
                self._is_open = False
                if first is not None:
                    self._events.append((phase, first, _recorded_event()))
                else:
                    self._add(phase, time.monotonic() - started_at)

        return timed


def _recorded_event() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


class Recorder:
    """The figures of a step on this rank. It listens to the job's log and to Policy.update.

    A step is logged when its lap of the timers ends, so its wall time is the time between two calls of log_step.
    """

    def __init__(self, job: Job, waits: Waits) -> None:
        self._waits = waits
        self._metrics: StepMetrics = {}
        self._mini_batches: list[list[PackedBatch]] = []
        self.groups: Sequence[Group] = ()
        assert job.policy is not None
        _call_first(job.policy, "update", lambda mini_batches: self._mini_batches.extend(map(list, mini_batches)))
        _call_first(job.log, "log_samples", lambda step, groups, decode: setattr(self, "groups", groups))
        _call_first(job.log, "log_step", self._end_step)

    def start(self) -> None:
        """Start the clock of the first step."""
        self._waits.take()
        self._mark = time.perf_counter()

    def _end_step(self, step: int, metrics: StepMetrics) -> None:
        now = time.perf_counter()
        self._wall, self._mark = now - self._mark, now
        self._metrics, self._step_waits = metrics, self._waits.take()

    def take(self) -> dict[str, Any]:
        """Return the last step's seconds and peak GiB by phase, bytes, and sizes of the micro-batches."""

        def below(prefix: str, suffix: str = "") -> dict[str, float]:
            return {
                name.removeprefix(prefix).removesuffix(suffix): value
                for name, value in self._metrics.items()
                if name.startswith(prefix) and name.endswith(suffix)
            }

        mini_batches, self._mini_batches = self._mini_batches, []
        phases = {name: value for name, value in below("seconds/").items() if name not in ("step", "idle")}
        return {
            "wall": self._wall,  # seconds, measured independently of the timers
            "phases": phases,
            "waits": self._step_waits,
            "memory": below("memory/", "_gib"),
            # bytes that the sync received from other ranks
            "received": self._metrics.get("sync/received_mib", 0.0) * 2**20,
            # per mini-batch: micro-batches, tokens per micro-batch, total without padding
            "micro_batches": [(len(mini), mini[0].num_tokens, sum(map(_filled, mini))) for mini in mini_batches],
        }


def _call_first(owner: Any, name: str, act: Callable[..., object]) -> None:
    """Call `act` with the arguments of each call of the owner's method, before the method."""
    method = getattr(owner, name)

    def both(*args: Any) -> Any:
        act(*args)
        return method(*args)

    setattr(owner, name, both)


def _replace_sampling(job: Job, lengths: Lengths) -> None:
    layout, config = job.runtime.layout, job.config
    vocab = min(job.model.shape.vocab, len(read_tokenizer(job.model.folder, job.model.shape.vocab)))
    made = SyntheticEngine(
        job.colocation.engine, lengths, vocab=vocab, rank=job.runtime.rank, world_size=layout.world_size
    )
    job.colocation.engine = job.rollouts.engine = cast(Engine, made)
    names = [function.name for function in config.rewards.functions]
    job.rollouts.scorer = cast(Scorer, RandomRewards(names, has_steps=config.algorithm.adv_type == "grpo_process"))


@contextmanager
def _synchronized(phase: str) -> Iterator[None]:
    torch.cuda.synchronize()
    yield
    torch.cuda.synchronize()


def _filled(batch: PackedBatch) -> int:
    """Return the number of tokens without padding. Padding is the last segment and has no sample."""
    return int(batch.cu_seqlens[len(batch.sample_indices)])


def _about(job: Job) -> dict[str, Any]:
    assert job.policy is not None
    layout, device = job.runtime.layout, job.runtime.device
    itemsize = torch.tensor([], dtype=job.model.dtype).element_size()
    traffic = plan_transfers(
        job.policy.shards, job.colocation.engine.shard_layout, ranks_per_node=ranks_per_node()
    ).traffic(itemsize)
    return {
        "device": device.type,
        "card": torch.cuda.get_device_name(device.torch_device) if device.is_cuda else None,
        "world_size": layout.world_size,
        "ranks_per_node": ranks_per_node(),
        "layout": {name: getattr(layout, name) for name in ("tp", "pp", "vpp", "cp", "dp", "ep", "etp", "order")}
        | {"engine_tp": job.config.rollout.tp},
        "threads": torch.get_num_threads(),
        "sync_bytes": traffic.same_rank + traffic.moved,
    }


def _rates(job: Job) -> dict[str, float | None]:
    """Measure all devices at the same time: FLOP/s of a matmul, bytes/s copied and received."""
    device, dtype = job.runtime.device, job.model.dtype
    side = SIDES[device.type]
    a = torch.randn(side, side, device=device.torch_device, dtype=dtype)
    source = torch.zeros(BYTES_COPIED, dtype=torch.uint8, device=device.torch_device)
    target = torch.zeros_like(source)
    parcel = torch.zeros(BYTES_SENT, dtype=torch.uint8, device=device.torch_device)

    def best(act: Callable[[], object], seconds: float) -> float:
        """Return the seconds of the fastest of at least five runs, after one warm-up run."""
        act()
        dist.barrier()
        timed = harness.timed(act, functools.partial(finish, device.torch_device))
        until, found = time.perf_counter() + seconds, list[float]()
        while len(found) < 5 or time.perf_counter() < until:
            found.append(timed()["seconds"])
        return min(found)

    rates: dict[str, float | None] = {
        "matmul": 2 * side**3 / best(lambda: torch.matmul(a, a), SECONDS_OF_MATMUL),
        "copy": 2 * BYTES_COPIED / best(lambda: target.copy_(source), 0.0),
        "link": None,
    }
    if job.runtime.layout.world_size > 1:
        rates["link"] = BYTES_SENT / best(lambda: dist.broadcast(parcel, 0), 0.0)
    return rates
