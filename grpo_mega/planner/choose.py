"""Choose the values of a first config: lengths from the data's tokens, batch sizes and a layout that fit memory.

`choose` returns settings, each with the reason for its value. Memory and times are the plan's arithmetic. A value that
no arithmetic gives, such as the learning rate, is the usual one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from statistics import fmean
from typing import Any, NamedTuple

from grpo_mega import config as configs
from grpo_mega.errors import ConfigError
from grpo_mega.planner.job import PlannedJob
from grpo_mega.planner.plan import MARGIN, Option, Plan, suggest
from grpo_mega.planner.state import elements_of
from grpo_mega.planner.this_machine import Rates, cpu_assumptions
from grpo_mega.preflight.cards import ASSUMED, Card
from grpo_mega.preflight.model import Model, num_positions
from grpo_mega.weights.families import family_of

MULTIPLE = 64  # lengths are multiples of it
RATE_SHARE = 0.97  # a layout with this share of the highest rate is as good, because rates are estimates
SECONDS_PER_STEP = 90.0  # a step on a CPU should not take longer


class Setting(NamedTuple):
    key: str  # dotted
    value: Any
    why: str


@dataclass(frozen=True)
class Target:
    """The devices of a job: GPUs, or one rank on all cores of this machine, with their measured `rates`."""

    device: Card
    is_gpu: bool
    world_size: int
    gpus_per_node: int
    has_sglang: bool
    rates: Rates | None = None

    @property
    def title(self) -> str:
        if self.is_gpu:
            return f"{self.world_size} x {self.device.title}"
        return f"{self.device.title} and {self.device.memory_gib:.0f} GiB"


@dataclass(frozen=True)
class DataTokens:
    """Lengths in tokens of a data set's different prompts, as rendered, and of its gold answers."""

    prompts: Sequence[int]
    answers: Sequence[int]


def choose(known: Sequence[Setting], model: Model, data: DataTokens, target: Target) -> list[Setting]:
    """Return the settings of lengths, engine, batch and layout, and settings that follow from them.

    `known` are settings of the other required keys. Raise ConfigError if nothing fits the devices' memory.
    """
    lengths = _lengths(data, num_positions(model.fields), target.is_gpu)
    largest = lengths[0].value
    kept = [length for length in data.prompts if length <= largest]
    if not kept:
        raise ConfigError(
            f"data.train: must have prompts of at most {largest} tokens, half of the model's positions, but the"
            f" shortest has {min(data.prompts)}; name a model with more positions"
        )
    has_split = any(s.key == "data.heldout" for s in known)
    heldout = []
    if not has_split and len(kept) >= 20:
        size = min(256 if target.is_gpu else 16, len(kept) // 10)
        heldout = [Setting("data.heldout_size", size, f"of the {len(kept)} prompts, never trained on; for eval/score")]
    num_prompts = len(kept) - sum(s.value for s in heldout)
    fixed = [*known, *lengths, *heldout, *_precision(target)]
    for batch in _batches(num_prompts, largest + lengths[1].value, target):
        option = _fitting([*fixed, *batch], model, fmean(kept), target)
        if option is not None:
            break
    else:
        raise ConfigError(
            f"model.path has no layout that fits in the memory of {target.title}; "
            + ("give more GPUs by --num-gpus, or another card by --gpu" if target.is_gpu else "use a smaller model")
        )
    changed = {s.key: s for s in _layout(option, target)}
    kept_batch = [changed.pop(s.key, s) for s in batch]
    chosen = [*lengths, *heldout, *_precision(target), *kept_batch, *changed.values()]
    chosen += _training(option, num_prompts, target)
    if heldout or has_split:
        steps = next(s.value for s in chosen if s.key == "steps")
        chosen.append(Setting("eval.interval", max(1, steps // 5), "steps between evaluations on the held-out prompts"))
    if has_split:
        limit = 256 if target.is_gpu else 16
        chosen.append(Setting("eval.num_prompts", limit, "per evaluation, to keep it short"))
    return chosen


def _lengths(data: DataTokens, positions: int | None, is_gpu: bool) -> list[Setting]:
    """Return the limits of prompts and responses."""
    ordered, positions = sorted(data.prompts), positions or 1 << 20
    longest, usual = ordered[-1], ordered[int(0.99 * (len(ordered) - 1))]
    limit = _rounded(longest if longest <= 2 * usual else usual)
    limit = min(limit, positions // 2)
    num_dropped = sum(length > limit for length in ordered)
    why = f"tokens; the longest of {len(ordered)} different prompts has {longest}"
    why += f", and {num_dropped} longer than this are dropped" if num_dropped else ""
    least, most = (1024, 4096) if is_gpu else (128, 256)
    answers = sorted(data.answers)
    answer = answers[int(0.95 * (len(answers) - 1))]
    response = min(max(_rounded(1.5 * answer), least), most, positions - limit)
    reason = "" if is_gpu else ", and a CPU is slow"
    return [
        Setting("data.max_prompt_length", limit, why),
        Setting(
            "rollout.max_response_length",
            response,
            f"tokens; 95% of the gold answers have at most {answer}{reason}; raise it if response_length/cut is high",
        ),
    ]


def _precision(target: Target) -> list[Setting]:
    if not target.is_gpu:
        return [
            Setting("model.dtype", "float32", "the dtype that CPUs compute fastest; bfloat16 on GPUs"),
            Setting("rollout.engine", "embedded", "generates in the trainer's process; SGLang is for GPUs"),
        ]
    served = (
        Setting("rollout.engine", "sglang", "the fast engine")
        if target.has_sglang
        else Setting("rollout.engine", "embedded", "SGLang is not installed here; sglang is much faster on GPUs")
    )
    return [Setting("model.dtype", "bfloat16", "half the memory of float32; masters stay float32"), served]


def _batches(num_prompts: int, longest: int, target: Target) -> Iterator[list[Setting]]:
    """Yield batch sizes, largest first: samples of a step, and the token budget of a micro-batch."""
    if target.is_gpu:
        sizes = [(min(256, max(32, 8 * target.world_size)), 8)]
    else:
        sizes = [(8, 8), (8, 4), (4, 4), (2, 4)]
    budgets = dict.fromkeys((max(16384 if target.is_gpu else 4096, longest), longest))
    moments = [Setting("optimizer.moments_dtype", "bfloat16", "in float32 nothing fits; needs Transformer Engine")]
    for (prompts, group_size), more in product(sizes, ([], moments) if target.is_gpu else ([],)):
        prompts = min(prompts, num_prompts)
        for budget in budgets:
            yield [
                Setting("algorithm.group_size", group_size, "samples per prompt; more give better advantages"),
                Setting("batch.prompts_per_step", prompts, f"x group_size = {prompts * group_size} samples per step"),
                Setting("batch.tokens_per_micro_batch", budget, f"fits in memory; the longest sample has {longest}"),
                *more,
            ]


def _fitting(settings: Sequence[Setting], model: Model, mean_prompt: float, target: Target) -> Option | None:
    """Return the layout to train in; None if none fits. On a CPU a step must also be short, unless it is the least."""
    raw = configs.nested({s.key: s.value for s in settings})
    raw["layout"] = {"dp": target.world_size}
    raw.setdefault("steps", 1)
    config = configs.validate(raw)
    job = PlannedJob(
        config=config,
        shape=model.shape,
        experts_per_token=model.experts_per_token,
        card=target.device,
        world_size=target.world_size,
        gpus_per_node=target.gpus_per_node,
        mean_prompt=mean_prompt,
        mean_response=ASSUMED.response_fill * config.rollout.max_response_length,
        uses_te=target.is_gpu,
    )
    if target.rates is not None:
        job = replace(job, assumed=cpu_assumptions(config, target.rates))
    if not target.is_gpu:
        plan = Plan(job)
        samples = config.batch.prompts_per_step * config.algorithm.group_size
        is_short = plan.timing.step <= SECONDS_PER_STEP or samples <= 8
        fits = plan.fits and plan.host.peak.gib <= (1 - MARGIN) * target.device.memory_gib
        return Option({}, plan) if fits and is_short else None
    options = suggest(job)
    near = [option for option in options if option.rate >= RATE_SHARE * options[0].rate]

    def complexity(option: Option) -> tuple[int, ...]:
        layout, rollout = option.plan.setup.layout, option.plan.setup.config.rollout
        return layout.tp * layout.pp * layout.cp, rollout.tp, len(option.changes)

    return min(near, key=complexity, default=None)


def _layout(option: Option, target: Target) -> Iterator[Setting]:
    plan, config = option.plan, option.plan.setup.config
    if not target.is_gpu:
        figures = f"{plan.host.peak.gib:.0f} of {plan.capacity_gib:.0f} GiB, {float(plan.timing.step):.0f} s per step"
        yield Setting("layout.dp", 1, f"one process that uses all cores; grpo-mega plan: {figures}")
        return
    figures = f"{plan.peak_gib:.0f} of {plan.capacity_gib:.0f} GiB, {float(plan.timing.step):.0f} s per step"
    yield Setting("layout.tp", config.layout.tp, f"ranks that share each layer; grpo-mega plan: {figures}")
    yield Setting("layout.pp", config.layout.pp, "pipeline stages; by the same plan")
    yield Setting("layout.dp", config.layout.dp, "replicas, the rest of the GPUs")
    reasons = {
        "model.recompute": "saves the memory of activations; by the same plan",
        "layout.sequence_parallel": "splits activations over tp",
        "layout.vpp": "model chunks per stage, for less waiting; by the same plan",
        "layout.cp": "ranks that share each sequence; by the same plan",
        "layout.ep": "ranks that share the experts; by the same plan",
        "rollout.tp": "GPUs per engine; by the same plan",
        "rollout.ep": "ranks that share the experts in an engine; by the same plan",
        "batch.tokens_per_micro_batch": "the same number of tokens over all ranks of cp",
    }
    yield from (Setting(key, option.changes[key], why) for key, why in reasons.items() if option.changes.get(key))


def _training(option: Option, num_prompts: int, target: Target) -> Iterator[Setting]:
    setup = option.plan.setup
    per_step = setup.config.batch.prompts_per_step
    steps = min(200 if target.is_gpu else 50, max(10, num_prompts // per_step))
    epochs = steps * per_step / num_prompts
    yield Setting("steps", steps, f"{epochs:.2g} passes over {num_prompts} prompts")
    yield Setting("checkpoint.interval", max(1, steps // 10), "steps between checkpoints; --resume continues from them")
    billions = elements_of(family_of(setup.shape.model_type), setup.shape, None).total / 1e9
    lr = 1e-6 if billions >= 1 else 5e-6
    yield Setting(
        "optimizer.lr",
        lr,
        f"usual for {billions:.2g}B parameters; raise it if the reward stays flat, lower it if KL jumps",
    )


def _rounded(length: float) -> int:
    return -(-int(length) // MULTIPLE) * MULTIPLE
