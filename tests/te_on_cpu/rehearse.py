"""Run one rank with Transformer Engine's layers on fake tensors: its real Python over an extension that only makes
shapes.

    python -m tests.te_on_cpu.emulated_te.run 2.11.0 tests/te_on_cpu/rehearse.py < REQUESTS

Reads requests of tests.helpers.rehearsal, one JSON object per line, and prints the same answers plus `saved`: the
tensors that autograd holds after the forward passes, as [shape, dtype, bytes, count], the largest total first. FP8
copies of the weights are not counted, because they stay between passes and the plan counts them separately. Run it in a
separate process. Settings that affect saved tensors are the settings of a GPU.
"""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from functools import partial
from typing import Any

# torch.compile does not change the tensors that are saved.
os.environ["TORCHDYNAMO_DISABLE"] = "1"

import torch
import torch.distributed as dist
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor
from transformer_engine.pytorch.attention.dot_product_attention import utils as attention_utils
from transformer_engine.pytorch.module import base
from transformer_engine.pytorch.module.base import TransformerEngineBaseModule

from grpo_mega.megatron import attention as packed
from grpo_mega.megatron import model as models
from grpo_mega.megatron.attention import LatentPackedSeqParams
from grpo_mega.megatron.pipeline import te_params
from tests.helpers import rehearsal as rehearse_rank
from tests.te_on_cpu.emulated_te import extension
from tests.te_on_cpu.emulated_te.extension import positions

Saved = tuple[tuple[int, ...], str, int]


class KeptByTE(rehearse_rank.Kept):
    """Counts a quantized tensor by its inner tensors, and records shapes."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters)
        self.saved: Counter[Saved] = Counter()
        counters.append(self)

    def pack(self, tensor: Tensor) -> Tensor:
        copies = {t.untyped_storage()._cdata for copy in weight_copies.values() for t in inner(copy)}
        for part in inner(tensor) or [tensor]:
            if part.untyped_storage()._cdata in copies:
                continue
            before = self.now
            super().pack(part)
            if self.now > before:
                self.saved[tuple(part.shape), str(part.dtype).removeprefix("torch."), self.now - before] += 1
        return tensor


spread_on_host = rehearse_rank._spread_evenly
counters: list[KeptByTE] = []
weight_copies: dict[int, Any] = {}  # keyed by object id


def inner(tensor: Any) -> list[Tensor]:
    """Return the inner tensors of a quantized tensor; none for a plain tensor."""
    is_quantised = hasattr(tensor, "get_data_tensors")
    return [t for t in vars(tensor).values() if isinstance(t, Tensor)] if is_quantised else []


def attend(*args: Any, **kwargs: Any) -> list[Any]:
    """Return the outputs of fused attention's forward as shapes: in training also fp32 softmax statistics by token and
    head.
    """
    is_training, (q, _, v) = args[2], _queries_keys_values(args)
    out = q.new_empty(*q.shape[:-1], v.shape[-1])
    return (
        [out, q.new_empty(*q.shape[:-1], 1, dtype=torch.float32), torch.empty(2, dtype=torch.int64)]
        if is_training
        else [out]
    )


def attend_backward(*args: Any, **kwargs: Any) -> list[Any]:
    parts = _queries_keys_values(args)
    return [*(torch.empty_like(x, memory_format=torch.contiguous_format) for x in parts), None, None]


def _queries_keys_values(args: tuple[Any, ...]) -> list[Tensor]:
    """Return the tensors after the two tensors of lengths. Their places depend on the version."""
    return [x for x in args if isinstance(x, Tensor)][2:5]


def packed_params(
    is_latent: bool,
    cuts: Tensor,
    position_ids: Tensor,
    dtype: torch.dtype,
    cp_size: int = 1,
    cp_rank: int = 0,
    window: int = 0,
) -> PackedSeqParams:
    """Return the parameters that Transformer Engine's layers take for packed sequences. Layers have their windows."""
    segments = te_params(cuts, cp_size)
    return LatentPackedSeqParams("packed", position_ids=position_ids, segments=segments) if is_latent else segments


def with_fusions(plain: Any, **fields: Any) -> Any:
    return plain(**fields | {"bias_activation_fusion": True, "bias_dropout_fusion": True})


def spread_evenly(dispatcher: Any, routing_map_TE: Tensor) -> Any:
    """Replace the dispatcher's counts, as tensors, which the kernels of the fused permutation read."""
    counts = spread_on_host(dispatcher, routing_map_TE)
    for name in (
        "num_global_tokens_per_local_expert",
        "sort_input_by_local_experts",
        "restore_output_by_local_experts",
    ):
        setattr(dispatcher, name, torch.as_tensor(getattr(dispatcher, name)))
    return counts


def read_half(tensor: Tensor, cu_seqlens: Tensor, half: int) -> Tensor:
    """Return a tensor with the shape of one half of each sequence's rows, [T, heads, d] or [2, T, heads, d]."""
    dim = tensor.dim() - 3
    return tensor.new_empty(*tensor.shape[:dim], tensor.shape[dim] // 2, *tensor.shape[-2:])


def make_shapes_only() -> None:
    """Replace functions that read values or compare tensor types, because the tensors are fake."""
    functions: Any = sys.modules[extension.NAME]
    functions.fused_attn_fwd, functions.fused_attn_bwd = attend, attend_backward
    functions.thd_read_half_tensor = read_half
    functions.thd_read_second_half_lse = lambda lse, cu_seqlens, is_packed, length: lse.new_empty(lse.shape[0], length)
    for name in ("thd_second_half_lse_correction", "thd_out_correction", "thd_grad_correction"):
        setattr(functions, name, lambda *args: None)  # in-place updates keep the shape
    torch.equal = lambda a, b: True  # TE asks if sequences are padded
    positions._rope = lambda x, *args, **kwargs: torch.empty_like(x, memory_format=torch.contiguous_format)
    choose = attention_utils.get_attention_backend

    def choose_for_plain(params: Any) -> Any:
        params.qkv_type = Tensor  # TE compares types, and fake tensors have another type
        return choose(params)

    attention_utils.get_attention_backend = choose_for_plain
    workspace = TransformerEngineBaseModule.get_weight_workspace

    def noted(self: Any, *args: Any, **kwargs: Any) -> Any:
        found = workspace(self, *args, **kwargs)
        weight_copies[id(found)] = found
        return found

    TransformerEngineBaseModule.get_weight_workspace = noted
    # A parameter that is saved through a hook loses its attributes. Megatron reads this one with overlapped reductions.
    Tensor.grad_added_to_main_grad = False  # type: ignore[attr-defined]
    rehearse_rank._spread_evenly = spread_evenly
    rehearse_rank.Kept = KeptByTE  # type: ignore[misc]
    for name in ("TransformerConfig", "MLATransformerConfig"):
        setattr(models, name, partial(with_fusions, getattr(models, name)))


def main() -> None:
    rehearse_rank.send_nothing()
    from grpo_mega.megatron import runtime as runtimes

    make_shapes_only()
    for line in sys.stdin:
        request = json.loads(line)
        counters.clear()
        weight_copies.clear()
        base._dummy_wgrads.clear()  # drop the fake tensors of the last request
        dist.init_process_group("fake", store=dist.HashStore(), rank=request["rank"], world_size=request["world_size"])
        packed.pack_params = partial(packed_params, "kv_lora_rank" in request["model"])
        found = rehearse_rank.run_rank(request)
        runtimes.stop()
        [kept] = counters
        largest = sorted(kept.saved.items(), key=lambda item: -item[0][2] * item[1])
        print(json.dumps(found | {"saved": [[*key, number] for key, number in largest]}), flush=True)


if __name__ == "__main__":
    main()
