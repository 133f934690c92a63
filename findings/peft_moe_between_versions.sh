#!/usr/bin/env bash
# peft 0.21.2: a LoRA of an MoE model saved with transformers 4.57.6 loses its dense layers and shared experts under 5.24.0.
#
# transformers 5 stacks the experts of a layer, and PEFT translates older adapters. gate_proj, up_proj and down_proj then mean the experts
# alone, but these names are also those of the dense first layer and of the shared expert. Expected: the same logits, a warning that names
# the missing layers, or an error. The stored matrices are in the file and are not read. The only two warnings say that a pattern was
# ignored, and it was not. deepseek_v3 and qwen3_moe with mlp_only_layers lose theirs too. A new adapter with target_modules="all-linear"
# leaves these layers out as well. A qwen3_moe without such layers loads right.
#
# Seen on 2026-11-28, for a small GLM-4-MoE with 1 dense layer and 1 layer of 4 experts beside a shared one:
#   4.57.6 adapts 18 matrices: 3 dense, 3 shared, 12 of experts
#   5.24.0 adapts layers.1.mlp.experts, layers.1.mlp.experts.base_layer
#   largest change of a logit: base 0.0e+00, with the adapter 4.2e-01, with an adapter of the experts only 7.5e-08
#   warnings that name dense or shared layers: 0 of 2
set -euo pipefail

work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT
for version in 4.57.6 5.24.0; do
    "${PYTHON:-python3.11}" -m venv "$work/$version"
    "$work/$version/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 numpy "transformers==$version" peft==0.21.2
done

cat > "$work/common.py" <<'PYTHON'
import torch


def logits_of(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(torch.arange(16)[None]).logits
PYTHON

cat > "$work/save.py" <<'PYTHON'
import sys

import torch
import transformers
from common import logits_of
from peft import LoraConfig, get_peft_model
from transformers import Glm4MoeConfig, Glm4MoeForCausalLM

folder = sys.argv[1]
torch.manual_seed(0)
sizes = {"vocab_size": 64, "hidden_size": 32, "head_dim": 8, "intermediate_size": 48, "moe_intermediate_size": 16}
sizes |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4}
sizes |= {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1, "first_k_dense_replace": 1}
base = Glm4MoeForCausalLM(Glm4MoeConfig(**sizes))
base.save_pretrained(f"{folder}/base")
logits = {"base": logits_of(base)}
targets = ["gate_proj", "up_proj", "down_proj"]
model = get_peft_model(base, LoraConfig(r=2, lora_alpha=2, target_modules=targets, init_lora_weights=False))
logits["adapter"] = logits_of(model)
model.save_pretrained(f"{folder}/adapter")

adapted = {name: weight for name, weight in model.named_parameters() if "lora_B" in name}
others = {name for name in adapted if ".experts." not in name}
shared = {name for name in others if ".shared_experts." in name}
counts = f"{len(others - shared)} dense, {len(shared)} shared, {len(adapted) - len(others)} of experts"
print(f"{transformers.__version__} adapts {len(adapted)} matrices: {counts}")
for name in others:
    torch.nn.init.zeros_(adapted[name])
logits["experts"] = logits_of(model)
torch.save(logits, f"{folder}/logits.pt")
PYTHON

cat > "$work/load.py" <<'PYTHON'
import logging
import sys
import warnings

import torch
import transformers
from common import logits_of
from peft import PeftModel
from transformers import AutoModelForCausalLM

folder = sys.argv[1]
logged = []
handler = logging.Handler(logging.WARNING)
handler.emit = lambda record: logged.append(record.getMessage())
for name in (None, "transformers", "peft"):
    logging.getLogger(name).addHandler(handler)
wanted = torch.load(f"{folder}/logits.pt")
base = AutoModelForCausalLM.from_pretrained(f"{folder}/base")
base_change = (logits_of(base) - wanted["base"]).abs().max().item()
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    model = PeftModel.from_pretrained(base, f"{folder}/adapter")
told = [text for text in (*logged, *(str(one.message) for one in caught)) if "is_gradient_checkpointing" not in text]
got = logits_of(model)
change, change_of_experts = ((got - wanted[key]).abs().max().item() for key in ("adapter", "experts"))

adapted = {name.partition(".lora_")[0].rpartition("model.")[2] for name, _ in model.named_parameters() if ".lora_" in name}
print(f"{transformers.__version__} adapts {', '.join(sorted(adapted))}")
print(
    f"largest change of a logit: base {base_change:.1e}, with the adapter {change:.1e},"
    f" with an adapter of the experts only {change_of_experts:.1e}"
)
naming = sum("shared_experts" in text or "layers.0" in text for text in told)
print(f"warnings that name dense or shared layers: {naming} of {len(told)}")
assert base_change < 1e-5, "the base differs between the versions"
if change < 1e-5 or change_of_experts > 1e-5 or naming:
    sys.exit("changed: PEFT reads the adapters of dense layers or shared experts, or tells of them")
PYTHON

mkdir "$work/model"
"$work/4.57.6/bin/python" "$work/save.py" "$work/model" 2> "$work/log"
"$work/5.24.0/bin/python" "$work/load.py" "$work/model" 2> "$work/log"
