"""The host never waits for the device between the micro-batches of an update, so a card always has work.

The passes run on a card that is not there (helpers/fake_card.py), one process for all models. What waits on purpose:
Megatron's counts of tokens per expert, which its products need, and the search for tokens without a gradient, which
are then not computed.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from tests.te_on_cpu.emulated_te import launcher

ROOT = Path(__file__).resolve().parents[2]
SIZES: dict[str, Any] = {
    "num_hidden_layers": 2,
    "hidden_size": 56,
    "intermediate_size": 116,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 14,
    "vocab_size": 301,
    "max_position_embeddings": 512,
}
DENSE = SIZES | {"model_type": "qwen2", "tie_word_embeddings": True}
TE_MODEL = DENSE | {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16, "vocab_size": 304}
MIXTURE = SIZES | {"model_type": "qwen3_moe", "moe_intermediate_size": 36, "num_experts": 6, "num_experts_per_tok": 2}
MIXTURE |= {"mlp_only_layers": [], "decoder_sparse_step": 1, "norm_topk_prob": True}
LOSSES = {"balancing": "seq_aux_loss", "aux_loss_coeff": 0.01, "z_loss_coeff": 0.001}
HYBRID = SIZES | {"model_type": "qwen3_5_text", "num_hidden_layers": 4, "head_dim": 16}
HYBRID |= {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 10,
    "linear_value_head_dim": 7,
}
CASES: dict[str, dict[str, Any]] = {
    "dense": {"model": DENSE},
    "experts": {"model": MIXTURE, "settings": {"router": LOSSES}},
    "adapter": {"model": DENSE, "settings": {"lora": {"rank": 3}}},
    "shared prompts": {"model": DENSE, "batch": {"share_prompts": True}},
    "reference, entropy": {
        "model": DENSE,
        "algorithm": {"kl_beta": 0.01, "calculate_entropy": True, "entropy_bonus": 0.01},
    },
    "demonstrations": {"model": DENSE, "algorithm": {"positive_nll": 1.0}},
    "capacity": {"model": MIXTURE, "settings": {"router": {"capacity_factor": 1.5}}},
    "windows": {"model": SIZES | {"model_type": "mistral", "sliding_window": 13}},
    "recomputed": {"model": DENSE, "settings": {"recompute": "full"}},
    "linear attention": {"model": HYBRID},
}
SEARCHES: dict[str, dict[str, Any]] = {"clipped": {"old_logprobs": True}, "without advantage": {"zeros": True}}
SEARCHES["dropped by a correction"] = {"algorithm": {"correction": {"importance": "icepop"}}}
ALL = CASES | {name: {"model": DENSE} | more for name, more in SEARCHES.items()}
USUAL = ("dense", "experts", "clipped")  # the other cases are for the full suite


@pytest.fixture(scope="module")
def found(request: pytest.FixtureRequest) -> dict[str, dict[str, Any]]:
    """Run the cases of the selected tests in one process."""
    selected = [item.name for item in request.session.items if item.path == request.path]
    cases = {name: case for name, case in ALL.items() if any(test.endswith(f"[{name}]") for test in selected)}
    return answers([sys.executable, "-m", "tests.megatron.waits_worker"], cases)


def answers(command: list[str], cases: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    lines = "".join(json.dumps(case) + "\n" for case in cases.values())
    result = subprocess.run(command, input=lines, capture_output=True, text=True, cwd=ROOT, env=launcher.environment())
    assert result.returncode == 0, result.stderr[-3000:]
    found = [json.loads(line) for line in result.stdout.splitlines() if line.startswith("{")]
    return dict(zip(cases, found, strict=True))


def marked(names: Iterable[str]) -> list[Any]:
    return [pytest.param(name, marks=[pytest.mark.full] * (name not in USUAL)) for name in names]


@pytest.mark.parametrize("case", marked(CASES))
def test_no_micro_batch_waits_for_the_device(found: dict[str, dict[str, Any]], case: str) -> None:
    assert (found[case]["logprobs"], found[case]["update"]) == ("", "")
    assert found[case]["num_micro_batches"] > 2 and found[case]["update_operations"] > 1000


@pytest.mark.parametrize("case", marked(SEARCHES))
def test_tokens_that_may_lack_a_gradient_are_searched(found: dict[str, dict[str, Any]], case: str) -> None:
    assert found[case]["logprobs"] == "" and found[case]["update"].startswith("nonzero at logprobs.py")


@pytest.mark.full
@pytest.mark.skipif(launcher.why_not(launcher.DEFAULT) is not None, reason=str(launcher.why_not(launcher.DEFAULT)))
def test_no_micro_batch_waits_with_the_layers_of_transformer_engine() -> None:
    command = launcher.command(launcher.DEFAULT, "tests/te_on_cpu/waits.py")
    cases = {name: CASES[name] | {"model": TE_MODEL} for name in ("dense", "adapter", "reference, entropy")}
    for name, found in answers(command, cases).items():
        assert (found["logprobs"], found["update"]) == ("", ""), name
        assert found["update_operations"] > 1000, name
