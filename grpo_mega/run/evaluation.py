"""Evaluation: what the engine's policy answers to sets of prompts, greedily and by sampling, and how good that is.

    score       share of greedy answers with full marks from every reward function that applies
    mean@n, pass@k, majority@k      of n sampled answers to each prompt, see observe/pass_at_k.py. There a response is right if
                `accuracy` says so where that is among the rewards, else if it has full marks; responses vote by their answer's
                text as rewards/normalize.py writes it
    reward_errors       answers on which a reward function failed, if there are any; a warning names the first error

A training run logs them as "eval/score", "eval/pass@4", or "eval/NAME/score" where sets have names (then "eval/score" is the
mean of the sets'), and leaves a row for each prompt in heldout-N.jsonl:

    id, hash, prompt, gold                  of the prompt; and `set`, the name of its set, where that has one
    response, token_ids, scores, correct    the greedy answer
    samples, solved, answers                of n sampled ones how many are right, and what each says; solved is null where the
                                            gold answer cannot be read, and such prompts count nowhere
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from grpo_mega.config import RewardsConfig
from grpo_mega.data.pass_rates import text_hash
from grpo_mega.json_lines import json_line
from grpo_mega.observe.metrics import has_full_marks, heldout_metrics
from grpo_mega.observe.pass_at_k import Tally, sampled_metrics, tally
from grpo_mega.paths import write_atomically
from grpo_mega.rewards.math.answer import extract_answer, whole_turn
from grpo_mega.rewards.math.normalize import normalize_answer
from grpo_mega.rewards.scorer import drop_unusable
from grpo_mega.rollout.engine import Sampling
from grpo_mega.run.job import Job
from grpo_mega.run.rollout import rollout
from grpo_mega.types import Group, Prompt, Sample, StepMetrics

MOST_SAMPLES = 16384  # asked for in one phase, at whose end every rank holds all of them
SEED_OFFSET = 2**31  # above all seeds of runs: evaluation does not draw what training draws for a prompt of the same id
JUDGE = "accuracy"


@dataclass
class Evaluated:
    """One set of prompts; on the first rank, which alone needs it."""

    metrics: StepMetrics = field(default_factory=dict)  # "score", "pass@4", ...
    rows: list[dict[str, Any]] = field(default_factory=list)  # one a prompt, in their order
    num_unusable: int = 0  # prompts whose gold answer cannot be read
    num_failed: int = 0  # answers on which a reward function raised or crashed


def evaluate_if_due(job: Job, step: int) -> None:
    """Before the first step, after the last, and every eval.interval steps; a run that goes on does not repeat one."""
    is_due = step in (0, job.config.steps) or job.is_due(job.config.eval.interval, step)
    if is_due and any(job.heldout.values()):
        rendezvous, deadline_s = job.colocation.rendezvous, job.config.rollout.phase_deadline_s
        is_done, *_ = rendezvous.all_gather("evaluation", heldout_path(job, step).exists(), deadline_s)
        if not is_done:  # as the first rank sees it, which writes the file
            evaluate(job, step)


def evaluate(job: Job, step: int) -> None:
    """Logs the metrics of all held-out sets, and leaves the answers in the run's folder."""
    found = {name: evaluate_set(job, name, prompts, step) for name, prompts in job.heldout.items()}
    metrics = logged({name: one.metrics for name, one in found.items()})
    job.log.log_eval(step, metrics | {"seconds/evaluation": job.timers.lap()["seconds/step"]})
    if job.is_main:
        write_rows(heldout_path(job, step), [row for one in found.values() for row in one.rows])


def evaluate_set(job: Job, name: str, prompts: Sequence[Prompt], step: int) -> Evaluated:
    """Answers the prompts as job.config.eval says; `step` is the policy's version. All ranks call it."""
    config = job.config.eval
    found = Evaluated(rows=[_row_of(name, prompt) for prompt in prompts] if job.is_main else [])
    what = f"prompts of {name}" if name else "held-out prompts"
    if config.greedy:
        sampling = replace(job.sampling, group_size=1, temperature=0.0)
        _add_greedy(job, found, [g for groups in _answered(job, prompts, sampling, step, what, found) for g in groups])
    if config.samples:
        sampling = replace(
            job.sampling,
            group_size=config.samples,
            temperature=config.temperature,
            top_p=config.top_p,
            top_k=0,
            seed=job.config.seed + SEED_OFFSET,
        )
        _add_sampled(job, found, _answered(job, prompts, sampling, step, f"{what}, sampled", found))
    if found.num_failed:
        found.metrics["reward_errors"] = float(found.num_failed)
    return found


def logged(by_set: Mapping[str, StepMetrics]) -> StepMetrics:
    """The metrics of all sets under the names that a run logs."""
    metrics = {
        f"eval/{f'{name}/' if name else ''}{key}": value for name, found in by_set.items() for key, value in found.items()
    }
    scores = [found["score"] for found in by_set.values() if "score" in found]
    return ({"eval/score": sum(scores) / len(scores)} if scores else {}) | metrics


def write_rows(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """JSON lines; the file is there when it is whole."""
    write_atomically(path, "".join(map(json_line, rows)).encode())


def heldout_path(job: Job, step: int) -> Path:
    return job.config.run_dir / f"heldout-{step:06d}.jsonl"


def is_right(sample: Sample, rewards: RewardsConfig) -> bool:
    """What pass@k counts."""
    if any(function.name == JUDGE for function in rewards.functions):
        return (sample.scores.get(JUDGE) or 0.0) >= 1.0
    return has_full_marks(sample)


def _answered(
    job: Job, prompts: Sequence[Prompt], sampling: Sampling, step: int, what: str, found: Evaluated
) -> Iterator[list[Group]]:
    """The groups of all prompts in their order, phase by phase."""
    size = max(1, MOST_SAMPLES // sampling.group_size)
    for first in range(0, len(prompts), size):
        part = prompts[first : first + size]
        is_all = len(part) == len(prompts)
        described = what if is_all else f"{what}, {first + 1} to {first + len(part)}"
        groups = rollout(job, part, sampling, step, described, is_evaluation=True)
        found.num_failed += sum("error" in sample.verdicts.values() for group in groups for sample in group.samples)
        yield groups


def _row_of(name: str, prompt: Prompt) -> dict[str, Any]:
    row = {"id": prompt.id, "hash": text_hash(prompt.text), "prompt": prompt.text, "gold": prompt.answer}
    return {"set": name} | row if name else row


def _add_greedy(job: Job, found: Evaluated, groups: Sequence[Group]) -> None:
    if not job.is_main:
        return
    usable, found.num_unusable = drop_unusable(groups)
    found.metrics |= {name.removeprefix("eval/"): value for name, value in heldout_metrics(usable).items()}
    for row, group in zip(found.rows, groups, strict=True):
        (sample,) = group.samples
        row |= {"response": job.decode(sample.response_ids), "token_ids": sample.response_ids, "scores": sample.scores}
        row |= {"correct": has_full_marks(sample)}


def _add_sampled(job: Job, found: Evaluated, phases: Iterator[list[Group]]) -> None:
    """Keeps of each phase what the metrics need; the samples themselves would fill the memory."""
    tallies: list[Tally] = []
    lengths: list[int] = []
    rows = iter(found.rows)
    found.num_unusable = 0
    for groups in phases:
        if not job.is_main:
            continue
        found.num_unusable += drop_unusable(groups)[1]
        for group, row in zip(groups, rows, strict=False):
            answers = [_answer_of(job.decode(s.response_ids), s.prompt.prefill) for s in group.samples]
            right = [is_right(sample, job.config.rewards) for sample in group.samples]
            is_usable = not drop_unusable([group])[1]
            row |= {"samples": len(answers), "solved": sum(right) if is_usable else None, "answers": answers}
            if is_usable:
                tallies.append(tally(answers, right))
                lengths += [sample.response_len for sample in group.samples]
    if tallies:
        found.metrics |= sampled_metrics(tallies, job.config.eval.all_ks)
        found.metrics["sampled_response_length"] = sum(lengths) / len(lengths)


def _answer_of(response: str, prefill: str) -> str:
    """In the form in which answers vote; "" where there is none."""
    extracted = extract_answer(whole_turn(response, {"prefill": prefill}))
    return "" if extracted is None else normalize_answer(extracted)
