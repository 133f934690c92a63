"""The pool's queue of checks: which samples wait for which check, and the verdicts of the accuracy reward so far.

Invariants: of two checks with the same texts one is queued or under way at a time; a check in the queue has samples. Not for
several threads at once: the pool's lock guards it.
"""

from collections import OrderedDict, deque
from collections.abc import Collection, Hashable
from dataclasses import dataclass

from grpo_mega.rewards.api import Score

CAPACITY = 10_000  # verdicts; some megabytes

Texts = tuple[str, str]  # what stands for the gold answer and for the answer, on which alone a verdict depends


@dataclass(eq=False)
class Check:
    """One function on the samples that must get the same score: one, unless `texts` are those on which it depends. With a
    `group`, one call on all its samples, which each get a score of their own."""

    name: str
    keys: list[Hashable]
    texts: Texts | None = None
    group: bytes | None = None  # what the call needs beside the samples, pickled
    num_deaths: int = 0  # workers that ended during it
    failure: Score | None = None  # the score if the gold answer alone can be checked, which is the next thing to try


class Checks:
    """Checks to be done, first come, first served."""

    def __init__(self, capacity: int = CAPACITY) -> None:
        self._queue: deque[Check] = deque()
        self._shared: dict[Texts, Check] = {}  # queued or under way
        self._verdicts: OrderedDict[Texts, Score] = OrderedDict()  # the most recently used ones are last
        self._failures: dict[Texts, Score] = {}  # of checks that hung or crashed in this rollout
        self._refused: dict[str, Score] = {}  # by gold answer that itself hung or crashed in this rollout
        self._capacity = capacity

    def known(self, texts: Texts) -> Score | None:
        """Return the Score of these texts, if it is remembered."""
        if texts in self._verdicts:
            self._verdicts.move_to_end(texts)
            return self._verdicts[texts]
        return self._refused.get(texts[0]) or self._failures.get(texts)

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

    def again(self, check: Check) -> None:
        """Queue a check that was under way before all others, unless all its samples were discarded."""
        if check.keys:
            self._queue.appendleft(check)
        else:
            self._end(check)

    def finish(self, check: Check, score: Score, *, is_own: bool) -> list[Hashable]:
        """Return all samples of a check that has ended. The function's own score is remembered; what it gets for a hang or a
        crash is remembered until `end_rollout`, since the cause may have been the machine."""
        self._end(check)
        if check.texts is not None:
            if not is_own:
                self._failures[check.texts] = score
            else:
                self._verdicts[check.texts] = score
                if len(self._verdicts) > self._capacity:
                    self._verdicts.popitem(last=False)
        return check.keys

    def refuse_gold(self, gold: str, score: Score) -> list[Check]:
        """Let every check of this gold answer have this score until `end_rollout`. Return those that were queued."""
        self._refused[gold] = score
        refused = [check for check in self._queue if check.texts is not None and check.texts[0] == gold]
        self._queue = deque(check for check in self._queue if check not in refused)
        for check in refused:
            self._end(check)
        return refused

    def end_rollout(self) -> None:
        """Forget hangs and crashes."""
        self._failures, self._refused = {}, {}

    def forget(self, keys: Collection[Hashable]) -> None:
        """Drop the checks for which no other samples than these wait."""
        for check in (*self._queue, *self._shared.values()):
            check.keys = [key for key in check.keys if key not in keys]
        self._queue = deque(check for check in self._queue if check.keys)
        self._shared = {texts: check for texts, check in self._shared.items() if check.keys}

    def _end(self, check: Check) -> None:
        if check.texts is not None and self._shared.get(check.texts) is check:
            del self._shared[check.texts]
