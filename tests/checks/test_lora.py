"""Settings that model.lora allows and refuses, and what a sync sends with it."""

from __future__ import annotations

from math import prod
from typing import Any

import pytest

from grpo_mega import config as configs
from grpo_mega.cli.checks.model import sync_problems
from grpo_mega.errors import ConfigError
from grpo_mega.weights.derived import adapter_family, sends_adapter
from grpo_mega.weights.families import FAMILIES
from tools.benchmarks.gpu.models import shape_of

RANK = 16


def config_of(*, model: dict[str, Any] | None = None, **sections: Any) -> configs.Config:
    raw: dict[str, Any] = {"run_dir": "unused", "steps": 1, "data": {"train": "unused"}}
    raw["model"] = {"path": "unused", "dtype": "bfloat16", "lora": {"rank": RANK}} | (model or {})
    return configs.validate(raw | sections)


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({"optimizer": {"cpu_offload": True}}, "optimizer.cpu_offload=true conflicts with model.lora"),
        ({"optimizer": {"moments_dtype": "bfloat16"}}, "optimizer.moments_dtype=bfloat16 conflicts with model.lora"),
        ({"precision": {"fp8": "hybrid"}}, "precision.fp8=hybrid conflicts with model.lora"),
        ({"sync": {"lora": "merged"}, "model": {"lora": None}}, "sync.lora=merged needs model.lora; leave it out"),
    ],
)
def test_a_setting_that_an_adapter_lacks_is_refused(sections: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as error:
        config_of(**sections)
    assert error.value.lines[0].startswith(words)


@pytest.mark.parametrize(
    ("model", "rollout", "reason"),
    [
        ("llama-3.1-8b", {"engine": "sglang"}, ""),
        ("llama-3.1-8b", {}, "with rollout.engine='embedded'"),
        ("llama-3.1-8b", {"engine": "sglang", "quantization": "fp8"}, "with rollout.quantization='fp8'"),
        ("qwen3-235b", {"engine": "sglang"}, "for qwen3_moe"),
    ],
)
def test_an_engine_that_cannot_apply_adapters_gets_merged_weights(
    model: str, rollout: dict[str, Any], reason: str
) -> None:
    shape, asked = shape_of(model), config_of(rollout=rollout, sync={"lora": "adapter"})
    said = [line.partition("; ")[0] for line in sync_problems(asked, shape)]
    assert len(said) == bool(reason) and all(f"sync.lora='adapter': must be merged {reason}" in line for line in said)
    for wanted, is_sent in (("adapter", not reason), (None, not reason), ("merged", False)):
        config = config_of(rollout=rollout, sync={"lora": wanted})
        assert sends_adapter(config.model.lora, config.sync, config.rollout, shape) == is_sent


@pytest.mark.parametrize("model", ["qwen3-8b", "llama-3.1-8b", "llama-70b"])
def test_an_adapter_is_at_most_a_hundredth_of_its_base(model: str) -> None:
    shape = shape_of(model)
    family = FAMILIES[shape.model_type]
    adapter = adapter_family(family, shape, RANK, ("all-linear",))
    sizes = [sum(prod(size) for size in one.hf_tensors(shape).values()) for one in (adapter, family)]
    assert 100 * sizes[0] <= sizes[1]
