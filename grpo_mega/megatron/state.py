"""The policy's state as a Megatron distributed checkpoint: weights, optimizer and counters, loadable in any layout.

`save` and `load` are collective. Data-parallel ranks share the work: each writes and reads a part, and a load then
exchanges the parts. The reference is saved only if it follows the policy; otherwise it is the model that the run
started from. Weights and their fp32 masters are saved separately, and a load verifies that they match.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as distributed_checkpoint
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.dist_checkpointing.optimizer import make_sharded_optimizer_tensor
from megatron.core.dist_checkpointing.strategies.fully_parallel import (
    FullyParallelLoadStrategyWrapper,
    FullyParallelSaveStrategyWrapper,
)
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    TorchDistLoadShardedStrategy,
    TorchDistSaveShardedStrategy,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)
from megatron.core.optimizer import MegatronOptimizer
from torch.distributed.checkpoint.api import CheckpointException

from grpo_mega.checkpoint_io.dcp_read import COMMON, METADATA, check_extra_state, load_metadata
from grpo_mega.distributed.watchdog import recorder
from grpo_mega.errors import ResumeError
from grpo_mega.megatron import compat
from grpo_mega.megatron.optimizer import parts, separate_steps
from grpo_mega.megatron.precision import is_rounded_from, reset_scales

Values = dict[str, torch.Tensor]  # a reference's values on the host, by "chunk0.NAME"; empty: not saved


def save(
    folder: Path, models: Sequence[Any], optimizer: MegatronOptimizer, counters: dict[str, Any], reference: Values
) -> None:
    """Write to `folder`. It must exist on every node and be empty. `models` are the unwrapped chunks."""
    compat.save_optimizer_state_in_place()
    _make_states(optimizer)
    state = _state(models, optimizer, counters, reference, is_loading=False)
    strategy = FullyParallelSaveStrategyWrapper(InProcessSave("torch_dist", 1), _replicas())
    dist_checkpointing.save(state, str(folder), sharded_strategy=strategy)


def load_state(
    folder: Path, models: Sequence[Any], optimizer: MegatronOptimizer, counters: dict[str, Any], reference: Values
) -> dict[str, Any]:
    """Fill models, optimizer and `reference` from `folder`. Return the counters that `counters` names.

    Raise ResumeError if the checkpoint belongs to another model, is damaged, or contains objects other than model
    state. Raise it on all ranks if any weight is not its fp32 master in the model's dtype. Nothing in the files is ever
    called.
    """
    compat.keep_adam_steps_apart()
    compat.beat_per_loaded_tensor()
    compat.read_common_state()
    _make_states(optimizer)
    names = {p: name for model in models for name, p in model.named_parameters()}
    with compat.only_plain_pickles(), _one_line(folder), _compared(optimizer) as differing:
        with (folder / METADATA).open("rb") as file:
            metadata = load_metadata(file)  # torch would report a refusal with two tracebacks
        strategy = FullyParallelLoadStrategyWrapper(TorchDistLoadShardedStrategy(), _replicas())
        wanted = _state(models, optimizer, counters, reference, is_loading=True)
        # Norms of local layers have no extra state. Norms of Transformer Engine keep their own, which is empty.
        absent = [
            {
                name: wanted[f"model{index}"].pop(name).data
                for name, value in list(wanted[f"model{index}"].items())
                if isinstance(value, ShardedObject) and value.unique_key not in metadata.state_dict_metadata
            }
            for index in range(len(models))
        ]
        state = dist_checkpointing.load(wanted, str(folder), strategy)
        for index, model in enumerate(models):
            state[f"model{index}"] |= absent[index]
            for name, value in state[f"model{index}"].items():  # TE would load any pickle
                if "_extra_state" in name and isinstance(value, torch.Tensor) and value.numel():
                    check_extra_state(value.cpu().numpy().tobytes())
            reset_scales(model)
            model.load_state_dict(state[f"model{index}"])
        reference |= state.get("reference", {})
        optimizer.load_state_dict(_regrouped(state["optimizer"], optimizer))
        restored = {name: state[name] for name in counters}
    separate_steps(optimizer)
    by_rank: list[list[str]] = [[]] * dist.get_world_size()
    dist.all_gather_object(by_rank, [names[p] for p in differing[:1]])
    for rank, (name, *_) in ((rank, first) for rank, first in enumerate(by_rank) if first):
        raise ResumeError(
            f"checkpoint {folder}: fp32 masters do not match the weights (first {name} on rank {rank}); "
            "the weights are sound: write them with `grpo-mega export RUN_DIR OUT --step N` or "
            f"`grpo-mega convert {folder} OUT`, and start a new run with model.path=OUT"
        )
    return restored


@contextmanager
def _one_line(folder: Path) -> Iterator[None]:
    """Raise ResumeError instead of any error of a checkpoint that cannot be loaded. Damaged files raise arbitrary
    errors.
    """
    try:
        yield
    except (
        CheckpointException,
        Exception,
    ) as error:  # CheckpointException, a BaseException, has the errors of all ranks
        cause: BaseException = error
        if isinstance(error, CheckpointException) and error.failures:
            cause = next(iter(error.failures.values()))[0]
        if isinstance(cause, (pickle.UnpicklingError, EOFError, OSError)):
            name = "" if getattr(cause, "filename", None) else f"{METADATA}, {COMMON} or a .distcp file "
            raise ResumeError(
                f"checkpoint {folder} cannot be read: {name}{_reason(cause)}; put the name of an older step-N into"
                " latest"
            ) from cause
        raise ResumeError(
            f"checkpoint {folder} does not fit this model ({_reason(cause)}); use the run_dir that belongs to this"
            " model"
        ) from cause


def _reason(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]


def _regrouped(loaded: dict[Any, Any], optimizer: MegatronOptimizer) -> dict[Any, Any]:
    """Return the loaded state of an optimizer in the form of this layout's optimizer.

    If ep > 1, Megatron has a separate optimizer for experts, and its state has one more level. Any saved parameter
    group serves for all groups, because they have the same step. All other settings come from this run, because another
    kind of Adam has different ones.
    """
    saved = next(part for part in (loaded, *loaded.values()) if isinstance(part, dict) and "optimizer" in part)
    group, is_single = saved["optimizer"]["param_groups"][0], len(parts(optimizer)) == 1
    states: dict[int, dict[str, Any]] = {}
    for index, part in enumerate(parts(optimizer)):
        groups = [
            group | {name: value for name, value in mine.items() if name not in ("params", "step")}
            for mine in part.optimizer.param_groups
        ]
        own = {name: v for name, v in loaded.items() if not isinstance(name, int)} if is_single else loaded[index]
        states[index] = saved | own | {"optimizer": saved["optimizer"] | {"param_groups": groups}}
    return states[0] if is_single else states


@contextmanager
def _compared(optimizer: MegatronOptimizer) -> Iterator[list[torch.Tensor]]:
    """Collect the parameters with weights that do not match the masters loaded inside the context.

    Each rank compares its shards one at a time. Masters of fp32 weights are views of them, so the load overwrites the
    weights.
    """
    differing: list[torch.Tensor] = []

    def take(part: Any, take_state: Any, parameter: torch.Tensor, tensors: Any) -> None:
        shard = part._get_model_param_range_map(parameter)["param"]
        is_master = is_rounded_from(parameter, shard.start, shard.end)
        take_state(parameter, tensors)
        if not is_master(part._get_main_param_and_optimizer_states(parameter)["param"]):
            differing.append(parameter)

    for part in parts(optimizer):
        part._set_main_param_and_optimizer_states = partial(take, part, part._set_main_param_and_optimizer_states)
    try:
        yield differing
    finally:
        for part in parts(optimizer):
            del part._set_main_param_and_optimizer_states


class InProcessSave(TorchDistSaveShardedStrategy):
    """Write Megatron's format in this process.

    Megatron's own writer spawns a manager and forks processes. That takes seconds and does not help for files that are
    staged in memory.
    """

    def save(self, sharded_state_dict: Any, checkpoint_dir: Path) -> None:
        state, _, _ = _replace_state_dict_keys_with_sharded_keys(sharded_state_dict, self.keep_only_main_replica)
        distributed_checkpoint.save(
            mcore_to_pyt_state_dict(state, False),
            storage_writer=distributed_checkpoint.FileSystemWriter(checkpoint_dir, sync_files=False),
            planner=_SavePlanner(dedup_replicated_tensors=not self.keep_only_main_replica, flatten_state_dict=False),
        )


class _SavePlanner(MCoreSavePlanner):
    """Report progress per tensor written."""

    def resolve_data(self, write_item: Any) -> Any:
        recorder().heartbeat()
        return super().resolve_data(write_item)


def _state(
    models: Sequence[Any],
    optimizer: MegatronOptimizer,
    counters: dict[str, Any],
    reference: Values,
    *,
    is_loading: bool,
) -> dict[str, Any]:
    metadata = {
        "distrib_optim_sharding_type": "fully_reshardable",  # the only type that loads in another layout without TE
        "dp_cp_group": _replicas(),
        "singleton_local_shards": False,
        "chained_optim_avoid_prefix": True,
    }
    weights = {f"model{i}": model.sharded_state_dict(metadata=metadata) for i, model in enumerate(models)}
    state = weights | {"optimizer": optimizer.sharded_state_dict(weights, is_loading=is_loading, metadata=metadata)}
    if reference:  # sharded like the weights, under keys that start with "reference."
        places = {f"chunk{i}.{name}": p for i in range(len(models)) for name, p in weights[f"model{i}"].items()}
        state["reference"] = {
            name: make_sharded_optimizer_tensor(places[name], values, "reference") for name, values in reference.items()
        }
    return state | counters


def _replicas() -> dist.ProcessGroup:
    """Return the group of ranks that hold the same weights, except experts."""
    return parallel_state.get_data_parallel_group(with_context_parallel=True)


def _make_states(optimizer: MegatronOptimizer) -> None:
    """Create Adam's states before its first step, because Megatron saves and loads only existing states."""
    for part in parts(optimizer):
        adam, config = part.optimizer, part.config
        if config.optimizer_cpu_offload:
            for inner in adam.sub_optimizers:
                _fill_states(inner)
            adam._sync_sub_optimizers_state_to_hdo()
            continue
        is_torchs = isinstance(adam, torch.optim.AdamW)
        if not is_torchs and not config.use_precision_aware_optimizer:
            part.init_state_fn(adam, config)
            continue
        if is_torchs:
            _fill_states(adam)
            continue
        for p in (p for group in adam.param_groups for p in group["params"] if not adam.state[p]):
            adam.initialize_state(p, config.store_param_remainders)  # Megatron's function lacks this argument


def _fill_states(adam: torch.optim.Optimizer) -> None:
    """Create the missing states of torch's Adam."""
    for p in (p for group in adam.param_groups for p in group["params"] if not adam.state[p]):
        adam.state[p] = {
            "step": torch.tensor(0.0),
            "exp_avg": torch.zeros_like(p),
            "exp_avg_sq": torch.zeros_like(p),
        }
