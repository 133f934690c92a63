"""Compare phases that start the longest responses first with phases that start groups in order.

The model makes similar lengths within a group. The last token of a prompt names its class. Each class has a mean length; the
last class's mean is 16 times the first one's. A response goes through STAGES states of its class before it ends, so its length
has a deviation of 1 / sqrt(STAGES) of its mean. The layers add nothing to the residual stream, so these probabilities are
exact.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed import HashStore

from grpo_mega.distributed.rendezvous import Rendezvous
from grpo_mega.rollout.embedded.engine import EmbeddedEngine
from grpo_mega.rollout.engine import RolloutRequest, Sampling, StopCondition
from grpo_mega.types import Group, Prompt
from tools.benchmarks.oversampling.partial import Partial, rollouts_of
from tools.benchmarks.oversampling.served import Lengths, SimulatedSession, fresh, simulate, steps_of

CLASSES, STAGES, SPREAD, STOP = 8, 4, 16.0, 0
NEVER = -60.0  # logit of impossible tokens


def measure(engine: EmbeddedEngine, options: Any, num_started: int) -> dict[str, Any]:
    """Change the engine's model and measure. A step with partial rollouts starts `num_started` groups."""
    set_lengths(engine.tensors(), options.mean_length)
    in_order = Sampling(options.group_size, 1.0, options.max_length, frozenset({STOP}))
    longest_first = replace(in_order, longest_first=True)
    slots = engine.max_concurrent = max(1, options.prompts * options.group_size // 4)
    rounds = [_round(engine, options.prompts, in_order, longest_first, step) for step in range(options.rounds)]
    total = {name: sum(one[name] for one in rounds) for name in rounds[0] if name != "lengths"}
    lengths = [length for one in rounds for length in one["lengths"]]
    drawn = {
        "gain": round(total["plain"] / total["longest_first"], 3),
        "identical": total["differing"] == 0,
        "between_groups": round(_share_between_groups(lengths), 3),
        **_served(lengths, longest_first, slots, options.prompts),
    }
    numbers = random.Random(0)
    flat = [length for group in lengths for length in group]
    numbers.shuffle(flat)
    shuffled = _in_parts(flat, options.group_size)
    drawn["unlike"] = _served(shuffled, longest_first, slots, options.prompts)
    plain, drawn["partial_in_order"] = _partial(in_order, lengths, slots, options, num_started)
    _, drawn["partial"] = _partial(longest_first, lengths, slots, options, num_started)
    for found in (drawn["partial_in_order"], drawn["partial"]):
        found["served_gain"] = round(plain / found.pop("steps"), 3)
    return drawn


def set_lengths(tensors: Mapping[str, Tensor], mean_length: float) -> None:
    """Set the weights so that the mean length of class c is SPREAD ** (c / (CLASSES - 1)) times the first class's mean."""
    ratios = [SPREAD ** (c / (CLASSES - 1)) for c in range(CLASSES)]
    means = [mean_length * ratio / statistics.fmean(ratios) for ratio in ratios]
    embedding, head = tensors["model.embed_tokens.weight"], tensors["lm_head.weight"]
    vocab, num_states = len(embedding), CLASSES * STAGES
    for name, tensor in tensors.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor.zero_()
    state_V = torch.tensor([-1, *(token % num_states for token in range(vocab - 1))])  # state per token; -1 for the stop token
    scale = embedding.shape[1] ** 0.5  # length of a one-hot vector after the last norm
    embedding.zero_()
    embedding[torch.arange(1, vocab), state_V[1:]] = 1.0
    head.fill_(NEVER / scale)
    for state in range(num_states):
        leave = min(1 - 1e-6, STAGES / means[state // STAGES])
        after = -1 if state % STAGES == STAGES - 1 else state + 1
        for to, probability in ((state, 1 - leave), (after, leave)):
            head[state_V == to, state] = math.log(probability / int((state_V == to).sum())) / scale


def _round(engine: EmbeddedEngine, num_groups: int, plain: Sampling, longest_first: Sampling, step: int) -> dict[str, Any]:
    """Run both phases. Return their decoding steps, and the lengths."""
    numbers = random.Random(step)
    prompts = {
        i: Prompt(i, "", tuple(1 + STAGES * numbers.randrange(CLASSES) for _ in range(1 + i % 5)), "")
        for i in range(num_groups)
    }
    found: dict[str, Any] = {}
    tokens = []
    for name, sampling in (("plain", plain), ("longest_first", longest_first)):
        stop = StopCondition(Rendezvous(HashStore(), 0, 1), num_groups)  # only its clock is used
        groups = engine.generate(RolloutRequest(fresh(prompts), sampling, step, stop=stop))
        found[name] = max(stop.clocks.values())
        tokens.append([[list(s.response_ids) for s in groups[i].samples] for i in range(num_groups)])
    found["differing"] = int(tokens[0] != tokens[1])
    return found | {"lengths": [[len(sample) for sample in group] for group in tokens[0]]}


def _served(lengths: Sequence[Sequence[int]], sampling: Sampling, slots: int, per_phase: int) -> dict[str, float]:
    """Return the gain on a server that decodes `slots` sequences at once, over phases of `per_phase` groups."""
    steps: dict[str, int] = dict.fromkeys(("in_order", "longest_first", "bound"), 0)
    for phase in _in_parts(lengths, per_phase):
        known = {(key, i): length for key, group in enumerate(phase) for i, length in enumerate(group)}
        prompts = {key: Prompt(key, "", (1,), "") for key in range(per_phase)}
        steps["in_order"] += steps_of(known, prompts, replace(sampling, longest_first=False), slots)
        steps["longest_first"] += steps_of(known, prompts, sampling, slots)
        steps["bound"] += max(max(known.values()), math.ceil(sum(known.values()) / slots))
    return {
        "served_gain": round(steps["in_order"] / steps["longest_first"], 3),
        "served_over_bound": round(steps["longest_first"] / steps["bound"], 3),
    }


class _Served:
    """An engine with the simulated server. It has only the attributes that a generation phase uses."""

    failure, version = None, 0

    def __init__(self, lengths: Sequence[Sequence[int]], slots: int) -> None:
        self.now = 0  # steps of the last phase
        self._lengths, self._slots = lengths, slots

    def generate(self, request: RolloutRequest) -> dict[int, Group]:
        lengths: Lengths = {
            (index, i): self._lengths[group.prompt.id % len(self._lengths)][i]
            for index, group in request.groups.items()
            for i in range(request.sampling.group_size)
        }
        session = SimulatedSession(lengths, version=self.version)
        groups = simulate(session, request, self._slots)
        self.now = session.now
        return groups


class _PartialOnServer(Partial):
    def phase(self, *arguments: Any) -> Any:
        found = super().phase(*arguments)
        self.steps.append(self.engine.now)  # type: ignore[attr-defined]
        return found

    def measure(self, num_steps: int, max_staleness: int) -> dict[str, Any]:
        self.steps: list[int] = []
        return super().measure(num_steps, max_staleness)


def _partial(
    sampling: Sampling, lengths: Sequence[Sequence[int]], slots: int, options: Any, num_started: int
) -> tuple[int, dict[str, float]]:
    """Return the steps on the simulated server for phases to the end, and the figures of alternating partial rollouts."""
    engine: Any = _Served(lengths, slots)
    rollouts = rollouts_of(engine, sampling, lambda _: None, 60)
    bench = _PartialOnServer(rollouts, options.prompts, num_started)
    found = bench.measure(options.partial_rounds, options.max_staleness)
    in_turn = bench.steps[: 2 * options.partial_rounds]
    return sum(in_turn[1::2]), {
        "steps": sum(in_turn[::2]),
        "thrown_away": found["thrown_away"],
        "length_bias": found["length_bias"],
    }


def _in_parts(items: Sequence[Any], size: int) -> list[Sequence[Any]]:
    return [items[first : first + size] for first in range(0, len(items), size)]


def _share_between_groups(lengths: Sequence[Sequence[int]]) -> float:
    """Return the share of the log-length variance that is between groups, corrected for chance."""
    logs = [[math.log(length) for length in group] for group in lengths]
    within = statistics.fmean(statistics.variance(group) for group in logs)
    between = statistics.variance([statistics.fmean(group) for group in logs]) - within / len(logs[0])
    return max(0.0, between) / (max(0.0, between) + within)
