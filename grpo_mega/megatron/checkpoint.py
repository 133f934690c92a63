"""The policy's state as a Megatron distributed checkpoint: weights, optimizer and counters, loadable in any layout.

`save` and `load` are collective. The reference is not part of it: it is the model that the run started from.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as distributed_checkpoint
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    TorchDistSaveShardedStrategy,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)
from megatron.core.optimizer import MegatronOptimizer

from grpo_mega.errors import ResumeError
from grpo_mega.megatron import compat
from grpo_mega.megatron.optimizer import parts, separate_steps


def save(folder: Path, models: Sequence[Any], optimizer: MegatronOptimizer, counters: dict[str, Any]) -> None:
    """Writes into `folder`, which exists on every node and is empty. `models` are the unwrapped chunks."""
    _make_states(optimizer)
    state = _state(models, optimizer, counters, is_loading=False)
    dist_checkpointing.save(state, str(folder), sharded_strategy=_InProcessSave("torch_dist", 1))


def load(folder: Path, models: Sequence[Any], optimizer: MegatronOptimizer, counters: dict[str, Any]) -> dict[str, Any]:
    """Fills models and optimizer from `folder`; returns the counters, of which `counters` gives the names.

    Raises ResumeError if the checkpoint is of another model.
    """
    compat.keep_adam_steps_apart()
    _make_states(optimizer)
    try:
        state = dist_checkpointing.load(_state(models, optimizer, counters, is_loading=True), str(folder))
    except (dist_checkpointing.core.CheckpointingException, RuntimeError, KeyError) as error:
        reason = " ".join(str(error).split())[:300]
        raise ResumeError(f"checkpoint {folder} does not fit this model ({reason}); give the run_dir of its own run") from None
    for index, model in enumerate(models):
        model.load_state_dict(state[f"model{index}"])
    optimizer.load_state_dict(state["optimizer"])
    separate_steps(optimizer)
    return {name: state[name] for name in counters}


class _InProcessSave(TorchDistSaveShardedStrategy):
    """Megatron's format, written by this process alone. Its own writer forks processes around a manager that it spawns, which
    takes seconds, and is of no use to files that are staged in memory."""

    def save(self, sharded_state_dict: Any, checkpoint_dir: Path) -> None:
        state, _, _ = _replace_state_dict_keys_with_sharded_keys(sharded_state_dict, self.keep_only_main_replica)
        distributed_checkpoint.save(
            mcore_to_pyt_state_dict(state, False),
            storage_writer=distributed_checkpoint.FileSystemWriter(checkpoint_dir, sync_files=False),
            planner=MCoreSavePlanner(dedup_replicated_tensors=not self.keep_only_main_replica, flatten_state_dict=False),
        )


def _state(
    models: Sequence[Any], optimizer: MegatronOptimizer, counters: dict[str, Any], *, is_loading: bool
) -> dict[str, Any]:
    metadata = {
        "distrib_optim_sharding_type": "fully_reshardable",  # the only one that loads in another layout without TE
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
        "singleton_local_shards": False,
        "chained_optim_avoid_prefix": True,
    }
    weights = {f"model{i}": model.sharded_state_dict(metadata=metadata) for i, model in enumerate(models)}
    return {
        **weights,
        "optimizer": optimizer.sharded_state_dict(weights, is_loading=is_loading, metadata=metadata),
        **counters,
    }


def _make_states(optimizer: MegatronOptimizer) -> None:
    """Adam makes its states at the first step, but Megatron saves and loads only states that are there."""
    for part in parts(optimizer):
        if not isinstance(part.optimizer, torch.optim.AdamW):
            _make_fused_states(part)
            continue
        for group in part.optimizer.param_groups:
            for p in group["params"]:
                if not part.optimizer.state[p]:
                    part.optimizer.state[p] = {
                        "step": torch.tensor(0.0),
                        "exp_avg": torch.zeros_like(p),
                        "exp_avg_sq": torch.zeros_like(p),
                    }


def _make_fused_states(part: Any) -> None:
    """Make a fused Adam's states by Megatron's function, which leaves out an argument that the precision-aware one requires."""
    if not part.config.use_precision_aware_optimizer:
        part.init_state_fn(part.optimizer, part.config)
        return
    for group in part.optimizer.param_groups:
        for p in group["params"]:
            if not part.optimizer.state[p]:
                part.optimizer.initialize_state(p, part.config.store_param_remainders)
