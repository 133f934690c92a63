"""The plan's decoding steps against published figures of servers on H100s."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from grpo_mega import config as configs
from grpo_mega.cli.checks.machine import card_of
from grpo_mega.cli.checks.model import KNOWN_MODELS
from grpo_mega.cli.planner.job import PlannedJob
from grpo_mega.cli.planner.memory import cache_bytes_per_token, engine_memory, host_memory
from grpo_mega.cli.planner.timing import decoding_step, token_seconds
from grpo_mega.weights.spec import ModelShape
from tests.helpers.shapes import LLAMA_70B

LLAMA_8B = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "rms_norm_eps": 1e-5,
}
LLAMA_405B = dict(KNOWN_MODELS["llama-3.1-405b"].fields)
CLOSE = 0.15  # relative to the published figure


# sizes of DeepSeek-V3
LATENT = {
    "model_type": "deepseek_v3",
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 61,
    "first_k_dense_replace": 3,
    "num_attention_heads": 128,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "vocab_size": 129280,
}


def setup_of(fields: dict[str, Any], tp: int, quantization: str | None = None, ep: int = 1) -> PlannedJob:
    raw = {
        "run_dir": "unused",
        "steps": 1,
        "model": {"path": "unused", "dtype": "bfloat16"},
        "layout": {"tp": tp},
        "data": {"train": "unused"},
        "rollout": {"engine": "sglang", "tp": tp, "ep": ep, "quantization": quantization},
    }
    return PlannedJob(configs.validate(raw), ModelShape.from_hf_config(fields), 0, card_of("h100"), tp, 8, 64.0, 256.0)


def step(setup: PlannedJob, concurrent: float, context: float) -> float:
    return float(decoding_step(setup, engine_memory(setup).weights, concurrent, context))


@pytest.mark.parametrize(("tp", "batch", "published"), [(1, 1, 7.37e-3), (1, 128, 11.84e-3), (8, 1, 3.35e-3)])
def test_a_step_of_llama_3_8b_takes_as_long_as_sglang_published(tp: int, batch: int, published: float) -> None:
    """github.com/sgl-project/sglang/issues/1008, 9 August 2024: Llama-3-8B in bf16 with CUDA graphs, 128 tokens in, 8
    out; median latency of decoding by bench_latency, which calls the model without the scheduler. The excerpt does not
    name the card, but an A100 would need its full memory bandwidth to read 15 GB in 7.37 ms."""
    setup = setup_of(LLAMA_8B, tp)
    assert step(setup, batch, 132) - setup.assumed.decode_step_s == pytest.approx(published, rel=CLOSE)


@pytest.mark.parametrize(
    ("fields", "rate", "published", "close"),
    [
        (LLAMA_70B, 1, 7.78, CLOSE),
        (LLAMA_70B, 2, 8.82, CLOSE),
        (LLAMA_70B, 4, 9.65, CLOSE),
        (LLAMA_405B, 1, 20.9, 0.25),
    ],
    ids=["70b-1", "70b-2", "70b-4", "405b-1"],
)
def test_a_request_to_a_server_at_tp8_takes_as_long_as_sglang_published(
    fields: dict[str, Any], rate: float, published: float, close: float
) -> None:
    """lmsys.org/blog/2024-07-25-sglang-llama3 (SGLang v0.2): Llama-3-70B and Llama-3.1-405B in FP8 on 8 H100s 80GB SXM
    at TP8, prompts of 512 to 4,096 tokens and responses of 128 to 1,024, `rate` requests per second; median end-to-end
    latency in seconds, read from the plots. The number of running requests is the rate times the latency, and each
    request also waits while the server processes other prompts."""
    prompt, response, setup = 2304, 576, setup_of(fields, 8, "fp8")
    prefill = prompt * token_seconds(setup)
    decoding = response * step(setup, rate * published, prompt + response / 2)
    assert prefill + decoding / (1 - rate * prefill) == pytest.approx(published, rel=close)


@pytest.mark.parametrize(("context", "published"), [(5250, 18.58e-3), (1500, 18.91e-3)])
def test_a_step_of_llama_3_3_70b_at_tp2_takes_as_long_as_nvidia_published(context: float, published: float) -> None:
    """docs.nvidia.com/nim/benchmarking/llm/1.0.0/performance, read in November 2026: Llama-3.3-70B in FP8 with NIM
    1.8.0 on 2 H100s 80G at TP2, one request at a time with 5,000 tokens in and 500 out, or 500 in and 2,000 out; time
    between tokens."""
    assert step(setup_of(LLAMA_70B, 2, "fp8"), 1, context) == pytest.approx(published, rel=CLOSE)


def test_experts_take_the_same_memory_for_any_ep_of_an_engine() -> None:
    fields = dict(KNOWN_MODELS["qwen3-235b-a22b"].fields)
    weights = {engine_memory(setup_of(fields, 8, ep=ep)).weights for ep in (1, 2, 8)}
    assert len(weights) == 1
    spread, cut = (setup_of(LATENT, 8, ep=ep) for ep in (8, 1))
    assert engine_memory(spread).weights == engine_memory(cut).weights


def test_a_server_keeps_states_of_linear_attention_beside_its_cache() -> None:
    """On a CPU there are four states per sample. On a GPU SGLang divides the memory as 9 to 10."""
    linear = {"linear_num_key_heads": 8, "linear_num_value_heads": 16}
    fields = {**LLAMA_8B, "model_type": "qwen3_5_text", "num_hidden_layers": 4, "head_dim": 128, **linear}
    setup = setup_of(fields, 2)
    memory = engine_memory(setup)
    assert memory.cache_tokens == int(float(memory.cache) * 10 / 19 / cache_bytes_per_token(setup))
    state = 3 * (16 * 128 * 128 * 4 + 3 * (8 + 8 + 16) * 128 * 2) / 2  # three layers, halved by tp
    here = [
        replace(setup, card=replace(setup.card, name="cpu"), shape=replace(setup.shape, linear_layers=layers))
        for layers in ((0, 1, 2), ())
    ]
    extra = [float(engine_memory(one).extra) for one in here]
    assert extra[0] - extra[1] == (4 * setup.config.rollout.max_concurrent + 1) * state


def test_every_rank_keeps_all_latents_of_multi_latent_attention() -> None:
    in_bf16 = setup_of(LATENT, 8)
    assert cache_bytes_per_token(in_bf16) == 61 * (512 + 64) * 2
    raw = in_bf16.config.model_dump()
    raw["model"]["dtype"], raw["rollout"]["dtype"] = "float32", "bfloat16"  # only the trainer's weights are wider
    wider = replace(in_bf16, config=configs.validate(raw))
    assert cache_bytes_per_token(wider) == cache_bytes_per_token(in_bf16)


def test_recorded_experts_take_the_host_memory_of_layers_that_have_experts() -> None:
    """DeepSeek-V3 has 58 such layers with 8 of 256 experts per token. One byte has no value left for "unknown", so an
    id takes 2."""
    setup = setup_of(LATENT, 8)
    config = setup.config.model_copy(
        update={"rollout": setup.config.rollout.model_copy(update={"routing_replay": True})}
    )
    host = host_memory(replace(setup, config=config, experts_per_token=8))
    [recorded] = [figure for figure in host.other if figure.label == "recorded experts"]
    assert recorded == 2 * 8 * setup.batch.tokens * 58 * 8 * 2
