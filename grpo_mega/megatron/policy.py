"""The policy: a Megatron model with its optimizer and, for a KL penalty, a frozen reference, on this rank.

The reference has the policy's layout; its weights wait in host memory and are swapped in while its log-probs are computed.
Between updates the policy's own memory may go to the host too (`offload_*`, `onload*`); whatever is already in its place is
left alone. Methods that need more than is there bring it back, except `tensors`. All ranks call every method together.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from grpo_mega.algorithm.inputs import LossInputs
from grpo_mega.algorithm.logprobs import vocab_parallel_logprobs
from grpo_mega.algorithm.losses import LossOutputs, accumulate, finalize, policy_loss
from grpo_mega.algorithm.settings import loss_settings
from grpo_mega.batching.layout import segments, to_device
from grpo_mega.config import Config
from grpo_mega.hardware.fp8 import RECIPES
from grpo_mega.megatron import optimizer as optimizers
from grpo_mega.megatron import state as checkpoint
from grpo_mega.megatron.fp8_weights import PlainTensors, held, is_quantised, write_back
from grpo_mega.megatron.guard import Guard, num_groups
from grpo_mega.megatron.model import build_chunks, output_weight, uses_transformer_engine
from grpo_mega.megatron.offload import HostCopy, PolicyMemory
from grpo_mega.megatron.pipeline import Pipeline
from grpo_mega.megatron.precision import in_bf16, set_level
from grpo_mega.megatron.runtime import Runtime
from grpo_mega.types import PackedBatch, StepMetrics
from grpo_mega.weights.apply import load_shards
from grpo_mega.weights.boxes import Box, RankShards
from grpo_mega.weights.layout import ShardLayout, megatron_rank_shards, megatron_shards
from grpo_mega.weights.spec import Family, ModelShape


class Policy:
    def __init__(self, config: Config, shape: ModelShape, family: Family, hf_config: Any, runtime: Runtime) -> None:
        """Builds the model without weights; `load` fills them."""
        self._config, self._family, self._shape, self._runtime = config, family, shape, runtime
        self._uses_te = uses_transformer_engine(runtime)
        self._holding_of = partial(megatron_rank_shards, family, shape, runtime.layout, fused_norms=self._uses_te)
        models = build_chunks(shape, family, hf_config, config, runtime)
        self._parameters = _parameters_of(models, self._holding_of(runtime.rank))
        _check_partitions(self._parameters, runtime, self._holding_of)
        self._models = models
        self._layer_group = _layer_groups(models, shape.num_layers)
        self._chunks = optimizers.wrap(models, config.layout, config.precision)
        self._pipeline = Pipeline(self._chunks, uses_te=self._uses_te)
        self._optimizer: Any = None
        self._optimizer_step = 0
        self.num_pushed = 0  # optimizer steps of this process that had to move the weights: past warm-up, by a gradient above 0
        self._memory = PolicyMemory(
            self._chunks, partial(held, self._parameters.values()), self._optimizer_state, is_cuda=runtime.device.is_cuda
        )
        self._reference: HostCopy | None = None
        self._loss_settings = loss_settings(config.algorithm)
        self._seen: list[tuple[PackedBatch, Tensor]] = []  # of the mini-batch under way, with its log-probs
        self.guard = Guard(config.precision.guard, shape.num_layers, config.rollout.mismatch_warn)
        self._layer_norms: list[list[float]] = []  # of each optimizer step of the last update, by the guard's groups
        self.nonfinite_samples: set[int] = set()  # indices of the step's samples, of its updates that were dropped

    @property
    def length_multiple(self) -> int:
        """To what packed micro-batches are padded: sequence parallelism cuts them into tp parts, and FP8 wants whole blocks."""
        precision = self._config.precision
        return (RECIPES[precision.fp8_recipe].length_multiple if precision.fp8 else 16) * self._runtime.layout.tp

    @property
    def micro_batch_multiple(self) -> int:
        """Interleaved pipelines want whole rounds of micro-batches."""
        return self._runtime.layout.pp if self._runtime.layout.vpp > 1 else 1

    @property
    def dp_size(self) -> int:
        return self._runtime.layout.dp

    @property
    def dp_rank(self) -> int:
        return self._runtime.dp_rank

    def rank_shards(self) -> list[RankShards]:
        """What each rank holds of the policy."""
        return [self._holding_of(rank) for rank in range(self._runtime.layout.world_size)]

    def shard_layout(self) -> ShardLayout:
        """What each rank holds of the policy, for plans."""
        return megatron_shards(self._family, self._shape, self._runtime.layout, fused_norms=self._uses_te)

    def tensors(self) -> Mapping[str, Tensor]:
        """This rank's parameters by the local names of its holding. They must be on the device."""
        assert self._memory.has_weights, "the weights are on the host; call onload_weights() first"
        self._settle()
        return PlainTensors(self._parameters)

    def load(self, read: Callable[[Box], Tensor]) -> None:
        """Fills the weights from a checkpoint's slices; keeps them as the reference if one is needed; makes the optimizer."""
        self.load_weights(read)
        if self._config.algorithm.kl_beta > 0:
            self._reference = self._memory.copy_weights()
        # Only now: the optimizer copies the weights into its fp32 master shards.
        self._optimizer = optimizers.build(self._chunks, self._config.optimizer, self._config.layout, self._config.precision)

    def load_weights(self, read: Callable[[Box], Tensor]) -> None:
        """Fills the weights and makes nothing else: of a policy that is to be published or exported, not trained."""
        with self._runtime.together():
            self._fill(read)

    def save(self, folder: Path) -> None:
        """Writes weights, optimizer and counters as a Megatron distributed checkpoint into the empty `folder`."""
        self._onload_state()
        self._settle()
        checkpoint.save(
            folder, self._models, self._optimizer, {"optimizer_step": self._optimizer_step, "guard": self.guard.state()}
        )

    def restore(self, folder: Path) -> None:
        """Goes on from a checkpoint of any layout, after `load`. Raises ResumeError."""
        self._onload_state()
        found = checkpoint.load(folder, self._models, self._optimizer, {"optimizer_step": 0, "guard": {}})
        self._optimizer_step = found["optimizer_step"]
        self.guard.restore(found["guard"])
        set_level(self._models[0].config, self._config.precision, self.guard.level)

    def offload_optimizer(self) -> None:
        """Drops the gradients and moves the optimizer's state to the host; weights stay. After an update, before a sync."""
        self._memory.offload_optimizer()

    def offload_weights(self) -> None:
        """Moves the weights to the host, after a sync."""
        if self._memory.has_weights:
            self._settle()
        self._memory.offload_weights()

    def onload_weights(self) -> None:
        """Brings the weights back, and nothing else."""
        self._memory.onload_weights()

    def onload(self) -> None:
        """Brings everything back, gradients as zeros: before log-probs and update."""
        self._memory.onload()

    @property
    def device_bytes(self) -> int:
        """Now held on this rank's device by weights, gradients and optimizer state."""
        return self._memory.device_bytes

    @property
    def host_bytes(self) -> int:
        """Host memory that this rank holds for what is or was offloaded, and for the reference."""
        return self._memory.host_bytes + (self._reference.nbytes if self._reference else 0)

    @property
    def state_bytes(self) -> int:
        """This rank's share of a checkpoint: its weights and three fp32 numbers for each, over the ranks that hold the same."""
        dp, ep = self._runtime.layout.dp, self._runtime.layout.ep
        copies = {True: dp, False: dp // ep}  # by Megatron's mark: experts are not reduced over all data-parallel ranks
        return sum(
            p.numel() * (p.element_size() + 12) // copies[getattr(p, "allreduce", True)] for p in self._parameters.values()
        )

    @property
    def optimizer_step(self) -> int:
        """Optimizer steps taken so far, dropped mini-batches not counted."""
        return self._optimizer_step

    def fingerprint(self) -> str:
        """A checksum over all ranks of the weights that the optimizer moves (fp32); depends on the layout."""
        self._onload_state()
        sums = [
            p.detach().double().sum() for part in optimizers.parts(self._optimizer) for p in optimizers.main_parameters(part)
        ]
        mine = zlib.crc32(torch.stack(sums).cpu().numpy().tobytes())
        everyone = torch.zeros(dist.get_world_size(), dtype=torch.int64, device=self._runtime.device.torch_device)
        everyone[self._runtime.rank] = mine
        return f"{zlib.crc32(self._runtime.sum(everyone).cpu().numpy().tobytes()):08x}"

    def attach_logprobs(
        self,
        mini_batches: Sequence[Sequence[PackedBatch]],
        timed: Callable[[str], AbstractContextManager[None]] = lambda phase: nullcontext(),
    ) -> list[list[PackedBatch]]:
        """The batches on the device, with old_ and ref_logprobs where the update needs them (on the last stage).

        They are `timed("logprobs")` and `timed("reference")`.
        With one optimizer step a rollout, old_logprobs equal the update's own log-probs by definition; unless the reward needs
        them, they are not computed here, and `update` takes them from its forward pass.
        """
        self.onload_weights()
        batches = [[to_device(b, self._runtime.device.torch_device) for b in mini] for mini in mini_batches]
        if self._config.needs_old_logprobs:
            with timed("logprobs"):
                for batch, values in self._evaluate(batches):
                    batch.old_logprobs = values
        if self._reference:
            self._settle()
            precision = self._config.precision
            in_dtype = in_bf16(self._models[0].config) if precision.fp8 and not precision.fp8_reference else nullcontext()
            with timed("reference"), self._memory.with_weights(self._reference), in_dtype:
                for batch, values in self._evaluate(batches):
                    batch.ref_logprobs = values
        return batches

    def update(self, mini_batches: Sequence[Sequence[PackedBatch]]) -> list[StepMetrics]:
        """All optimizer steps of one rollout, and the metrics of each."""
        self.onload()
        algorithm = self._config.algorithm
        passes: list[StepMetrics] = []
        self.nonfinite_samples, self._layer_norms = set(), []
        for _ in range(self._config.batch.epochs):
            for batches in mini_batches:
                self._seen = []
                metrics = self._reduced(self._pipeline.forward_backward(batches, self._loss))
                limit = algorithm.early_stop_imp_ratio
                if limit is not None and metrics["ratio/mean"] > limit:  # a NaN is no early stop
                    metrics |= {"dropped_mini_batches": 1.0, "nonfinite_mini_batches": 0.0}
                else:
                    metrics |= self._optimizer_update(metrics["loss/total"], metrics["ratio/mean"])
                passes.append(metrics)
        return passes

    def watch(self, step: int, mismatch: float) -> Sequence[str]:
        """Shows the guard the update of `step`; the next one computes as it decides. Returns what is to be told."""
        verdict = self.guard.observe(step, mismatch, self._layer_norms)
        set_level(self._models[0].config, self._config.precision, verdict.level)
        return verdict.messages

    def _optimizer_update(self, *totals: float) -> StepMetrics:
        """One optimizer step, unless one of `totals` or the gradient is not finite: then no weight feels the mini-batch."""
        self._optimizer.prepare_grads()
        squares = optimizers.squared_norms(self._optimizer, self._layer_group, num_groups(self._shape.num_layers))
        self._layer_norms.append(self._runtime.sum(squares).sqrt().tolist())
        grad_norm = math.hypot(*self._layer_norms[-1])
        if not all(map(math.isfinite, (*totals, grad_norm))):
            self.nonfinite_samples |= self._find_nonfinite()
            return {"dropped_mini_batches": 1.0, "nonfinite_mini_batches": 1.0}
        lr = optimizers.learning_rate(
            self._config.optimizer, self._optimizer_step, self._config.steps * self._config.batch.optimizer_steps
        )
        optimizers.set_rates(self._optimizer, lr, self._config.optimizer.weight_decay)
        self._memory.onload_optimizer()
        self._optimizer.step()
        self.num_pushed += self._optimizer_step >= self._config.optimizer.warmup_steps and lr > 0 and grad_norm > 0
        self._optimizer_step += 1
        return {"grad_norm": grad_norm, "lr": lr, "dropped_mini_batches": 0.0, "nonfinite_mini_batches": 0.0}

    def _find_nonfinite(self) -> set[int]:
        """The samples of the mini-batch with a log-prob or advantage that is not finite, from all ranks."""
        mine: set[int] = set()
        for batch, logprobs in self._seen:
            values = [v for v in (logprobs, batch.old_logprobs, batch.ref_logprobs, batch.advantages) if v is not None]
            is_bad = ~torch.isfinite(torch.stack(values)).all(dim=0) & (batch.loss_mask > 0)
            cuts = batch.cu_seqlens.tolist()
            segments = zip(batch.sample_indices, cuts, cuts[1:], strict=False)  # padding comes last and has no sample
            mine |= {index for index, begin, end in segments if bool(is_bad[begin:end].any())}
        everyone: list[set[int]] = [set()] * dist.get_world_size()
        dist.all_gather_object(everyone, mine)
        return set().union(*everyone)

    def _evaluate(self, mini_batches: Sequence[Sequence[PackedBatch]]) -> list[tuple[PackedBatch, Tensor]]:
        """Each batch with its [T] log-probs under the current weights; none on all but the last stage."""
        pairs: list[tuple[PackedBatch, Tensor]] = []
        for batches in mini_batches:
            values = self._pipeline.forward(batches, lambda hidden_TH, batch: self._logprobs(hidden_TH, batch)[0])
            pairs += zip(batches, values, strict=bool(values))
        return pairs

    def _logprobs(self, hidden_TH: Tensor, batch: PackedBatch) -> tuple[Tensor, Tensor | None]:
        """Of the tokens that train; 0 for the others."""
        weight_VH = output_weight(self._models[-1])
        return vocab_parallel_logprobs(
            hidden_TH,
            weight_VH,
            batch.targets,
            vocab_size=self._shape.vocab,
            temperature=self._config.rollout.temperature,
            tp_group=self._runtime.tp_group if self._runtime.layout.tp > 1 else None,
            with_entropy=self._config.algorithm.calculate_entropy,
            needed_T=batch.loss_mask > 0,
            # Where reductions overlap with the backward, Megatron insists on a gradient that autograd brought.
            weight_grad_VH=None if self._config.layout.overlap_grad_reduce else weight_VH.main_grad,
        )

    def _loss(self, hidden_TH: Tensor, batch: PackedBatch) -> LossOutputs:
        logprobs, entropy = self._logprobs(hidden_TH, batch)
        self._seen.append((batch, logprobs.detach()))
        if batch.old_logprobs is None:  # the rollout's only optimizer step: equal by definition
            batch.old_logprobs = logprobs.detach()
        return policy_loss(
            LossInputs(
                logprobs=logprobs,
                old_logprobs=batch.old_logprobs,
                ref_logprobs=batch.ref_logprobs,
                rollout_logprobs=batch.rollout_logprobs,
                advantages=batch.advantages,
                loss_mask=batch.loss_mask,
                loss_weights=batch.loss_weights,
                segments=segments(batch),
                num_segments=batch.num_segments,
                entropy=entropy,
            ),
            self._loss_settings,
        )

    def _reduced(self, outputs: list[LossOutputs]) -> StepMetrics:
        """Metrics of a mini-batch, the same on all ranks. Only one tensor-parallel rank of the last stage brings its counts."""
        device = self._runtime.device.torch_device
        counts = outputs if self._runtime.tp_rank == 0 else []
        sums, maxima = accumulate([self._nothing(), *counts])
        summed = self._runtime.sum(torch.stack([v.to(device) for v in sums.values()]))
        largest = self._runtime.max(torch.stack([v.to(device) for v in maxima.values()]))
        return finalize(dict(zip(sums, summed, strict=True)), dict(zip(maxima, largest, strict=True)))

    def _nothing(self) -> LossOutputs:
        """The outputs of no token at all: they name the metrics on ranks that compute no loss."""
        zero = torch.zeros(1)
        inputs = LossInputs(
            logprobs=zero,
            old_logprobs=zero,
            ref_logprobs=zero if self._reference else None,
            rollout_logprobs=zero,
            advantages=zero,
            loss_mask=zero,
            loss_weights=zero,
            segments=torch.zeros(1, dtype=torch.int64),
            num_segments=1,
            entropy=zero if self._config.algorithm.calculate_entropy else None,
        )
        return policy_loss(inputs, self._loss_settings)

    def _fill(self, read: Callable[[Box], Tensor]) -> None:
        """The parameters from a checkpoint's slices; those in FP8 one by one by way of plain ones."""
        holding = self._holding_of(self._runtime.rank)
        plain = {name: p for name, p in self._parameters.items() if not is_quantised(p)}
        load_shards({name: holding[name] for name in plain}, plain, read)
        for name in holding.keys() - plain.keys():
            p = self._parameters[name]
            values = torch.empty(p.shape, dtype=p.dtype, device=p.device)
            load_shards({name: holding[name]}, {name: values}, read)
            write_back(p, values)

    def _settle(self) -> None:
        """Waits until every parameter is the newest: the gather after an optimizer step may be overlapped with what follows."""
        if self._config.layout.overlap_param_gather:
            optimizers.settle(self._chunks)

    def _onload_state(self) -> None:
        """Weights and optimizer state on the device and ready to be read."""
        self._memory.onload_weights()
        self._memory.onload_optimizer()

    def _optimizer_state(self) -> list[Tensor]:
        return optimizers.state_tensors(self._optimizer) if self._optimizer else []


def _parameters_of(models: Sequence[Any], holding: RankShards) -> dict[str, Tensor]:
    """Every parameter by its local name; the table and the model must agree on names and shapes."""
    found = {f"chunk{i}.{name}": p for i, model in enumerate(models) for name, p in model.named_parameters()}
    assert set(found) == set(holding), sorted(set(found) ^ set(holding))
    for name, p in found.items():
        assert tuple(p.shape) == holding[name].shape, (name, tuple(p.shape), holding[name].shape)
    return found


def _layer_groups(models: Sequence[Any], num_layers: int) -> dict[Tensor, int]:
    """The guard's group of each parameter: 0 for the embedding, then the decoder layers, then what follows them."""
    groups: dict[Tensor, int] = {}
    for model in models:
        groups |= dict.fromkeys(model.parameters(), num_layers + 1)
        if model.pre_process:
            groups |= dict.fromkeys(model.embedding.parameters(), 0)
        for layer in model.decoder.layers:
            groups |= dict.fromkeys(layer.parameters(), layer.layer_number)
    return groups


def _check_partitions(parameters: Mapping[str, Tensor], runtime: Runtime, holding_of: Callable[[int], RankShards]) -> None:
    """Parameters must be marked as cut where they are: the gradient norm counts unmarked ones on one rank only."""
    group = dist.get_process_group_ranks(runtime.tp_group)
    if len(group) == 1:
        return
    first, second = holding_of(group[0]), holding_of(group[1])
    for name, p in parameters.items():
        is_cut = first[name] != second[name]
        assert getattr(p, "tensor_model_parallel", False) == is_cut, (name, is_cut)
