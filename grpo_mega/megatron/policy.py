"""The policy on this rank: a Megatron model with its optimizer and, for a KL penalty, a reference.

The reference has the policy's layout. Its weights stay in host memory and are swapped in while its log-probs are
computed. Between updates `memory` can offload the policy itself to the host. Methods onload the state that they need,
except `tensors`. Every method is collective: all ranks must call it together.
"""

import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from weakref import ref

import torch
import torch.distributed as dist
from torch import Tensor

from grpo_mega.algorithm.inputs import LossInputs
from grpo_mega.algorithm.kl import adapted_beta, vocab_parallel_kl
from grpo_mega.algorithm.logprobs import vocab_parallel_logprobs
from grpo_mega.algorithm.losses import LossOutputs, accumulate, finalize, policy_loss
from grpo_mega.batching.layout import note_gradients, segments, sequences, to_device
from grpo_mega.batching.pack import PackingSpec
from grpo_mega.config import AlgorithmConfig, Config
from grpo_mega.distributed.kernels import length_multiple
from grpo_mega.distributed.watchdog import recorder
from grpo_mega.megatron import optimizer as optimizers
from grpo_mega.megatron import state as checkpoint
from grpo_mega.megatron.lora import Lora
from grpo_mega.megatron.model import (
    biases_of,
    build_chunks,
    check_marks,
    output_weight,
    parameters_of,
    shards_of,
    uses_transformer_engine,
)
from grpo_mega.megatron.offload import PolicyMemory, Reference, Teacher
from grpo_mega.megatron.pipeline import Pipeline
from grpo_mega.megatron.precision import (
    DTYPES,
    Guard,
    PlainTensors,
    in_bf16,
    is_quantised,
    num_groups,
    set_level,
    storage_tensors,
    write_back,
)
from grpo_mega.megatron.routers import Replay, Routers
from grpo_mega.megatron.runtime import Runtime
from grpo_mega.tracking.progress import phase
from grpo_mega.types import PackedBatch, StepMetrics
from grpo_mega.weights.apply import load_shards
from grpo_mega.weights.architecture import tokens_per_pair
from grpo_mega.weights.boxes import Box
from grpo_mega.weights.spec import Family, ModelShape

OPTIMIZER = "optimizer"  # kind of beat at the start of an optimizer step


class Policy:
    def __init__(self, config: Config, shape: ModelShape, family: Family, hf_config: Any, runtime: Runtime) -> None:
        """Build the model without weights; `load` fills them."""
        self._config, self._shape, self._runtime = config, shape, runtime
        self.shards = shards_of(family, shape, config.model, runtime)
        self._shows_progress = runtime.rank == 0 and config.log.progress
        with phase("building the model", self._shows_progress):
            # One per virtual pipeline stage.
            self.models = build_chunks(shape, family, hf_config, config.model, config.layout, config.precision, runtime)
        self.parameters = parameters_of(self.models, self.shards.rank_shards(runtime.rank))  # by local name
        check_marks(self.parameters, self.shards, runtime)
        self.lora = Lora(self.models, config.model, config.seed, family, shape, runtime)
        self._layer_group = optimizers.layer_groups(self.models, shape.num_layers)
        self.chunks = optimizers.wrap(self.models, config.layout, config.precision, self.lora.finish_gradients)
        self._weights = self.parameters | biases_of(self.models)  # parameters_of leaves out biases: they are buffers
        self.parameters = self._weights | self.lora.parameters
        replay = Replay(self.models[0].config, shape, runtime, ref(self)) if config.rollout.routing_replay else None
        self.routers = Routers(self.models, config.model.router, runtime, shape.num_layers, replay)
        self.pipeline = Pipeline(self.chunks, uses_te=uses_transformer_engine(runtime), routers=self.routers)
        self._optimizer: Any = None
        self.algorithm: AlgorithmConfig = config.algorithm  # has the current kl_beta, adapted to algorithm.kl_target
        self.optimizer_step = 0  # optimizer steps taken so far, without dropped mini-batches
        # Steps of this process that must change weights: past warm-up, with a gradient above 0.
        self.num_effective_steps = 0
        self.memory = PolicyMemory(
            self.chunks,
            partial(storage_tensors, self.parameters.values()),
            lambda: optimizers.state_tensors(self._optimizer) if self._optimizer else [],
            is_cuda=runtime.device.is_cuda,
        )
        self._reference: Reference | None = None
        # Returns a context in which the policy's modules compute as the reference; None without a reference.
        self._as_reference: Callable[[], AbstractContextManager[None]] | None = None
        self.teachers: dict[str, Teacher] = {}  # models to distill from, by name
        self._heads: dict[str, Tensor] = {}  # during an update: the teachers' output layers [vocab / tp, G], by name
        # Called when an update runs out of GPU memory. Returns True if there is more room now.
        self.make_room: Callable[[], bool] = lambda: False
        self._seen: list[tuple[PackedBatch, Tensor]] = []  # micro-batches of this mini-batch, with their log-probs
        self.guard = Guard(config.precision.guard, shape.num_layers, config.rollout.mismatch_warn)
        # Gradient norms of each optimizer step of the last update, by guard group.
        self._layer_norms: list[list[float]] = []
        # Indices of samples with NaN or infinite values in dropped mini-batches.
        self.nonfinite_samples: set[int] = set()

    @property
    def packing(self) -> PackingSpec:
        """Return this rank's packing specification."""
        layout = self._runtime.layout
        return PackingSpec(
            layout.dp,
            self._runtime.dp_rank,
            self._config.batch.tokens_per_micro_batch,
            # Sequence parallelism splits micro-batches into tp parts, and FP8 needs whole blocks.
            length_multiple=length_multiple(self._config.precision, self._config.layout),
            # Interleaved pipelines need whole rounds of micro-batches.
            micro_batch_multiple=layout.pp if layout.vpp > 1 else 1,
            tokens_per_pair=tokens_per_pair(self._shape, self.models[0].config.moe_router_topk),
            share_prompts=self._config.batch.share_prompts,
            keeps_samples_whole=self._config.algorithm.has_sequence_sums,
            cp_size=layout.cp,
            cp_rank=self._runtime.cp_rank,
        )

    def tensors(self) -> Mapping[str, Tensor]:
        """Return this rank's weights by local name, merged with the adapter in fp32. They must be on the device."""
        assert self.memory.has_weights, "the weights are on the host; call memory.onload_weights() first"
        optimizers.wait_for_param_gather(self.chunks)
        return PlainTensors(self._weights, self.lora.merged)

    def load(self, read: Callable[[Box], Tensor], read_adapter: Callable[[Box], Tensor] | None = None) -> None:
        """Fill the weights from a checkpoint's slices, copy them if a reference is needed, and create the optimizer."""
        self.load_weights(read, read_adapter)
        config = self._config
        if config.algorithm.kl_beta > 0 and self.lora.parameters:
            self._as_reference = self.lora.off
        elif config.algorithm.kl_beta > 0:
            with phase("copying the weights for the reference", self._shows_progress):
                self._reference = Reference(self.memory, self.parameters, config.algorithm)
            self._as_reference = self._reference.computing
        # The optimizer copies the weights into its fp32 master shards, so they must be filled first.
        with phase("setting up the optimizer", self._shows_progress):
            self._optimizer = optimizers.build(self.chunks, config.optimizer, config.layout, config.precision)

    def load_weights(self, read: Callable[[Box], Tensor], read_adapter: Callable[[Box], Tensor] | None = None) -> None:
        """Fill the weights only, for a policy that is served or exported. Without `read_adapter` an adapter is new."""
        self.lora.load(read_adapter)
        shards, b = self.shards.rank_shards(self._runtime.rank), DTYPES[self._config.model.resolved_dtype].itemsize
        total = b * sum(piece.box.size for shard in shards.values() for piece in shard.pieces)
        with (
            phase("loading the model", self._shows_progress, total, "bytes") as bar,
            self._runtime.raise_on_all_ranks(),
        ):

            def read_shown(box: Box) -> Tensor:
                values = read(box)
                bar.advance(b * box.size)
                return values

            for name, shard in shards.items():
                p = self.parameters[name]
                values = torch.empty(p.shape, dtype=p.dtype, device=p.device) if is_quantised(p) else p
                load_shards({name: shard}, {name: values}, read_shown)
                if values is not p:
                    write_back(p, values)

    def save(self, folder: Path) -> None:
        """Write weights, optimizer and counters as a Megatron distributed checkpoint into the empty `folder`."""
        self._onload_state()
        optimizers.wait_for_param_gather(self.chunks)
        counters = {"optimizer_step": self.optimizer_step, "guard": self.guard.state()}
        checkpoint.save(folder, self.models, self._optimizer, counters, self._saved_reference())

    def restore(self, folder: Path) -> None:
        """Resume from a checkpoint of any layout, after `load`. Raise ResumeError if it cannot be used."""
        self._onload_state()
        reference = self._saved_reference()
        counters = checkpoint.load_state(
            folder, self.models, self._optimizer, {"optimizer_step": 0, "guard": {}}, reference
        )
        if self._reference and reference:
            self._reference.restore(reference)
        self.optimizer_step = counters["optimizer_step"]
        self.guard.restore(counters["guard"])
        set_level(self.models[0].config, self._config.precision, self.guard.level)

    @property
    def state_bytes(self) -> int:
        """Return the size in bytes of this rank's share of a checkpoint.

        Each weight has three fp32 numbers and, if the reference follows the policy, a reference value. Ranks with a
        copy of a weight share the work.
        """
        layout = self._runtime.layout
        # Keyed by `allreduce`, which is False for experts with other replicas than the other weights.
        copies = {True: layout.num_replicas, False: layout.num_expert_replicas}
        of_reference = self._config.algorithm.saved_reference_bytes
        return sum(
            p.numel()
            * (p.element_size() + 12 + of_reference(p.element_size()))
            // copies[getattr(p, "allreduce", True)]
            for p in (self.lora.parameters or self.parameters).values()
        )

    def fingerprint(self) -> str:
        """Return a checksum of the optimizer's fp32 weights over all ranks. It depends on the layout."""
        self._onload_state()
        sums = [
            p.detach().double().sum()
            for part in optimizers.parts(self._optimizer)
            for p in optimizers.main_parameters(part)
        ]
        by_rank = torch.zeros(dist.get_world_size(), dtype=torch.int64, device=self._runtime.device.torch_device)
        by_rank[self._runtime.rank] = zlib.crc32(torch.stack(sums).cpu().numpy().tobytes())
        return f"{zlib.crc32(self._runtime.sum(by_rank).cpu().numpy().tobytes()):08x}"

    def attach_logprobs(
        self,
        mini_batches: Sequence[Sequence[PackedBatch]],
        timed: Callable[[str], AbstractContextManager[None]] = lambda phase: nullcontext(),
    ) -> list[list[PackedBatch]]:
        """Return the batches on the device, with old_ and ref_logprobs if the update needs them (on the last stage).

        `timed("logprobs")` and `timed("reference")` surround the two computations. With one optimizer step per rollout,
        old_logprobs equal the update's own log-probs by definition, so `update` uses its forward pass, unless the
        reward needs them earlier.
        """
        self.memory.onload_weights()
        batches = [[to_device(b, self._runtime.device.torch_device) for b in mini] for mini in mini_batches]
        if self._config.needs_old_logprobs:
            with timed("logprobs"):
                for batch, values in self._evaluate(batches):
                    batch.old_logprobs = values
        if self._as_reference is not None:
            optimizers.wait_for_param_gather(self.chunks)
            precision = self._config.precision
            in_dtype = (
                in_bf16(self.models[0].config) if precision.fp8 and not precision.fp8_reference else nullcontext()
            )
            is_replayed = self._config.rollout.routing_replay == "reference"
            routed = nullcontext() if is_replayed else self.routers.choosing()
            with timed("reference"), self._as_reference(), in_dtype, routed:
                for batch, values in self._evaluate(batches):
                    batch.ref_logprobs = values
        return batches

    def evaluate(self, mini_batches: Sequence[Sequence[PackedBatch]]) -> list[tuple[PackedBatch, Tensor]]:
        """Return the batches on the device with their log-probs [T]; an empty list except on the last stage."""
        self.memory.onload_weights()
        return self._evaluate(
            [[to_device(b, self._runtime.device.torch_device) for b in mini] for mini in mini_batches]
        )

    def update(self, mini_batches: Sequence[Sequence[PackedBatch]]) -> list[StepMetrics]:
        """Take all optimizer steps of one rollout. Return the metrics of each step."""
        self.memory.onload()
        device = self._runtime.device.torch_device
        self._heads = {name: one.head_VG.to(device, non_blocking=True) for name, one in self.teachers.items()}
        limit = self._config.algorithm.early_stop_imp_ratio
        passes: list[StepMetrics] = []
        self.nonfinite_samples, self._layer_norms = set(), []
        note_gradients([batch for batches in mini_batches for batch in batches], self.algorithm)
        for _ in range(self._config.batch.epochs):
            for batches in mini_batches:
                metrics = self._reduced(self._forward_backward(batches)) | self.routers.metrics()
                if limit is not None and metrics["ratio/mean"] > limit:  # NaN does not stop early
                    metrics |= {"dropped_mini_batches": 1.0, "nonfinite_mini_batches": 0.0}
                else:
                    metrics |= self._optimizer_update(metrics["loss/total"], metrics["ratio/mean"])
                passes.append(metrics)
        self._heads = {}
        return passes

    @property
    def can_repeat_passes(self) -> bool:
        """Return True if a mini-batch's passes on this rank wait for no other rank, so that it can run them again
        alone.
        """
        layout = self._runtime.layout
        is_whole = layout.tp == layout.pp == layout.cp == 1 and not self._shape.num_experts
        return is_whole and not self._config.layout.overlap_grad_reduce

    def _forward_backward(self, batches: Sequence[PackedBatch]) -> list[LossOutputs]:
        """Run a mini-batch. If it runs out of GPU memory and `make_room` makes room, run it again."""
        self._seen = []
        try:
            return self.pipeline.forward_backward(batches, self._loss)
        except torch.OutOfMemoryError:
            if not self.make_room():
                raise
        # The error is gone here. Its traceback held the activations.
        self._seen = []
        return self.pipeline.forward_backward(batches, self._loss)

    def watch(self, step: int, mismatch: float) -> Sequence[str]:
        """Let the guard judge the update of `step` and set the precision of the next step. Return its log messages."""
        messages = self.guard.observe(step, mismatch, self._layer_norms)
        set_level(self.models[0].config, self._config.precision, self.guard.level)
        return messages

    def adapt_kl(self, kl: float, num_samples: int) -> None:
        """Set the weight of the KL penalty for the next step from this step's kl/mean."""
        self.restore_kl_beta(adapted_beta(self.algorithm.kl_beta, kl, num_samples, self.algorithm))

    def restore_kl_beta(self, kl_beta: float) -> None:
        self.algorithm = self.algorithm.model_copy(update={"kl_beta": kl_beta})

    def refresh_reference(self) -> None:
        """Set the reference to the policy, or to the average that algorithm.ref_model_mixup_alpha defines."""
        assert self._reference is not None, "there is no reference without algorithm.kl_beta"
        self.memory.onload_weights()
        optimizers.wait_for_param_gather(self.chunks)
        self._reference.refresh()

    def _saved_reference(self) -> dict[str, Tensor]:
        """Return the reference for a checkpoint; an empty dict if the reference stays the start model."""
        return self._reference.tensors() if self._reference and self._config.algorithm.ref_model_sync_steps else {}

    def _optimizer_update(self, *totals: float) -> StepMetrics:
        """Take one optimizer step. Drop the mini-batch instead if one of `totals` or the gradient is not finite."""
        recorder().heartbeat(OPTIMIZER)
        self._optimizer.prepare_grads()
        squares = optimizers.squared_norms(self._optimizer, self._layer_group, num_groups(self._shape.num_layers))
        self._layer_norms.append(self._runtime.sum(squares).sqrt().tolist())
        grad_norm = math.hypot(*self._layer_norms[-1])
        if not all(map(math.isfinite, (*totals, grad_norm))):
            self.nonfinite_samples |= self._find_nonfinite()
            return {"dropped_mini_batches": 1.0, "nonfinite_mini_batches": 1.0}
        lr = optimizers.learning_rate(
            self._config.optimizer, self.optimizer_step, self._config.steps * self._config.batch.optimizer_steps
        )
        optimizers.set_rates(self._optimizer, lr, self._config.optimizer.weight_decay)
        self.memory.onload_optimizer()
        self._optimizer.step()
        self.routers.move_biases()
        self.num_effective_steps += (
            self.optimizer_step >= self._config.optimizer.warmup_steps and lr > 0 and grad_norm > 0
        )
        self.optimizer_step += 1
        return {"grad_norm": grad_norm, "lr": lr, "dropped_mini_batches": 0.0, "nonfinite_mini_batches": 0.0}

    def _find_nonfinite(self) -> set[int]:
        """Return the indices of samples, on any rank, with a log-prob or advantage that is not finite."""
        mine: set[int] = set()
        for batch, logprobs in self._seen:
            own = (logprobs, batch.old_logprobs, batch.ref_logprobs, batch.teacher_logprobs, batch.advantages)
            values = [v for v in own if v is not None]
            is_bad = ~torch.isfinite(torch.stack(values)).all(dim=0) & (batch.loss_mask > 0)
            mine |= {batch.sample_indices[segment] for segment in segments(batch)[is_bad].tolist()}
        by_rank: list[set[int]] = [set()] * dist.get_world_size()
        dist.all_gather_object(by_rank, mine)
        return set().union(*by_rank)

    def _evaluate(self, mini_batches: Sequence[Sequence[PackedBatch]]) -> list[tuple[PackedBatch, Tensor]]:
        """Return each batch with its log-probs [T] under the current weights; nothing except on the last stage."""
        return self.pipeline.evaluate(mini_batches, lambda hidden_TH, batch: self._logprobs(hidden_TH, batch)[0])

    def _logprobs(self, hidden_TH: Tensor, batch: PackedBatch) -> tuple[Tensor, Tensor | None]:
        """Return log-probs and, if configured, entropies [T] of the tokens in the loss; 0 for other tokens."""
        weight_VH = output_weight(self.models[-1])
        return vocab_parallel_logprobs(
            hidden_TH,
            weight_VH,
            batch.targets,
            with_entropy=self._config.algorithm.calculate_entropy,
            needed_T=batch.loss_mask > 0,
            num_needed=batch.num_loss_tokens,
            skips_zeros=not batch.has_gradients,
            **self._vocab_arguments(weight_VH),
        )

    def _vocab_arguments(self, weight_VH: Any) -> dict[str, Any]:
        return {
            "vocab_size": self._shape.vocab,
            "temperature": self._config.rollout.temperature,
            "tp_group": self._runtime.tp_group,
            # With overlapped gradient reductions autograd must return the gradient. A frozen weight has none.
            "weight_grad_VH": None
            if self._config.layout.overlap_grad_reduce
            else getattr(weight_VH, "main_grad", None),
        }

    def _teacher_kl(self, hidden_TH: Tensor, batch: PackedBatch) -> Tensor | None:
        """Return the KL between policy and teacher over the vocabulary, per token [T]; None if it is not configured."""
        if batch.teacher_hidden is None:
            return None
        weight_VH, of_teachers = output_weight(self.models[-1]), []
        for name, (is_taught_T, teacher_hidden_NG) in batch.teacher_hidden.items():
            of_teachers.append(
                vocab_parallel_kl(
                    hidden_TH,
                    weight_VH,
                    teacher_hidden_NG.to(hidden_TH.device, non_blocking=True),
                    self._heads[name],
                    is_reverse=self.algorithm.distill_kl == "reverse",
                    needed_T=is_taught_T,
                    **self._vocab_arguments(weight_VH),
                )
            )
        return torch.stack(of_teachers).sum(dim=0)

    def _loss(self, hidden_TH: Tensor, batch: PackedBatch) -> LossOutputs:
        logprobs, entropy = self._logprobs(hidden_TH, batch)
        self._seen.append((batch, logprobs.detach()))
        if batch.old_logprobs is None:  # with one optimizer step per rollout they are equal by definition
            batch.old_logprobs = logprobs.detach()
        inputs = LossInputs.of_batch(
            batch,
            logprobs=logprobs,
            segments=sequences(batch),
            num_segments=batch.num_segments,
            teacher_kl=self._teacher_kl(hidden_TH, batch),
            entropy=entropy,
            cp_group=self._runtime.cp_group,
        )
        return policy_loss(inputs, self.algorithm)

    def _reduced(self, outputs: list[LossOutputs]) -> StepMetrics:
        """Return the metrics of a mini-batch, identical on all ranks. One rank per tensor-parallel group
        contributes.
        """
        device, algorithm = self._runtime.device.torch_device, self.algorithm
        # Ranks that compute no loss get the names of the metrics from a masked token. It adds 0 to each metric.
        masked = LossInputs.of_masked_token(algorithm, has_reference=self._as_reference is not None)
        sums, maxima = accumulate([policy_loss(masked, algorithm), *(outputs if self._runtime.tp_rank == 0 else [])])
        summed = self._runtime.sum(torch.stack([v.to(device) for v in sums.values()]))
        largest = self._runtime.max(torch.stack([v.to(device) for v in maxima.values()]))
        return finalize(dict(zip(sums, summed, strict=True)), dict(zip(maxima, largest, strict=True)))

    def _onload_state(self) -> None:
        """Onload weights and optimizer state, and wait until they can be read."""
        self.memory.onload_weights()
        self.memory.onload_optimizer()
