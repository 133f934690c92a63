"""All prompts train equally often, however long their responses are. Whole runs with an engine that counts tokens.

Draws, backlog, dynamic sampling and the ledger are the real code. Only phases are simulated: every unfinished response
gets a token per tick, and response lengths are known.
"""

from __future__ import annotations

import dataclasses
import functools
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import grpo_mega.megatron  # noqa: F401  # its patches come first
from grpo_mega import config as configs
from grpo_mega.data.load import Draw, Sampler, make_sampler
from grpo_mega.rollout.backlog import Backlog
from grpo_mega.rollout.rollouts import Rollouts
from grpo_mega.train import generate, generate_ahead
from grpo_mega.trainer.job import Job
from grpo_mega.types import Group, Prompt, Sample, Span

SIZE = 3
STEPS = 1000
TICKS_OF_TRAINING = 9  # tokens per response that separate engine ranks generate during training


@functools.cache
def drawn(sampler: Sampler, number: int) -> list[Draw]:
    return sampler.draws(number)


@dataclass
class Counted(Rollouts):
    """Rollouts whose phases are simulated. Prompts with an id below `num_long` have long responses."""

    num_long: int = 2
    equal_share: float = 0.0  # probability that all samples of a group get the same reward
    started: list[int] = field(default_factory=list)  # ids of started prompts

    def generate(self, groups: Sequence[Group], step: int, description: str, **others: Any) -> Any:
        missing = [max(self.length(g, i, step) - had(g, i) for i in range(SIZE)) for g in groups]
        needed, num_wanted = others["needed"], min(others["wanted"], len(groups))
        end = max([sorted(missing)[num_wanted - 1], *(missing[index] for index in needed)])
        done = [index for index in range(len(groups)) if missing[index] <= end]
        order = {
            p: (p not in needed, groups[p].oldest_version if groups[p].samples else step, missing[p], p) for p in done
        }
        return groups, step, end, sorted(done, key=order.__getitem__)[:num_wanted]

    def score(self, phase: Any) -> tuple[list[Group], list[Group]]:
        groups, step, end, kept = phase
        after = [self.grown(g, step, end) for g in groups]
        self.started += [g.prompt.id for g, grown in zip(groups, after, strict=True) if grown.samples and not g.samples]
        return [after[p] for p in sorted(kept)], [g for p, g in enumerate(after) if p not in kept]

    def generate_ahead(self, backlog: Backlog, step: int, num_groups: int) -> Backlog:
        before = backlog.groups[:num_groups]
        return backlog.after_phase(before, *self.score((before, step, TICKS_OF_TRAINING, [])))

    def length(self, group: Group, index: int, step: int) -> int:
        rng = random.Random(f"{group.prompt.id} {index} {group.oldest_version if group.samples else step}")
        return rng.randint(20, 40) if group.prompt.id < self.num_long else rng.randint(2, 6)

    def grown(self, group: Group, step: int, ticks: int) -> Group:
        samples, is_equal = [], random.Random(f"{group.prompt.id} {step}").random() < self.equal_share
        for index in range(SIZE):
            before, length = had(group, index), self.length(group, index, step)
            end = min(length, before + ticks)
            spans = [span for sample in group.samples if sample.index == index for span in sample.spans]
            spans += [Span(step, before, end)] if end > before else []
            if not end:
                continue
            reward = 1.0 if is_equal else float(index == 0)
            reason: Any = "stop" if end == length else None
            samples.append(Sample(group.prompt, index, [7] * end, [-1.0] * end, reason, spans, reward=reward))
        return Group(group.prompt, samples)


def had(group: Group, index: int) -> int:
    return sum(sample.response_len for sample in group.samples if sample.index == index)


def make_job(sizes: tuple[int, ...], per_step: int, **rollout: Any) -> Job:
    algorithm = rollout.pop("algorithm", {})
    weights = tuple(float(3 - 2 * n) if n < 2 else 1.0 for n in range(len(sizes)))
    config = configs.validate(
        {
            "run_dir": "unused",
            "steps": STEPS,
            "model": {"path": "unused"},
            "data": {
                "train": [{"path": f"unused-{n}", "weight": w} for n, w in enumerate(weights)],
                "max_prompt_length": 4,
            },
            "rollout": {"max_response_length": 64, **rollout},
            "layout": {"engine_ranks": 1} if rollout.get("placement") == "separate" else {},
            "algorithm": {"group_size": SIZE, **algorithm},
            "batch": {"prompts_per_step": per_step},
        }
    )
    prompts = [Prompt(i, f"p{i}", (i, 70_000 + i), "") for i in range(sum(sizes))]
    anything: Any = None
    others = (one.name for one in dataclasses.fields(Rollouts) if one.init and one.name != "config")
    rollouts = Counted(config, **dict.fromkeys(others, anything))
    sampler = make_sampler(config.data, sizes, per_step, 5, config.rollout)
    draws = SimpleNamespace(draws=functools.partial(drawn, sampler))
    names = ("runtime", "model", "policy", "checkpoints", "inputs", "log", "timers", "stop", "health")
    parts = dict.fromkeys(names, anything)
    job = Job(config=config, data=SimpleNamespace(train=prompts), sampler=draws, **parts)  # type: ignore[arg-type]
    job.rollouts = rollouts
    return job


def step_of(job: Job, step: int) -> list[int]:
    """Run the generation of a step. Return the ids of its prompts."""
    groups, job.backlog, metrics = generate(job, step)
    if job.config.rollout.is_separate:
        generate_ahead(job, step)
    if job.config.rollout.keeps_unfinished:
        assert metrics["ledger/deferred_prompts"] <= job.backlog.ledger["deferred_prompts"]
    return [group.prompt.id for group in groups]


def turns(job: Job) -> Counter[int]:
    return Counter(turn.prompt.id for number in range(job.backlog.draws) for turn in job.draw(number))


def left(backlog: Backlog) -> Counter[int]:
    return Counter([*(g.prompt.id for g in backlog.groups), *(turn.prompt.id for turn in backlog.deferred)])


PARTIAL = {"partial": True, "oversample": 1.5}


@pytest.mark.parametrize("max_staleness", [1, 2])
@pytest.mark.parametrize(("num_prompts", "per_step"), [(7, 4), (7, 3), (8, 4), (8, 3), (13, 4), (13, 3)])
def test_long_prompts_of_a_small_data_set_keep_their_share(num_prompts: int, per_step: int, max_staleness: int) -> None:
    job = make_job((num_prompts,), per_step, **PARTIAL, max_staleness=max_staleness)
    trained: Counter[int] = Counter()
    for step in range(STEPS):
        prompts = step_of(job, step)
        assert len(set(prompts)) == len(prompts) == per_step
        trained.update(prompts)
    assert turns(job) == trained + left(job.backlog)  # no prompt is lost
    assert job.backlog.ledger["deferred_prompts"] > STEPS / 20 and sum(left(job.backlog).values()) < 3 * num_prompts
    share = STEPS * per_step / num_prompts
    assert all(abs(trained[prompt] / share - 1) < 0.01 for prompt in range(num_prompts)), trained


@pytest.mark.parametrize("max_staleness", [1, 2])
def test_engines_that_run_ahead_keep_every_turn(max_staleness: int) -> None:
    """Several steps are in progress, with more groups than the dataset has prompts."""
    job = make_job((8,), 4, placement="separate", engine="sglang", max_staleness=max_staleness)
    trained: Counter[int] = Counter()
    for step in range(STEPS):
        trained.update(step_of(job, step))
    assert turns(job) == trained + left(job.backlog)
    assert all(abs(trained[prompt] * 8 / trained.total() - 1) < 0.01 for prompt in range(8)), trained


@pytest.mark.parametrize("rollout", [{}, {"oversample": 1.5}, PARTIAL])
def test_dynamic_sampling_defers_prompts_that_the_step_has_seen(rollout: dict[str, Any]) -> None:
    """Two of three groups are replaced, so most steps draw more prompts than the dataset has."""
    job = make_job((9,), 4, **rollout, algorithm={"dynamic_sampling_tries": 3})
    job.rollouts.equal_share = 2 / 3  # type: ignore[attr-defined]
    started: Counter[int] = Counter()
    for step in range(300):
        before = len(job.rollouts.started)  # type: ignore[attr-defined]
        step_of(job, step)
        found = Counter(job.rollouts.started[before:])  # type: ignore[attr-defined]
        assert max(found.values(), default=1) == 1  # no step has a prompt twice
        started += found
    assert turns(job) == started + Counter(g.prompt.id for g in job.backlog.groups if not g.samples) + Counter(
        turn.prompt.id for turn in job.backlog.deferred
    )
    assert job.backlog.ledger["deferred_prompts"] > 100


def test_sets_of_a_mix_keep_the_turns_of_their_long_prompts() -> None:
    job = make_job((5, 11), 4, **PARTIAL)
    trained: Counter[int] = Counter()
    for step in range(STEPS):
        trained.update(step_of(job, step))
    assert turns(job) == trained + left(job.backlog)
    of_first = [trained[prompt] / sum(trained[p] for p in range(5)) for prompt in range(5)]
    assert all(abs(5 * share - 1) < 0.01 for share in of_first), trained


def test_a_resumed_run_draws_the_same_prompts(tmp_path: Path) -> None:
    whole, resumed = (make_job((7,), 4, **PARTIAL) for _ in range(2))
    prompts = {prompt.id: prompt for prompt in resumed.data.train}
    num_deferred = 0
    for step in range(60):
        expected = step_of(whole, step)
        folder = tmp_path / str(step)
        folder.mkdir()
        for name, content in resumed.backlog.files().items():
            (folder / name).write_bytes(content)
        resumed.backlog = Backlog.read(folder, resumed.backlog.draws, prompts.get)
        num_deferred += len(resumed.backlog.deferred)
        assert step_of(resumed, step) == expected
    assert num_deferred > 20
