"""One rank of the LoRA tests: gradients, merges and checkpoints in every layout."""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from grpo_mega import config as configs
from grpo_mega.algorithm.losses import LossOutputs
from grpo_mega.batching.pack import pack_mini_batches
from grpo_mega.checkpoint_io.dcp_read import read_metadata
from grpo_mega.checkpoint_io.megatron_weights import MegatronWeights
from grpo_mega.checkpoint_io.model import read_model_files
from grpo_mega.checkpoint_io.reader import CheckpointReader
from grpo_mega.cli.checks.machine import CARDS, Machine
from grpo_mega.cli.checks.model import Model
from grpo_mega.cli.planner.job import plan_on
from grpo_mega.cli.planner.memory import state_of
from grpo_mega.distributed.device import Device
from grpo_mega.megatron import optimizer as optimizers
from grpo_mega.megatron import runtime as runtimes
from grpo_mega.megatron.policy import Policy
from grpo_mega.trainer.export import gather_on_first
from grpo_mega.trainer.parts import build_policy
from grpo_mega.types import PackedBatch
from grpo_mega.weights.apply import load_shards
from grpo_mega.weights.boxes import region, whole
from grpo_mega.weights.layout import ShardLayout, hf_rank_shards
from tests.distributed.layout_cases import as_samples
from tests.helpers.ranks import run_cases

RANK, ALPHA = 3, 5.0
FULL, SP = "recompute=full", "sequence_parallel=true"
OVERLAP = "dp=2,overlap_grad_reduce=true,overlap_param_gather=true"
# By number of ranks and model: layouts, each with settings of model.
ALONE = {
    "llama": ("tp=1", f"tp=1 {FULL}"),
    "qwen2-tied": (f"tp=1 {FULL}",),
    "qwen3-few": ("tp=1 targets=[q,v,gate]",),
    "qwen3_moe": (f"tp=1 {FULL}",),
    "deepseek_v3": ("tp=1",),
    "qwen3_5": ("tp=1", f"tp=1 {FULL} targets=[in_proj_a,in_proj_qkv,q,out]"),
    "qwen3_5_moe": (f"tp=1 {FULL}",),
}
PAIRS = {
    "llama": (f"tp=2,{SP}", "tp=2", "dp=2", OVERLAP, "cp=2", "pp=2", f"tp=2,{SP} {FULL}"),
    "qwen2-tied": ("pp=2", f"pp=2 {FULL}", f"pp=2,vpp=2 {FULL}", "pp=2,vpp=2", f"dp=2 {FULL}", "tp=2"),
    "qwen3-few": ("tp=2 targets=[q,v,gate]", f"pp=2 {FULL} targets=[k,o,down]"),
    "qwen3_moe": ("dp=2,ep=2", f"dp=2,ep=2 {FULL}", f"tp=2,etp=2,{SP}", f"tp=2,ep=2,{SP}", f"tp=2,{SP}"),
    "qwen3_5_moe": (f"tp=2,ep=2,{SP}", "dp=2,ep=2 targets=[gate,down,in_proj_z]"),
    "qwen3_5": (f"tp=2,{SP}", "pp=2", "tp=2 targets=[in_proj_a,in_proj_qkv,q,out]"),
    "deepseek_v3": (f"tp=2,{SP}", "dp=2,ep=2", f"pp=2,layers_per_chunk=[3,2] {FULL}"),
}
CASES = {1: ALONE, 2: PAIRS}
# Each is saved and restored in the next one, and the last in the first.
RESTORED = {
    1: {"llama": ("tp=1",), "deepseek_v3": ("tp=1",)},
    2: {
        "llama": (f"tp=2,{SP}", "pp=2", OVERLAP, "cp=2"),
        "qwen3_moe": ("dp=2,ep=2", f"tp=2,etp=2,{SP}", "pp=2", f"tp=2,{SP}"),
        "deepseek_v3": ("pp=2,layers_per_chunk=[3,2]", "dp=2,ep=2"),
        "qwen3_5": (f"tp=2,{SP}", "pp=2"),
        "qwen3_5_moe": ("dp=2,ep=2", f"tp=2,etp=2,{SP}"),
    },
}
BOUND, WIDE_BOUND = 2e-6, 4e-6  # the second one for latent attention (MLA) and linear attention


def config_of(model: str, text: str, folder: Path, **sections: Any) -> configs.Config:
    """Return the config of a case such as "tp=2 recompute=full targets=[q,v]"."""
    layout, *settings = text.split()
    raw = {
        "steps": 1,
        "device": "cpu",
        "run_dir": "unused",
        "data": {"train": "unused", "max_prompt_length": 12},
        "rollout": {"max_response_length": 24},
        "model": {"path": str(folder / model), "dtype": "float32", "lora": {"rank": RANK, "alpha": ALPHA}},
        "batch": {"tokens_per_micro_batch": 64},
        "log": {"progress": False},
    }
    configs_of = [f"layout.{part}" for part in _split(layout)]
    for setting in settings:
        configs_of.append(f"model.{'lora.' if setting.startswith('targets') else ''}{setting}")
    for override in configs_of:
        configs.apply_override(raw, override)
    return configs.validate(raw | sections)


def policy_of(config: configs.Config, adapter: Path | None) -> tuple[Policy, runtimes.Runtime]:
    if adapter is not None:
        config = config.model_copy(update={"model": config.model.model_copy(update={"adapter": adapter})})
    runtime = runtimes.arrange(config, Device("cpu", torch.device("cpu")))
    return build_policy(config, read_model_files(config.model), runtime), runtime


def targets_of(text: str) -> str:
    return next((word for word in text.split() if word.startswith("targets")), "all")


def backward(policy: Policy, case: dict[Any, Any], tp: int) -> None:
    """Compute the gradient of a fixed function of the last hidden states."""
    samples = as_samples(case["sequences"])
    batches = pack_mini_batches([samples], [[1.0] * len(samples)], policy.packing)[0]

    def probed(hidden_TH: torch.Tensor, batch: PackedBatch) -> LossOutputs:
        loss = hidden_TH.sum() * 0
        for start, end, index in zip(batch.cu_seqlens, batch.cu_seqlens[1:], batch.sample_indices, strict=False):
            positions = batch.position_ids[start:end]
            is_real = positions < len(case["sequences"][index])
            loss = loss + (hidden_TH[start:end][is_real] * case["probes"][index][positions[is_real]].float()).sum()
        return LossOutputs(loss / tp, {}, {})  # tensor-parallel ranks add up their parts

    policy.pipeline.forward_backward(batches, probed)


def check_gradients(model: str, text: str, rank: int, folder: Path) -> None:
    """Gradients and their norm equal transformers', slice by slice."""
    case = torch.load(folder / f"{model}.pt")
    policy, runtime = policy_of(config_of(model, text, folder), folder / f"{model}-{targets_of(text)}")
    backward(policy, case, runtime.layout.tp)
    expected = case["gradients", targets_of(text)]
    shards, names = policy.lora.shards.rank_shards(rank), {p: name for name, p in policy.lora.parameters.items()}
    num_compared, worst = 0, (0.0, "")
    for part in optimizers.parts(policy._optimizer):
        for p in [] if part.is_stub_optimizer else part.model_param_gbuf_map:
            wanted, shard = torch.zeros(p.shape, dtype=torch.float64), shards[names[p]]
            load_shards({"": shard}, {"": wanted}, lambda box: expected[box.tensor][region(box.start, box.shape)])
            scale = max(float(expected[piece.box.tensor].abs().max()) for piece in shard.pieces)
            assert scale > 0 or ".experts." in names[p]  # an expert may get no token
            mine = part._get_model_param_range_map(p)["param"]
            difference = p.main_grad.view(-1)[mine.start : mine.end] - wanted.view(-1)[mine.start : mine.end]
            if len(difference):
                worst = max(worst, (float(difference.abs().max()) / (scale or 1.0), names[p]))
            num_compared += len(difference)
    size = torch.tensor(num_compared)
    dist.all_reduce(size)
    bound = WIDE_BOUND if model in ("deepseek_v3", "qwen3_5", "qwen3_5_moe") else BOUND
    assert int(size) >= sum(g.numel() for g in expected.values()) and worst[0] <= bound, (worst, size)
    policy._optimizer.prepare_grads()
    total = sum(float(g.square().sum()) for g in expected.values()) ** 0.5
    found = optimizers.squared_norms(policy._optimizer, policy._layer_group, policy._shape.num_layers + 2).sum()
    dist.all_reduce(found)
    assert abs(float(found) ** 0.5 / total - 1) < 1e-5, (float(found) ** 0.5, total)
    assert abs(policy._optimizer.get_grad_norm() / total - 1) < 1e-5
    check_plan(policy, runtime)


def check_plan(policy: Policy, runtime: runtimes.Runtime) -> None:
    """The planned bytes of base, adapter, gradients and optimizer are the real ones."""
    fields = policy._config.model_dump(mode="json")
    setup = plan_on(CARDS["h100"], configs.validate(fields), Model(policy._shape, 2, {}), Machine(2, 8))
    setup = replace(setup, world_size=runtime.layout.world_size, uses_te=False)
    state = state_of(setup, runtime.pp_rank)
    buffers = [b for chunk in policy.chunks for b in (*chunk.buffers, *chunk.expert_parallel_buffers)]
    weights = sum(b.param_data.nbytes for b in buffers) + sum(p.nbytes for p in policy.lora.frozen)
    assert (state.weights, state.gradients) == (weights, sum(b.grad_data.nbytes for b in buffers))
    assert state.num_parameters == sum(p.numel() for p in policy.lora.parameters.values())
    masters = sum(p.numel() for part in optimizers.parts(policy._optimizer) for p in owned(part))
    assert state.optimizer_elements[runtime.layout.rank_in_stage(runtime.rank)] == masters


def owned(part: Any) -> list[torch.Tensor]:
    return [] if part.is_stub_optimizer else [p for group in part.optimizer.param_groups for p in group["params"]]


def step(policy: Policy, case: dict[Any, Any], tp: int) -> dict[str, torch.Tensor]:
    """Take an optimizer step. Return the adapter on rank 0 by Hugging Face names."""
    backward(policy, case, tp)
    policy._optimizer_update(0.0)
    return gathered(policy)


def gathered(policy: Policy) -> dict[str, torch.Tensor]:
    optimizers.wait_for_param_gather(policy.chunks)
    lora, size = policy.lora, policy.lora.shards.world_size
    sources = ShardLayout.of_ranks([lora.shards.rank_shards(rank) for rank in range(size)])
    return gather_on_first(sources, lora.parameters, hf_rank_shards(lora.family, policy._shape), torch.float32)


def check_restore(model: str, saved: str, restored: str, rank: int, folder: Path) -> None:
    """A restored adapter is the saved one, in any layout, and it continues like the saved one. The base never moves."""
    case = torch.load(folder / f"{model}.pt")
    optimizer = {"optimizer": {"lr": 0.01, "weight_decay": 0.1, "clip_grad": 1e9}}
    config = config_of(model, saved, folder, **optimizer)
    policy, runtime = policy_of(config, folder / f"{model}-all")
    base = [p.clone() for p in policy.lora.frozen]
    step(policy, case, runtime.layout.tp)
    before = step(policy, case, runtime.layout.tp)
    assert all(map(torch.equal, base, policy.lora.frozen))
    state = folder / f"state-{model}-{saved}-{restored}".replace(" ", "-")
    state.mkdir(exist_ok=True)
    dist.barrier()
    policy.save(state)
    after = step(policy, case, runtime.layout.tp)
    other, runtime = policy_of(config_of(model, restored, folder, **optimizer), None)
    other.restore(state)
    found = gathered(other)
    assert all(torch.equal(found[name], values) for name, values in before.items())
    continued = step(other, case, runtime.layout.tp)
    assert other.optimizer_step == 3
    for name, values in after.items():
        difference = float((continued[name] - values).abs().max())
        assert difference <= (0 if saved == restored else 2e-4 * float(values.abs().max())), (name, difference)
        assert not torch.equal(values, before[name]) or ".experts." in name
    if rank == 0:
        family, shape = other.lora.family, other._shape
        with CheckpointReader(MegatronWeights(state, family, shape)) as reader:
            assert all(torch.equal(reader.read(whole(name, v.shape)), v) for name, v in before.items())
        assert all(".lora." in key for key in read_metadata(state))


def check_fresh(model: str, rank: int, folder: Path) -> None:
    """A new adapter changes no bit, and the reference of a trained one is its base."""
    case = torch.load(folder / f"{model}.pt")
    samples = as_samples(case["sequences"])
    config = config_of(model, "tp=1", folder)
    plain = config.model_copy(update={"model": config.model.model_copy(update={"lora": None})})
    policy, _ = policy_of(plain, None)
    for chunk in policy.models:
        chunk.requires_grad_(False)  # torch's F.linear has another kernel for such weights
    batches = pack_mini_batches([samples], [[1.0] * len(samples)], policy.packing)
    expected = [values for _, values in policy.evaluate(batches)]
    weights = {name: tensor.clone() for name, tensor in policy.tensors().items()}
    policy, runtime = policy_of(config_of(model, "tp=1", folder, algorithm={"kl_beta": 0.1}), None)
    found = [values for _, values in policy.evaluate(batches)]
    assert all(map(torch.equal, found, expected))
    tensors = policy.tensors()
    assert set(tensors) == set(weights) and all(torch.equal(tensors[name], w) for name, w in weights.items())
    for _ in range(2):
        step(policy, case, runtime.layout.tp)
    assert not all(map(torch.equal, [values for _, values in policy.evaluate(batches)], expected))
    referenced = [batch.ref_logprobs for mini in policy.attach_logprobs(batches) for batch in mini]
    assert all(map(torch.equal, referenced, expected))
    trained = [values for _, values in policy.evaluate(batches)]
    policy.memory.offload_optimizer()
    policy.memory.offload_weights()
    assert not any(p.untyped_storage().nbytes() for p in policy.parameters.values())
    assert all(map(torch.equal, [values for _, values in policy.evaluate(batches)], trained))


def _split(text: str) -> list[str]:
    """Split at commas outside of brackets."""
    parts, depth = [""], 0
    for letter in text:
        depth += (letter == "[") - (letter == "]")
        if letter == "," and not depth:
            parts.append("")
        else:
            parts[-1] += letter
    return parts


if __name__ == "__main__":
    world_size = int(sys.argv[2])
    cases: dict[str, Any] = {
        f"gradients {model}:{text}": partial(check_gradients, model, text)
        for model, texts in CASES[world_size].items()
        for text in texts
    }
    for model, layouts in RESTORED[world_size].items():
        for saved, restored in pairwise((*layouts, layouts[0])):
            cases[f"restored {model}:{saved} in {restored}"] = partial(check_restore, model, saved, restored)
    if world_size == 1:
        cases |= {f"fresh {model}": partial(check_fresh, model) for model in ("llama", "deepseek_v3")}
    run_cases(cases)
