"""`hf_logits.py OUT DEVICE SIZES FAMILY...`: write random models and transformers' logits for them, in a separate
process.

Writes OUT/FAMILY (a checkpoint in bf16) and OUT/FAMILY.pt with "tokens" (a few sequences), "bfloat16" and "float32"
(the logits [tokens, vocab] of each sequence, computed in that dtype from the same bf16 weights). A mixture of experts
also has "routes" (random experts), "bfloat16 replayed" and "float32 replayed" (the logits with these experts). SIZES:
config fields, as JSON.
"""

from __future__ import annotations

import copy
import json
import sys
from pathlib import Path
from typing import Any

import torch

from tests.distributed.forced_routes import force_routes, routes_of
from tests.helpers.models import VOCAB_SIZE, make_model, save_checkpoint

LENGTHS = (7, 19, 64, 130)
# Latent attention without q_lora, as in DeepSeek-V2-Lite and Moonlight. Every token uses all experts, so rounding
# cannot select another expert.
LATENT = {
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "kv_lora_rank": 64,
    "q_lora_rank": None,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "moe_intermediate_size": 128,
    "n_routed_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 4,
    "n_group": 1,
    "topk_group": 1,
}
# Changes of a family's config. The window is below some lengths, and not in every layer.
CHANGES: dict[str, dict[str, Any]] = {
    "deepseek_v2": LATENT,
    "deepseek_v3": LATENT,
    "qwen3_moe": {"moe_intermediate_size": 128},
    "qwen2": {"tied": True},
    "qwen2-windowed": {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 2},
}


def tokens() -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(2, VOCAB_SIZE, (n,), generator=generator).tolist() for n in LENGTHS]


@torch.no_grad()
def main(out: Path, device: str, sizes: str, families: list[str]) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    for family in families:
        changes = json.loads(sizes) | CHANGES.get(family, {})
        model = make_model(family.partition("-")[0], dtype=torch.bfloat16, **changes)
        if changes.get("kv_lora_rank"):
            model.config._experts_implementation = "eager"  # torch.grouped_mm does not support all row sizes
        save_checkpoint(model, out / family)
        found: dict[str, list[Any]] = {"tokens": tokens()}
        for dtype in (torch.bfloat16, torch.float32):
            copied = copy.deepcopy(model).to(device=device, dtype=dtype)
            found[str(dtype).removeprefix("torch.")] = [
                copied(torch.tensor([ids], device=device)).logits[0].float().cpu() for ids in tokens()
            ]
            if family.endswith("moe"):
                found["routes"] = routes_of(copied, LENGTHS)
                force_routes(copied, found["routes"])
                found[f"{str(dtype).removeprefix('torch.')} replayed"] = [
                    copied(torch.tensor([ids], device=device)).logits[0].float().cpu() for ids in tokens()
                ]
        torch.save(found, out / f"{family}.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3], sys.argv[4:])
