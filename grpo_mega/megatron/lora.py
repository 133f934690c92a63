"""LoRA on Megatron's linear layers: modules that add x A^T B^T alpha / rank, their merge, and their checkpoint.

Only A and B train. They are not dropped out, and B starts as zeros, so the policy starts as its base bit for bit.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.mlp import apply_swiglu_sharded_factory
from torch import Tensor, nn

from grpo_mega.checkpoint_io.megatron_weights import stored_tensors
from grpo_mega.config import ModelConfig
from grpo_mega.megatron.attention import rms_norm
from grpo_mega.megatron.compat import split_tensor_factory
from grpo_mega.megatron.model import shards_of
from grpo_mega.megatron.runtime import Runtime
from grpo_mega.weights.apply import load_shards
from grpo_mega.weights.boxes import Box, Index, LocalTensor, RankShards, region
from grpo_mega.weights.derived import adapter_family
from grpo_mega.weights.spec import Family, ModelShape

_EXPERTS = ".mlp.experts."


class Adapter(nn.Module):
    """A and B of one Megatron linear layer; of each of its experts if the layer computes several.

    `cut` is the matrix that tensor parallelism cuts: B of a column-parallel layer, A of a row-parallel layer; "" for
    none, and for experts, whose ranks add up their outputs elsewhere.
    """

    mask: Tensor

    def __init__(self, layer: Any, tensors: RankShards, scale: float, cut: str, config: Any) -> None:
        """`tensors`: A and B by the name of their parameter, such as A, or A0 of the first expert."""
        super().__init__()
        self._scale, self._cut, self._is_split = scale, cut, config.sequence_parallel
        self._eps, self._is_zero_centred = config.layernorm_epsilon, config.layernorm_zero_centered_gamma
        self._norms = [layer] if getattr(layer, "layer_norm_weight", None) is not None else []
        self._suffixes = [name.removeprefix("A") for name in tensors if name.startswith("A")]
        like = next(layer.parameters())
        for name in (f"{letter}{suffix}" for suffix in self._suffixes for letter in "AB"):
            self.register_parameter(name, nn.Parameter(like.new_empty(tensors[name].shape)))
        a, b = (tensors[f"{letter}{self._suffixes[0]}"] for letter in "AB")
        # [rows, matrices]: 1 at the matrix of each row. A fused layer has rows of several matrices.
        names = [piece.box.tensor.replace("lora_A", "lora_B") for piece in a.pieces]
        mask = like.new_zeros(b.shape[0], len(names))
        for piece in b.pieces:
            mask[piece.offset[0] : piece.offset[0] + piece.box.shape[0], names.index(piece.box.tensor)] = 1
        self.register_buffer("mask", mask, persistent=False)

    def forward(self, x: Tensor, splits: Sequence[int] | None = None) -> Tensor:
        """Return what the adapter adds to the layer's output. `splits`: number of rows of `x` of each expert."""
        for layer in self._norms:  # Transformer Engine's layer normalizes its input itself
            x = rms_norm(x, layer.layer_norm_weight, self._eps, is_zero_centred=self._is_zero_centred)
        parts = (x,) if splits is None else x.split(list(splits))
        added = [self._added(part, suffix) for part, suffix in zip(parts, self._suffixes, strict=True)]
        return added[0] if splits is None else torch.cat(added)

    def wide(self, suffix: str) -> Tensor:
        """Return B as [rows, matrices * rank], 0 outside of the columns of a row's matrix."""
        return (self.get_parameter(f"B{suffix}")[:, None, :] * self.mask[:, :, None]).flatten(1)

    def _added(self, x: Tensor, suffix: str) -> Tensor:
        z = F.linear(x, self.get_parameter(f"A{suffix}"))
        if self._cut == "B":
            z = (gather_from_sequence_parallel_region if self._is_split else copy_to_tensor_model_parallel_region)(z)
        elif self._cut == "A":
            z = (
                reduce_scatter_to_sequence_parallel_region
                if self._is_split
                else reduce_from_tensor_model_parallel_region
            )(z)
        return F.linear(z * self._scale, self.wide(suffix))


class Lora:
    """The adapter of a policy on this rank. Without model.lora it has no parameters and changes nothing."""

    def __init__(
        self, models: Sequence[Any], model: ModelConfig, seed: int, family: Family, shape: ModelShape, runtime: Runtime
    ) -> None:
        """Freeze the base and attach the adapter to the chunks, before they are wrapped."""
        self.parameters: dict[str, Any] = {}
        self.frozen: list[Any] = []  # the base's parameters
        self._is_on = True
        lora = model.lora
        if lora is None:
            return
        self.scale = lora.alpha / lora.rank
        self.family = adapter_family(family, shape, lora.rank, lora.targets)
        self.shards = shards_of(self.family, shape, model, runtime)
        self._shape, self._runtime, self._seed = shape, runtime, seed
        self._mine, self._cut = self.shards.rank_shards(runtime.rank), self._find_cut()
        self._adapters: dict[str, Adapter] = {}  # by the local name of the layer
        for index, chunk in enumerate(models):
            self.frozen += chunk.requires_grad_(False).parameters()
            self._attach(chunk, f"chunk{index}.")
            if chunk.pre_process:
                # Without it the embedding's output has no gradient, and recomputed layers get none without an error.
                chunk.embedding.register_forward_hook(_require_grad)
            # A checkpoint has only the adapter.
            chunk.sharded_state_dict = partial(self._sharded, f"chunk{index}.")
            chunk.load_state_dict = partial(chunk.load_state_dict, strict=False)
        self.parameters = {
            f"{layer}.lora.{name}": p for layer, a in self._adapters.items() for name, p in a.named_parameters()
        }
        assert set(self.parameters) == set(self._mine), sorted(set(self.parameters) ^ set(self._mine))
        for name, p in self.parameters.items():
            is_cut, is_expert, layout = name in self._cut, _EXPERTS in name, runtime.layout
            p.allreduce = not (is_expert and layout.has_own_expert_groups)
            # Megatron counts a gradient without this mark on the first tensor-parallel rank only.
            p.tensor_model_parallel = is_cut or (is_expert and layout.etp_rank(runtime.rank) == 0)
            p.sequence_parallel = models[0].config.sequence_parallel and not is_cut and not is_expert

    def load(self, read: Callable[[Box], Tensor] | None) -> None:
        """Fill A and B from slices of an adapter's tensors. None starts a new one."""
        if self.parameters:
            load_shards(self._mine, self.parameters, read or fresh(self.family.hf_tensors(self._shape), self._seed))

    @contextmanager
    def off(self) -> Iterator[None]:
        """Compute with the base alone inside the context."""
        self._is_on = False
        try:
            yield
        finally:
            self._is_on = True

    def finish_gradients(self) -> None:
        """Sum the gradients of expert matrices that are replicated over ETP. Megatron does it for other layers.

        Call it after Megatron has reduced the gradients.
        """
        if self.parameters and self._runtime.layout.etp > 1:
            group = parallel_state.get_expert_tensor_parallel_group()
            for name, p in self.parameters.items():
                if _EXPERTS in name and name not in self._cut:
                    dist.all_reduce(p.main_grad, group=group)

    @torch.no_grad()
    def merged(self, name: str, weight: Tensor) -> Tensor:
        """Return W + alpha / rank B A of a local name in fp32; the weight itself if it has no adapter, or it is off."""
        layer, _, parameter = name.rpartition(".")
        suffix = parameter.removeprefix("weight")
        if not self._is_on or not parameter.startswith("weight") or f"{layer}.lora.A{suffix}" not in self.parameters:
            return weight
        a, b = self.parameters[f"{layer}.lora.A{suffix}"], self._adapters[layer].wide(suffix)
        return weight.float() + self.scale * (b.float() @ a.float())

    def _find_cut(self) -> set[str]:
        """Return the names of the tensors that differ between the ranks of a tensor-parallel group."""
        layout, names = self._runtime.layout, set()
        groups = {True: parallel_state.get_expert_tensor_parallel_group()} if layout.etp > 1 else {}
        if self._runtime.tp_group is not None:
            groups[False] = self._runtime.tp_group
        for is_expert, group in groups.items():
            first, second = map(self.shards.rank_shards, dist.get_process_group_ranks(group)[:2])
            names |= {name for name in first if first[name] != second[name] and (_EXPERTS in name) == is_expert}
        return names

    def _attach(self, model: Any, chunk: str) -> None:
        by_layer: dict[str, RankShards] = {}
        for name, tensor in self._mine.items():
            if name.startswith(chunk):
                layer, _, parameter = name.partition(".lora.")
                by_layer.setdefault(layer, {})[parameter] = tensor
        for name, tensors in by_layer.items():
            layer = model.get_submodule(name.removeprefix(chunk))
            cut = next((letter for letter in "AB" if f"{name}.lora.{letter}" in self._cut), "")
            adapter = Adapter(layer, tensors, self.scale, "" if _EXPERTS in name else cut, model.config)
            layer.lora, self._adapters[name] = adapter, adapter
            layer.forward = partial(self._forward, layer.forward, adapter)

    def _forward(self, forward: Callable[..., Any], adapter: Adapter, x: Tensor, *rest: Any) -> Any:
        out, bias = forward(x, *rest)
        return (out + adapter(x, *rest) if self._is_on else out), bias

    def _sharded(self, chunk: str, metadata: Any = None) -> dict[str, Any]:
        """Return Megatron's sharded tensors of a chunk's adapter, as checkpoint_io/megatron_weights.py reads them."""
        layout, rank = self._runtime.layout, self._runtime.rank
        stored = {
            piece.box.tensor: one for one in stored_tensors(self.family, self._shape) for piece in one.tensor.pieces
        }
        separate = {row.megatron.rpartition("}")[2]: row.saved_as for row in self.family.rows if row.saved_as}
        states: dict[str, Any] = {}
        for name, local in self._mine.items():
            if not name.startswith(chunk):
                continue
            one, is_expert = stored[local.pieces[0].box.tensor], _EXPERTS in name
            depth, is_cut = len(one.stack), name in self._cut
            stack = [(axis, one.place[axis], one.stack[axis]) for axis in range(depth)]
            tp_rank, tp = (layout.etp_rank(rank), layout.etp) if is_expert else (self._runtime.tp_rank, layout.tp)
            of_part = [(depth + (0 if ".lora.B" in name else 1), tp_rank, tp)] if is_cut else []
            if is_expert and layout.has_own_expert_groups:
                replica = parallel_state.get_expert_data_parallel_rank()
            else:
                replica = parallel_state.get_data_parallel_rank(with_context_parallel=True)
            tensor = ShardedTensor.from_rank_offsets(
                one.keys[0],
                self.parameters[name],
                *stack,
                *of_part,
                replica_id=(0, 0 if is_cut else tp_rank, replica),
                prepend_axis_num=depth,
            )
            # The rows of the gate are above the rows of the up projection, also if ranks share them.
            is_gated = is_cut and ".linear_fc1.lora.B" in name
            states[name.removeprefix(chunk)] = apply_swiglu_sharded_factory(tensor, stack) if is_gated else tensor
            if saved_as := next((parts for end, parts in separate.items() if name.endswith(end)), ()):
                tensor.key = tensor.key.rpartition(".")[0]
                states[name.removeprefix(chunk)] = split_tensor_factory()(tensor, *_sections(local, saved_as), depth)
        return states


def _sections(local: LocalTensor, saved_as: Sequence[str]) -> tuple[list[int], list[str]]:
    """Return sizes and names of the parts of a local tensor along its rows, padding between its pieces included."""
    sections: list[tuple[int, str]] = []
    row = 0
    for piece, name in [*zip(local.pieces, saved_as, strict=True), (None, "")]:
        start = piece.offset[0] if piece else local.shape[0]
        sections += [(start - row, f"padding{len(sections)}")] if start > row else []
        sections += [(piece.box.shape[0], name)] if piece else []
        row = start + (piece.box.shape[0] if piece else 0)
    return [size for size, _ in sections], [name for _, name in sections]


def fresh(tensors: Mapping[str, Index], seed: int) -> Callable[[Box], Tensor]:
    """Return a function that reads a new adapter, the same in every layout: A as torch's Linear starts, B as zeros."""

    def read(box: Box) -> Tensor:
        if "lora_B" in box.tensor:
            return torch.zeros(box.shape)
        bound, generator = tensors[box.tensor][1] ** -0.5, torch.Generator()
        generator.manual_seed(zlib.crc32(f"{seed}:{box.tensor}".encode()))
        values = torch.empty(tensors[box.tensor]).uniform_(-bound, bound, generator=generator)
        return values[region(box.start, box.shape)]

    return read


def _require_grad(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
    return output.requires_grad_() if torch.is_grad_enabled() else output
