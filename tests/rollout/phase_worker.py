"""One of the two ranks of test_phase.py: phases of the embedded engine that end early, one case after another."""

from __future__ import annotations

import random
import time
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from grpo_mega.config import RolloutConfig
from grpo_mega.distributed.device import Device
from grpo_mega.distributed.rendezvous import Rendezvous
from grpo_mega.errors import RewardError
from grpo_mega.rollout.backlog import gather_samples
from grpo_mega.rollout.embedded.engine import EmbeddedEngine
from grpo_mega.rollout.engine import Sampling
from grpo_mega.rollout.rollouts import Phase, Rollouts
from grpo_mega.tracking.progress import Timers
from grpo_mega.types import Group, Prompt
from grpo_mega.weights.apply import load_shards
from grpo_mega.weights.boxes import region
from grpo_mega.weights.families import family_of
from grpo_mega.weights.spec import ModelShape
from tests.helpers.models import VOCAB_SIZE, make_model
from tests.helpers.ranks import run_cases

WORLD_SIZE, GROUP_SIZE = 2, 3
SAMPLING = Sampling(GROUP_SIZE, 1.0, 40, stop_token_ids=frozenset(range(0, VOCAB_SIZE, 9)), seed=5)
NUMBERS = random.Random(0)
PROMPTS = [
    Prompt(id=9 + 2 * i, text="", token_ids=tuple(NUMBERS.randrange(VOCAB_SIZE) for _ in range(3 + i % 4)), answer="")
    for i in range(14)
]
MODEL = make_model("qwen2", seed=3)


class Ranks:
    """An engine with MODEL's weights, and the rendezvous."""

    def __init__(self, rank: int, max_concurrent: int = 256, *, partial: bool = False) -> None:
        shape = ModelShape.from_hf_config(MODEL.config.to_dict())
        self.rank = rank
        self.engine = EmbeddedEngine(
            MODEL.config,
            family_of(shape.model_type),
            shape,
            MODEL.dtype,
            Device("cpu", torch.device("cpu")),
            max_concurrent,
            rank=rank,
            world_size=WORLD_SIZE,
            verify=False,
        )
        weights = dict(MODEL.named_parameters())
        holding = self.engine.shard_layout.rank_shards(rank)
        load_shards(holding, self.engine.tensors(), lambda box: weights[box.tensor][region(box.start, box.shape)])
        self.engine.version = 1
        RENDEZVOUS[0] = RENDEZVOUS[0] or Rendezvous(dist.distributed_c10d._get_default_store(), rank, WORLD_SIZE)
        self.rendezvous = RENDEZVOUS[0]
        self.seconds_per_sample = 0.0  # duration of scoring a sample on this rank
        config: Any = SimpleNamespace(
            rollout=RolloutConfig(partial=partial, oversample=1.25, phase_deadline_s=60),
            log=SimpleNamespace(progress=False),
        )
        scorer: Any = SimpleNamespace(
            submit=lambda sample: time.sleep(self.seconds_per_sample), submit_group=lambda samples: None
        )
        self.rollouts = Rollouts(
            config=config,
            engine=self.engine,
            recover=lambda version: None,
            rendezvous=self.rendezvous,
            scorer=scorer,
            sampling=SAMPLING,
            decode=str,
            timers=Timers(),
            warn=print,
            ranks=None,
            raise_on_all_ranks=nullcontext,
        )

    def generate(self, wanted: int, *, slow_rank: int | None = None, step: int = 4) -> Phase:
        self.seconds_per_sample = 0.02 * (self.rank == slow_rank)
        return self.rollouts.generate([Group(prompt, []) for prompt in PROMPTS], step, "test", wanted=wanted)

    def all_groups(self, step: int = 4) -> dict[int, Group]:
        """Return the finished groups of both ranks."""
        found: list[dict[int, Group]] = [{}] * WORLD_SIZE
        dist.all_gather_object(found, self.generate(len(PROMPTS), step=step).mine)
        return {index: group for groups in found for index, group in groups.items()}


RENDEZVOUS: list[Any] = [None]  # one for all cases, because a store key can be used only once


def longest(group: Group) -> int:
    return max(s.response_len for s in group.samples)


def check_same(mine: dict[int, Group], whole: dict[int, Group]) -> None:
    for index, group in mine.items():
        assert group.prompt is PROMPTS[index]
        for found, expected in zip(group.samples, whole[index].samples, strict=True):
            assert (found.index, list(found.response_ids)) == (expected.index, list(expected.response_ids))
            assert found.finish_reason == expected.finish_reason
            torch.testing.assert_close(
                torch.tensor(found.rollout_logprobs), torch.tensor(expected.rollout_logprobs), rtol=0, atol=1e-5
            )


def keeps_the_first(rank: int, folder: Path) -> None:
    """A phase keeps the first groups by a clock of decoded tokens, at any speed of the ranks."""
    ranks = Ranks(rank)
    whole = ranks.all_groups()
    assert len({longest(group) for group in whole.values()}) > 6, "the test has become too easy"
    for wanted in (1, 5, 13):
        expected = sorted(sorted(whole, key=lambda index: (longest(whole[index]), index))[:wanted])
        for slow_rank in (None, 0, 1):
            phase = ranks.generate(wanted, slow_rank=slow_rank)
            assert phase.kept == expected, (phase.kept, expected)
            mine = {index: group for index, group in phase.mine.items() if index in phase.kept}
            assert sorted(mine) == [index for index in expected if index % WORLD_SIZE == rank]
            check_same(mine, whole)
    assert ranks.all_groups() == whole, "a phase changed the engine"


def keeps_the_first_of_several_batches(rank: int, folder: Path) -> None:
    """Each rank decodes 2 of its 7 prompts at a time. The clock continues across batches, in prompt order."""
    whole = Ranks(rank).all_groups()
    clocks: dict[int, int] = {}
    for first in range(WORLD_SIZE):
        mine, started_at = list(range(first, len(PROMPTS), WORLD_SIZE)), 0
        for batch in (mine[i : i + 2] for i in range(0, len(mine), 2)):
            clocks |= {index: started_at + longest(whole[index]) for index in batch}
            started_at = max(clocks[index] for index in batch)
    for wanted in (3, 8):
        expected = sorted(sorted(clocks, key=lambda index: (clocks[index], index))[:wanted])
        for slow_rank in (0, 1):
            phase = Ranks(rank, max_concurrent=2 * GROUP_SIZE).generate(wanted, slow_rank=slow_rank)
            assert phase.kept == expected, (phase.kept, expected)
            check_same({index: group for index, group in phase.mine.items() if index in phase.kept}, whole)


def counts_what_is_thrown_away(rank: int, folder: Path) -> None:
    ranks = Ranks(rank)
    whole = ranks.all_groups()
    assert ranks.rollouts.flush_stats() == {}, "no samples were discarded"
    wanted = 6
    phase = ranks.generate(wanted)
    kept = [s.response_len for index in phase.kept for s in whole[index].samples]
    aborted = [s.response_len for index in set(whole) - set(phase.kept) for s in whole[index].samples]
    found = ranks.rollouts.flush_stats()
    assert ranks.rollouts.flush_stats() == {}
    everyone: list[dict[str, float]] = [{}] * WORLD_SIZE
    dist.all_gather_object(everyone, found)
    assert everyone[0] == everyone[1]
    assert (found["rollout/begun_groups"], found["rollout/aborted_groups"]) == (len(PROMPTS), len(PROMPTS) - wanted)
    assert (found["rollout/kept_tokens"], found["rollout/kept_length"]) == (sum(kept), sum(kept) / len(kept))
    # A rank aborts at the clock of the last kept group, or a few tokens later.
    clock = max(longest(whole[index]) for index in phase.kept)
    assert sum(min(length, clock) for length in aborted) <= found["rollout/aborted_tokens"] <= sum(aborted)
    assert found["rollout/aborted_length"] == found["rollout/aborted_tokens"] / len(aborted)


def reports_idle_slots_of_all_engines(rank: int, folder: Path) -> None:
    """Each rank has 21 slots, and most samples end before the longest one. Evaluations do not count."""
    ranks = Ranks(rank)
    groups = [Group(prompt, []) for prompt in PROMPTS]
    ranks.rollouts.generate(groups, 4, "evaluation", sampling=SAMPLING)
    assert ranks.rollouts.flush_usage() == {}
    ranks.generate(len(PROMPTS))
    slots = ranks.rollouts._usage["most_running"]
    assert slots == len(PROMPTS) * GROUP_SIZE == ranks.rollouts._usage["num_ended"]
    seconds = ranks.rollouts._usage["seconds"]
    usage = ranks.rollouts.flush_usage()
    assert usage.keys() == {"seconds/idle"} and 0.1 * seconds < usage["seconds/idle"] < 0.95 * seconds, usage
    assert ranks.rollouts.flush_usage() == {}


def raises_an_error_of_one_rank_on_all_ranks(rank: int, folder: Path) -> None:
    ranks = Ranks(rank)
    generate = ranks.engine.generate

    def broken(request: Any) -> Any:
        if rank == 1:
            raise RewardError("the pool is gone")
        return generate(request)

    ranks.engine.generate = broken  # type: ignore[method-assign]
    with pytest.raises(RewardError, match="the pool is gone"):
        ranks.generate(len(PROMPTS))


def goes_on_with_what_is_unfinished(rank: int, folder: Path) -> None:
    """The phases produce the same groups at any speed of the ranks, and finally the samples of one phase without an
    early end."""
    whole = [Ranks(rank).all_groups(step) for step in range(9)]
    for most_at_once, sampling in (
        (256, SAMPLING),
        (2 * GROUP_SIZE, SAMPLING),
        (4, replace(SAMPLING, longest_first=True)),
    ):
        histories = []
        for slow_rank in (None, 0, 1):
            ranks = Ranks(rank, most_at_once, partial=True)
            groups, history = [Group(prompt, []) for prompt in PROMPTS], list[Any]()
            while not all(group.is_complete(GROUP_SIZE) for group in groups):
                groups, kept = one_more_phase(ranks, groups, sampling, len(history), slow_rank)
                history.append((kept, [[(s.response_len, s.finish_reason) for s in g.samples] for g in groups]))
            histories.append(history)
            assert len(history) > 2 and any(reason is None for group in history[0][1] for _, reason in group)
            expected = [
                [whole[s.first_version][index].samples[s.index] for s in group.samples]
                for index, group in enumerate(groups)
            ]
            check_same(
                dict(enumerate(groups)),
                {index: Group(PROMPTS[index], samples) for index, samples in enumerate(expected)},
            )
            has_two_beginnings = any(len({s.first_version for s in group.samples}) > 1 for group in groups)
            assert has_two_beginnings or not sampling.longest_first
            for sample in (sample for group in groups for sample in group.samples):
                ends = [0, *(span.end for span in sample.spans)]
                assert [span.start for span in sample.spans] == ends[:-1] and ends[-1] == sample.response_len
            assert max(len(sample.spans) for group in groups for sample in group.samples) > 1
        assert histories[0] == histories[1] == histories[2]


def one_more_phase(
    ranks: Ranks, groups: list[Group], sampling: Sampling, step: int, slow_rank: int | None
) -> tuple[list[Group], list[int]]:
    """Run a phase that wants three more of the first unfinished groups. Return all groups, and the finished ones."""
    done = [index for index, group in enumerate(groups) if group.is_complete(GROUP_SIZE)]
    needed = (
        [index for index, group in enumerate(groups) if group.samples and index not in done][-1:]
        if len(done) > 8
        else []
    )
    ranks.seconds_per_sample = 0.03 * (ranks.rank == slow_rank)
    ranks.engine.version = step
    phase = ranks.rollouts.generate(
        groups[: 6 + 3 * step], step, "test", wanted=len(done) + 3, needed=needed, sampling=sampling
    )
    assert set(done + needed) <= set(phase.kept) and not set(done) & set(phase.shared)
    assert all(phase.mine.get(index, groups[index]).is_complete(GROUP_SIZE) for index in phase.mine.keys() & phase.kept)
    found = gather_samples(phase.mine, {index: PROMPTS[index] for index in phase.shared}, (), "x")
    return [found.get(index, group) for index, group in enumerate(groups)], phase.kept


def leaves_no_keys_in_the_store(rank: int, folder: Path) -> None:
    ranks = Ranks(rank)
    store = dist.distributed_c10d._get_default_store()

    def num_keys() -> int:
        ranks.rendezvous.all_gather("counting", None, 60)
        dist.barrier()
        found = store.num_keys()
        dist.barrier()
        return found

    ranks.generate(3)
    before = num_keys()
    for _ in range(3):
        ranks.generate(3)
    assert num_keys() == before


if __name__ == "__main__":
    cases = (
        keeps_the_first,
        keeps_the_first_of_several_batches,
        counts_what_is_thrown_away,
        reports_idle_slots_of_all_engines,
        raises_an_error_of_one_rank_on_all_ranks,
        goes_on_with_what_is_unfinished,
        leaves_no_keys_in_the_store,
    )
    run_cases({f.__name__: f for f in cases})
