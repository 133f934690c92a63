"""Evaluation: how well the engine's policy answers sets of prompts, greedily and by sampling.

    score       share of greedy answers with full marks from every reward function that applies
    mean@n, pass@k, majority@k      values over n sampled answers per prompt, see tracking/metrics.py. If `accuracy` is
                one of the rewards, it decides if an answer is correct. Otherwise an answer is correct if it has full
                marks. Answers vote by their text, normalized by rewards/math/answer.py
    reward_errors       number of answers with a failed reward function, if there are any; a warning has the first error

A training run logs them as "eval/score" and "eval/pass@4". If sets have names, it logs "eval/NAME/score", and
"eval/score" is the mean over the sets. It writes a row per prompt to heldout-N.jsonl:

    id, hash, prompt, gold                  the prompt; and `set`, the name of its set, if it has a name
    response, token_ids, scores, correct    the greedy answer
    samples, solved, answers                number of sampled answers, number of correct ones, and their texts. If the
                                            gold answer cannot be parsed, solved is null and the prompt is not counted
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any

from grpo_mega.config import RewardsConfig
from grpo_mega.data.load import text_hash
from grpo_mega.paths import heldout_file, write_atomically
from grpo_mega.rewards.math.accuracy import read_answer
from grpo_mega.rewards.math.answer import whole_turn
from grpo_mega.rewards.scorer import drop_unusable
from grpo_mega.rollout.engine import Sampling
from grpo_mega.rollout.rollouts import Rollouts
from grpo_mega.text import json_line
from grpo_mega.tracking.metrics import Tally, has_full_marks, heldout_metrics, sampled_metrics, tally
from grpo_mega.trainer.job import Job
from grpo_mega.types import Group, Prompt, Sample, StepMetrics

MOST_SAMPLES = 16384  # samples per generation phase; at its end every rank holds all of them
MOST_SHOWN = 512  # samples per generation phase if someone waits for them
SEED_OFFSET = 2**31  # above all seeds of runs, so evaluation and training draw different samples for the same prompt id
JUDGE = "accuracy"


@dataclass
class Evaluated:
    """The result on one set of prompts. Only the first rank needs it and fills it."""

    metrics: StepMetrics = field(default_factory=dict)  # "score", "pass@4", ...
    rows: list[dict[str, Any]] = field(default_factory=list)  # one row per prompt, in the order of prompts
    num_unusable: int = 0  # number of prompts with a gold answer that cannot be parsed
    num_failed: int = 0  # number of answers with a reward function that raised or crashed


def evaluate_if_due(job: Job, step: int) -> None:
    """Evaluate before the first step, after the last, and every eval.interval steps. A resumed run repeats no
    evaluation.
    """
    interval = job.config.eval.interval
    is_due = step in (0, job.config.steps) or (interval > 0 and step % interval == 0)
    if is_due and any(job.heldout.values()):
        path = job.config.run_dir / heldout_file(step)
        # The first rank writes the file, so it decides for all ranks.
        is_done, *_ = job.rollouts.rendezvous.all_gather(
            "evaluation", path.exists(), job.config.rollout.phase_deadline_s
        )
        if not is_done:
            evaluate(job, step, path)


def evaluate(job: Job, step: int, path: Path) -> None:
    """Evaluate all held-out sets, log their metrics, and write the answers to `path`."""
    results = {name: evaluate_set(job.rollouts, name, prompts, step) for name, prompts in job.heldout.items()}
    metrics = logged({name: result.metrics for name, result in results.items()})
    job.log.log_eval(step, metrics | {"seconds/evaluation": job.timers.lap()["seconds/step"]})
    if job.is_main:
        write_rows(path, [row for result in results.values() for row in result.rows])


def evaluate_set(
    rollouts: Rollouts,
    name: str,
    prompts: Sequence[Prompt],
    step: int,
    show: Callable[[Sequence[Group]], None] | None = None,
) -> Evaluated:
    """Generate and score answers to the prompts by config.eval. `step` is the policy's version. All ranks call it.

    On the first rank `show` gets the groups of each generation phase.
    """
    config, is_main = rollouts.config, rollouts.rendezvous.rank == 0
    named = {"set": name} if name else {}
    result = Evaluated(
        rows=[
            named | {"id": p.id, "hash": text_hash(p.undated or p.text), "prompt": p.text, "gold": p.answer}
            for p in prompts
        ]
        if is_main
        else []
    )
    description = f"prompts of {name}" if name else "held-out prompts"
    if config.eval.greedy:
        sampling = replace(rollouts.sampling, group_size=1, temperature=0.0, longest_first=False)
        groups = list(chain.from_iterable(_answer(rollouts, prompts, sampling, step, description, show)))
        result.num_failed += _num_failed(groups)
        if is_main:
            usable, dropped = drop_unusable(groups)
            result.num_unusable = len(dropped)
            result.metrics |= {name.removeprefix("eval/"): value for name, value in heldout_metrics(usable).items()}
            for row, group in zip(result.rows, groups, strict=True):
                (sample,) = group.samples
                row |= {
                    "response": rollouts.decode(sample.response_ids),
                    "token_ids": list(sample.response_ids),
                    "scores": sample.scores,
                    "correct": has_full_marks(sample),
                }
    if config.eval.samples:
        sampling = replace(
            rollouts.sampling,
            group_size=config.eval.samples,
            temperature=config.eval.temperature,
            top_p=config.eval.top_p,
            top_k=0,
            seed=config.seed + SEED_OFFSET,
            longest_first=False,
        )
        _add_sampled(rollouts, result, _answer(rollouts, prompts, sampling, step, f"{description}, sampled", show))
    if result.num_failed:
        result.metrics["reward_errors"] = float(result.num_failed)
    return result


def logged(by_set: Mapping[str, StepMetrics]) -> StepMetrics:
    """Return the metrics of all sets, with the names in the log."""
    metrics = {
        f"eval/{f'{name}/' if name else ''}{key}": value for name, one in by_set.items() for key, value in one.items()
    }
    scores = [one["score"] for one in by_set.values() if "score" in one]
    return ({"eval/score": sum(scores) / len(scores)} if scores else {}) | metrics


def write_rows(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write JSON lines. The file appears only when it is complete."""
    write_atomically(path, "".join(map(json_line, rows)).encode())


def is_correct(sample: Sample, rewards: RewardsConfig) -> bool:
    """Return True if the sample counts as correct in pass@k."""
    if any(function.name == JUDGE for function in rewards.functions):
        return (sample.scores.get(JUDGE) or 0.0) >= 1.0
    return has_full_marks(sample)


def _answer(
    rollouts: Rollouts,
    prompts: Sequence[Prompt],
    sampling: Sampling,
    step: int,
    description: str,
    show: Callable[[Sequence[Group]], None] | None,
) -> Iterator[list[Group]]:
    """Yield the scored groups of all prompts in their order, phase by phase."""
    size = max(1, (MOST_SAMPLES if show is None else MOST_SHOWN) // sampling.group_size)
    for first in range(0, len(prompts), size):
        part = prompts[first : first + size]
        text = description if len(part) == len(prompts) else f"{description}, {first + 1} to {first + len(part)}"
        phase = rollouts.generate([Group(prompt, []) for prompt in part], step, text, sampling=sampling)
        groups, _ = rollouts.share(phase)
        rollouts.warn_of_failures(groups, text, known=set())
        if show is not None and rollouts.rendezvous.rank == 0:
            show(groups)
        yield groups


def _num_failed(groups: Sequence[Group]) -> int:
    """Return the number of answers with a reward function that raised or crashed."""
    return sum("error" in sample.verdicts.values() for group in groups for sample in group.samples)


def _add_sampled(rollouts: Rollouts, result: Evaluated, phases: Iterator[list[Group]]) -> None:
    """Add the metrics of sampled answers. Keep only tallies of each phase, because all samples would fill the
    memory.
    """
    tallies: list[Tally] = []
    lengths: list[int] = []
    rows = iter(result.rows)
    result.num_unusable = 0
    for groups in phases:
        result.num_failed += _num_failed(groups)
        if rollouts.rendezvous.rank != 0:
            continue
        for group, row in zip(groups, rows, strict=False):
            # The normalized answer is the vote; "" if there is none.
            answers = [
                read_answer(whole_turn(rollouts.decode(s.response_ids[s.last_turn :]), {"prefill": s.prompt.prefill}))
                for s in group.samples
            ]
            correct = [is_correct(sample, rollouts.config.rewards) for sample in group.samples]
            is_usable = not drop_unusable([group])[1]
            row |= {"samples": len(answers), "solved": sum(correct) if is_usable else None, "answers": answers}
            result.num_unusable += not is_usable
            if is_usable:
                tallies.append(tally(answers, correct))
                lengths += [sample.num_sampled for sample in group.samples]
    if tallies:
        result.metrics |= sampled_metrics(tallies, rollouts.config.eval.all_ks)
        result.metrics["sampled_response_length"] = sum(lengths) / len(lengths)
