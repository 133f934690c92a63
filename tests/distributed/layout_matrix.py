"""Models, layouts and methods that the layout tests compare, and the cases that need --all."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest

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
METHODS_LAYOUTS = ("tp=1", "tp=2,dp=2 batch.tokens_per_micro_batch=40 reversed", "cp=4 batch.tokens_per_micro_batch=19")
ALL_UPDATES = UPDATES | {f"short+{method}": METHODS_LAYOUTS for method in METHODS}
for _method in (
    "reinforce_plus_plus",
    "clip_cov",
    "opd",
    "opd_kl",
):  # they need log-probs of the last stage before the update
    ALL_UPDATES[f"short+{_method}"] += ("tp=2,pp=2",)
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
# Cases that every model runs without --all; qwen2 runs two more.
KEPT_ROUTED = ("pp=4,vpp=2 batch.tokens_per_micro_batch=40 model.recompute=full",)
KEPT_LOGITS = ("tp=2,pp=2", "tp=2,ep=2,sequence_parallel=true")  # the cases with gradients cover one rank
KEPT_GRADIENTS = (
    *("tp=1", "tp=2,ep=2,sequence_parallel=true", "pp=2,vpp=2,ep=2", "tp=2,pp=2", "pp=4,vpp=2", *KEPT_ROUTED),
)
IN_ONE_TOKEN = ("gspo_token", "cispo", "sapo", "reinforce_plus_plus_baseline", "kl_cov", "dual_clip", "rloo")
FULL_UPDATES = {
    "qwen2": (
        "tp=1 reversed",
        "pp=2,dp=2,order=tp-pp-dp reversed",
        "pp=2,dp=2",
        "pp=4,vpp=2",
        "tp=4",
        "dp=4,overlap_grad_reduce=true,overlap_param_gather=true",
        "tp=2,pp=2,dp=2",
        "cp=2,pp=2,vpp=2 model.recompute=full",
        "cp=2,dp=2,overlap_grad_reduce=true,overlap_param_gather=true",
        "tp=1 model.recompute=selective",
        "pp=2,vpp=2,dp=2",
        "tp=2,pp=2 batch.tokens_per_micro_batch=40",
        "dp=4 batch.tokens_per_micro_batch=40",
        "dp=4 batch.share_prompts=true batch.tokens_per_micro_batch=40",
        "cp=2,pp=2",
        "tp=1 model.recompute=full",
        "pp=2,vpp=2,dp=2,overlap_grad_reduce=true,overlap_param_gather=true",
        "cp=2,tp=2,sequence_parallel=true model.recompute=selective",
        "tp=1 batch.share_prompts=true",
        "tp=1 batch.tokens_per_micro_batch=40",
        "tp=2,pp=2,sequence_parallel=true model.recompute=full",
    ),
    "qwen3_5": ("tp=2,pp=2", "tp=1 model.recompute=selective batch.tokens_per_micro_batch=40 reversed"),
    "qwen3_5_moe": ("pp=2,ep=2 model.recompute=full",),
    "qwen3": ("tp=2,pp=2", "dp=4", "tp=4,sequence_parallel=true"),
    "qwen3_moe": (
        *("ep=2", "ep=4", "dp=4,ep=2", "tp=4,etp=2,sequence_parallel=true", "pp=2,ep=2", "cp=2,ep=2"),
        "tp=2,ep=2,sequence_parallel=true",
        "dp=4,ep=2 model.recompute=selective",
        "tp=1 batch.tokens_per_micro_batch=40 reversed",
    ),
    "deepseek_v3": (
        *("tp=1 model.recompute=full", "tp=1 batch.tokens_per_micro_batch=40", "pp=2,vpp=2,ep=2"),
        "tp=2,ep=2,sequence_parallel=true",
    ),
    "qwen3_moe-routed": (
        "tp=2,sequence_parallel=true model.recompute=selective",
        "pp=2",
        "ep=2",
        "tp=2,ep=2,sequence_parallel=true",
        "tp=1 model.recompute=full batch.tokens_per_micro_batch=40",
        "pp=4,vpp=2 batch.tokens_per_micro_batch=40 model.recompute=full",
    ),
    "uneven": ("pp=4", "tp=2,pp=2,sequence_parallel=true", "pp=2,vpp=2,dp=2"),
    # Without --all, methods that use sums or maxima over responses, or values of the mini-batch, run with cp=4, and
    # methods that need log-probs of the last pipeline stage run with pp=2.
    **{f"short+{m}": METHODS_LAYOUTS[1:2] for m in ("gspo", "gmpo")},
    "short+clip_cov": (METHODS_LAYOUTS[1], "tp=2,pp=2"),
    **{f"short+{m}": METHODS_LAYOUTS[1:] for m in ("reinforce_plus_plus", "opd", "opd_kl")},
    "short+process_supervision": METHODS_LAYOUTS[2:],
    # These methods differ only in the loss of one token; an oracle and a replay of whole steps cover it.
    **{f"short+{m}": METHODS_LAYOUTS for m in IN_ONE_TOKEN},
}


def parameters(names: Iterable[str], is_full: Callable[[str, str], bool]) -> list[Any]:
    """Return "MODEL:LAYOUT" as test parameters. Of the cases not kept, every fifth is marked `full` and the others
    `sweep`.
    """
    parameters, num_full = [], 0
    for name in names:
        mark = None
        if is_full(*name.split(":")):
            mark = pytest.mark.full if num_full % 5 == 0 else pytest.mark.sweep
            num_full += 1
        parameters.append(pytest.param(name, marks=[mark] if mark else []))
    return parameters


ALL_LOGITS = parameters(
    (f"{model}:{layout}" for model, layouts in LOGITS.items() for layout in layouts),
    lambda model, layout: layout not in (*KEPT_LOGITS, *(("tp=1", "cp=4", "pp=4,vpp=2") if model == "qwen2" else ())),
)
ALL_GRADIENTS = parameters(
    (f"{model}:{text}" for model, texts in GRADIENTS.items() for text in texts),
    lambda model, text: len(GRADIENTS[model]) > 2 and text not in KEPT_GRADIENTS,
)
ALL_METHODS = [pytest.param(m, marks=[pytest.mark.full] * (m in IN_ONE_TOKEN)) for m in METHODS]
COMPARED = parameters(
    (f"{model}:{text}" for model, texts in ALL_UPDATES.items() for text in texts[1:]),
    lambda model, text: text in FULL_UPDATES.get(model, ()),
)
