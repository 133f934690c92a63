"""Models, layouts and methods that the layout tests compare, and the cases that need --all or --sweep.

By default the cases cover pairs: of axes with each other, with the kind of attention and with experts, of each family
with tp, pp and ep, and of each kind of comparison with each axis and family. With --all they cover each pair of sizes
of axes, and of a family with a size.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from math import prod
from typing import Any

import pytest

from grpo_mega.weights.families import FAMILIES
from tests.distributed.layout_cases import (
    HYBRID_LAYOUTS,
    HYBRID_MOE_LAYOUTS,
    LOGITS_LAYOUTS,
    METHODS,
    MIXTURES,
    MIXTURES_LAYOUTS,
    MODELS,
    ROUTED_LAYOUTS,
)
from tests.helpers.cover import cover, pairs

# Router settings and other overrides per model.
ROUTERS = {
    "qwen3_moe": ("model.router={balancing: seq_aux_loss, aux_loss_coeff: 0.05, z_loss_coeff: 0.002}",),
    "qwen3_moe-unnormalised": ("model.router={balancing: aux_loss, aux_loss_coeff: 0.05}",),
    "mixtral": ("model.router.freeze=true",),
    "qwen3_moe-routed": ("rollout.routing_replay=true",),
    "qwen3_5_moe": ("model.router={balancing: seq_aux_loss, aux_loss_coeff: 0.05}",),
    "qwen3_5_moe-routed": ("rollout.routing_replay=true",),
    "deepseek_v3-routed": ("rollout.routing_replay=true",),
    "deepseek_v3-plain": (
        "model.router={balancing: seq_aux_loss, aux_loss_coeff: 0.05, bias_update_rate: 0.02}",
        "optimizer.lr=1e-12",  # only the biases move
    ),
}
# Layouts and other overrides per model.
UPDATES = {
    "qwen2": (
        "tp=1",
        "tp=1 batch.tokens_per_micro_batch=40",
        "tp=1 model.recompute=full",
        "tp=1 model.recompute=selective",
        "tp=1 reversed",
        "tp=2,dp=2,sequence_parallel=true",
        "pp=2,dp=2",
        "pp=2,vpp=2,dp=2",
        "pp=4,vpp=2",
        "tp=2,pp=2 batch.tokens_per_micro_batch=40",
        "tp=2,pp=2,sequence_parallel=true model.recompute=full",
        "tp=4",
        "dp=4 batch.tokens_per_micro_batch=40",
        "dp=4,overlap_grad_reduce=true,overlap_param_gather=true",
        "pp=2,vpp=2,dp=2,overlap_grad_reduce=true,overlap_param_gather=true",
        "pp=2,dp=2,order=tp-pp-dp reversed",
        "tp=2,pp=2,dp=2",
        "cp=2,dp=2 batch.tokens_per_micro_batch=40 reversed",
        "tp=1 batch.share_prompts=true",
        "tp=2,pp=2 batch.share_prompts=true batch.tokens_per_micro_batch=47 model.recompute=full",
        "dp=4 batch.share_prompts=true batch.tokens_per_micro_batch=40",
        "cp=2,tp=2,sequence_parallel=true model.recompute=selective",
        "cp=2,pp=2",
        "cp=2,pp=2,vpp=2 model.recompute=full",
        "cp=4 batch.tokens_per_micro_batch=19",
        "cp=2,dp=2,overlap_grad_reduce=true,overlap_param_gather=true",
    ),
    "qwen3_5": (
        "tp=1",
        "tp=2,sequence_parallel=true",
        "tp=2,pp=2",
        "pp=4,vpp=2 model.recompute=full",
        "dp=4,overlap_grad_reduce=true,overlap_param_gather=true batch.tokens_per_micro_batch=40",
        "tp=1 model.recompute=selective batch.tokens_per_micro_batch=40 reversed",
    ),
    "qwen3_5_moe": (
        "tp=1",
        "tp=2,ep=2,sequence_parallel=true",
        "pp=2,ep=2 model.recompute=full",
        "dp=4,ep=2,overlap_grad_reduce=true,overlap_param_gather=true batch.tokens_per_micro_batch=40",
    ),
    "qwen3": ("tp=1", "tp=2,pp=2", "tp=4,sequence_parallel=true", "dp=4"),
    "qwen3_moe": (
        "tp=1",
        *MIXTURES_LAYOUTS[1:],
        "dp=4,ep=2 model.recompute=selective",
        "tp=1 batch.tokens_per_micro_batch=40 reversed",
        "cp=2,ep=2",
        "cp=2,tp=2,ep=2,sequence_parallel=true",
    ),
    "mixtral": ("tp=1", "tp=2,ep=2,sequence_parallel=true"),
    "deepseek_v3": (
        "tp=1",
        "tp=1 model.recompute=full",
        "tp=1 batch.tokens_per_micro_batch=40",
        "tp=2,ep=2,sequence_parallel=true",
        "pp=2,vpp=2,ep=2",
        "cp=2,tp=2,sequence_parallel=true",
    ),
    "deepseek_v3-plain": ("tp=1", "tp=2,ep=2,sequence_parallel=true"),
    "qwen3_moe-routed": ROUTED_LAYOUTS,
    "uneven": (
        "tp=1",
        "pp=4",
        "pp=4,layers_per_chunk=[1;2;2;1]",
        "tp=2,pp=2,sequence_parallel=true",
        "pp=2,vpp=2,dp=2",
    ),
}

# Updates without a comparison to another layout.
ALONE = {
    "deepseek_v3-plain": ("tp=1 algorithm.early_stop_imp_ratio=0.5",),  # drops every mini-batch
    "qwen3_moe": ("tp=1 model.router.capacity_factor=0.5",),
}
METHODS_LAYOUTS = ("tp=1", "dp=2 batch.tokens_per_micro_batch=40 reversed", "cp=2 batch.tokens_per_micro_batch=19")
ALL_UPDATES = UPDATES | {f"short+{method}": METHODS_LAYOUTS for method in METHODS}
# They need log-probs of the last stage before the update. A teacher's log-probs are of a vocabulary that is split.
for _method, _layout in {
    "reinforce_plus_plus": "pp=2",
    "clip_cov": "pp=2",
    "opd": "tp=2,pp=2",
    "opd_kl": "tp=2,pp=2",
}.items():
    ALL_UPDATES[f"short+{_method}"] += (_layout,)
LOGITS = {
    name: MIXTURES_LAYOUTS if name in MIXTURES else LOGITS_LAYOUTS
    for name in MODELS | MIXTURES
    if name not in ("short", "large")
}
GRADIENTS = {
    "qwen3_5": HYBRID_LAYOUTS,
    "qwen3_5_moe": HYBRID_MOE_LAYOUTS,
    "qwen3_5_moe-tied": ("pp=2", "tp=2,etp=2,sequence_parallel=true"),
    "qwen3_5_moe-routed": ("tp=1 model.recompute=full", "tp=2,ep=2,sequence_parallel=true"),
    "deepseek_v3": (
        *MIXTURES_LAYOUTS,
        "tp=1 model.recompute=full",
        "tp=2,ep=2,sequence_parallel=true model.recompute=selective",
        "cp=2,tp=2,ep=2,sequence_parallel=true",
    ),
    "deepseek_v2": ("tp=1", "tp=2,sequence_parallel=true"),
    "deepseek_v3-plain": ("ep=2",),
    "glm4_moe": ("tp=1", "pp=2,ep=2"),
    "glm4_moe_lite": ("tp=2,ep=2,sequence_parallel=true",),
    "glm4_moe-normed": ("tp=2,ep=2,sequence_parallel=true",),
    "qwen3_moe": (
        "tp=1",
        "tp=2,sequence_parallel=true",
        "tp=2,dp=2,sequence_parallel=true",
        "tp=2,ep=2,sequence_parallel=true",
        "tp=2,etp=2,ep=2,sequence_parallel=true",
        "tp=2,pp=2,order=tp-pp-dp,ep=2,sequence_parallel=true",
        "pp=2,vpp=2,ep=2",
        "pp=2,vpp=2,ep=2 model.recompute=full",
        "dp=4,ep=2 model.recompute=selective",
    ),
    "qwen3_moe-unnormalised": ("tp=2,sequence_parallel=true",),
}
LOGITS |= {"qwen3_moe-routed": ROUTED_LAYOUTS, "deepseek_v3-routed": ("tp=2,ep=2,sequence_parallel=true",)}
GRADIENTS |= {name: LOGITS[name] for name in ("qwen3_moe-routed", "deepseek_v3-routed")}
LOGITS |= {name: (*dict.fromkeys((*LOGITS[name], *texts)),) for name, texts in GRADIENTS.items()}
LOGITS |= {name: texts for name, texts in GRADIENTS.items() if name.startswith("qwen3_5")}
LOGITS["uneven"] = tuple(layout for layout in LOGITS_LAYOUTS if "vpp" not in layout)

AXES = ("tp", "pp", "vpp", "cp", "ep", "etp", "sequence_parallel")
# Cases that a test or a row of tests/README.md names.
NEEDED = (
    "logits qwen3_moe-routed:pp=4,vpp=2 batch.tokens_per_micro_batch=40 model.recompute=full",
    "logits qwen3_moe:tp=2,sequence_parallel=true",
    "update mixtral:tp=2,ep=2,sequence_parallel=true",
    "update qwen2:cp=2,dp=2 batch.tokens_per_micro_batch=40 reversed",
    "update qwen2:tp=2,pp=2 batch.share_prompts=true batch.tokens_per_micro_batch=47 model.recompute=full",
)
# These methods differ only in the loss of one token; an oracle and a replay of whole steps cover it.
IN_ONE_TOKEN = ("gspo_token", "cispo", "sapo", "reinforce_plus_plus_baseline", "kl_cov", "dual_clip", "rloo")
# Without --all, methods that use sums or maxima over responses run with cp=2, methods that need log-probs of the last
# pipeline stage with pp=2, and rewards of steps with dp=2. All layouts of opd have another test.
USUAL_METHODS = {
    **dict.fromkeys(("gspo", "gmpo", "clip_cov"), METHODS_LAYOUTS[2:]),
    "process_supervision": METHODS_LAYOUTS[1:2],
    "reinforce_plus_plus": ("pp=2",),
    "opd": (*METHODS_LAYOUTS[1:], "tp=2,pp=2"),
    "opd_kl": ("tp=2,pp=2",),
}


def values_of(text: str) -> dict[str, str]:
    """Return the values of a layout's axes, also of those that it does not set, and its other keys."""
    axes = dict(part.split("=", 1) for part in text.partition(" ")[0].split(","))
    return {"sequence_parallel": "false"} | dict.fromkeys(AXES[:-1], "1") | axes


def num_ranks(text: str) -> int:
    values = values_of(text)
    by_experts = prod(int(values[axis]) for axis in ("pp", "ep", "etp"))
    return max(by_experts, prod(int(values.get(axis, "1")) for axis in ("tp", "pp", "cp", "dp")))


def features(case: str, is_fine: bool) -> set[Hashable]:
    """Return what a case of logits or updates covers by default, or (`is_fine`) with --all."""
    kind, _, name = case.partition(" ")
    model, _, text = name.partition(":")
    family, settings, values = (MODELS | MIXTURES)[model][0], text.split(" ")[1:], values_of(text)
    axes: dict[str, Hashable] = {axis: values.pop(axis) for axis in AXES}
    if is_fine:
        found = pairs(axes | {"family": family})
    else:
        axes = {axis: value not in ("1", "false") for axis, value in axes.items()}
        attention = FAMILIES[family].attention
        found = pairs(axes | {"attention": attention, "has experts": model in MIXTURES})
        found |= {(family, axis) for axis in ("tp", "pp", "ep") if axes[axis]}
    kinds = [kind, "gradients"] if kind == "logits" and text in GRADIENTS.get(model, ()) else [kind]
    for one in kinds:
        found |= {(one, *axis) for axis in axes.items()} | {(one, family)}
    others = [setting.partition("=")[0] if "tokens" in setting else setting for setting in settings]
    others += [axis if axis == "dp" else f"{axis}={value}" for axis, value in values.items()]
    found |= {("model", model), *((kind, other) for other in others)}
    return found


def levels() -> tuple[set[str], set[str]]:
    """Return the cases of logits and of updates that run by default, and those that run with --all."""
    cases = [f"logits {model}:{text}" for model, layouts in LOGITS.items() for text in layouts]
    cases += [f"update {model}:{text}" for model, layouts in UPDATES.items() for text in layouts[1:]]
    costs = {case: 0.3 + num_ranks(case.partition(":")[2]) * (1.5 if case[0] == "u" else 1) for case in cases}
    usual = cover({case: features(case, is_fine=False) for case in cases}, costs, NEEDED)
    return usual, cover({case: features(case, is_fine=True) for case in cases}, costs, usual)


USUAL, FULL = levels()
USUAL |= {f"update short+{method}:{text}" for method, layouts in USUAL_METHODS.items() for text in layouts}
FULL |= {f"update short+{method}:{METHODS_LAYOUTS[2]}" for method in METHODS}


def parameters(kind: str, names: Iterable[str]) -> list[Any]:
    """Return "MODEL:LAYOUT" as test parameters with the marks of their levels."""
    cases = {name: f"{kind} {name}" for name in names}
    marks = {name: [pytest.mark.full if case in FULL else pytest.mark.sweep] for name, case in cases.items()}
    return [pytest.param(name, marks=[] if case in USUAL else marks[name]) for name, case in cases.items()]


ALL_LOGITS = parameters("logits", (f"{model}:{text}" for model, layouts in LOGITS.items() for text in layouts))
ALL_GRADIENTS = parameters("logits", (f"{model}:{text}" for model, layouts in GRADIENTS.items() for text in layouts))
ALL_METHODS = [pytest.param(m, marks=[pytest.mark.full] * (m in IN_ONE_TOKEN)) for m in METHODS]
COMPARED = parameters("update", (f"{model}:{text}" for model, layouts in ALL_UPDATES.items() for text in layouts[1:]))
