"""Dynamic sampling in a real run: groups of equal rewards are replaced, and a resumed run draws the same prompts.

The held-out file is a copy of the training file, so that responses of training and evaluation can be compared.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pytest

from grpo_mega.data.load import Sampler
from tests.helpers.coarse_reward import SCORED
from tools.benchmarks import kills
from tools.benchmarks.kills import End, read_end

pytestmark = [pytest.mark.distributed, pytest.mark.usefixtures("preloaded_python")]

NUM_PROMPTS, PER_STEP, GROUP_SIZE = 8, 4, 4

OPTIONS = [
    part
    for setting in (
        "algorithm.recipe=dapo",
        "algorithm.dynamic_sampling_tries=2",
        "steps=6",
        "batch.mini_batches=1",
        "eval={interval: 4, samples: 4}",
        "log.samples_per_step=16",
        "rewards.functions=[{name: tests.helpers.coarse_reward.right_for_a_third}]",
    )
    for part in ("--set", setting)
]


def run(config: Path, run_dir: Path, *arguments: str) -> None:
    process = kills.start(config, run_dir, [*OPTIONS, *arguments], output=subprocess.PIPE)
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0, output


def metrics(run_dir: Path) -> list[dict[str, float]]:
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if "rollouts" in row]


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = kills.write_inputs(tmp_path_factory.mktemp("dynamic"), "tp=1")
    shutil.copy(path.parent / "train.jsonl", path.parent / "heldout.jsonl")
    return path


@pytest.fixture(scope="module")
def whole(config: Path) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(SCORED, str(config.parent / "scored.jsonl"))
        run(config, config.parent / "whole")
    return config.parent / "whole"


@dataclass
class Phases:
    """The (prompt, response) pairs scored in each phase of the run. Phases do not overlap."""

    steps: list[list[tuple[int, str]]]
    drawn_in_evaluation: dict[int, list[tuple[int, str]]]  # sampled answers, keyed by the number of steps before


@pytest.fixture(scope="module")
def phases(config: Path, whole: Path) -> Phases:
    texts = [json.loads(line)["prompt"] for line in (config.parent / "train.jsonl").read_text().splitlines()]
    lines = [json.loads(line) for line in (config.parent / "scored.jsonl").read_text().splitlines()]
    scored = iter([(next(i for i, text in enumerate(texts) if text in prompt), response) for prompt, response in lines])
    found = Phases([], {})
    for row in [{}, *metrics(whole)]:
        if row:
            num_groups = kept_groups(whole, row) + row["prompts_dropped/equal_rewards"] + row["prompts_dropped/surplus"]
            found.steps.append([next(scored) for _ in range(int(num_groups) * GROUP_SIZE)])
        if len(found.steps) in (0, 4, 6):
            greedy = [next(scored) for _ in range(NUM_PROMPTS)]
            assert len({prompt for prompt, _ in greedy}) == NUM_PROMPTS
            found.drawn_in_evaluation[len(found.steps)] = [next(scored) for _ in range(NUM_PROMPTS * 4)]
    assert next(scored, None) is None
    return found


def kept_groups(run_dir: Path, row: dict[str, float]) -> int:
    rows = [json.loads(line) for line in (run_dir / "samples.jsonl").read_text().splitlines()]
    return sum(found["step"] == row["step"] for found in rows) // GROUP_SIZE


def test_groups_whose_rewards_are_all_equal_are_replaced_up_to_the_bound(whole: Path) -> None:
    rows = metrics(whole)
    assert len(rows) == 6
    assert all(row.get("groups/zero_variance", 0.0) == 0 and row["rollouts"] <= 3 for row in rows)
    assert sum(row["prompts_dropped/equal_rewards"] for row in rows) > 0
    for row in rows:  # another rollout starts only if too few groups are kept
        assert row["rollouts"] == 1 or row["prompts_dropped/equal_rewards"] > 0
        assert row["prompts_dropped/surplus"] < 4


def test_every_rollout_of_a_step_draws_the_next_prompts(whole: Path, phases: Phases) -> None:
    """A prompt that the step has already seen comes first in the next step."""
    order = Sampler([NUM_PROMPTS], [1.0], PER_STEP, seed=3, shuffle=True)
    to_come = [draw.row for number in range(40) for draw in order.draws(number)]
    num_drawn = 0
    for row, scored in zip(metrics(whole), phases.steps, strict=True):
        seen: list[int] = []
        for _ in range(int(row["rollouts"])):
            for prompt in [p for i, p in enumerate(to_come) if p not in to_come[:i] and p not in seen][:PER_STEP]:
                to_come.remove(prompt)
                seen.append(prompt)
        assert Counter(prompt for prompt, _ in scored) == dict.fromkeys(seen, GROUP_SIZE), row  # each prompt once
        num_drawn += len(seen)
    assert num_drawn > PER_STEP * len(phases.steps)


def test_evaluation_does_not_draw_with_the_seeds_of_training(phases: Phases) -> None:
    """Compare answers of the same policy to the same prompts with the same ids: before step 1, and between steps 4 and
    5.
    """
    for steps_before in (0, 4):
        trained, evaluated = (
            by_prompt(s) for s in (phases.steps[steps_before], phases.drawn_in_evaluation[steps_before])
        )
        assert len(trained) >= PER_STEP and len(evaluated) == NUM_PROMPTS
        for prompt, responses in trained.items():
            assert len(set(responses)) > 1
            assert not set(responses) & set(evaluated[prompt])


def by_prompt(scored: list[tuple[int, str]]) -> dict[int, list[str]]:
    return {prompt: [response for other, response in scored if other == prompt] for prompt, _ in scored}


@pytest.mark.full
def test_a_resumed_run_draws_the_same_prompts_as_an_uninterrupted_run(
    config: Path, whole: Path, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    process = kills.start(config, run_dir, OPTIONS, output=subprocess.PIPE)
    while not (run_dir / "metrics.jsonl").exists() or len(metrics(run_dir)) < 2:
        assert process.poll() is None
    (run_dir / "stop").touch()
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0 and not (run_dir / "hf").exists(), output
    run(config, run_dir, "--resume")
    ends: list[End] = [read_end(run_dir), read_end(whole)]
    assert ends[0] == ends[1]
