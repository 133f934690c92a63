#!/usr/bin/env bash
# peft 0.21.2 warns that it ignored rank_pattern and alpha_pattern for stacked experts, and applies both.
#
# target_parameters adapts a stack of experts that is no module, and the two patterns hold for it. The warning compares the patterns with
# the names of modules only. Expected: no warning for a name that matches. A misspelled name gets the same text, and then it is true: the
# warning does not tell a training at the wrong rank from one at the right rank. It also appears when PEFT sets the pattern itself, for
# adapters that transformers 4 saved.
#
# Seen on 2026-11-28, for 4 experts, r=2, lora_alpha=2, and a rank of 8 and an alpha of 32 in the patterns:
#   experts.gate_up_proj: 2 warnings of ignored keys, rank 8, scaling 4.0
#   experts.gate_up_prj:  2 warnings of ignored keys, rank 2, scaling 1.0
set -euo pipefail

work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT
"${PYTHON:-python3.11}" -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 numpy transformers==5.24.0 peft==0.21.2

"$work/venv/bin/python" - 2> "$work/log" <<'PYTHON'
import sys
import warnings

from peft import LoraConfig, get_peft_model
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

sizes = {"vocab_size": 64, "hidden_size": 32, "head_dim": 8, "moe_intermediate_size": 16, "num_experts": 4}
sizes |= {"num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 4, "num_experts_per_tok": 2}
seen = []
for key in ("experts.gate_up_proj", "experts.gate_up_prj"):
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes))
    patterns = {"rank_pattern": {key: 8}, "alpha_pattern": {key: 32}}
    lora = LoraConfig(r=2, lora_alpha=2, target_modules=["q_proj"], target_parameters=["experts.gate_up_proj"], **patterns)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        experts = get_peft_model(model, lora).base_model.model.model.layers[0].mlp.experts
    ignored = sum("were ignored" in str(one.message) and key in str(one.message) for one in caught)
    rank = experts.lora_A["default"].weight.shape[0] // sizes["num_experts"]
    seen.append((ignored, rank, experts.scaling["default"]))
    print(f"{key + ':':21} {ignored} warnings of ignored keys, rank {rank}, scaling {seen[-1][2]}")
if seen != [(2, 8, 4.0), (2, 2, 1.0)]:
    sys.exit("changed: PEFT warns of these patterns, or applies them, in another way")
PYTHON
