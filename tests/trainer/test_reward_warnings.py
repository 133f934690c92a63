"""The warning when reward functions fail on samples: once per kind of failure in training, always in evaluation."""

from __future__ import annotations

from types import SimpleNamespace

from grpo_mega.rollout.rollouts import Rollouts
from grpo_mega.types import Group, Prompt, Sample

PROMPT = Prompt(0, "p", (1,), "7")


def group_of(*outcomes: tuple[str, float | None]) -> Group:
    samples = [
        Sample(PROMPT, i, [1], [-1.0], "stop", scores={"f": score}, verdicts={"f": verdict})
        for i, (verdict, score) in enumerate(outcomes)
    ]
    return Group(PROMPT, samples)


def test_each_kind_of_failure_is_reported_once_in_training() -> None:
    said: list[str] = []
    rollouts = SimpleNamespace(
        scorer=SimpleNamespace(first_error="f: the scales are broken"),
        rendezvous=SimpleNamespace(all_gather=lambda name, text, deadline_s: [None, text]),
        config=SimpleNamespace(rollout=SimpleNamespace(phase_deadline_s=1.0)),
        warn=said.append,
    )

    def warn(*outcomes: tuple[str, float | None], known: set[str]) -> list[str]:
        said.clear()
        Rollouts.warn_of_failures(rollouts, [group_of(*outcomes)], "step 3", known)  # type: ignore[arg-type]
        return list(said)

    known: set[str] = set()  # in training
    assert warn(("scored", 1.0), ("timeout", 0.0), known=known) == []
    first = "; the first: f: the scales are broken"
    zero = (
        "step 3: reward functions failed on 1 of 2 samples; 0 have no score and are excluded, the others have 0" + first
    )
    assert warn(("error", 0.0), ("scored", 1.0), known=known) == [zero]
    assert warn(("error", 0.0), ("scored", 1.0), known=known) == []
    both = (
        "step 3: reward functions failed on 2 of 3 samples; 1 have no score and are excluded, the others have 0" + first
    )
    assert warn(("error", 0.0), ("error", None), ("scored", 1.0), known=known) == [both]
    assert warn(("timeout", None), ("error", 0.0), known=known) == []
    assert len(warn(("error", 0.0), known=set())) == len(warn(("error", 0.0), known=set())) == 1
