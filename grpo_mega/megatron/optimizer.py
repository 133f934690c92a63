"""Data parallelism and the distributed optimizer for the model chunks, and the learning-rate schedule."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import MegatronOptimizer, get_megatron_optimizer
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.tensor_parallel import param_is_not_tensor_parallel_duplicate
from megatron.core.transformer.module import Float16Module, param_is_not_shared

from grpo_mega.config import LayoutConfig, OptimizerConfig, PrecisionConfig
from grpo_mega.megatron import compat
from grpo_mega.megatron.precision import DTYPES


def wrap(
    chunks: list[GPTModel],
    layout: LayoutConfig,
    precision: PrecisionConfig,
    finish_gradients: Callable[[], None] = lambda: None,
) -> list[DistributedDataParallel]:
    """Wrap the chunks with fp32 gradient buffers that are reduced over data-parallel ranks.

    bf16 chunks also get Megatron's casts. `finish_gradients` is called after Megatron has reduced the gradients.
    """
    config = chunks[0].config
    ddp_config = DistributedDataParallelConfig(
        use_distributed_optimizer=True,
        grad_reduce_in_fp32=True,
        fp8_param_gather=precision.fp8_parameters,
        overlap_grad_reduce=layout.overlap_grad_reduce,
        overlap_param_gather=layout.overlap_param_gather,
    )
    inner = [Float16Module(config, chunk) if config.bf16 else chunk for chunk in chunks]
    wrapped = [
        DistributedDataParallel(config, ddp_config, chunk, disable_bucketing=i > 0) for i, chunk in enumerate(inner)
    ]

    # Megatron would divide the gradients by `num_tokens`, but the loss is already normalized by global counts.
    def finalize(model: Any, num_tokens: Any = None, **kwargs: Any) -> None:
        finalize_model_grads(model, None, **kwargs)
        finish_gradients()

    config.finalize_model_grads_func = finalize
    if layout.overlap_grad_reduce:
        config.no_sync_func = [w.no_sync for w in wrapped] if len(wrapped) > 1 else wrapped[0].no_sync
    return wrapped


def build(
    chunks: list[DistributedDataParallel], optimizer: OptimizerConfig, layout: LayoutConfig, precision: PrecisionConfig
) -> MegatronOptimizer:
    """Return Adam with its state sharded over data-parallel ranks.

    The weights must already be loaded, because the optimizer copies them as fp32 masters.
    """
    config = chunks[0].config
    settings = MegatronOptimizerConfig(
        optimizer="adam",
        lr=optimizer.lr,
        weight_decay=optimizer.weight_decay,
        adam_beta1=optimizer.betas[0],
        adam_beta2=optimizer.betas[1],
        adam_eps=optimizer.eps,
        clip_grad=optimizer.clip_grad,
        bf16=config.bf16,
        params_dtype=config.params_dtype,
        use_distributed_optimizer=True,
        overlap_param_gather=layout.overlap_param_gather,
        # Weights kept in FP8 are written by this recipe. With bf16 weights it would make Megatron treat them as
        # FP8.
        fp8_recipe=precision.fp8_recipe if precision.fp8_parameters else None,
        use_precision_aware_optimizer=optimizer.moments_dtype != "float32",
        optimizer_cpu_offload=optimizer.cpu_offload,
        optimizer_offload_fraction=1.0,
        overlap_cpu_optimizer_d2h_h2d=optimizer.cpu_offload,
        # Checkpoints hold float32 masters. Megatron would save remainders of bf16 weights as if their bits were
        # numbers.
        store_param_remainders=False,
        exp_avg_dtype=DTYPES[optimizer.moments_dtype],
        exp_avg_sq_dtype=DTYPES[optimizer.moments_dtype],
    )
    if optimizer.cpu_offload:
        # Then the fp32 masters are only on the host. Set here, because the config's own check needs Transformer Engine.
        compat.offload_from_any_device()
        settings.pin_cpu_grads = settings.pin_cpu_params = torch.cuda.is_available()
        settings.use_precision_aware_optimizer = settings.use_precision_aware_optimizer_no_fp8_or_ds_fp8 = True
    made = get_megatron_optimizer(settings, chunks)
    for part in parts(made):
        if not part.is_stub_optimizer:
            compat.index_weights_as_stored(part)
    for group in made.param_groups if optimizer.cpu_offload else ():
        for name in ("cpu_optimizer_cls", "gpu_optimizer_cls"):  # checkpoints hold no classes
            group.pop(name, None)
    return made


def learning_rate(config: OptimizerConfig, step: int, total_steps: int) -> float:
    """Return the rate of optimizer step `step` (from 0): linear warm-up, then constant, or decay to min_lr.

    The decay would reach min_lr one step after the last, so no step has a rate of 0.
    """
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    if config.schedule == "constant":
        return config.lr
    progress = (step - config.warmup_steps) / max(1, total_steps - config.warmup_steps)
    remaining = 1 - progress if config.schedule == "linear" else (1 + math.cos(math.pi * progress)) / 2
    return config.min_lr + (config.lr - config.min_lr) * max(0.0, remaining)


def set_rates(optimizer: MegatronOptimizer, lr: float, weight_decay: float) -> None:
    """Set the learning rate and weight decay of each parameter group. Otherwise only Megatron's own scheduler sets
    them.

    `wd_mult` is 0 for biases and one-dimensional parameters (norms), and 1 for all matrices, embeddings included.
    """
    for group in optimizer.param_groups:
        group["lr"] = lr * group["lr_mult"]
        group["weight_decay"] = weight_decay * group["wd_mult"]


def parts(optimizer: MegatronOptimizer) -> list[Any]:
    """Return the optimizers of a chained optimizer, or the optimizer itself."""
    return list(getattr(optimizer, "chained_optimizers", [optimizer]))


def layer_groups(models: Sequence[Any], num_layers: int) -> dict[torch.Tensor, int]:
    """Return each parameter's guard group: 0 for the embedding, then one per decoder layer, then one for the rest."""
    groups: dict[torch.Tensor, int] = {}
    for model in models:
        groups |= dict.fromkeys(model.parameters(), num_layers + 1)
        if model.pre_process:
            groups |= dict.fromkeys(model.embedding.parameters(), 0)
        for layer in model.decoder.layers:
            groups |= dict.fromkeys(layer.parameters(), layer.layer_number)
    return groups


def squared_norms(optimizer: MegatronOptimizer, group_of: Mapping[torch.Tensor, int], num_groups: int) -> torch.Tensor:
    """Return [num_groups] float64: this rank's part of the squared gradient norm of each group. Sum it over ranks.

    Call it after the gradients are reduced and before the step. As in Megatron's norm, duplicates on other ranks count
    once.
    """
    squares = torch.zeros(num_groups, dtype=torch.float64, device=next(iter(group_of)).device)
    gradients: dict[int, list[torch.Tensor]] = {}
    for part in parts(optimizer):
        for p in [] if part.is_stub_optimizer else part.model_param_gbuf_map:
            if param_is_not_shared(p) and param_is_not_tensor_parallel_duplicate(p, part.tp_group):
                mine = part._get_model_param_range_map(p)["param"]
                gradients.setdefault(group_of[p], []).append(p.main_grad.view(-1)[mine.start : mine.end])
    for group, parts_of_group in gradients.items():
        squares[group] = torch.stack(torch._foreach_norm(parts_of_group)).double().square().sum()
    return squares


def state_tensors(optimizer: MegatronOptimizer) -> list[torch.Tensor]:
    """Return the fp32 master shards and, after Adam's first step, its moments. Shards of fp32 weights are views of
    them.

    Adam's `step` is left out: torch keeps it on the host, and Transformer Engine keeps it with the parameter group. The
    state of an optimizer on the CPU is left out, because it never leaves the host.
    """
    tensors: list[torch.Tensor] = []
    for part in parts(optimizer):
        for group in part.optimizer.param_groups:
            tensors += group["params"]
        for state in part.optimizer.state.values() if not part.config.optimizer_cpu_offload else ():
            tensors += [value for name, value in state.items() if name != "step" and torch.is_tensor(value)]
    return tensors


def main_parameters(optimizer: Any) -> list[torch.Tensor]:
    """Return the fp32 masters. A precision-aware optimizer with bf16 weights keeps them in its state, and an optimizer
    on the CPU in host memory.
    """
    if optimizer.config.optimizer_cpu_offload and not optimizer.is_stub_optimizer:
        return list(optimizer.optimizer.inner_param_to_orig_param)
    groups = [p for group in optimizer.optimizer.param_groups for p in group["params"]]
    masters = [state["master_param"] for state in optimizer.optimizer.state.values() if "master_param" in state]
    return [*groups, *masters] or [torch.zeros(1)]


def wait_for_param_gather(chunks: Sequence[DistributedDataParallel]) -> None:
    """Wait until all parameters are up to date, if the gather after an optimizer step overlaps with later work."""
    if any(chunk.ddp_config.overlap_param_gather for chunk in chunks):
        gather_parameters(chunks)


def gather_parameters(chunks: Sequence[DistributedDataParallel]) -> None:
    """Gather all parameters that were not gathered since the last backward pass. A second call costs nothing."""
    for chunk in chunks:
        for group in [*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups]:
            if group.param_gather_handle is not None or not group.param_gather_dispatched:
                group.start_param_sync(force_sync=True)


def separate_steps(optimizer: MegatronOptimizer) -> None:
    """Give each parameter its own step count after a load.

    Megatron loads one step tensor for all parameters. torch's Adam counts in place, so a shared tensor would grow by
    the number of parameters per update.
    """
    for part in parts(optimizer):
        for state in part.optimizer.state.values():
            if torch.is_tensor(state.get("step")):
                state["step"] = state["step"].clone()
