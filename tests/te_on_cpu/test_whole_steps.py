"""The quickstart's recipe in FP8 with a real SGLang server through whole steps: sampling, update, verified sync, guard.

Two runs start at once, with models that are bit-identical in bf16. In the second model the middle layers have an
outlier: one channel of the norm before the MLP is 2**SHIFT times larger, and the weights that read it are 2**-SHIFT
times smaller. FP8 has one scale per tensor, which must fit this channel, so it loses every other channel.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.helpers.models import make_model
from tests.te_on_cpu.emulated_te import launcher
from tests.te_on_cpu.whole_steps import Run, start

pytestmark = [
    pytest.mark.sglang,
    pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu/test_whole_steps.py runs here, on a GPU"),
    pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="SGLang is not installed"),
]

SIZES = {"hidden_size": 96, "intermediate_size": 160, "num_attention_heads": 6, "num_key_value_heads": 2}
MIDDLE, CHANNEL, SHIFT = (1, 2), 5, 17  # middle of 4 layers, outlier channel, log2 of its factor
WARN = 0.15  # nats per token; above FP8's mismatch without the outlier, below its mismatch with the outlier
PRECISION = {"fp8": "hybrid", "guard": {"fall_back": True, "layers": 1, "steps": 1}}
# The weights that read the outlier are small, but an Adam step is not: at the quickstart's rate one step would ruin the
# model.
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {"steps": 2},
    "outlier": {"steps": 4, "changes": {"optimizer.lr": 1e-6}},
}


def make_policy(*, has_outlier: bool) -> torch.nn.Module:
    model: torch.nn.Module = make_model("qwen2", seed=5, **SIZES)
    if has_outlier:
        parameters = dict(model.named_parameters())
        for layer in MIDDLE:
            parameters[f"model.layers.{layer}.post_attention_layernorm.weight"][CHANNEL] *= 2.0**SHIFT
            for name in ("gate_proj", "up_proj"):
                parameters[f"model.layers.{layer}.mlp.{name}.weight"][:, CHANNEL] *= 2.0**-SHIFT
    return model


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Run]]:
    if reason := launcher.why_not(launcher.DEFAULT):
        pytest.skip(reason)
    started: dict[str, Run] = {}
    try:
        for name, settings in SETTINGS.items():
            changes = {"precision": PRECISION, "rollout.mismatch_warn": WARN} | settings.get("changes", {})
            folder, model = tmp_path_factory.mktemp(name), make_policy(has_outlier=name == "outlier")
            started[name] = start(folder, model, settings["steps"], changes)
        yield started
    finally:
        for run in started.values():
            run.process.kill()  # the server ends with its run
            run.process.wait()


def test_both_models_are_the_same_in_bf16() -> None:
    ids = torch.arange(6, 38)[None]
    plain, outlier = (make_policy(has_outlier=has).bfloat16()(ids).logits for has in (False, True))
    assert torch.equal(plain, outlier)


@pytest.mark.full
def test_whole_steps_in_fp8_end_with_verified_syncs_and_weights_that_moved(runs: dict[str, Run]) -> None:
    run = runs["plain"]
    steps = run.steps()
    assert len(steps) == SETTINGS["plain"]["steps"]
    assert any(f"Transformer Engine's (version {launcher.DEFAULT}, emulated" in line for line in run.messages()[:3])
    for row in steps:
        assert 0.01 < row["mismatch/k3"] < WARN and row["guard/level"] == 0
        assert row["grad_norm"] > 0 and row["nonfinite_mini_batches"] == 0
    assert not any("bf16" in message for message in run.messages())
    assert "verify: false" not in (run.folder / "run" / "config.yaml").read_text()  # wrong checksums would end the run
    start_weights, end = (load_file(run.folder / name / "model.safetensors") for name in ("model", "run/hf"))
    moved = [name for name, weight in end.items() if not torch.equal(weight, start_weights[name].to(weight.dtype))]
    assert len(moved) > len(end) / 2, moved


@pytest.mark.full
def test_the_guard_falls_back_from_an_outlier_to_bf16_and_the_run_goes_on(runs: dict[str, Run]) -> None:
    run = runs["outlier"]
    steps = run.steps()
    assert [row["guard/level"] for row in steps] == [1, 2, 0, 1]
    first, ends_in_bf16, in_bf16, again = [row["mismatch/k3"] for row in steps]
    assert min(first, ends_in_bf16, again) > WARN
    usual = [row["mismatch/k3"] for row in runs["plain"].steps()]
    assert 0 < in_bf16 < min(usual) / 10
    # The policy has moved from its start, and the engine has followed it.
    assert steps[2]["kl/mean"] > 5 * in_bf16
    assert all(math.isfinite(row["loss/total"]) for row in steps)
    assert "verify: false" not in (run.folder / "run" / "config.yaml").read_text()  # wrong checksums would end the run
    told = [message for message in run.messages() if message.startswith("step ") and "bf16" in message]
    whose = ("the first and last 1 layers", "all layers", "the first and last 1 layers")
    assert len(told) == len(whose)
    for message, which, step in zip(told, whose, (1, 2, 4), strict=True):
        assert message.startswith(f"step {step}: engine and trainer disagree by a KL (k3) of 0.")
        assert message.endswith(f"{which} compute in bf16 for the next 1 steps")
    assert "step 3: no anomaly for 1 steps; restoring the configured precision" in run.messages()
