"""One reward worker: a process, forked by the fork server, that runs one check at a time. It never imports torch itself.

After importing all functions, the worker sends the names of the functions that take groups, or the reason why it cannot start.
For each request (function name, pickled samples, pickled group data or None) it sends the outcome of every sample. The worker
ends with the connection or the fork server, even during a check that hangs.
"""

import contextlib
import importlib
import os
import pickle
import resource
import signal
import sys
import traceback
from dataclasses import dataclass
from multiprocessing import forkserver
from multiprocessing.connection import Connection

from grpo_mega.config.rewards import RewardsConfig
from grpo_mega.processes import die_with_parent
from grpo_mega.rewards import registry, trl_signature
from grpo_mega.rewards.api import NoScore, RewardFunction, Score, as_score
from grpo_mega.text import well_formed

ACCURACY = "accuracy"
JUDGED = frozenset({ACCURACY, "len", "cosine"})  # need the accuracy verdict, which workers compute once for all of them
GUARDIAN, WARM = "grpo_mega.rewards.workers.guardian", "grpo_mega.rewards.workers.warm"  # modules that the fork server preloads
MEMORY_LIMIT_BYTES = 4 << 30  # address space limit of a worker
_MAX_ERROR_CHARS = 2000
_OUT_OF_MEMORY_STATUS = 71

Outcome = tuple[Score, str | None]  # score, and the text of the exception if any
Request = tuple[str, list[bytes], bytes | None]


@dataclass(frozen=True)
class Job:
    """The task of a worker, sent to it through the fork server."""

    rewards: RewardsConfig
    is_replacement: bool  # True if it replaces a worker that ended during the run

    def _bootstrap(self, parent_sentinel: int) -> int:
        """Run the job in the forked process and return its exit status. The fork server calls this method by name."""
        inherited = forkserver.get_inherited_fds()
        assert inherited
        os.close(forkserver._forkserver._forkserver_alive_fd)  # type: ignore[attr-defined]  # only the trainer may keep it open
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        os.setsid()  # gives the worker a process group, so the pool can kill whatever a check leaves behind
        with contextlib.suppress(OSError):
            die_with_parent(os.getppid())
        for limit, num_bytes in ((resource.RLIMIT_CORE, 0), (resource.RLIMIT_AS, MEMORY_LIMIT_BYTES)):
            with contextlib.suppress(OSError, ValueError):  # some systems refuse RLIMIT_AS; the deadline still holds
                resource.setrlimit(limit, (num_bytes, num_bytes))
        # These errors mean that the pool is gone.
        with contextlib.suppress(EOFError, BrokenPipeError), Connection(inherited[0]) as connection:
            self._serve(connection)
        return 0

    def _serve(self, connection: Connection) -> None:
        try:
            functions = self._import()
        except BaseException as error:
            connection.send(describe(error))
            return
        connection.send(frozenset(name for name, function in functions.items() if trl_signature.takes_groups(function)))
        forms = {f.name: "text" if f.name in registry.BUILT_IN else f.completions for f in self.rewards.functions}
        while True:
            name, samples, group = connection.recv()
            connection.send(_run(functions[name], samples, group, forms.get(name, "text")))

    def _import(self) -> dict[str, RewardFunction]:
        if GUARDIAN not in sys.modules:  # fork servers silently skip modules that they cannot import
            raise ImportError("a new Python process cannot import grpo_mega; install it, or set PYTHONPATH to its folder")
        functions: dict[str, RewardFunction] = {}
        wanted = {function.name: function.options for function in self.rewards.functions}
        if not JUDGED.isdisjoint(wanted):
            wanted.setdefault(ACCURACY, {})
        for name, options in wanted.items():
            functions[name] = registry.bind(name, options, self.rewards.step_splitter)
            if name == ACCURACY:
                importlib.import_module(WARM)
            elif name == "reward_model" and not self.is_replacement:  # a restarting server must not end the run
                from grpo_mega.rewards.reward_model import check_reachable

                check_reachable(options)
        return functions


def _run(function: RewardFunction, pickled: list[bytes], group: bytes | None, form: str) -> list[Outcome]:
    try:
        samples = [pickle.loads(sample) for sample in pickled]
        if group is None:
            returned = [function(*samples[0])]
        else:
            given, token_ids = pickle.loads(group)
            returned = trl_signature.call(function, samples, given, token_ids, form)
        return [_outcome(value, response) for value, (_, response, _, _) in zip(returned, samples, strict=True)]
    except MemoryError:
        os._exit(_OUT_OF_MEMORY_STATUS)  # the heap is full, so only a fresh process can continue
    except BaseException as error:  # SystemExit and similar end the check, not the worker
        return [_failed(error)] * len(pickled)


def _outcome(returned: object, response: str) -> Outcome:
    try:
        return as_score(returned, response), None
    except Exception as error:
        return _failed(error)


def _failed(error: BaseException) -> Outcome:
    return Score(None if isinstance(error, NoScore) else 0.0, "error"), describe(error)


def describe(error: BaseException) -> str:
    """Return the type, text and location of an exception."""
    try:
        text = f"{type(error).__name__}: {error}"
    except Exception:
        text = type(error).__name__
    frames = traceback.extract_tb(error.__traceback__)
    place = f" (in {frames[-1].name}, {os.path.basename(frames[-1].filename)}:{frames[-1].lineno})" if frames else ""
    return well_formed(text[:_MAX_ERROR_CHARS]) + place
