"""Cases for the ranks of sync_worker.py and for the test that reads their results. Does not import Megatron-core."""

from dataclasses import dataclass, field, replace
from typing import Any, Literal

from grpo_mega.rollout.engine import Sampling
from tests.helpers.models import EOS_ID, VOCAB_SIZE

SAMPLING = Sampling(4, temperature=0.8, max_response_length=12, stop_token_ids=frozenset({EOS_ID}), with_routes=True)
LONG = replace(SAMPLING, max_response_length=36, stop_token_ids=frozenset(range(EOS_ID, VOCAB_SIZE, 20)))


@dataclass(frozen=True)
class Case:
    family: str
    changes: dict[str, Any] = field(default_factory=dict)  # changes to the model's config
    # Trainer layouts. In the first layout the ranks of an engine are in different numbers of Megatron's groups.
    layouts: tuple[str, ...] = ("{pp: 4, vpp: 2}", "{tp: 1}", "{tp: 2}", "{tp: 2, pp: 2}", "{tp: 4}")
    engine_tps: tuple[int, ...] = (1, 2)
    engine_ep: int = 1
    quantise: bool = False  # send linear layers as FP8 blocks
    lora: Literal["", "merged", "adapter"] = ""  # what is sent of a policy with an adapter
    steps: int = 1  # optimizer steps before each sync
    level: Literal["", "full", "sweep"] = ""  # pytest mark of the test


BLOCKS = {
    "num_hidden_layers": 2,
    "hidden_size": 128,
    "intermediate_size": 512,
    "head_dim": 128,
    "initializer_range": 0.06,
}
SOME: dict[str, Any] = {"layouts": ("{tp: 2, pp: 2}", "{pp: 4, vpp: 2}"), "engine_tps": (2,)}
SPREAD = ("{tp: 2, ep: 2, sequence_parallel: true}", "{pp: 2, ep: 2}")
EXPERTS = {"num_hidden_layers": 3, "moe_intermediate_size": 64, "num_local_experts": 12}
LATENT = EXPERTS | {"moe_intermediate_size": 128, "q_lora_rank": 20}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32}
LORA_LAYOUTS = ("{tp: 2, pp: 2, sequence_parallel: true}", "{dp: 4}", "{tp: 4}")
ADAPTED = {"num_hidden_layers": 3, "tied": True}
CASES = {
    "deepseek_v2": Case("deepseek_v2", LATENT | {"q_lora_rank": None}, SPREAD, (2,), level="sweep"),
    "deepseek_v3 over four": Case(
        "deepseek_v3", LATENT | {"q_lora_rank": None}, SPREAD, (4,), engine_ep=2, level="sweep"
    ),
    "mixtral over four": Case(
        "mixtral", EXPERTS | {"intermediate_size": 128}, SPREAD, (4,), engine_ep=4, level="sweep"
    ),
    "llama": Case("llama", level="sweep", **SOME),
    "mistral": Case("mistral", {"sliding_window": 7}, level="sweep", **SOME),
    "qwen2 tied": Case("qwen2", {"tied": True}, ("{pp: 4, vpp: 2}", "{tp: 2}")),
    "qwen3": Case("qwen3", level="sweep", **SOME),
    "qwen3 in FP8": Case("qwen3", BLOCKS, ("{tp: 2, pp: 2}", "{tp: 4}"), (2,), quantise=True, level="full"),
    "qwen3_moe": Case("qwen3_moe", EXPERTS, SPREAD, (2,), engine_ep=2),
    "glm4_moe": Case("glm4_moe", EXPERTS | {"use_qk_norm": True}, SPREAD, (2,), level="sweep"),
    "deepseek_v3": Case(
        "deepseek_v3",
        LATENT | {"rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 0.7}},
        SPREAD,
        (2,),
        level="full",
    ),
    "glm4_moe_lite": Case("glm4_moe_lite", LATENT, SPREAD, (2,), level="full"),
    "qwen3_5": Case("qwen3_5", {"tied": True}, ("{tp: 2, pp: 2}", "{pp: 4}", "{tp: 1}"), level="full"),
    "qwen2 with an adapter": Case("qwen2", ADAPTED, LORA_LAYOUTS, lora="adapter", steps=20, level="full"),
    "qwen2 with a merged adapter": Case("qwen2", ADAPTED, LORA_LAYOUTS[:1], lora="merged", steps=20, level="full"),
    # Families differ only in their tensors, and the cases above move all of these.
    "llama everywhere": Case("llama", level="sweep"),
    "llama at any size": Case("llama", layouts=("{pp: 4, vpp: 2}", "{tp: 1}", "{tp: 4}"), level="full"),
    "mistral everywhere": Case("mistral", {"sliding_window": None}, level="sweep"),
    "qwen3 everywhere": Case("qwen3", level="sweep"),
}
