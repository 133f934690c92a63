"""`grpo-mega init MODEL DATA`: write a first config, with the reason for each value.

The columns are guessed from the data, the lengths come from its tokens, and the planner chooses batch sizes and a
layout that fit this machine, or the GPUs of --gpu. The config is written only if it breaks no rule of `train` here, or
of `plan` for those GPUs.

`choose` returns settings, each with the reason for its value. Memory and times are the plan's arithmetic. A value that
no arithmetic gives, such as the learning rate, is the usual one.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from grpo_mega import config as configs
from grpo_mega.checkpoint_io.hf_files import WEIGHT_SUFFIXES
from grpo_mega.cli.checks import Machine, find_violations, resolve_dtype, this_machine
from grpo_mega.cli.checks.machine import CARDS, Card, card_of
from grpo_mega.cli.checks.model import Model, num_positions, read_model
from grpo_mega.cli.checks.tokenizer import check_tokenizer_files
from grpo_mega.cli.commands.options import InitOptions
from grpo_mega.cli.planner.job import plan_on
from grpo_mega.cli.planner.plan import MARGIN, Option, Plan, suggest
from grpo_mega.cli.planner.state import elements_of
from grpo_mega.cli.planner.this_machine import Rates, cpu_assumptions, cpu_card, measure_rates
from grpo_mega.config.base import MAX_COUNT
from grpo_mega.config.data import DataConfig
from grpo_mega.data.load import load_prompts
from grpo_mega.data.rows import MissingColumn, find_columns, find_value, read_rows
from grpo_mega.distributed.environment import gpu_sign
from grpo_mega.errors import ConfigError, raise_all
from grpo_mega.paths import write_atomically
from grpo_mega.processes import host_room
from grpo_mega.tracking.progress import phase
from grpo_mega.weights.families import family_of
from grpo_mega.yaml_text import dump_yaml, parse_yaml

SYSTEM_PROMPT = "Think step by step, then give the final answer inside \\boxed{}."
SECTIONS = ("model", "data", "rewards", "layout", "rollout", "algorithm", "batch", "optimizer", "eval", "checkpoint")
MAX_LINE = 120
NUM_ANSWERS = 2000  # answers to count the tokens of
_ASK = (
    "import torch; n = torch.cuda.device_count(); p = torch.cuda.get_device_properties(0); "
    "print('GPUs:', n, p.total_memory / 2**30, p.name)"
)


def run(options: InitOptions) -> int:
    """Write the config and print the next command. Return the exit code."""
    if options.out.exists():
        raise ConfigError(f"--out {options.out} exists; name a file that does not")
    print(f"reading {options.model} and {options.data}", flush=True)
    target = find_target(options)
    required = {"run_dir": "unused", "steps": 1, "model": {"path": str(options.model)}, "data": {"train": options.data}}
    least = configs.validate(required)
    model = read_model(least)
    check_tokenizer_files(options.model, model.shape.vocab)
    known = list(_known_settings(options))
    if not target.is_gpu:
        rates = measure_rates(resolve_dtype(least, is_gpu=False)[0], model.shape, target.world_size)
        target = replace(target, device=cpu_card(target.world_size, host_room(), rates), rates=rates)
    with phase(f"counting the tokens of {options.data}"):
        data, system_prompt = _count_tokens(options, known, model)
    settings = [*known, *system_prompt, *choose([*known, *system_prompt], model, data, target)]
    text = config_text(options, settings, target)
    config = configs.validate(parse_yaml(text))
    machine = Machine(target.world_size, target.gpus_per_node, target.device)
    raise_all(find_violations(config, machine if options.gpu else this_machine(config.layout)))
    options.out.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(options.out, text.encode())
    print(
        f"{options.out} is written for {target.title}; train with it: grpo-mega train {shlex.quote(str(options.out))}"
    )
    return 0


def find_target(options: InitOptions) -> Target:
    """Return the GPUs of --gpu, or the devices of this machine. Raise ConfigError."""
    for name, value in (("--num-gpus", options.num_gpus), ("--gpus-per-node", options.gpus_per_node)):
        if value is not None and value < 1:
            raise ConfigError(f"{name}={value}: must be at least 1")
    if options.gpu is not None:
        num_gpus = options.num_gpus or options.gpus_per_node
        return Target(card_of(options.gpu), True, num_gpus, options.gpus_per_node, has_sglang=True)
    if gpu_sign(os.environ) is None:
        if options.num_gpus is not None:
            raise ConfigError(f"--num-gpus={options.num_gpus}: this machine has no GPU; name another one by --gpu")
        return Target(cpu_card(1, host_room(), Rates()), False, 1, 1, has_sglang=False)
    asked = subprocess.run([sys.executable, "-c", _ASK], capture_output=True, text=True)
    found = re.search(r"GPUs: (\d+) ([\d.]+) (.*)", asked.stdout)
    if found is None:
        raise ConfigError(
            "torch sees no GPU although this machine has a driver; fix it, or hide it by CUDA_VISIBLE_DEVICES="
        )
    card = next((card for name, card in CARDS.items() if name in found[3].lower()), None)
    if card is None:
        raise ConfigError(
            f"the planner has no figures for {found[3]}; name the most similar GPU of {', '.join(CARDS)} by --gpu"
        )
    num_gpus = options.num_gpus or int(found[1])
    card = replace(card, memory_gib=min(card.memory_gib, float(found[2])))
    return Target(card, True, num_gpus, num_gpus, Machine(1, 1).has_sglang)


def config_text(options: InitOptions, settings: Sequence[Setting], target: Target) -> str:
    """Return the config as YAML, with the reason for each value as a comment."""
    command = ["grpo-mega", "init", str(options.model), options.data, "--out", str(options.out)]
    for name in ("prompt_column", "answer_column", "gpu", "num_gpus"):
        value = getattr(options, name)
        command += [] if value is None else [f"--{name.replace('_', '-')}", str(value)]
    lines = [
        f"# A first config for {target.title}, written by",
        f"#     {_as_comment(shlex.join(command))}",
        "# Change any value. `grpo-mega config KEY` explains a key, and `grpo-mega config` lists all of them.",
    ]
    lines += [line for s in settings if "." not in s.key for line in _lines(s, "")]
    for section in SECTIONS:
        inner = [line for s in settings if s.key.startswith(f"{section}.") for line in _lines(s, "  ")]
        lines += [f"{section}:", *inner] if inner else []
    return "\n".join(lines) + "\n"


def _as_comment(text: str) -> str:
    """Return text that stays on one line of YAML: other characters than printable ones are escaped."""
    return "".join(one if one.isprintable() else ascii(one)[1:-1] for one in text)


def _lines(setting: Setting, indent: str) -> Iterator[str]:
    leaf, why = setting.key.rpartition(".")[2], _as_comment(setting.why)
    plain = dump_yaml({leaf: setting.value}).rstrip()
    is_flow = isinstance(setting.value, list) or "\n" in plain
    line = indent + (f"{leaf}: {json.dumps(setting.value)}" if is_flow else plain)
    if len(line) + len(why) + 4 > MAX_LINE:
        yield f"{indent}# {why}"
        yield line
    else:
        yield f"{line}  # {why}"


def _known_settings(options: InitOptions) -> Iterator[Setting]:
    """Yield the run's folder, the model, the rewards, and the datasets and their columns.

    Raise ConfigError if the data is empty or has no usual columns.
    """
    data = Path(options.data.removeprefix("hub:").partition("@")[0].partition(":")[0])
    data_name = data.parent.name if data.stem == "train" and data.parent.name else data.stem
    name = f"{options.model.resolve().name}-{data_name}"
    run_dir = Path("runs", name)
    number = 2
    while run_dir.exists():
        run_dir, number = Path("runs", f"{name}-{number}"), number + 1
    yield Setting("run_dir", str(run_dir), "a new folder for checkpoints, metrics, samples and the trained model")
    yield Setting("model.path", str(options.model), "the policy and, unless kl_beta is 0, its reference")
    if not any(path.name.endswith(WEIGHT_SUFFIXES) for path in options.model.iterdir()):
        yield Setting("model.init", "random", "the folder has no weights; training starts from random ones")
    functions = [{"name": "accuracy", "weight": 1.0}]
    why = "1 if the answer equals the gold answer; your own: module.function or file.py:function"
    yield Setting("rewards.functions", functions, why)
    first = next(iter(read_rows(options.data)), None)
    if first is None:
        raise ConfigError(f"dataset {options.data} is empty; it needs one row per prompt")
    try:
        prompt, answer = find_columns(first, options.prompt_column, options.answer_column)
    except ConfigError as error:
        flag = "--prompt-column" if "data.prompt_column" in str(error) else "--answer-column"
        raise ConfigError(f"{error}, here by {flag}") from None
    for flag, column in (("--prompt-column", prompt), ("--answer-column", answer)):
        try:
            find_value(first.values, column)
        except MissingColumn as error:
            raise ConfigError(f"{flag}={column}: must be a column of {first.place}; {error}") from None
    columns = ", ".join(first.values)
    yield Setting("data.train", options.data, "the prompts and their gold answers")
    yield Setting("data.prompt_column", prompt, f"the columns are {columns}")
    yield Setting("data.answer_column", answer, "the gold answers, for rewards")
    test = f"{options.data}@test"
    if not options.data.startswith("hub:") and Path(options.data).is_dir():
        with suppress(ConfigError):
            if next(iter(read_rows(test)), None) is not None:
                yield Setting("data.heldout", test, "the folder's test split, never trained on; for eval/score")


def _count_tokens(options: InitOptions, known: Sequence[Setting], model: Model) -> tuple[DataTokens, list[Setting]]:
    """Return the lengths of prompts and answers, and the setting of a system prompt if the data can have one.

    Data whose prompts are messages, and templates that refuse a system message, have none.
    """
    from grpo_mega.checkpoint_io.model import read_tokenizer

    tokenizer = read_tokenizer(options.model, model.shape.vocab)
    values = {s.key.removeprefix("data."): s.value for s in known if s.key.startswith("data.")}
    is_text = isinstance(find_value(next(read_rows(options.data)).values, values["prompt_column"]), str)
    system_prompt = Setting("data.system_prompt", SYSTEM_PROMPT, "tells the model where `accuracy` reads the answer")
    for settings in ([system_prompt], []) if is_text else ([],):
        limits = {"max_prompt_length": MAX_COUNT, **{s.key.removeprefix("data."): s.value for s in settings}}
        config = DataConfig.model_validate(values | limits)
        try:
            prompts, _, _ = load_prompts(config.train[0], config, tokenizer)
            break
        except ConfigError:
            if not settings:
                raise
    answers = tokenizer([prompt.answer for prompt in prompts[:NUM_ANSWERS]], add_special_tokens=False)["input_ids"]
    lengths = {prompt.text: len(prompt.token_ids) for prompt in prompts}
    return DataTokens(list(lengths.values()), list(map(len, answers))), list(settings)


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
    """Lengths in tokens of a dataset's different prompts, as rendered, and of its gold answers."""

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
    job = plan_on(target.device, config, model, Machine(target.world_size, target.gpus_per_node))
    job = replace(job, mean_prompt=mean_prompt)
    if target.rates is not None:
        job = replace(job, assumed=cpu_assumptions(target.rates))
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
