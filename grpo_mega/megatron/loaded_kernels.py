"""Find out which optional kernels Megatron loaded, because an installed package may fail to load.

If an import of Transformer Engine fails for lack of a module, Megatron continues without it and silently ignores FP8.
"""

import functools
import importlib
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from grpo_mega.config import Config
from grpo_mega.distributed import kernels
from grpo_mega.distributed.device import Device
from grpo_mega.distributed.kernels import (
    Kernels,
    card_problems,
    context_problems,
    dispatcher_problems,
    kernel_problems,
)
from grpo_mega.errors import ConfigError, raise_all
from grpo_mega.weights.spec import ModelShape

CHECKED_LENGTHS = (1, 5, 63, 129, 200)  # tokens of the samples that check_attention packs
ALLOWED_ERROR = 0.02  # relative to a tensor's norm; rounding to bf16 gives 0.003
attention_notes: dict[str, None] = {}  # lines for the run's log if Transformer Engine chose an attention that is slow


def in_use(device: Device) -> Kernels:
    """Return the kernels that a run on `device` uses."""
    if not device.is_cuda:
        return kernels.choose_kernels(is_cuda=False)
    problem = check_loads()
    from megatron.core import optimizer
    from megatron.core.models.gpt import gpt_layer_specs
    from megatron.core.tensor_parallel import layers

    return kernels.choose_kernels(
        is_cuda=True,
        transformer_engine=gpt_layer_specs.HAVE_TE,
        apex_adam=optimizer.Adam.__module__.startswith("apex."),
        apex_weight_gradients=layers._grad_accum_fusion_available,
        problem=problem,
    )


def check_kernels(config: Config, device: Device) -> None:
    """Raise ConfigError if the run needs a kernel that did not load or that this device lacks."""
    raise_all(card_problems(config.precision, device.capability, device.name))
    raise_all(dispatcher_problems(config.layout, config.model.resolved_dtype, device.capability, device.name))
    kernels_in_use, version = in_use(device), kernels.transformer_engine_version()
    if not kernels_in_use.transformer_engine:
        needs = {"precision.fp8": config.precision.fp8, "optimizer.moments_dtype": config.optimizer.moments_dtype}
        reason = kernels_in_use.why if device.is_cuda else "this run is on a CPU"
        for key, value in needs.items():
            if value not in (None, "float32"):
                raise ConfigError(f"{key}={value}: needs Transformer Engine on a GPU, and {reason}; leave {key} out")
        return
    raise_all(context_problems(config))
    raise_all(kernel_problems(config, device.capability, device.name, version, kernels.flash_attention_version()))


def check_attention(shape: ModelShape, dtype: torch.dtype, device: Device) -> None:
    """Raise ConfigError if Transformer Engine's attention is wrong for packed samples of this model on this card.

    With some versions of cuDNN the output is right and the gradients are wrong, without an error: 9.14 on an H100 for
    heads of 256.
    """
    if isinstance(torch.empty(0), FakeTensor):  # a rehearsal computes nothing
        return
    group = shape.num_heads // shape.num_kv_heads
    for window in sorted({0, *shape.windows} - {1}):  # alone, a token's query and key have no gradient
        errors = attention_errors(group, shape.head_dim, shape.v_dim or shape.head_dim, window, dtype, device)
        if wrong := {name: error for name, error in errors.items() if not error <= ALLOWED_ERROR}:
            from transformer_engine_torch import get_cudnn_version

            major, rest = divmod(get_cudnn_version(), 10_000)
            figures = ", ".join(f"{name} by {error:.0%}" for name, error in wrong.items())
            raise ConfigError(
                f"Transformer Engine's attention with cuDNN {major}.{rest // 100}.{rest % 100} is wrong on this card"
                f" for heads of {shape.head_dim} ({figures}); install a newer cuDNN and remove an older one from"
                " LD_LIBRARY_PATH, or set NVTE_FUSED_ATTN=0, which needs more memory"
            )


@functools.cache
def attention_errors(
    group: int, size: int, value_size: int, window: int, dtype: torch.dtype, device: Device
) -> dict[str, float]:
    """Return the relative errors of Transformer Engine's attention and of its gradients, against torch in float32.

    There are two key heads of `size` elements, with `group` query heads each. `window` is a sliding window; 0: none.
    """
    from transformer_engine.pytorch import DotProductAttention

    where = device.torch_device
    if device.is_cuda:
        # A kernel may read its workspace before it writes it. The allocator returns this memory as workspace.
        torch.full((1 << 26,), torch.nan, device=where)
    generator = torch.Generator(where).manual_seed(0)
    heads = ((2 * group, size), (2, size), (2, value_size), (2 * group, value_size))
    q, k, v, upstream = (
        torch.randn(sum(CHECKED_LENGTHS), *shape, generator=generator, device=where).to(dtype) for shape in heads
    )
    cuts = torch.tensor([0, *CHECKED_LENGTHS], device=where).cumsum(0).int()
    attend = DotProductAttention(
        2 * group,
        (size, value_size),
        num_gqa_groups=2,
        attention_dropout=0.0,
        qkv_format="thd",
        attn_mask_type="padding_causal",
        window_size=(window - 1 if window else -1, 0),
    )
    longest = max(CHECKED_LENGTHS)
    inputs = [x.clone().requires_grad_() for x in (q, k, v)]
    with _explained(f"heads of {size} in {str(dtype).removeprefix('torch.')}"):
        out = attend(*inputs, cu_seqlens_q=cuts, cu_seqlens_kv=cuts, max_seqlen_q=longest, max_seqlen_kv=longest)
    out.backward(upstream.flatten(1))
    exact = [x.float().requires_grad_() for x in (q, k, v)]
    samples = [[x[start:end] for x in exact] for start, end in pairwise(cuts.tolist())]
    expected = torch.cat([_attend(q, k, v, window) for q, k, v in samples])
    expected.backward(upstream.float())
    pairs: dict[str, tuple[Any, Any]] = {"output": (out.view_as(upstream), expected)}
    pairs |= {f"gradient of {n}": (x.grad, y.grad) for n, x, y in zip("qkv", inputs, exact, strict=True)}
    return {name: ((found - right).norm() / right.norm()).item() for name, (found, right) in pairs.items()}


@contextmanager
def _explained(heads: str) -> Iterator[None]:
    """Note or raise why Transformer Engine refuses its fast attention. It logs the reasons only for debugging."""
    from transformer_engine.pytorch.attention.dot_product_attention.utils import AttentionLogging

    lines: list[str] = []
    collector, logger = logging.Handler(), logging.getLogger("DotProductAttention")
    collector.emit = lambda record: lines.append(record.getMessage().rstrip("."))  # type: ignore[method-assign]
    before = AttentionLogging._log_level, logger.handlers, logger.propagate
    AttentionLogging._log_level, logger.handlers, logger.propagate = logging.DEBUG, [collector], False
    try:
        yield
    except ValueError as error:
        if "attention backend" not in str(error):
            raise
        raise ConfigError(
            f"Transformer Engine has no attention for {heads} on this card ({_reasons(lines)});"
            " pip uninstall transformer-engine to train with Megatron's local layers"
        ) from None
    finally:
        AttentionLogging._log_level, logger.handlers, logger.propagate = before
        logger.setLevel(before[0])
    if any(line.startswith("Selected backend = Unfused") for line in lines):
        attention_notes[
            f"attention: Transformer Engine's unfused one, which stores every score, for {heads} ({_reasons(lines)})"
        ] = None


def _reasons(lines: list[str]) -> str:
    return "; ".join(dict.fromkeys(line for line in lines if line.startswith("Disabling FusedAttention")))


def _attend(q: Tensor, k: Tensor, v: Tensor, window: int) -> Tensor:
    """Return the causal attention of one sample [tokens, heads, size]."""
    sees = torch.ones(len(q), len(q), dtype=torch.bool, device=q.device).tril()
    if window:
        sees = sees.triu(1 - window)
    query, key, value = (x.transpose(0, 1)[None] for x in (q, k, v))
    return F.scaled_dot_product_attention(query, key, value, sees, enable_gqa=True)[0].transpose(0, 1)


@functools.cache
def check_loads() -> str:
    """Return why an installed Transformer Engine does not load; "" if it loads or is not installed.

    Call it before importing megatron.core. Raise ConfigError for an error that would break that import.
    """
    if find_spec("transformer_engine") is None:
        return ""
    try:
        importlib.import_module("transformer_engine.pytorch")
    except ModuleNotFoundError as error:  # all of Megatron's modules catch this error, and no other
        return _one_line(error)
    except Exception as error:
        raise ConfigError(
            f"the installed Transformer Engine {kernels.transformer_engine_version() or '(no version)'} does not load "
            f"({_one_line(error)}); run pip install --no-build-isolation 'transformer-engine[pytorch]' after torch, "
            "or pip uninstall it"
        ) from None
    return ""


def _one_line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]
