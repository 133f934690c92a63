"""`grpo-mega init MODEL DATA`: write a first config, with the reason for each value.

The columns are guessed from the data, the lengths come from its tokens, and the planner chooses batch sizes and a
layout that fit this machine, or the GPUs of --gpu. The config is written only if it breaks no rule of `train` here, or
of `plan` for those GPUs.
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
from dataclasses import replace
from pathlib import Path

from grpo_mega import config as configs
from grpo_mega.commands.options import InitOptions
from grpo_mega.config.base import MAX_COUNT
from grpo_mega.config.data import DataConfig
from grpo_mega.data.load import load_prompts
from grpo_mega.data.rows import MissingColumn, find_columns, find_value, read_rows
from grpo_mega.distributed.environment import gpu_sign
from grpo_mega.distributed.memory import host_room
from grpo_mega.errors import ConfigError, raise_all
from grpo_mega.formats.hf_files import WEIGHT_SUFFIXES
from grpo_mega.observe.progress import phase
from grpo_mega.paths import write_atomically
from grpo_mega.planner.choose import DataTokens, Setting, Target, choose
from grpo_mega.planner.this_machine import Rates, cpu_card, measure_rates
from grpo_mega.preflight import Machine, find_problems, resolve_dtype, this_machine
from grpo_mega.preflight.cards import CARDS, card_of
from grpo_mega.preflight.model import Model, read_model
from grpo_mega.preflight.tokenizer import check_tokenizer_files
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
        print("measuring a matrix product of the model's sizes", file=sys.stderr, flush=True)
        rates = measure_rates(resolve_dtype(least, is_gpu=False)[0], model.shape, target.world_size)
        target = replace(target, device=cpu_card(target.world_size, host_room(), rates), rates=rates)
    with phase(f"counting the tokens of {options.data}"):
        data, system_prompt = _count_tokens(options, known, model)
    settings = [*known, *system_prompt, *choose([*known, *system_prompt], model, data, target)]
    text = config_text(options, settings, target)
    config = configs.validate(parse_yaml(text))
    machine = Machine(target.world_size, target.gpus_per_node, target.device)
    raise_all(find_problems(config, machine if options.gpu else this_machine(config.layout)))
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
        f"#     {shlex.join(command)}",
        "# Change any value. `grpo-mega config KEY` explains a key, and `grpo-mega config` lists all of them.",
    ]
    lines += [line for s in settings if "." not in s.key for line in _lines(s, "")]
    for section in SECTIONS:
        inner = [line for s in settings if s.key.startswith(f"{section}.") for line in _lines(s, "  ")]
        lines += [f"{section}:", *inner] if inner else []
    return "\n".join(lines) + "\n"


def _lines(setting: Setting, indent: str) -> Iterator[str]:
    leaf = setting.key.rpartition(".")[2]
    plain = dump_yaml({leaf: setting.value}).rstrip()
    is_flow = isinstance(setting.value, list) or "\n" in plain
    line = indent + (f"{leaf}: {json.dumps(setting.value, ensure_ascii=False)}" if is_flow else plain)
    if len(line) + len(setting.why) + 4 > MAX_LINE:
        yield f"{indent}# {setting.why}"
        yield line
    else:
        yield f"{line}  # {setting.why}"


def _known_settings(options: InitOptions) -> Iterator[Setting]:
    """Yield the run's folder, the model, the rewards, and the data sets and their columns.

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
        raise ConfigError(f"data set {options.data} is empty; it needs one row per prompt")
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
    from grpo_mega.run.model_files import read_tokenizer  # it imports torch

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
