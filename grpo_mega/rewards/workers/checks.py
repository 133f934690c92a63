"""The pool's queue of checks: which samples wait for which check, and the verdicts of the accuracy reward so far.

Invariants: of two checks with the same texts one is queued or under way at a time; a check in the queue has samples. Not for
several threads at once: the pool's lock guards it.
"""

from collections import OrderedDict, deque
from collections.abc import Collection, Hashable
from dataclasses import dataclass

from grpo_mega.rewards.api import Score

CAPACITY = 10_000  # verdicts; some megabytes

Texts = tuple[str, str]  # the normalized gold answer and answer, on which alone a verdict depends


@dataclass(eq=False)
class Check:
    """One function on the samples that must get the same score: one, unless `texts` are those on which it depends. With a
    `group`, one call on all its samples, which each get a score of their own."""

    name: str
    keys: list[Hashable]
    texts: Texts | None = None
    group: bytes | None = None  # what the call needs beside the samples, pickled


class Checks:
    """Checks to be done, first come, first served."""

    def __init__(self, capacity: int = CAPACITY) -> None:
        self._queue: deque[Check] = deque()
        self._shared: dict[Texts, Check] = {}  # queued or under way
        self._verdicts: OrderedDict[Texts, Score] = OrderedDict()  # the most recently used ones are last
        self._capacity = capacity

    def known(self, texts: Texts) -> Score | None:
        """Return the Score of these texts, if it is remembered."""
        if texts in self._verdicts:
            self._verdicts.move_to_end(texts)
        return self._verdicts.get(texts)

    def add(self, check: Check) -> None:
        """Queue a check, or have its samples wait for one with the same texts."""
        if check.texts is not None:
            like_it = self._shared.setdefault(check.texts, check)
            if like_it is not check:
                like_it.keys += check.keys
                return
        self._queue.append(check)

    def next(self) -> Check | None:
        """Return the check to begin with now; None if none waits."""
        return self._queue.popleft() if self._queue else None

    def finish(self, check: Check, score: Score | None) -> list[Hashable]:
        """Return the samples that have an outcome now that this check has ended. With the function's own `score` these are all
        its samples, and it is remembered; with None (it hung, crashed or raised) only the first, and the others wait again."""
        if check.texts is not None:
            if self._shared.get(check.texts) is check:
                del self._shared[check.texts]
            if score is not None:
                self._remember(check.texts, score)
        done = check.keys if score is not None else check.keys[:1]
        if others := check.keys[len(done) :]:
            self.add(Check(check.name, others, check.texts))
        return done

    def forget(self, keys: Collection[Hashable]) -> None:
        """Drop the checks for which no other samples than these wait."""
        for check in (*self._queue, *self._shared.values()):
            check.keys = [key for key in check.keys if key not in keys]
        self._queue = deque(check for check in self._queue if check.keys)
        self._shared = {texts: check for texts, check in self._shared.items() if check.keys}

    def _remember(self, texts: Texts, score: Score) -> None:
        self._verdicts[texts] = score
        if len(self._verdicts) > self._capacity:
            self._verdicts.popitem(last=False)
