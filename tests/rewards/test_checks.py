"""The queue of checks: what is shared, what is not, and that nothing is forgotten or remembered for ever."""

from grpo_mega.rewards.api import Score
from grpo_mega.rewards.workers.checks import Check, Checks

RIGHT, WRONG = Score(1.0, "correct"), Score(0.0, "wrong")


def _next(checks: Checks) -> Check:
    check = checks.next()
    assert check is not None
    return check


def test_samples_with_the_same_texts_wait_for_one_check_and_its_score_is_remembered() -> None:
    checks = Checks()
    for key, texts in enumerate([("x", "y"), ("x", "z"), ("x", "y")]):
        checks.add(Check("accuracy", [key], texts))
    checks.add(Check("format", [0]))
    first = _next(checks)
    checks.add(Check("accuracy", [3], ("x", "y")))  # while it is under way
    assert checks.finish(first, RIGHT) == [0, 2, 3]
    assert checks.known(("x", "y")) == RIGHT and checks.known(("x", "z")) is None
    second, third = _next(checks), _next(checks)
    assert (second.keys, third.name, checks.next()) == ([1], "format", None)
    assert checks.finish(second, WRONG) == [1] and checks.finish(third, RIGHT) == [0]


def test_a_check_that_fails_costs_the_first_sample_and_the_others_are_checked_again() -> None:
    checks = Checks()
    for key in range(3):
        checks.add(Check("accuracy", [key], ("x", "y")))
    assert checks.finish(_next(checks), None) == [0]
    assert checks.known(("x", "y")) is None
    again = _next(checks)
    assert checks.finish(again, RIGHT) == [1, 2] and checks.next() is None


def test_a_discarded_sample_takes_no_other_with_it() -> None:
    checks = Checks()
    for key, texts in enumerate([("x", "y"), ("x", "y"), ("x", "z"), ("x", "z")]):
        checks.add(Check("accuracy", [key], texts))
    under_way = _next(checks)
    checks.forget({0, 2, 3})
    assert checks.next() is None, "no sample waits for the second any more"
    checks.add(Check("accuracy", [4], ("x", "z")))
    assert _next(checks).keys == [4]
    assert checks.finish(under_way, WRONG) == [1]
    checks.add(Check("accuracy", [5], ("x", "w")))
    lost = _next(checks)
    checks.forget({5})
    assert checks.finish(lost, None) == [] and checks.next() is None


def test_the_memory_is_bounded_and_keeps_what_was_asked_for_last() -> None:
    checks = Checks(capacity=3)
    for number in range(5):
        checks.add(Check("accuracy", [number], ("x", str(number))))
        checks.finish(_next(checks), RIGHT)
        checks.known(("x", "0"))
    assert [checks.known(("x", str(number))) for number in range(5)] == [RIGHT, None, None, RIGHT, RIGHT]
