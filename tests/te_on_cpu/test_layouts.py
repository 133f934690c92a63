"""Transformer Engine's layers over tensor, sequence, pipeline, data and expert parallel ranks, in bf16 and every FP8 recipe.

By the cases of `grpo-mega check`: the same samples, log-probs and three optimizer steps in every layout and on a single rank.
What may differ is rounding: a layout cuts tensors elsewhere, and FP8 then rounds otherwise, as far as FP8 itself is from bf16.
"""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from emulated_te import launcher
from gpu_policies import precision_of
from models import VOCAB_SIZE, make_model, save_checkpoint
from ranks import FORKED, run_forked

from grpo_mega import config as configs
from grpo_mega.commands import check as checks
from grpo_mega.commands.check import Case, Outcome, compare, with_layout
from grpo_mega.config import Config
from grpo_mega.types import Group, Prompt, Sample

pytestmark = pytest.mark.distributed

RECIPES = ("bf16", "tensorwise", "delayed", "blockwise")
# Every recipe where ranks cut tensors or experts; elsewhere one, so that each layout has one whose scales it could spoil.
CASES = (
    *(("qwen3", recipe, "tp=2,sequence_parallel=true") for recipe in RECIPES),
    ("qwen3", "delayed", "pp=2"),
    ("qwen3", "blockwise", "pp=2,vpp=2"),
    ("qwen3", "delayed", "dp=2"),
    ("qwen3", "tensorwise", "tp=2,pp=2,sequence_parallel=true"),
    ("qwen3", "delayed", "pp=2,vpp=2,dp=2"),
    *(("qwen3", recipe, "cp=2") for recipe in RECIPES),
    ("qwen3", "bf16", "cp=2,cp_comm_type=a2a"),
    ("qwen3", "tensorwise", "cp=2,cp_comm_type=a2a"),
    ("qwen3", "bf16", "cp=2,tp=2,sequence_parallel=true"),
    ("qwen3", "blockwise", "cp=2,tp=2,sequence_parallel=true"),
    ("qwen3", "bf16", "cp=4"),
    *(("qwen3_moe", recipe, "ep=2") for recipe in RECIPES),
    ("qwen3_moe", "grouped", "ep=2"),
)
FAMILIES = tuple(dict.fromkeys(family for family, _, _ in CASES))
# Rows that are cut must be whole blocks of 128 on each of two ranks, as must hidden states that such ranks gather.
SIZES = {
    "hidden_size": 256,
    "intermediate_size": 256,
    "moe_intermediate_size": 128,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "initializer_range": 0.05,
}


def make_inputs(folder: Path, family: str) -> None:
    sizes = {name: size for name, size in SIZES.items() if family.endswith("moe") or not name.startswith("moe")}
    save_checkpoint(make_model(family, seed=3, **sizes), folder / family)


def make_groups() -> list[Group]:
    """Return four groups of four ragged samples, with the log-probs of a model that knows nothing and random rewards."""
    generator = torch.Generator().manual_seed(7)

    def ids(n: int) -> list[int]:
        return torch.randint(2, VOCAB_SIZE, (n,), generator=generator).tolist()

    groups = []
    for number in range(4):
        prompt = Prompt(number, "", tuple(ids(3 + number)), "")
        samples = []
        for index in range(4):
            length = int(torch.randint(4, 24, (1,), generator=generator))
            sample = Sample(prompt, index, ids(length), [-math.log(VOCAB_SIZE)] * length, "stop")
            sample.reward = float(torch.rand(1, generator=generator))
            samples.append(sample)
        groups.append(Group(prompt, samples))
    return groups


def config_of(folder: Path, family: str, recipe: str) -> Config:
    raw: dict[str, Any] = {
        "run_dir": "unused",
        "steps": 1,
        "model": {"path": str(folder / family), "dtype": "bfloat16", "grouped_experts": recipe == "grouped"},
        "data": {"train": str(folder / "unused.jsonl"), "max_prompt_length": 12},
        "rollout": {"max_response_length": 24},
        "algorithm": {"group_size": 4, "kl_beta": 0.02},
        "batch": {"prompts_per_step": 4, "epochs": checks.UPDATES, "tokens_per_micro_batch": 256},
        "optimizer": {"lr": 3e-5},  # few tokens are clipped; otherwise a few others decide the gradient
        "precision": {} if recipe in ("bf16", "grouped") else precision_of(recipe),
    }
    return configs.validate(raw)


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str, str], Outcome]:
    """Run all cases, in one launch of ranks for each world size; return them by family, recipe and layout."""
    folder = tmp_path_factory.mktemp("layouts")
    torch.save(make_groups(), folder / "groups.pt")
    rows = [json.dumps({"prompt": f"Say {number}.", "answer": str(number)}) for number in range(4)]
    (folder / "unused.jsonl").write_text("\n".join(rows) + "\n")
    for family in FAMILIES:
        make_inputs(folder, family)
    keys = [*((family, recipe, "tp=1") for family in FAMILIES for recipe in RECIPES), *CASES]
    cases = [Case(" ".join(key), with_layout(config_of(folder, key[0], key[1]), key[2])) for key in keys]

    def emulated(command: list[str], world_size: int, log_dir: Path) -> int:
        assert command[1] == "-m"
        run_forked(command[2], world_size, *command[3:], command=launcher.command(launcher.DEFAULT, str(FORKED)))
        return 0

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checks, "run_ranks", emulated)
        return dict(zip(keys, checks.run_cases(cases, folder), strict=True))


@pytest.mark.parametrize(("family", "recipe", "layout"), CASES)
def test_a_layout_differs_from_one_rank_by_rounding(outcomes: Any, family: str, recipe: str, layout: str) -> None:
    """Two roundings of the same numbers are up to twice as far apart as each is from them. Pipeline stages round alike.

    Expert parallel ranks bring an expert the tokens of two micro-batches at once, so that one scale per tensor rounds them
    otherwise, and in later layers 4 or 5 of 275 tokens choose another expert. That moves the gradient norm of tensorwise FP8 by
    0.3%, 0.3% and 1.7% in the three updates; its own distance from bf16 is 2.5%. At a larger step (a learning rate of 1e-4) 82%
    of the tokens are clipped in the third update, and the few that are left decide its gradient: it then differed by 107%.
    """
    one_rank = outcomes[family, "bf16" if recipe == "grouped" else recipe, "tp=1"]
    found = asdict(compare(layout, outcomes[family, recipe, layout], one_rank))
    own = asdict(compare(layout, one_rank, outcomes[family, "bf16", "tp=1"]))
    print(layout, found, own)
    sums = 10 if family == "qwen3" else 2.5  # times the tolerance, where rounding adds up
    for name in ("loss", "logprobs", "ref_logprobs", "weights", "grad_norm", "metrics"):
        tolerance = checks.TOLERANCE["bfloat16"] * (sums if name in ("grad_norm", "metrics") else 1)
        allowed = 1e-6 if layout in ("pp=2", "pp=2,vpp=2") else max(tolerance, 2 * own[name])
        assert found[name] <= allowed, (name, found[name], allowed)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_updates_compared_are_real_ones(outcomes: Any, family: str) -> None:
    for recipe in RECIPES:
        first, *_, last = outcomes[family, recipe, "tp=1"].updates
        assert first["grad_norm"] > 0.01 and last["grad_norm"] > 0.01 and last["ratio/max"] > 1.02, (recipe, first, last)


@pytest.mark.parametrize("family", FAMILIES)
def test_each_recipe_was_in_use_and_near_to_bf16(outcomes: Any, family: str) -> None:
    """By the log-prob of the worst token, relative to the mean of all."""
    for recipe, other in itertools.combinations(RECIPES, 2):
        found = compare(recipe, outcomes[family, recipe, "tp=1"], outcomes[family, other, "tp=1"])
        print(found)
        assert 1e-3 < found.logprobs < 0.3, (recipe, other, found)
