"""The pool's queue of checks, the samples that wait for each check, and the accuracy verdicts so far."""

from collections import deque
from collections.abc import Collection, Hashable
from dataclasses import dataclass

from grpo_mega.rewards.api import Score

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

    At most one check with the same texts is queued or running at a time. Every queued check has samples. The class has
    no lock: callers hold the pool's lock.
    """

    def __init__(self, capacity: int = CAPACITY) -> None:
        self._queue: deque[Check] = deque()
        self._shared: dict[Texts, Check] = {}  # checks that are queued or running
        self._verdicts: dict[Texts, Score] = {}  # most recently used last
        self._failures: dict[Texts | str, Score] = {}  # by texts or gold answer; checks that hung or crashed
        self._capacity = capacity

    def known(self, texts: Texts) -> Score | None:
        """Return the remembered Score of these texts; None if there is none."""
        if texts in self._verdicts:
            self._verdicts[texts] = self._verdicts.pop(texts)
            return self._verdicts[texts]
        return self._failures.get(texts[0]) or self._failures.get(texts)

    def add(self, check: Check) -> None:
        """Queue a check. If a check with the same texts exists, add the samples to it instead."""
        shared = check if check.texts is None else self._shared.setdefault(check.texts, check)
        if shared is check:
            self._queue.append(check)
        else:
            shared.keys += check.keys

    def next(self) -> Check | None:
        """Return the check to start now; None if the queue is empty."""
        return self._queue.popleft() if self._queue else None

    def again(self, check: Check) -> None:
        """Put a started check at the front of the queue, unless all its samples were discarded."""
        if check.keys:
            self._queue.appendleft(check)
        else:
            self._end(check)

    def finish(self, check: Check, score: Score, *, is_own: bool) -> list[Hashable]:
        """Return all samples of a check that has ended, and remember its score.

        A score from the function itself is kept. The score of a hang or crash is kept until `end_rollout`, because the
        machine may have been the cause.
        """
        self._end(check)
        if check.texts is not None and is_own:
            self._verdicts[check.texts] = score
            if len(self._verdicts) > self._capacity:
                del self._verdicts[next(iter(self._verdicts))]
        elif check.texts is not None:
            self._failures[check.texts] = score
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

    def forget(self, keys: Collection[Hashable]) -> None:
        """Drop these samples, and the checks that have no other samples."""
        for check in (*self._queue, *self._shared.values()):
            check.keys = [key for key in check.keys if key not in keys]
        self._queue = deque(check for check in self._queue if check.keys)
        self._shared = {texts: check for texts, check in self._shared.items() if check.keys}

    def _end(self, check: Check) -> None:
        if check.texts is not None and self._shared.get(check.texts) is check:
            del self._shared[check.texts]
