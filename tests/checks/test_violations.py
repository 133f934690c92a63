"""The plan refuses what training refuses, for the same reason, and accepts what it accepts: 300 random configs."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from grpo_mega import config as configs
from grpo_mega.cli import checks
from grpo_mega.cli.commands.options import PlanOptions
from grpo_mega.cli.commands.plan import prepare_plan
from grpo_mega.errors import UserError
from tests.helpers.models import VOCAB_SIZE, make_tokenizer

pytestmark = pytest.mark.pool

COUNT = 300
GPUS_PER_NODE = 8


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer and a dataset that are in order."""
    folder = tmp_path_factory.mktemp("run")
    make_tokenizer().save_pretrained(folder / "model", save_jinja_files=False)
    rows = [json.dumps({"prompt": f"{i}", "answer": "1"}) for i in range(64)]
    (folder / "train.jsonl").write_text("\n".join(rows) + "\n")
    return folder


def refusals_of_training(path: Path) -> list[str]:
    """The lines with which `grpo-mega train` ends on nodes of 8."""
    try:
        config = configs.load(path)
    except UserError as error:
        return error.lines
    machine = checks.Machine(config.layout.world_size, GPUS_PER_NODE, transformer_engine="2.9.0")
    found = checks.find_violations(config, machine)
    return [problem for problem in found if not problem.startswith("SGLang pads ")]  # only on a machine without a GPU


def refusals_of_the_plan(path: Path) -> list[str]:
    try:
        return prepare_plan(PlanOptions(path, gpus_per_node=GPUS_PER_NODE))[1].violations
    except UserError as error:
        return error.lines


@pytest.mark.full
@pytest.mark.waiting
def test_the_plan_refuses_what_training_refuses_and_nothing_else(folder: Path) -> None:
    chance = random.Random(0)
    accepted: list[dict[str, Any]] = []
    reasons = set()
    for _ in range(COUNT):
        path = write_random(folder, chance)
        expected = refusals_of_training(path)
        assert refusals_of_the_plan(path) == expected, path.read_text()
        if expected:
            reasons |= {problem.partition("=")[0] for problem in expected}
        else:
            accepted.append(start_of(path, chance))
    assert COUNT / 5 < len(accepted) < 4 * COUNT / 5
    assert len(reasons) >= 8, reasons
    start(accepted[::16])  # more than a second each


def start_of(path: Path, chance: random.Random) -> dict[str, Any]:
    """How a rank of this config starts without the others: on Megatron's local layers."""
    config = configs.load(path)
    raw = checks.resolve_dtype(config, is_gpu=True)[0].model_dump(mode="json") | {"precision": {}}
    raw["layout"]["dp"] = config.layout.world_size // (config.layout.tp * config.layout.pp)
    return {
        "config": raw,
        "model": json.loads((path.parent / "model/config.json").read_text()),
        "rank": chance.randrange(config.layout.world_size),
        "world_size": config.layout.world_size,
        "num_batches": 0,
        "num_tokens": 64 * config.layout.tp,
        "segment": 32,
    }


def start(requests: list[dict[str, Any]]) -> None:
    """Layouts that the plan accepts can be built by real Megatron, rank for rank as the mapping of weights has it."""
    command = [sys.executable, "-m", "tests.helpers.rehearsal"]
    lines = "".join(json.dumps(request) + "\n" for request in requests)
    result = subprocess.run(command, input=lines, capture_output=True, text=True, timeout=600)
    answers = [json.loads(line) for line in result.stdout.splitlines() if line.startswith("{")]
    assert len(answers) == len(requests), (requests[len(answers)], result.stderr[-2000:])
    assert all(answer["num_parameters"] > 0 for answer in answers)


def write_random(folder: Path, chance: random.Random) -> Path:
    """A model and a config, each rule broken now and then."""
    pick = chance.choice

    def rarely(value: Any, otherwise: Any) -> Any:
        return value if chance.random() < 0.06 else otherwise

    is_mixture = chance.random() < 0.3
    fields: dict[str, Any] = {
        "model_type": rarely("gpt2", "qwen3_moe" if is_mixture else pick(["llama", "qwen2", "qwen3"])),
        "hidden_size": 384,  # which transformers wants to be a multiple of the heads
        "intermediate_size": pick([1024, 768]),
        "num_hidden_layers": pick([8, 6, 3]),
        "num_attention_heads": pick([8, 8, 12]),
        "num_key_value_heads": pick([4, 2]),
        "head_dim": 64,
        "vocab_size": rarely(50, VOCAB_SIZE),
        "tie_word_embeddings": pick([True, False]),
        "hidden_act": rarely("gelu", "silu"),
    }
    if is_mixture:
        fields |= {"num_experts": pick([8, 6]), "num_experts_per_tok": 2, "moe_intermediate_size": pick([256, 96])}
    (folder / "model/config.json").write_text(json.dumps(fields))
    tp, pp = pick([1, 1, 2, 4, rarely(3, 2)]), pick([1, 2, 4])
    dp = pick([1, 2, 4])
    raw: dict[str, Any] = {
        "run_dir": str(folder / "out"),
        "steps": 1,
        "model": {"path": str(folder / "model"), "init": "random"},
        "layout": {
            "tp": tp,
            "pp": pp,
            "dp": rarely(None, dp),
            "vpp": pick([None, None, 2]) if pp > 1 else rarely(2, None),
            "ep": pick([1, dp]) if is_mixture else rarely(2, 1),
            "sequence_parallel": tp > 1 and chance.random() < 0.8,
            "order": pick(["tp-dp-pp", "tp-dp-pp", "tp-pp-dp"]),
        },
        "data": {"train": str(folder / "train.jsonl"), "max_prompt_length": 64},
        "rollout": {"engine": pick(["embedded", "sglang"]), "max_response_length": 64},
        "rewards": {"functions": [{"name": rarely("no.such_module", "accuracy")}]},
        "batch": {"prompts_per_step": rarely(128, 32), "tokens_per_micro_batch": rarely(100, 1024)},
    }
    if raw["rollout"]["engine"] == "sglang":
        raw["rollout"]["tp"] = pick([1, 2, 2, rarely(8, 1)])
    if chance.random() < 0.2:
        raw["precision"] = {"fp8": "hybrid", "fp8_recipe": pick(["blockwise", "tensorwise"])}
    if rarely(True, False):
        raw["layout"]["layers_per_chunk"] = [1] * (pp * (raw["layout"]["vpp"] or 1))
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(raw))
    return path


def test_every_broken_rule_is_named_once(folder: Path) -> None:
    fields = {"model_type": "llama", "hidden_size": 512, "intermediate_size": 1000, "num_hidden_layers": 2}
    fields |= {"num_attention_heads": 8, "vocab_size": VOCAB_SIZE}
    (folder / "model/config.json").write_text(json.dumps(fields))
    raw = {
        "run_dir": "out",
        "steps": 1,
        "model": {"path": str(folder / "model"), "init": "random", "dtype": "float32"},
        "layout": {"tp": 3, "pp": 4, "cp": 2, "dp": 2, "ep": 2, "order": "tp-pp-dp", "layers_per_chunk": [1, 1, 1, 1]},
        "data": {"train": str(folder / "train.jsonl"), "max_prompt_length": 64},
        "rollout": {"engine": "sglang", "tp": 5, "max_response_length": 64},
        "rewards": {"functions": [{"name": "acuracy"}]},
        "batch": {"prompts_per_step": 65, "tokens_per_micro_batch": 128},
    }
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(raw))
    found = refusals_of_the_plan(path)
    for part in (
        "acuracy",
        "layout.tp=3",
        "layout.cp=2",
        "layout.pp=4",
        "layout.ep=2 spreads",
        "Megatron's only order for cp=2 with pp=4",
        "layers_per_chunk",
        "rollout.tp=5",
        "65",
    ):
        assert sum(part in problem for problem in found) >= 1, (part, found)
    assert len({problem.partition(";")[0] for problem in found}) == len(found)
