"""One reward worker, forked by `template`; never imports torch by itself.

Reads checks from one pipe and writes their outcomes to another (see `protocol`); its standard input is empty, and what a reward
function prints goes to standard error. It ends when its input does, and with the template, even if a check hangs.
"""

import contextlib
import os
import pickle
import resource
import traceback
from typing import Any, BinaryIO

from grpo_mega.rewards import registry
from grpo_mega.rewards.api import NoScore, RewardFunction, as_score
from grpo_mega.rewards.workers.protocol import FAILED, RAISED, READY, SCORED, Setup, frame, read_frame
from grpo_mega.text import well_formed

_MAX_ERROR_CHARS = 2000
_OUT_OF_MEMORY_STATUS = 71


def work(setup: Setup, requests: BinaryIO, replies: BinaryIO, is_replacement: bool) -> None:
    """Runs checks until the end of the input; `is_replacement` of a worker that ended in the midst of the run."""
    _limit_memory(setup.memory_limit_bytes)
    try:
        functions = {name: registry.bind(name, options, setup.step_splitter) for name, options in setup.functions.items()}
        if "reward_model" in functions and not is_replacement:  # a server that restarts must not end the run
            from grpo_mega.rewards.reward_model import check_reachable

            check_reachable(functions["reward_model"])
    except BaseException as error:
        _send(replies, (FAILED, describe(error)))
        return
    _send(replies, (READY,))
    while (name := read_frame(requests)) is not None and (check := read_frame(requests)) is not None:
        _send(replies, _run(functions[name.decode()], check))


def _run(function: RewardFunction, check: bytes) -> tuple[Any, ...]:
    try:
        prompt, response, answer, extras = pickle.loads(check)
        score = as_score(function(prompt, response, answer, extras), response)
        return (SCORED, score.value, score.verdict, tuple((step.end, step.value) for step in score.steps))
    except MemoryError:
        os._exit(_OUT_OF_MEMORY_STATUS)  # the heap is full of what did not fit; a fresh process is the way back
    except BaseException as error:  # SystemExit and the like end the check, not the worker
        return (RAISED, describe(error), None if isinstance(error, NoScore) else 0.0)


def _send(replies: BinaryIO, message: tuple[Any, ...]) -> None:
    try:
        replies.write(frame(pickle.dumps(message)))
        replies.flush()
    except BrokenPipeError:
        os._exit(0)  # the pool is gone


def _limit_memory(limit_bytes: int | None) -> None:
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if limit_bytes is not None:
        with contextlib.suppress(OSError, ValueError):  # some systems refuse RLIMIT_AS; the deadline still holds
            resource.setrlimit(resource.RLIMIT_AS, (limit_bytes, limit_bytes))


def describe(error: BaseException) -> str:
    """Type, text and place of an exception."""
    try:
        text = f"{type(error).__name__}: {error}"
    except Exception:
        text = type(error).__name__
    frames = traceback.extract_tb(error.__traceback__)
    place = f" (in {frames[-1].name}, {os.path.basename(frames[-1].filename)}:{frames[-1].lineno})" if frames else ""
    return well_formed(text[:_MAX_ERROR_CHARS]) + place
