"""The policy's logits of packed sequences on a GPU against transformers' logits, with both sets of layers.

In bf16 every operation rounds to 8 bits, and implementations add in different orders: two correct ones differ as much
as each differs from fp32. So the measure is transformers' bf16 error against its fp32 logits. Our error against the
same fp32 logits may be 1.5 times as large. It is usually smaller, because our last product is in fp32.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from grpo_mega.checkpoint_io.reader import open_reader
from grpo_mega.distributed.device import Device
from grpo_mega.megatron.loaded_kernels import in_use
from grpo_mega.types import Routes
from grpo_mega.weights.families import family_of
from grpo_mega.weights.spec import ModelShape
from tests.helpers.gpu_policies import SIZES, logits_of, make_policy, make_sample, use_local_layers

HERE = Path(__file__).parent
FAMILIES = ("qwen2", "llama", "qwen3", "qwen2-windowed", "deepseek_v2", "deepseek_v3")
MIXTURE = "qwen3_moe"
ALLOWED, ALLOWED_OF_MIXTURE = 1.5, 3.0  # allowed error as a multiple of transformers' bf16 error

pytestmark = [pytest.mark.rehearsed, pytest.mark.emulated]


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a checkpoint and logits per family, written by a process without the patches of a CPU
    run.
    """
    out = tmp_path_factory.mktemp("hf")
    environment = os.environ | {"PYTHONPATH": str(HERE.parents[1])}
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    command = [sys.executable, str(HERE / "hf_logits.py"), str(out), kind, json.dumps(SIZES), *FAMILIES, MIXTURE]
    subprocess.run(command, check=True, env=environment)
    return out


def ours(
    folder: Path, device: Device, tokens: list[list[int]], routes: list[Routes] | None = None
) -> list[torch.Tensor]:
    hf_config = AutoConfig.from_pretrained(folder)
    shape = ModelShape.from_hf_config(hf_config.to_dict())
    with open_reader(folder, family_of(shape.model_type), shape) as reader:
        policy = make_policy(device, hf_config, reader.read, rollout={"routing_replay": routes is not None})
    samples = [make_sample(i, ids[:2], ids[2:], 1.0) for i, ids in enumerate(tokens)]
    for sample, routes_of_sample in zip(samples, routes or [], strict=False):
        sample.routes = routes_of_sample
    return logits_of(policy, samples)


def rms(values: list[torch.Tensor]) -> float:
    return float(torch.cat([v.flatten() for v in values]).square().mean().sqrt())


def check(theirs: Path, family: str, device: Device, allowed: float = ALLOWED, *, is_replayed: bool = False) -> None:
    expected: dict[str, Any] = torch.load(theirs / f"{family}.pt", weights_only=False)
    found = ours(theirs / family, device, expected["tokens"], expected["routes"] if is_replayed else None)
    suffix = " replayed" if is_replayed else ""
    exact = expected[f"float32{suffix}"]
    own = rms([a - b for a, b in zip(found, exact, strict=True)])
    usual = rms([a - b for a, b in zip(expected[f"bfloat16{suffix}"], exact, strict=True)])
    assert 0 < own <= allowed * usual, (own, usual)
    assert usual < 0.05 * rms(exact), "bf16 is too coarse for these weights"


@pytest.mark.parametrize("family", FAMILIES)
def test_the_layers_of_a_run_give_transformers_logits(family: str, theirs: Path, device: Device) -> None:
    """Use Transformer Engine's layers if it is installed."""
    check(theirs, family, device)


@pytest.mark.parametrize("family", FAMILIES)
def test_layers_without_transformer_engine_give_transformers_logits(
    family: str, theirs: Path, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_local_layers(monkeypatch)
    check(theirs, family, device)


def test_a_mixture_of_experts_gives_transformers_logits(theirs: Path, device: Device) -> None:
    """Rounding of a hidden state may select another expert, so few tokens cause most of the error of both
    implementations.
    """
    check(theirs, MIXTURE, device, ALLOWED_OF_MIXTURE)


def test_replayed_experts_give_the_logits_of_transformers_with_them(theirs: Path, device: Device) -> None:
    """Most experts are fixed, so rounding selects others only for the tokens without a record."""
    check(theirs, MIXTURE, device, ALLOWED_OF_MIXTURE, is_replayed=True)


def test_transformer_engine_is_in_use_where_it_is_installed(device: Device) -> None:
    model = make_policy(device).models[0]
    is_theirs = any("transformer_engine" in type(m).__module__ for m in model.modules())
    has_theirs = in_use(device).transformer_engine
    assert is_theirs == has_theirs
