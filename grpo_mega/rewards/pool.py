"""A pool of killable processes that score samples while sampling continues.

`submit` queues a sample and does not block. `collect` waits for all samples and returns a RewardResult for each. Every
check (one sample, one function) ends within `deadline_s` of its start, with SIGKILL if necessary. A check that hangs,
crashes or raises affects only its own score. No worker outlives the pool or its process. One daemon thread drives each
worker; the methods only touch queues.

The accuracy verdict depends only on two short texts, the normalized answers, so `submit` tries `quick` and the cached
verdicts first. Samples with the same texts share one check, whatever its outcome. `collect` computes `len` and `cosine`
from verdicts and lengths. If a check hangs, the pool checks the gold answer alone. If that hangs too, every sample with
this gold answer gets "gold_unparsable".

If a worker ends during a check, the check is retried once in another worker, because the system may have killed the
first. The second time the response is to blame. If a reward-server check takes too long, the response is not to blame:
it gets no score.

A function with TRL's signature is called once per group; `submit_group` announces the groups. Only workers know which
user functions have it, so these are queued per sample and per group, and a worker skips what does not apply.
"""

import contextlib
import hashlib
import pickle
from collections import Counter, deque
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from grpo_mega.config.data import RewardsConfig
from grpo_mega.errors import RewardError
from grpo_mega.rewards.api import Extras, RewardResult, Score, result_of
from grpo_mega.rewards.math.accuracy import CUT, GOLD_UNPARSABLE, quick
from grpo_mega.rewards.math.answer import locate_answer, whole_turn
from grpo_mega.rewards.registry import ACCURACY, BUILT_IN, FINISH_REASON, JUDGED, OF_PROGRAMS, OF_SERVERS
from grpo_mega.rewards.shaping import cosine, len_reward
from grpo_mega.rewards.worker import MATH_VERIFY, CheckJob, Outcome, Request
from grpo_mega.workers.pool import Worker, WorkerEnded, WorkerPool

CAPACITY = 10_000  # number of verdicts to remember; takes a few megabytes

Texts = tuple[str, str]  # digests or texts of the gold answer and the answer; a verdict depends only on them


@dataclass(eq=False)
class Check:
    """One call of a function, whose samples all get the same score.

    A check without `texts` has one sample. With `texts`, all samples with these texts share it. With `group`, it is one
    call for all samples of the group, and each sample gets its own score.
    """

    name: str
    keys: list[Hashable]
    texts: Texts | None = None
    group: bytes | None = None  # pickled arguments of the call that do not belong to one sample
    num_deaths: int = 0  # number of workers that ended during this check
    # Set while only the gold answer is checked: the score for the samples if that check succeeds.
    failure: Score | None = None


class Checks:
    """A first-in, first-out queue of checks.

    At most one check with the same texts is queued or running at a time. Callers hold the pool's lock.
    """

    def __init__(self, capacity: int = CAPACITY) -> None:
        self._queue: deque[Check] = deque()
        self._shared: dict[Texts, Check] = {}  # checks that are queued or running
        self._verdicts: dict[Texts, Score] = {}  # most recently used last
        self._failures: dict[Texts | str, Score] = {}  # by texts or gold answer; checks that hung or crashed
        self._capacity = capacity

    def known(self, texts: Texts) -> Score | None:
        """Return the remembered Score of these texts; None if there is none."""
        if score := self._verdicts.pop(texts, None):
            self._verdicts[texts] = score
        return score or self._failures.get(texts[0]) or self._failures.get(texts)

    def add(self, check: Check) -> None:
        """Queue a check. If a check with the same texts exists, add the samples to it instead."""
        shared = check if check.texts is None else self._shared.setdefault(check.texts, check)
        if shared is check:
            self._queue.append(check)
        else:
            shared.keys += check.keys

    def next(self, waiting: Collection[Hashable]) -> Check | None:
        """Return the check to start now, without the samples that no longer wait; None if no check is left."""
        while self._queue:
            check = self._queue.popleft()
            left = [key for key in check.keys if key in waiting]
            check.keys = left if check.group is None or left == check.keys else []
            if check.keys:
                return check
            self._end(check)
        return None

    def again(self, check: Check) -> None:
        """Put a started check at the front of the queue."""
        self._queue.appendleft(check)

    def finish(self, check: Check, score: Score, *, is_own: bool) -> list[Hashable]:
        """Return all samples of a check that has ended, and remember its score.

        A score from the function itself is kept. The score of a hang or crash is kept until `end_rollout`, because the
        machine may have been the cause.
        """
        self._end(check)
        if check.texts is not None:
            (self._verdicts if is_own else self._failures)[check.texts] = score
        if len(self._verdicts) > self._capacity:
            del self._verdicts[next(iter(self._verdicts))]
        return check.keys

    def refuse_gold(self, gold: str, score: Score) -> list[Check]:
        """Give this score to every check of this gold answer until `end_rollout`. Return the checks that were
        queued.
        """
        self._failures[gold] = score
        refused = [check for check in self._queue if check.texts is not None and check.texts[0] == gold]
        self._queue = deque(check for check in self._queue if check not in refused)
        for check in refused:
            self._end(check)
        return refused

    def end_rollout(self) -> None:
        """Forget hangs and crashes."""
        self._failures = {}

    def _end(self, check: Check) -> None:
        if check.texts is not None and self._shared.get(check.texts) is check:
            del self._shared[check.texts]


COSINE, LENGTH = "cosine", "len"  # computed from the accuracy verdict
# Seconds between looks at the progress while results are awaited, and between checks that an idle worker is still
# alive.
SECONDS_BETWEEN_LOOKS = 1.0


@dataclass
class _Pending:
    payload: bytes
    length: int  # characters of the response
    group: Sequence[Hashable] = ()  # keys of the complete group; empty until then
    outcomes: dict[str, Score] = field(default_factory=dict)  # by function
    errors: dict[str, str] = field(default_factory=dict)  # exceptions by function


class RewardPool(WorkerPool):
    """Run reward functions in worker processes; a context manager.

    `rewards` must have passed registry.check_rewards. Its `deadline_s` starts when a worker receives the check, so
    queueing and startup do not count. user_code.py describes `code_dir`. A pool without workers is for a rank that
    submits nothing.

    The workers start immediately, in the background. If a start fails, the next `submit` or `collect` raises
    RewardError.
    """

    def __init__(self, rewards: RewardsConfig, *, code_dir: Path | None = None, has_workers: bool = True) -> None:
        self._rewards, self._code_dir = rewards, code_dir
        self._weights = {function.name: function.weight for function in rewards.functions}
        self._factors = frozenset(function.name for function in rewards.functions if function.multiplies)
        self._options: dict[str, dict[str, Any]] = {one.name: dict(one.options) for one in rewards.functions}
        self._is_judged = not JUDGED.isdisjoint(self._weights)
        self._in_workers = [name for name in self._weights if name not in JUDGED]
        self._num_checks = len(self._in_workers) + self._is_judged  # checks of a sample
        self._maybe_of_groups = frozenset(name for name in self._in_workers if name not in BUILT_IN)
        super().__init__(
            "reward workers",
            CheckJob(code_dir, rewards, is_replacement=False),
            [CheckJob.__module__, *([MATH_VERIFY] if self._is_judged else [])],
        )
        self.counters: Counter[str] = Counter(killed_workers=0)  # checks by verdict, "killed_workers" and "retried"
        self.first_error: str | None = None  # the first exception or crash since the start, with the function's name
        self._checks = Checks()
        self._pending: dict[Hashable, _Pending] = {}
        self._unfinished = 0  # outcomes that are still missing
        for _ in range(rewards.num_workers if has_workers and rewards.functions else 0):
            self.keep(self._run_checks)

    @property
    def has_functions(self) -> bool:
        return bool(self._weights)

    @property
    def worker_pids(self) -> list[int]:
        """The process ids of the current workers."""
        return [worker.pid for worker in self.workers]

    def wait_until_ready(self) -> None:
        """Wait until a worker has imported all functions. Raises RewardError if the workers cannot start."""
        with self.changed:
            self.changed.wait_for(lambda: self.workers or self.failure or not self._threads)
            self._raise_failure()

    def submit(
        self,
        key: Hashable,
        prompt: str,
        response: str,
        answer: str,
        extras: Extras,
        length: int | None = None,
    ) -> None:
        """Queue one sample for all functions. `key` must be new; `collect` returns the result under it.

        `length` is the number of characters for `len` and `cosine`; None: all of the response.
        """
        assert self._threads, "a pool without workers"
        score, texts = None, None  # the accuracy Score if it is clear without a check, else the texts that determine it
        if self._is_judged:
            turn, reason = whole_turn(response, extras), extras.get(FINISH_REASON)
            score, texts = quick(turn, answer, reason, **self._options.get(ACCURACY, {}))
            if score is None and texts is None:
                marked = None
                if reason != CUT:
                    with contextlib.suppress(Exception):  # the check in the worker meets the same error and fails
                        marked = locate_answer(turn)[0]
                texts = _digest(answer), _digest(turn if marked is None else marked, reason)
        is_known = score is not None and not self._in_workers
        payload = b"" if is_known else pickle.dumps((prompt, response, answer, extras))
        with self.changed:
            self._raise_failure()
            if key in self._pending:
                raise ValueError(f"key {key!r} is submitted twice before a collect")
            self._pending[key] = _Pending(payload, len(response) if length is None else length)
            self._unfinished += self._num_checks
            if texts is not None:
                score = self._checks.known(texts)
            if score is not None:
                self._record(key, ACCURACY, score)
            elif self._is_judged:
                self._queue(Check(ACCURACY, [key], texts))
            for name in self._in_workers:
                self._queue(Check(name, [key]))

    def submit_group(
        self,
        keys: Sequence[Hashable],
        given: Mapping[str, Any],
        token_ids: Sequence[list[int]],
        conversations: Sequence[list[dict[str, Any]]] = (),
    ) -> None:
        """Queue the functions that take a whole group. All samples of the group must have been submitted.

        `given` and `conversations` are arguments of registry.call_group. A sample without a group when results are
        collected is its own group.
        """
        if not self._maybe_of_groups and LENGTH not in self._weights:
            return
        group = pickle.dumps((given, token_ids, conversations))
        with self.changed:
            for key in keys:
                self._pending[key].group = keys
            for name in self._maybe_of_groups:
                self._queue(Check(name, list(keys), group=group))

    def discard(self, keys: Collection[Hashable]) -> None:
        """Forget samples submitted since the last collect.

        A check of such a sample that has started still finishes, but does not count. So never reuse these keys.
        """
        with self.changed:
            forgotten = {key: self._pending.pop(key) for key in keys}
            self._unfinished -= sum(self._num_checks - len(sample.outcomes) for sample in forgotten.values())

    def collect(self, on_progress: Callable[[], None] = lambda: None) -> dict[Any, RewardResult]:
        """Wait for all samples submitted since the last collect; return their results in the order of submission.

        The caller's thread calls `on_progress()` whenever checks have finished. Raises RewardError if the workers
        cannot start.
        """
        for key in [key for key, sample in self._pending.items() if not sample.group]:
            self.submit_group([key], {}, [[]])
        with self.changed:
            while (before := self._unfinished) and self.failure is None:
                self.changed.wait(SECONDS_BETWEEN_LOOKS)
                if self._unfinished < before:
                    on_progress()
            self._raise_failure()
            pending, self._pending = self._pending, {}
            self._checks.end_rollout()
        for key, sample in pending.items() if self._is_judged else ():
            judged = sample.outcomes[ACCURACY]
            if COSINE in self._weights:
                sample.outcomes[COSINE] = cosine(judged, sample.length, **self._options[COSINE])
            if LENGTH in self._weights:
                keys = [one for one in sample.group if one in pending]
                judgements = [pending[one].outcomes[ACCURACY] for one in keys]
                scores = len_reward(judgements, [pending[one].length for one in keys])
                sample.outcomes[LENGTH] = scores[keys.index(key)]
            if error := sample.errors.pop(ACCURACY, None):
                sample.errors |= {name: error for name in self._weights if name in JUDGED}
        return {key: result_of(self._weights, one.outcomes, one.errors, self._factors) for key, one in pending.items()}

    def _raise_failure(self) -> None:
        if self.failure is not None:
            raise RewardError(self.failure)

    def _queue(self, check: Check) -> None:
        self._checks.add(check)
        self.changed.notify_all()

    def _record(self, key: Hashable, name: str, score: Score, error: str | None = None) -> None:
        """Record the outcome of a check. `error` is the text of its exception, if any."""
        if (sample := self._pending.get(key)) is None:  # the sample was discarded
            return
        sample.outcomes[name] = score
        self.counters[score.verdict] += 1
        if error is not None:
            sample.errors[name] = error
            self.first_error = self.first_error or f"{name}: {error}"
        self._unfinished -= 1
        if not self._unfinished:
            self.changed.notify_all()

    # The worker threads run everything below.

    def _run_checks(self, worker: Worker) -> None:
        """Send checks to the worker until the worker ends or the pool closes."""
        with self.changed:
            self.job = CheckJob(self._code_dir, self._rewards, is_replacement=True)
            self._maybe_of_groups = worker.ready
            self.changed.notify_all()
        while (next_check := self._next_check(worker)) is not None:
            check, request = next_check
            try:
                outcomes, problem = worker.run(request, self._rewards.deadline_s), ""
            except WorkerEnded as ended:
                outcomes, problem = None, f"{check.name}: the worker process ended with {ended}"
            with self.changed:
                if outcomes is not None:
                    is_own = check.failure is None and outcomes[0][1] is None
                    self._give(check, outcomes if check.failure is None else [(check.failure, None)], is_own=is_own)
                    continue
                check.num_deaths += bool(problem)
                if problem and check.num_deaths == 1:
                    self.counters["retried"] += 1
                    self._again(check)
                elif problem:
                    self.first_error = self.first_error or problem
                    self._blame(check, Score(None if check.name in OF_PROGRAMS else 0.0, "error"), problem)
                else:
                    self.counters["killed_workers"] += 1
                    self._blame(check, Score(None if check.name in OF_SERVERS | OF_PROGRAMS else 0.0, "timeout"))
            return

    def _next_check(self, worker: Worker) -> tuple[Check, Request] | None:
        """Wait for a check, and return it with its samples; None if the worker has ended or the pool is closed."""
        with self.changed:
            while self.failure is None:
                if (check := self._checks.next(self._pending)) is None:
                    self.changed.wait(SECONDS_BETWEEN_LOOKS)
                elif (check.group is not None) == (check.name in worker.ready):
                    payloads = [self._pending[key].payload for key in (check.keys if check.group else check.keys[:1])]
                    if check.failure is not None:
                        _, _, answer, _ = pickle.loads(payloads[0])
                        payloads = [pickle.dumps(("", answer, answer, {}))]
                    return check, (check.name, payloads, check.group)
                if worker.has_ended:
                    break
        return None

    # The methods below run with the lock held.

    def _blame(self, check: Check, score: Score, problem: str = "") -> None:
        """Give this score to a check that hung or crashed. First find out whether the gold answer is to blame."""
        if check.texts is None:
            late = problem or f"no answer within rewards.deadline_s={self._rewards.deadline_s:g}"
            self._give(check, [(score, late if score.value is None else None)], is_own=False)
        elif check.failure is not None:
            for refused in (check, *self._checks.refuse_gold(check.texts[0], GOLD_UNPARSABLE)):
                self._give(refused, [(GOLD_UNPARSABLE, None)], is_own=False)
        elif known := self._checks.known(check.texts):
            self._give(check, [(known, None)], is_own=False)
        else:
            check.failure, check.num_deaths = score, 0
            self._again(check)

    def _again(self, check: Check) -> None:
        self._checks.again(check)
        self.changed.notify_all()

    def _give(self, check: Check, outcomes: list[Outcome], *, is_own: bool) -> None:
        """Record one outcome per sample, or one outcome for all samples. `is_own`: the function itself returned the
        score.
        """
        keys = check.keys if check.group is not None else self._checks.finish(check, outcomes[0][0], is_own=is_own)
        for key, (score, error) in zip(keys, outcomes * (len(keys) if len(outcomes) == 1 else 1), strict=True):
            self._record(key, check.name, score, error)


def _digest(*parts: object) -> str:
    """Return a digest that identifies a text too long to keep."""
    return hashlib.blake2b(repr(parts).encode(errors="backslashreplace"), digest_size=16).hexdigest()
