"""Events that trip the guard, its messages, and how it falls back to bf16 and returns."""

import math
from collections.abc import Sequence

import pytest

from grpo_mega.config import GuardConfig
from grpo_mega.megatron.precision import Guard, Level, names

NUM_LAYERS = 6
CALM = [0.5, *[1.0, 2.0, 3.0, 4.0, 5.0, 6.0], 0.1]


def guard(**settings: object) -> Guard:
    return Guard(GuardConfig.model_validate({"history": 8, "steps": 3, **settings}), NUM_LAYERS, mismatch_limit=0.02)


def spiked(*groups: int, by: float = 20.0) -> list[float]:
    return [norm * by if group in groups else norm for group, norm in enumerate(CALM)]


def run(
    watching: Guard, steps: Sequence[tuple[float, list[float]]], first: int = 1
) -> list[tuple[Level, tuple[str, ...]]]:
    seen = []
    for step, (mismatch, norms) in enumerate(steps, first):
        messages = tuple(watching.observe(step, mismatch, [norms]))
        seen.append((watching.level, messages))
    return seen


def test_a_calm_run_is_left_alone() -> None:
    wobbling = [(0.001, [n * f for n in CALM]) for f in (1.0, 3.0, 0.3, 2.0) * 10]
    assert run(guard(), wobbling) == [(Level.AS_CONFIGURED, ())] * 40


def test_a_spike_is_reported_with_its_layers_and_alone_changes_nothing() -> None:
    *_, last = run(guard(), [(0.0, CALM)] * 8 + [(0.0, spiked(2, 3, 6))])
    assert last == (
        Level.AS_CONFIGURED,
        ("step 9: the gradient norm of layers 1-2, layer 5 is up to 20 times its median",),
    )


def test_a_mismatch_above_its_limit_is_reported_if_layers_fall_back() -> None:
    ((level, (message,)),) = run(guard(fall_back=True), [(0.5, CALM)])
    assert message.startswith("step 1: engine and trainer disagree by a KL (k3) of 0.5 nats per token; the first")
    assert level == Level.ENDS
    assert run(guard(fall_back=True), [(math.nan, CALM)])[0][0] == Level.ENDS
    assert run(guard(), [(0.5, CALM)]) == [(Level.AS_CONFIGURED, ())]  # tracking/rules.py warns


def test_the_ends_then_all_layers_fall_back_and_return_after_their_steps() -> None:
    watching = guard(fall_back=True)
    run(watching, [(0.0, CALM)] * 8)
    levels = [
        level for level, _ in run(watching, [(0.0, spiked(1)), (0.0, CALM), (0.9, CALM), *[(0.0, CALM)] * 4], first=9)
    ]
    assert levels == [Level.ENDS, Level.ENDS, Level.ALL, Level.ALL, Level.ALL, Level.AS_CONFIGURED, Level.AS_CONFIGURED]
    ((_, messages),) = run(watching, [(0.0, spiked(0, 7))], first=20)
    [message] = messages
    assert message.startswith("step 20: ") and "embedding, output layer" in message and "20 times" in message
    assert "2 layers" in message and "3 steps" in message


def test_norms_that_are_not_finite_trip_at_once_and_spoil_no_median() -> None:
    watching = guard()
    ((_, messages),) = run(watching, [(0.0, spiked(4, by=math.nan))])
    assert len(messages) == 1 and messages[0].startswith("step 1: ") and "layer 3 " in messages[0]
    assert not any(m for _, m in run(watching, [(0.0, CALM)] * 10))


def test_steps_without_gradient_do_not_count() -> None:
    watching = guard()
    zeros = [0.0] * len(CALM)
    assert not any(m for _, m in run(watching, [(0.0, zeros)] * 20 + [(0.0, CALM)] * 10))


def test_every_optimizer_step_of_a_rollout_is_seen() -> None:
    watching = guard()
    watching.observe(1, 0.0, [CALM] * 8)
    assert watching.observe(2, 0.0, [CALM, spiked(5), CALM])


def test_spikes_can_be_left_unwatched() -> None:
    assert not any(m for _, m in run(guard(grad_spike=None), [(0.0, CALM)] * 8 + [(0.0, spiked(1, by=1e6))]))


def test_a_guard_resumes_from_its_state() -> None:
    steps = [(0.0, CALM)] * 8 + [(0.0, spiked(1)), (0.0, CALM), (0.9, spiked(2)), *[(0.0, CALM)] * 6]
    whole = run(guard(fall_back=True), steps)
    for cut in range(len(steps)):
        before, after = guard(fall_back=True), guard(fall_back=True)
        first = run(before, steps[:cut])
        after.restore(before.state())
        assert first + run(after, steps[cut:], first=cut + 1) == whole


@pytest.mark.parametrize(
    ("groups", "text"),
    [
        ([0], "embedding"),
        ([7], "output layer"),
        ([6, 7], "layer 5, output layer"),
        ([0, 1, 2, 4], "embedding, layers 0-1, layer 3"),
    ],
)
def test_runs_of_layers_are_named_together(groups: list[int], text: str) -> None:
    assert names(groups, NUM_LAYERS) == text
