"""Metrics of a step, over the samples of its rollout and over its optimizer steps, and of an evaluation.

An evaluation has unbiased estimates from n responses to a prompt:

pass@k      the probability that at least one of k responses is correct: 1 - C(n - c, k) / C(n, k) with c of n correct
            (Chen et al. 2021, arXiv 2107.03374, eq. 1)
mean@k      the expected share of correct responses among k, equal to c / n for every k
majority@k  the probability that the most frequent answer among k responses is correct. Responses vote with the text of
            their answer; a response without an answer does not vote. Ties are broken by a random draw. Without any vote
            the result is incorrect.

Each is the exact mean over all C(n, k) subsets, so a smaller k needs no further samples and adds no noise.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import comb
from statistics import stdev

import numpy as np

from grpo_mega.rewards.shaping import SHAPING
from grpo_mega.types import Group, Sample, StepMetrics

COUNTS = ("num_tokens", "dropped_mini_batches", "nonfinite_mini_batches")
BY_STEP = ("grad_norm", "lr")  # a dropped mini-batch does not have these
MISMATCH = "mismatch/k3"  # KL (k3) between engine and trainer, in nats per token
ORACLE_WRONG = "oracle_wrong"
ORACLE = frozenset({"oracle_right", ORACLE_WRONG})
K3_STALE = f"{MISMATCH}_stale_"  # name prefix; the staleness of the tokens in versions follows


def rollout_metrics(groups: Sequence[Group], is_zero_variance: Callable[[Group], bool]) -> StepMetrics:
    """Return the metrics of a rollout.

    reward/<function>, reward/mean
    reward/std, /min, /max           over all rewards of the step, if there are at least two
    reward/steps                     mean number of rewarded steps or turns of a sample, if there are any
    reward/excluded                  samples without a reward, which do not train
    reward/paid_but_wrong            only with an oracle; see `paid_but_wrong`
    verdict/<function>/<verdict>
    response_length/...              sampled tokens; cut: share of samples that reached the limit of tokens
    agent/...                        only with agents; see `agent_metrics`
    groups/zero_variance             share of groups from which the update learns nothing
    """
    samples = [s for g in groups for s in g.samples]
    if not samples:
        return {}
    lengths = [s.num_sampled for s in samples]
    verdicts = Counter((name, verdict) for s in samples for name, verdict in s.verdicts.items())
    rewards = [s.reward for s in samples if s.reward is not None]
    num_steps, spread = sum(len(s.step_rewards) for s in samples), {}
    if len(rewards) > 1:
        spread = {"reward/std": stdev(rewards), "reward/min": min(rewards), "reward/max": max(rewards)}
    return {
        "reward/mean": _mean([s.reward for s in samples]),
        **spread,
        **_mean_scores("reward", samples),
        **({"reward/steps": num_steps / len(samples)} if num_steps else {}),
        "reward/excluded": float(sum(not s.is_scored for s in samples)),
        **paid_but_wrong(samples),
        **{f"verdict/{name}/{verdict}": n / len(samples) for (name, verdict), n in sorted(verdicts.items())},
        "response_length/mean": sum(lengths) / len(lengths),
        "response_length/min": float(min(lengths)),
        "response_length/max": float(max(lengths)),
        "response_length/cut": sum(s.finish_reason == "length" for s in samples) / len(samples),
        **agent_metrics(samples),
        "groups/zero_variance": sum(map(is_zero_variance, groups)) / len(groups),
    }


def agent_metrics(samples: Sequence[Sample]) -> StepMetrics:
    """Return means over the conversations of agents; {} without any.

    agent/turns              turns that the policy sampled
    agent/inserted_tokens    response tokens that it did not sample: tool results, and separators of the template
    agent/segments           rows of a micro-batch; more than 1 if a history was rewritten
    agent/ended_by_turns     share of conversations that reached rollout.max_turns
    agent/ended_by_deadline  share of conversations that reached rollout.agent_timeout_s
    """
    found = [s for s in samples if s.messages is not None]
    if not found:
        return {}
    sums = {
        "turns": sum(s.num_turns for s in found),
        "inserted_tokens": sum(s.response_len - s.num_sampled for s in found),
        "segments": sum(len(s.segments()) for s in found),
        "ended_by_turns": sum(s.finish_reason == "turns" for s in found),
        "ended_by_deadline": sum(s.finish_reason == "deadline" for s in found),
    }
    return {f"agent/{name}": value / len(found) for name, value in sums.items()}


def engine_mismatch(metrics: StepMetrics) -> float:
    """Return the mismatch (k3) between engine and trainer on the least stale tokens. Stale tokens are meant to
    differ.
    """
    ages = [int(name.removeprefix(K3_STALE)) for name in metrics if name.startswith(K3_STALE)]
    return metrics[f"{K3_STALE}{min(ages)}"] if ages else metrics.get(MISMATCH, 0.0)


def mean_over_updates(passes: Sequence[StepMetrics]) -> StepMetrics:
    """Return the metrics of one step from the metrics of its optimizer steps.

    Counts are summed and maxima are kept. Losses, gradient norm and learning rate are averaged over optimizer steps.
    Other metrics are weighted by tokens.
    """
    tokens = [m["num_tokens"] for m in passes]
    result: StepMetrics = {}
    for name in dict.fromkeys(name for m in passes for name in m):
        values = [m[name] for m in passes if name in m]
        if name in COUNTS:
            result[name] = sum(values)
        elif name.endswith("max"):
            result[name] = max(values)
        elif name.startswith("loss/") or name in BY_STEP:
            result[name] = sum(values) / len(values)
        else:
            result[name] = sum(v * n for v, n in zip(values, tokens, strict=True)) / max(sum(tokens), 1.0)
    return result


def heldout_metrics(groups: Sequence[Group]) -> StepMetrics:
    """Return "eval/score", the share of responses with full marks, and the mean score of each reward function."""
    samples = [s for g in groups for s in g.samples]
    if not samples:
        return {}
    return {
        "eval/score": sum(map(has_full_marks, samples)) / len(samples),
        **_mean_scores("eval", samples),
        "eval/response_length": sum(s.num_sampled for s in samples) / len(samples),
    }


def has_full_marks(sample: Sample) -> bool:
    """Return True if every reward function that applies scored at least 1, and at least one applies.

    Shaping functions and oracles do not count.
    """
    ignored = SHAPING | {name for name, verdict in sample.verdicts.items() if verdict in ORACLE}
    marks = [value for name, value in sample.scores.items() if value is not None and name not in ignored]
    return bool(marks) and min(marks) >= 1.0


def paid_but_wrong(samples: Sequence[Sample]) -> StepMetrics:
    """Return the share of responses with a reward for a correct answer whose answer an oracle calls wrong.

    An oracle is a reward function, usually of weight 0, with the verdicts of ORACLE. Return {} without an oracle.
    """
    judged = [set(s.verdicts.values()) for s in samples if not ORACLE.isdisjoint(s.verdicts.values())]
    paid = [verdicts for verdicts in judged if "correct" in verdicts]
    return {"reward/paid_but_wrong": sum(ORACLE_WRONG in v for v in paid) / max(len(paid), 1)} if judged else {}


def _mean(values: Sequence[float | None]) -> float:
    """Return the mean of the values that are not None; 0 if there are none."""
    present = [v for v in values if v is not None]
    return sum(present) / len(present) if present else 0.0


def _mean_scores(family: str, samples: Sequence[Sample]) -> StepMetrics:
    """Return the mean of each score. Agent functions may return other names for other samples."""
    names = dict.fromkeys(name for sample in samples for name in sample.scores)
    return {f"{family}/{name}": _mean([s.scores.get(name) for s in samples]) for name in names}


# Sorted pairs, one per answer: (number of responses with the answer, number of correct responses among them).
Votes = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Tally:
    """Counts of the responses to one prompt."""

    num_samples: int
    num_correct: int
    votes: Votes


def tally(answers: Sequence[str], is_correct: Sequence[bool]) -> Tally:
    """Count the votes of responses, from the answer of each as text ("" for none) and whether it is correct."""
    given = Counter(filter(None, answers))
    right = Counter(answer for answer, is_right in zip(answers, is_correct, strict=True) if is_right)
    return Tally(len(answers), sum(is_correct), tuple(sorted((n, right[answer]) for answer, n in given.items())))


def sampled_metrics(tallies: Sequence[Tally], ks: Sequence[int]) -> StepMetrics:
    """Return "mean@<n>", then "pass@<k>" and "majority@<k>" for each k, over prompts with n responses each.

    Also return the shares of prompts that were "never_solved" and "always_solved".
    """
    if not tallies:
        return {}
    n = tallies[0].num_samples
    metrics = {f"mean@{n}": _mean([t.num_correct / n for t in tallies])}
    for k in ks:
        metrics[f"pass@{k}"] = _mean([estimate_pass_at_k(n, t.num_correct, k) for t in tallies])
        metrics[f"majority@{k}"] = _mean([majority_at_k(n, t.votes, k) for t in tallies])
    for name, number in (("never_solved", 0), ("always_solved", n)):
        metrics[name] = _mean([t.num_correct == number for t in tallies])
    return metrics


def estimate_pass_at_k(n: int, c: int, k: int) -> float:
    """Return pass@k if c of n responses are correct, 1 <= k <= n."""
    assert 0 <= c <= n and 1 <= k <= n, (n, c, k)
    return 1.0 - comb(n - c, k) / comb(n, k)


@lru_cache(maxsize=65536)  # few different tallies occur in a set of prompts
def majority_at_k(n: int, votes: Votes, k: int) -> float:
    """Return majority@k of n responses, 1 <= k <= n; the responses in `votes` have an answer.

    For each t, count the subsets in which the winners have t votes. If an answer is correct in r of its m responses (r
    is 0 or m if correctness depends only on the answer), a response with this answer in a subset is correct with
    probability r / m.
    """
    assert sum(m for m, _ in votes) <= n and 1 <= k <= n, (n, votes, k)
    if not any(right for _, right in votes):
        return 0.0
    num_silent = n - sum(m for m, _ in votes)
    total = 0.0
    for t in range(1, min(k, max(m for m, _ in votes)) + 1):
        worth = _worths(votes, k, t)
        silent = np.array([comb(num_silent, k - size) for size in range(k + 1)], dtype=np.float64)
        num_tied = np.arange(1, worth.shape[1])
        total += float(((silent @ worth)[1:] / num_tied).sum())
    return total / comb(n, k)


def _worths(votes: Votes, k: int, t: int) -> np.ndarray:
    """Return [k + 1, k // t + 1] sums of r / m over the answers with t votes.

    Each entry sums over the subsets of voting responses in which no answer has more than t votes. The indices are the
    size of the subset and the number of answers with t votes.
    """
    shape = (k + 1, k // t + 1)
    ways, worth = np.zeros(shape), np.zeros(shape)
    ways[0, 0] = 1.0
    for m, right in votes:
        new_ways, new_worth = ways.copy(), worth.copy()  # subsets without a response with this answer
        for taken in range(1, min(m, t) + 1):
            choices, is_tied = float(comb(m, taken)), int(taken == t)
            fewer = slice(k + 1 - taken), slice(shape[1] - is_tied)
            new_ways[taken:, is_tied:] += choices * ways[fewer]
            new_worth[taken:, is_tied:] += choices * (worth[fewer] + is_tied * right / m * ways[fewer])
        ways, worth = new_ways, new_worth
    return worth
