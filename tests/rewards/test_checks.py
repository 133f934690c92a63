"""The queue of checks: shared and separate checks, remembered scores, and the bounded memory."""

from collections.abc import Collection, Hashable

from grpo_mega.rewards.api import Score
from grpo_mega.rewards.pool import Check, Checks

RIGHT, WRONG = Score(1.0, "correct"), Score(0.0, "wrong")
TIMEOUT, NO_GOLD = Score(0.0, "timeout"), Score(None, "gold_unparsable")


KEYS = range(10)


def _next(checks: Checks, waiting: Collection[Hashable] = KEYS) -> Check:
    check = checks.next(waiting)
    assert check is not None
    return check


def test_samples_with_the_same_texts_share_one_check_and_its_score() -> None:
    checks = Checks()
    for key, texts in enumerate([("x", "y"), ("x", "z"), ("x", "y")]):
        checks.add(Check("accuracy", [key], texts))
    checks.add(Check("format", [0]))
    first = _next(checks)
    checks.add(Check("accuracy", [3], ("x", "y")))  # added while the check is running
    assert checks.finish(first, RIGHT, is_own=True) == [0, 2, 3]
    assert checks.known(("x", "y")) == RIGHT and checks.known(("x", "z")) is None
    second, third = _next(checks), _next(checks)
    assert (second.keys, third.name, checks.next(KEYS)) == ([1], "format", None)
    assert checks.finish(second, WRONG, is_own=True) == [1] and checks.finish(third, RIGHT, is_own=True) == [0]


def test_a_failure_counts_for_all_waiting_samples_until_the_rollout_ends() -> None:
    checks = Checks()
    for key in range(3):
        checks.add(Check("accuracy", [key], ("x", "y")))
    assert checks.finish(_next(checks), TIMEOUT, is_own=False) == [0, 1, 2]
    assert checks.known(("x", "y")) == TIMEOUT and checks.next(KEYS) is None
    checks.end_rollout()
    assert checks.known(("x", "y")) is None


def test_a_retried_check_comes_first_and_is_still_shared() -> None:
    checks = Checks()
    for key, text in enumerate("abc"):
        checks.add(Check("accuracy", [key], ("x", text)))
    first = _next(checks)
    checks.again(first)
    checks.add(Check("accuracy", [3], ("x", "a")))
    assert _next(checks) is first and first.keys == [0, 3]
    checks.again(first)
    assert _next(checks, {1, 2}).keys == [1], "no sample waits for this check any more"


def test_a_refused_gold_answer_removes_all_its_checks_from_the_queue() -> None:
    checks = Checks()
    for key, texts in enumerate([("x", "a"), ("x", "b"), ("z", "a")]):
        checks.add(Check("accuracy", [key], texts))
    assert [check.keys for check in checks.refuse_gold("x", NO_GOLD)] == [[0], [1]]
    assert checks.known(("x", "c")) == NO_GOLD and checks.known(("z", "a")) is None
    assert (_next(checks).keys, checks.next(KEYS)) == ([2], None)
    checks.end_rollout()
    assert checks.known(("x", "c")) is None


def test_discarding_a_sample_does_not_affect_other_samples() -> None:
    checks = Checks()
    for key, texts in enumerate([("x", "y"), ("x", "y"), ("x", "z"), ("x", "z")]):
        checks.add(Check("accuracy", [key], texts))
    under_way = _next(checks)
    assert checks.next({1}) is None, "no sample waits for the second check any more"
    checks.add(Check("accuracy", [4], ("x", "z")))
    checks.add(Check("accuracy", [5], ("x", "y")))
    assert _next(checks, {1, 4, 5}).keys == [4]
    assert checks.finish(under_way, WRONG, is_own=True) == [0, 1, 5]
    checks.add(Check("format", [6, 7], group=b""))
    assert checks.next({6}) is None, "a group is checked as a whole"


def test_the_memory_is_bounded_and_keeps_the_latest_requests() -> None:
    checks = Checks(capacity=3)
    for number in range(5):
        checks.add(Check("accuracy", [number], ("x", str(number))))
        checks.finish(_next(checks), RIGHT, is_own=True)
        checks.known(("x", "0"))
    assert [checks.known(("x", str(number))) for number in range(5)] == [RIGHT, None, None, RIGHT, RIGHT]
