"""What the pool gives back for a sample."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from grpo_mega.rewards.api import Score, Step


@dataclass(frozen=True)
class RewardResult:
    """One sample's outcome.

    `total` is the weighted sum over the functions that gave a value; None if none did. `scores` are those values, and for a
    function that rewarded steps alone the mean over them. `steps` are weighted, by ascending end; those of two functions may
    end at the same place. A function of weight 0 is only watched: its steps are not among them.
    """

    total: float | None
    scores: dict[str, float | None]
    verdicts: dict[str, str]
    steps: tuple[Step, ...] = ()
    errors: Mapping[str, str] = field(default_factory=dict)  # the exceptions that were raised, by function


def result_of(weights: Mapping[str, float], outcomes: Mapping[str, Score], errors: Mapping[str, str]) -> RewardResult:
    """The result from the Scores of all functions in `weights`, which gives the order."""
    weighted = [weight * score.value for name, weight in weights.items() if (score := outcomes[name]).value is not None]
    counted = [(weight, step) for name, weight in weights.items() if weight for step in outcomes[name].steps]
    return RewardResult(
        sum(weighted) if weighted else None,
        {name: outcomes[name].metric for name in weights},
        {name: outcomes[name].verdict for name in weights},
        tuple(sorted((Step(step.end, weight * step.value) for weight, step in counted), key=lambda step: step.end)),
        errors,
    )
