"""The kernels that a run gets, and the GPU and packages that attention and the FP8 recipes need.

Kernels are from Transformer Engine if it loads, otherwise from NVIDIA Apex, otherwise from torch. On a CPU they are all
torch's. This module does not import torch or these packages, because Megatron has already tried to load them. The
package `apex` on PyPI is an unrelated web package that Megatron would mistake for NVIDIA Apex, so it is refused.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.machinery import PathFinder
from importlib.util import find_spec
from pathlib import Path

from packaging.version import parse

from grpo_mega.config import Config, LayoutConfig, PrecisionConfig
from grpo_mega.distributed.versions import installed_version
from grpo_mega.errors import ConfigError
from grpo_mega.weights.spec import BLOCK, ModelShape

APEX_REPOSITORY = "https://github.com/NVIDIA/apex"

Version = tuple[int, ...]
# First Transformer Engine with packed samples in unfused attention, which supports fp32.
UNFUSED_PACKED: Version = (2, 11)
PACKED_A2A: Version = (2, 10)  # first Transformer Engine with packed samples in a2a context parallelism
FUSED_PACKED: Version = (9, 0)  # lowest compute capability for packed samples in Transformer Engine's fused attention
FLASH_ATTENTION: Version = (2, 1, 1)  # oldest flash-attn that Transformer Engine uses
DISPATCHERS = {"deepep": "deep_ep", "hybridep": "hybrid_ep_cpp"}  # layout.token_dispatcher -> its module
LENGTH_MULTIPLE = 16  # without FP8, tokens per tensor-parallel rank in a micro-batch are padded to this multiple


@dataclass(frozen=True)
class Kernels:
    """The packages that a run's kernels come from, and the reason for the choice."""

    transformer_engine: bool
    apex_adam: bool
    apex_weight_gradients: bool
    why: str

    @property
    def fuses_weight_gradients(self) -> bool:
        """Return True if the kernel that computes weight gradients also adds them to the fp32 buffers."""
        return self.transformer_engine or self.apex_weight_gradients

    def line(self) -> str:
        """Return the line for a run's log."""
        if self.transformer_engine:
            return (
                "kernels: layers, attention, norms, gradient accumulation and Adam are Transformer Engine's"
                f" ({self.why})"
            )
        apex = ["Adam"] * self.apex_adam + ["gradient accumulation"] * self.apex_weight_gradients
        ours = f"; {' and '.join(apex)} NVIDIA Apex's" if apex else ""
        return f"kernels: layers, attention and norms are torch's{ours or ', and so is Adam'} ({self.why})"


def choose_kernels(
    *,
    is_cuda: bool,
    transformer_engine: bool = False,
    apex_adam: bool = False,
    apex_weight_gradients: bool = False,
    problem: str = "",
) -> Kernels:
    """Choose the kernels of a run from the packages that Megatron could load. On a CPU these packages are not used.

    `problem`: why an installed Transformer Engine does not load. Raise ConfigError if the package `apex` is not NVIDIA
    Apex.
    """
    check_apex()
    if not is_cuda:
        return Kernels(False, False, False, "no others run on a CPU")
    if transformer_engine:
        return Kernels(True, False, False, f"version {transformer_engine_version()}")
    missing = "Transformer Engine is not installed"
    if transformer_engine_version() is not None or find_spec("transformer_engine") is not None:
        missing = f"the installed Transformer Engine does not load{f': {problem}' if problem else ''}"
    if find_spec("apex") is None:
        missing += ", nor is NVIDIA Apex" if missing.endswith("not installed") else "; NVIDIA Apex is not installed"
    return Kernels(False, apex_adam, apex_weight_gradients, missing)


def check_apex() -> None:
    """Raise ConfigError if the installed `apex` is the unrelated web package."""
    spec = find_spec("apex")
    if spec is None:
        return
    # Search the package's folder, because importing the package might fail.
    if PathFinder.find_spec("apex.multi_tensor_apply", list(spec.submodule_search_locations or ())) is None:
        package = f"apex {installed_version('apex') or ''}".rstrip()
        raise ConfigError(
            f"the installed package {package} is not NVIDIA Apex but an unrelated web package, and Megatron would"
            f" mistake it for Apex; run pip uninstall apex, and build NVIDIA's from {APEX_REPOSITORY} if you have no"
            " Transformer Engine"
        )


def transformer_engine_version() -> str | None:
    """Return the version of the installed Transformer Engine; None without one."""
    return installed_version("transformer-engine", "transformer_engine", "transformer-engine-torch")


def flash_attention_version() -> str | None:
    """Return the version of the installed flash-attn; None without one."""
    return installed_version("flash-attn")


def cuda_version() -> str | None:
    """Return the CUDA version of the installed torch, read from its files; None for a build without CUDA."""
    torch = find_spec("torch")
    if torch is None or torch.origin is None:
        return None
    lines = Path(torch.origin).with_name("version.py").read_text(encoding="utf-8").splitlines()
    matches = [re.search(r"'([\d.]+)'", line) for line in lines if line.startswith("cuda")]
    return matches[0][1] if matches and matches[0] else None


def as_version(text: str) -> Version:
    """Return the leading numbers of "2.11.0+cu12" as (2, 11, 0)."""
    return parse(text).release


def version_text(version: Version) -> str:
    return ".".join(map(str, version))


@dataclass(frozen=True)
class Needs:
    transformer_engine: Version  # first version with the recipe
    capability: Version  # lowest compute capability of a GPU
    card: str
    length_multiple: int  # tokens per tensor-parallel rank in a micro-batch are padded to this multiple
    cuda: Version = (12, 0)  # first CUDA with the recipe's matrix products
    end: Version = (99, 0)  # first compute capability without the recipe


RECIPES = {
    "delayed": Needs((1, 0), (8, 9), "an L40, H100, H200 or later", 16),
    "tensorwise": Needs((2, 2), (8, 9), "an L40, H100, H200 or later", 16),
    "blockwise": Needs((2, 3), (9, 0), "an H100, H200 or later", BLOCK, (12, 9)),
    "mxfp8": Needs((2, 1), (10, 0), "a B200, GB200 or B300", 32, (12, 8), (11, 0)),
}


def length_multiple(precision: PrecisionConfig, layout: LayoutConfig) -> int:
    """Return the multiple to which micro-batch lengths are padded.

    HybridEP gathers the routes of its ranks in parts of one length, and computes in chunks of 128 tokens
    (NUM_OF_TOKENS_PER_CHUNK in deep_ep/hybrid_ep_buffer.py). Without an error, unequal lengths send tokens to wrong
    experts (DeepEP issue 604; a KL of 0.8 in NeMo-RL pull request 4079). Megatron 0.16.1 pads nothing. 0.19.2 pads in
    every layer if moe_hybridep_pad_uneven_dispatch_inputs is set. It is left unset, because batching/pack.py gives all
    ranks one length.
    """
    multiple = RECIPES[precision.fp8_recipe].length_multiple if precision.fp8 else LENGTH_MULTIPLE
    return max(multiple, 128 if layout.token_dispatcher == "hybridep" else 0) * layout.tp


def kernel_problems(
    config: Config, capability: Version | None, name: str, transformer_engine: str | None, flash_attn: str | None
) -> Iterator[str]:
    """Yield what Transformer Engine lacks on a GPU called `name`. Without a `capability` the GPU is not known."""
    yield from transformer_engine_problems(config.precision, transformer_engine)
    yield from exchange_problems(config.layout, transformer_engine)
    if capability is not None:
        yield from attention_problems(config.model.resolved_dtype, capability, name, transformer_engine, flash_attn)


def transformer_engine_problems(precision: PrecisionConfig, version: str | None) -> Iterator[str]:
    """Yield problems if Transformer Engine does not support the recipe. Megatron would silently ignore a missing
    one.
    """
    if precision.fp8 is None:
        return
    needed = RECIPES[precision.fp8_recipe].transformer_engine
    if version is None:
        yield f"precision.fp8={precision.fp8!r} needs Transformer Engine; install it or leave precision.fp8 out"
    elif as_version(version) < needed:
        yield (
            f"precision.fp8_recipe={precision.fp8_recipe!r} needs Transformer Engine {version_text(needed)}, found"
            f" {version}; install a newer one, or use"
            f" {_recipes(lambda needs: needs.transformer_engine <= as_version(version))}"
        )


def exchange_problems(layout: LayoutConfig, version: str | None) -> Iterator[str]:
    """Yield a problem if Transformer Engine of `version` (None: not installed) cannot exchange packed samples like
    this.
    """
    if layout.cp > 1 and layout.cp_comm_type == "a2a" and version is not None and as_version(version) < PACKED_A2A:
        yield (
            f"layout.cp_comm_type=a2a: must have Transformer Engine {version_text(PACKED_A2A)} or later for packed"
            f" samples, found {version}; install a newer one, or use p2p"
        )


def attention_problems(
    dtype: str, capability: Version, name: str, transformer_engine: str | None, flash_attn: str | None
) -> Iterator[str]:
    """Yield problems if Transformer Engine has no attention for packed samples on a GPU called `name`.

    Its fused attention supports them in bf16 from compute capability 9.0 on. Its unfused attention supports any dtype
    since version 2.11, but stores every score. So flash-attn is required below 9.0 for every version.
    """
    if transformer_engine is None:
        return
    if dtype == "float32" and as_version(transformer_engine) < UNFUSED_PACKED:
        yield (
            f"model.dtype=float32: on a GPU must have Transformer Engine {version_text(UNFUSED_PACKED)} or later, the"
            f" first with an attention for it, found {transformer_engine}; install a newer one, or use"
            " model.dtype=bfloat16"
        )
    has_flash = flash_attn is not None and as_version(flash_attn) >= FLASH_ATTENTION
    if dtype == "bfloat16" and capability < FUSED_PACKED and not has_flash:
        yield (
            f"device={name!r}: must have compute capability 9.0 (an H100 or later) for Transformer Engine's fused"
            f" attention of packed samples, found {version_text(capability)} and"
            f" {f'flash-attn {flash_attn}' if flash_attn else 'no flash-attn'}; pip install"
            f" 'flash-attn>={version_text(FLASH_ATTENTION)}'"
        )


def latent_problems(shape: ModelShape, capability: Version | None, name: str) -> Iterator[str]:
    """Yield a problem if Transformer Engine has no fast attention for a model's latents on a GPU called `name`.

    Its fused attention supports packed samples from compute capability 9.0 on, and heads of different widths for keys
    and values only up to 128, or as DeepSeek's 192 and 128. flash-attn 2 does not support different widths.
    """
    if not shape.kv_lora or capability is None:
        return
    remedy = "pip uninstall transformer-engine to train with Megatron's local layers"
    if capability < FUSED_PACKED:
        yield (
            f"device={name!r}: must have compute capability 9.0 (an H100 or later) for {shape.model_type} with"
            f" Transformer Engine, found {version_text(capability)}; {remedy}"
        )
    widths = shape.head_dim, shape.v_dim
    if widths != (192, 128) and max(widths) > (256 if widths[0] == widths[1] else 128):
        yield (
            f"config.json has heads of {widths[0]} for keys and {widths[1]} for values: must be 192 and 128, equal up"
            f" to 256, or at most 128 for Transformer Engine; {remedy}"
        )


def card_problems(precision: PrecisionConfig, capability: Version | None, name: str) -> Iterator[str]:
    """Yield problems if a device called `name` cannot compute the recipe; `capability` is None on a CPU."""
    if precision.fp8 is None:
        return
    needs = RECIPES[precision.fp8_recipe]
    if capability is None:
        yield f"precision.fp8={precision.fp8!r} needs a GPU, and this run is on a CPU; leave precision.fp8 out"
    elif not needs.capability <= capability < needs.end:
        possible = _recipes(lambda other: other.capability <= capability < other.end)
        yield f"precision.fp8_recipe={precision.fp8_recipe!r} needs {needs.card}, found {name}; " + (
            f"use {possible}" if possible else "leave precision.fp8 out"
        )


def dispatcher_problems(layout: LayoutConfig, dtype: str, capability: Version | None, name: str) -> Iterator[str]:
    """Yield problems if a device called `name` lacks the chosen token dispatcher; `capability` is None on a CPU."""
    chosen = layout.token_dispatcher
    if chosen == "alltoall":
        return
    needed = (9, 0) if chosen == "hybridep" else (8, 0)
    if capability is None or capability < needed:
        least = version_text(needed)
        yield f"layout.token_dispatcher={chosen}: needs a GPU of compute capability {least}, found {name}; leave it out"
    if dtype == "float32":
        yield f"layout.token_dispatcher={chosen}: needs model.dtype=bfloat16; set it, or leave token_dispatcher out"


def _recipes(holds: Callable[[Needs], bool]) -> str:
    return " or ".join(name for name, needs in RECIPES.items() if holds(needs))


def context_problems(config: Config) -> Iterator[str]:
    """Yield problems of features that Transformer Engine's layers do not compute. Plans for GPUs use these layers,
    too.
    """
    if config.layout.cp > 1 and config.model.resolved_dtype == "float32":
        yield (
            f"layout.cp={config.layout.cp}: must be 1 with model.dtype=float32 on GPUs with Transformer Engine, whose "
            "context-parallel attention supports only bfloat16; use bfloat16, or raise layout.tp or layout.pp instead"
        )
    if config.batch.share_prompts:
        yield (
            "batch.share_prompts=true: must be left out on GPUs with Transformer Engine; its attention has no such mask"
        )


def cuda_problems(precision: PrecisionConfig, version: str | None) -> Iterator[str]:
    """Yield problems if torch's CUDA is too old for the recipe. `version` is None if torch has no CUDA."""
    if precision.fp8 is None or version is None:
        return
    needed = RECIPES[precision.fp8_recipe].cuda
    if as_version(version) < needed:
        yield (
            f"precision.fp8_recipe={precision.fp8_recipe!r} needs CUDA {version_text(needed)}, found torch with CUDA"
            f" {version}; install torch with CUDA {version_text(needed)} or later, or use"
            f" {_recipes(lambda needs: needs.cuda <= as_version(version))}"
        )
