"""End a run early: after a step if someone asks for it (StopRequest), or at once if it is stuck (HangWatch).

A thread on every rank watches the run. It ends a stuck run, and reports the collective in which each rank waits. If a
rank sees no progress on any rank for longer than its phase allows, it asks all other ranks for a report. Progress of
other ranks counts, because a rank that waits for a slow rank is not stuck. Rank 0 also asks if another rank's thread
sends no heartbeat, in any phase. Each rank answers from its watch thread with its phase, its last collective and its
position in the code, and writes the stacks of all its threads to RUN_DIR/hang/rank_N.txt. A rank that does not answer
is dead, stopped, or stuck outside of Python. The rank that asked prints the answers, groups equal ones, and exits with
EXIT_HANG. Launchers then end the other ranks. Nothing is saved, because a stuck policy may be half updated.

`recorder()` records the last collective of this rank: each function of torch.distributed records its start and its end.
It wraps the functions once and permanently. It must run before a library imports them by name, as Megatron does. A
record costs about a microsecond.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import os
import platform
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.distributed import Store

from grpo_mega.distributed.launch import answer_interrupt, end_now, signals_handled
from grpo_mega.distributed.messages import seal_value, unseal_value
from grpo_mega.errors import EngineError
from grpo_mega.paths import HANG, STOP_FILE
from grpo_mega.tracking.progress import Timers

EXIT_HANG = 3
LONGEST_PAUSE_S = 5.0  # pause between checks; each costs a few store requests per rank; must be below SECONDS_TO_ANSWER
SECONDS_TO_ANSWER = 10.0
SECONDS_AFTER_FIRST = 20.0  # other ranks wait longer than rank 0, so rank 0 asks first
SECONDS_TO_REPORT = 60.0  # if the rank that asked has not reported by then, another rank reports
SECONDS_TO_WRITE = 5.0
PACKAGE = Path(__file__).parents[1]


class StopRequest:
    """A request to stop between steps: SIGTERM or SIGINT to any rank, or a file RUN_DIR/stop.

    While it listens, the first signal sets a flag, and a second SIGINT ends the process.
    """

    def __init__(self, run_dir: Path) -> None:
        self._file = run_dir / STOP_FILE
        self._is_raised = False

    def listening(self, describe: Callable[[], str]) -> AbstractContextManager[None]:
        """Return a context that handles the signals. `describe` says after a Ctrl-C what the run does."""

        def handle(number: int) -> None:
            if number == signal.SIGINT:
                if self._is_raised:
                    end_now()
                answer_interrupt(describe())
            self._is_raised = True

        return signals_handled(handle)

    def requested(self) -> bool:
        """Return True if any rank got a signal or sees the file. The result is identical on all ranks."""
        flag = torch.tensor([int(self._is_raised or self._file.exists())])
        dist.all_reduce(flag, op=dist.ReduceOp.MAX)
        return bool(flag)

    def clear(self) -> None:
        """Remove the file, so the next start does not stop at once."""
        self._file.unlink(missing_ok=True)


class HangWatch:
    """Watches the run during the context."""

    def __init__(
        self,
        run_dir: Path,
        deadline_s: float,
        deadline_of_phase: Mapping[str, float],
        store: Store,
        rank: int,
        world_size: int,
        timers: Timers,
        last_checkpoint: Callable[[], str],
    ) -> None:
        """`last_checkpoint()` describes the last checkpoint for the report."""
        self._store: Store = store.clone()  # type: ignore[attr-defined]  # a store serves one thread at a time
        self._store.set_timeout(timedelta(seconds=SECONDS_TO_ANSWER))
        self._set(f"hang/node/{rank}", os.environ.get("SLURMD_NODENAME") or platform.node())
        self._rank, self._world_size = rank, world_size
        self._timers, self._last_checkpoint, self._folder = timers, last_checkpoint, run_dir / HANG
        self._deadline_s, self._deadline_of_phase = deadline_s, deadline_of_phase
        self._heard: dict[int, tuple[int, float]] = {}  # number of heartbeats and time of the last, by rank
        self._own_move = 0.0  # time of this rank's last progress that other ranks know of
        # Number of progress reports of all ranks, and time of the last.
        self._moves, self._job_moved = (
            0,
            time.monotonic(),
        )
        self._is_over = threading.Event()
        self._main_thread = threading.main_thread().ident
        self._thread = threading.Thread(target=self._watch, name="hang watch", daemon=True)

    def __enter__(self) -> HangWatch:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._is_over.set()
        self._thread.join()

    def _watch(self) -> None:
        has_answered = False
        store_answered = time.monotonic()
        others_report: float | None = None  # start of the wait for another rank to end the run
        while not self._is_over.wait(min(LONGEST_PAUSE_S, self._deadline_s / 10)):
            try:
                self._store.add(f"hang/beats/{self._rank}", 1)
                # Report this rank's progress since the last check, and record the time if any rank made progress.
                own_move = self._last_move()
                moves = self._store.add("hang/moves", int(own_move > self._own_move))
                self._own_move = own_move
                if moves > self._moves:
                    self._moves, self._job_moved = moves, time.monotonic()
                if not has_answered and self._store.check(["hang/asked"]):
                    self._answer()
                    has_answered = True
                reason = self._reason()
                others_report = (others_report or time.monotonic()) if reason else None
                if reason and (
                    self._store.add("hang/claims", 1) == 1
                    or time.monotonic() - (others_report or 0) > SECONDS_TO_REPORT
                ):
                    self._report(reason)
                store_answered = time.monotonic()
            except Exception as error:  # the store's process is dead or stopped, or this process is ending
                silence = time.monotonic() - store_answered
                if silence > self._deadline_s and not self._is_over.is_set():
                    problem = str(error).split("\n", 1)[0][:100]
                    self._end(f"no answer for {silence:.0f} s from the job's store ({problem})", [self._where()])

    def _reason(self) -> str | None:
        """Return why the run must end; None if it continues."""
        phase, _ = self._timers.current()
        limit = self._deadline_of_phase.get(phase, self._deadline_s) + (0 if self._rank == 0 else SECONDS_AFTER_FIRST)
        idle = time.monotonic() - max(self._last_move(), self._job_moved)
        if idle > limit:
            return f"no progress for {idle:.0f} s in {phase}"
        now = time.monotonic()
        for rank in range(1, self._world_size) if self._rank == 0 else ():
            beats = self._store.add(f"hang/beats/{rank}", 0)
            if self._heard.get(rank, (-1, 0.0))[0] != beats:
                self._heard[rank] = beats, now
        silent = [rank for rank, (_, when) in self._heard.items() if now - when > self._deadline_s]
        return f"no heartbeat from {_ranks(silent)} for {self._deadline_s:.0f} s" if silent else None

    def _last_move(self) -> float:
        """Return the time of the main thread's last progress: a phase, a collective or a beat."""
        return max(self._timers.current()[1], recorder().last_beat)

    def _answer(self) -> None:
        self._set(f"hang/{self._rank}", self._where())
        _attempt(self._write_stacks)

    def _write_stacks(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        with (self._folder / f"rank_{self._rank}.txt").open("w") as file:
            faulthandler.dump_traceback(file, all_threads=True)

    def _where(self) -> str:
        """Return the phase, the last collective, and the main thread's innermost line in this package.

        Add the innermost line of all if it is another.
        """
        phase, _ = self._timers.current()
        frame = sys._current_frames().get(self._main_thread or 0)
        stack = traceback.extract_stack(frame) if frame is not None else []
        ours = [f for f in stack if Path(f.filename).is_relative_to(PACKAGE)]
        places = [*ours[-1:], *(stack[-1:] if stack and stack[-1] not in ours[-1:] else [])]
        place = ", in ".join(f"{Path(f.filename).name}:{f.lineno} {f.name}" for f in places) or "nowhere"
        return f"{phase}, {recorder().last()}, at {place}"

    def _report(self, reason: str) -> None:
        """Ask all ranks, and end with one line per distinct answer with its ranks, rarest first."""
        try:
            self._store.set("hang/asked", "1")
            self._answer()
            ranks = range(self._world_size)
            until = time.monotonic() + SECONDS_TO_ANSWER
            while time.monotonic() < until and not self._store.check([f"hang/{rank}" for rank in ranks]):
                time.sleep(0.1)
            by_answer: dict[str, list[int]] = {}
            for rank in ranks:
                answer = self._try_get(f"hang/{rank}") or "no answer: dead, stopped, or stuck outside of Python"
                by_answer.setdefault(answer, []).append(rank)
            nodes = [self._try_get(f"hang/node/{rank}") or "" for rank in ranks]
            rarest_first = sorted(by_answer.items(), key=lambda item: len(item[1]))
            lines = [f"{_ranks(numbers, nodes)}: {answer}" for answer, numbers in rarest_first]
        except Exception as error:
            lines = [f"the other ranks cannot be asked ({str(error).splitlines()[0][:100]})", self._where()]
        self._end(reason, lines)

    def _try_get(self, key: str) -> str | None:
        if not self._store.check([key]):
            return None
        try:
            return str(unseal_value(key, self._store.get(key)))
        except EngineError as error:
            return str(error)

    def _set(self, key: str, text: str) -> None:
        self._store.set(key, seal_value(key, text))

    def _end(self, reason: str, lines: list[str]) -> NoReturn:
        """Print the report and end this process, even if something fails."""
        try:
            last, problem = _attempt(self._last_checkpoint)
            last = last or f"the last checkpoint cannot be read ({problem})"
            head = f"grpo-mega: {reason}, reported by rank {self._rank}; the run ends here"
            text = "\n  ".join([head, *lines, f"stacks are in {self._folder}; {last}"])
            _, problem = _attempt(partial(self._write_report, text + "\n"))
            if problem:
                text = "\n  ".join([head, *lines, f"stacks cannot be written to {self._folder} ({problem}); {last}"])
            _attempt(partial(print, text, file=sys.stderr, flush=True))
        finally:
            os._exit(EXIT_HANG)

    def _write_report(self, text: str) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        (self._folder / "report.txt").write_text(text)


def _attempt(act: Callable[[], str | None]) -> tuple[str | None, str]:
    """Return what `act` returns, and its problem, "" if it succeeded.

    Call it in a separate thread and wait at most SECONDS_TO_WRITE, because a file system may never answer.
    """
    outcome: tuple[str | None, str] = None, f"no answer in {SECONDS_TO_WRITE:.0f} s"

    def run() -> None:
        nonlocal outcome
        try:
            outcome = act(), ""
        except BaseException as error:
            outcome = None, str(error) or repr(error)

    thread = threading.Thread(target=run, name="hang report", daemon=True)
    thread.start()
    thread.join(SECONDS_TO_WRITE)
    return outcome


def _ranks(numbers: list[int], nodes: Sequence[str] = ()) -> str:
    """Join rank numbers, with ranges for consecutive ones: "rank 4" or "ranks 0-3, 5".

    `nodes` has names by rank, "" if not known. Add " on n1" if they are several.
    """
    runs: list[list[int]] = []
    for n in numbers:
        if runs and runs[-1][-1] == n - 1:
            runs[-1][1:] = [n]
        else:
            runs.append([n])
    text = ", ".join("-".join(map(str, run)) for run in runs)
    on = f" on {', '.join(sorted({nodes[n] or 'unknown' for n in numbers}))}" if len(set(nodes) - {""}) > 1 else ""
    return f"{'rank' if len(numbers) == 1 else 'ranks'} {text}{on}"


NAMES = (
    *("all_reduce", "all_gather", "all_gather_into_tensor", "_all_gather_base", "all_gather_object"),
    *("reduce_scatter_tensor", "_reduce_scatter_base", "all_to_all", "all_to_all_single", "broadcast"),
    *("barrier", "send", "recv", "isend", "irecv", "batch_isend_irecv"),
)


class Recorder:
    def __init__(self) -> None:
        self.last_beat = time.monotonic()  # time of the last progress
        self._on_beat: Callable[[str], None] | None = None
        self._name, self._arguments, self._is_done = "nothing yet", "", True

    def heartbeat(self, kind: str = "") -> None:
        """Record progress without a collective, such as the start of a "forward" pass. `kind` is for listeners.

        Only the main thread may call it, or a thread of autograd while the main thread waits for it. Work of a
        background thread counts as progress only if the main thread waits for the work and calls this. Otherwise the
        work would hide a stuck collective.
        """
        self.last_beat = time.monotonic()
        if self._on_beat is not None:
            self._on_beat(kind)

    @contextlib.contextmanager
    def on_heartbeat(self, on_beat: Callable[[str], None]) -> Iterator[None]:
        """Call `on_beat(kind)` at every beat during the context."""
        self._on_beat = on_beat
        try:
            yield
        finally:
            self._on_beat = None

    def last(self) -> str:
        """Describe the last collective: "in all_reduce of 16 float32 over 4 ranks", or "after ..." if it has
        returned.
        """
        return f"{'after' if self._is_done else 'in'} {self._name}{self._arguments}"

    def wrap(self, function: Callable[..., Any]) -> Callable[..., Any]:
        name = function.__name__

        @functools.wraps(function)
        def noted(*args: Any, **kwargs: Any) -> Any:
            values = (*args, *kwargs.values())
            tensor = next((v for v in values if isinstance(v, torch.Tensor)), None)
            group = next((v for v in values if isinstance(v, dist.ProcessGroup)), None)
            of = f" of {tensor.numel()} {str(tensor.dtype).removeprefix('torch.')}" if tensor is not None else ""
            over = f" over {group.size() if group is not None else 'all'} ranks"
            self._name, self._arguments, self._is_done = name, of + over, False
            self.last_beat = time.monotonic()
            result = function(*args, **kwargs)
            self._is_done = True
            return result

        return noted


@functools.cache
def recorder() -> Recorder:
    """Return the recorder of this process. The first call wraps torch.distributed's functions."""
    result = Recorder()
    for name in NAMES:
        setattr(dist, name, result.wrap(getattr(dist, name)))
    for name in ("isend", "irecv"):  # P2POp compares with the functions of its module
        setattr(dist.distributed_c10d, name, getattr(dist, name))
    return result
