"""The sections of the config for the policy, its routers, its optimizer, the teachers, FP8 and the guard."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from grpo_mega.config.base import (
    LIST,
    FilePath,
    Momentum,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Section,
    free,
    ruled,
)

# Rules of several keys.
_NO_LORA = "model.lora, which trains no router"
_LINEAR = "linear attention, which computes decays from small matrices"
_OPTIMIZER = (
    "model.lora, whose optimizer is small",
    "model.dtype=float32; use bfloat16",
    "linear attention, some of whose weights are float32",
)
_TE = "Transformer Engine; install it, or leave it out"
_FP8 = "precision.fp8; set it to hybrid or e4m3, or leave it out"
_DELAYED = "precision.fp8_recipe=delayed, which leaves no layer in bf16; use tensorwise"


class OptimizerConfig(Section):
    lr: PositiveFloat = free(default=1e-6, description="Peak learning rate.")
    min_lr: NonNegativeFloat = free(
        at_most="optimizer.lr", default=0.0, description="Learning rate at the end of the linear or cosine schedule."
    )
    schedule: Literal["constant", "linear", "cosine"] = free(
        default="constant", description="Schedule of the learning rate after the warm-up."
    )
    warmup_steps: NonNegativeInt = free(
        default=0, description="Number of optimizer steps in which the learning rate rises linearly to lr."
    )
    weight_decay: NonNegativeFloat = free(
        default=0.0, description="Decoupled weight decay of matrices and embeddings. Norms and biases have none."
    )
    betas: Annotated[tuple[Momentum, Momentum], LIST] = Field(
        default=(0.9, 0.95), description="Decay rates of Adam's two moments."
    )
    eps: PositiveFloat = Field(default=1e-8, description="Number that Adam adds to the denominator.")
    clip_grad: NonNegativeFloat = free(
        default=1.0, description="Maximum global L2 norm of the gradient. 0 does not clip."
    )
    moments_dtype: Literal["float32", "bfloat16"] = ruled(
        excludes=(*_OPTIMIZER, "optimizer.cpu_offload, because torch's Adam takes the steps"),
        default="float32",
        description="Dtype of Adam's moments. bfloat16 needs Transformer Engine's precision-aware Adam.",
    )
    cpu_offload: bool = free(
        excludes=(*_OPTIMIZER, "precision.fp8_parameters"),
        default=False,
        description=(
            "Keep Adam's float32 masters and moments in host memory, and take optimizer steps on the CPU (Megatron's "
            "hybrid optimizer). Frees 12 bytes per weight of a rank's share on the device, and makes updates slower. "
            "Use it only if nothing else fits: `grpo-mega plan` shows memory and time. Needs model.dtype=bfloat16."
        ),
    )


RecomputedPart = Literal["core_attn", "mlp", "moe", "layernorm", "moe_act"]


class RouterConfig(Section):
    """Train the routers of MoE models; they compute in fp32. megatron/routers.py says how a loss is averaged."""

    balancing: Literal["none", "aux_loss", "seq_aux_loss"] = ruled(
        needs="model.router.aux_loss_coeff>0",
        excludes=_NO_LORA,
        default="none",
        description=(
            "Loss that penalizes uneven expert loads. aux_loss measures loads over a micro-batch, seq_aux_loss "
            "over a sample."
        ),
    )
    aux_loss_coeff: NonNegativeFloat = ruled(
        needs="model.router.balancing",
        excludes=(_NO_LORA, "model.router.freeze"),
        default=0.0,
        description="Coefficient of the balancing loss.",
    )
    z_loss_coeff: NonNegativeFloat = ruled(
        excludes=(_NO_LORA, "model.router.freeze"),
        default=0.0,
        description="Coefficient of the z-loss, which penalizes large router logits.",
    )
    bias_update_rate: NonNegativeFloat = ruled(
        needs="a bias per expert; use balancing=seq_aux_loss",
        excludes=(_NO_LORA, "model.router.freeze"),
        default=0.0,
        description=(
            "Change per optimizer step of the expert bias that some model families have. 0 keeps the bias fixed."
        ),
    )
    capacity_factor: PositiveFloat | None = Field(
        default=None, description="Drop an expert's tokens above this multiple of an even load. None drops no token."
    )
    freeze: bool = Field(default=False, description="Do not train the routers.")


class LoraConfig(Section):
    """Train an adapter of low rank on the linear layers instead of the weights; see weights/derived.py."""

    rank: Annotated[int, Field(gt=0, le=65536)] = Field(default=16, description="Columns of B, and rows of A.")
    alpha: PositiveFloat = Field(default=32.0, description="The adapter's output is multiplied by alpha / rank.")
    targets: Annotated[tuple[str, ...], LIST] = Field(
        default=("all-linear",),
        description=(
            "Matrices that get an adapter, as a list such as [q, k, v, o]. all-linear selects the linear layers of "
            "attention, MLP and experts."
        ),
    )

    @field_validator("targets", mode="before")
    @classmethod
    def _as_list(cls, value: object) -> object:
        return (value,) if isinstance(value, str) else value

    def _problems(self) -> Iterator[str]:
        if not 0 < len(self.targets) == len(set(self.targets)):
            yield f"model.lora.targets={list(self.targets)}: must name at least one matrix, each once; use all-linear"


class ModelConfig(Section):
    path: FilePath = Field(
        description=(
            "Folder of a Hugging Face checkpoint or a converted Megatron checkpoint. With init=random its "
            "config.json is enough."
        )
    )
    dtype: Literal["float32", "bfloat16"] | None = Field(
        default=None,
        description=(
            "Dtype of the policy's weights and computation. None uses bfloat16 on GPUs and float32 on a CPU; a resumed "
            "run keeps its dtype. Master weights and optimizer state stay float32."
        ),
    )
    init: Literal["checkpoint", "random"] = Field(
        default="checkpoint", description="Where the weights come from. random initializes them from the seed."
    )
    lora: LoraConfig | None = Field(
        default=None, description="Train an adapter on frozen weights (LoRA). None trains all weights."
    )
    adapter: FilePath | None = ruled(
        needs="model.lora; set its rank, alpha and targets",
        default=None,
        description="Folder of a PEFT adapter to start from, with the numbers of lora. None starts a new adapter.",
    )
    recompute: Literal["none", "selective", "full"] = free(
        default="none",
        description=(
            "Activations to recompute in the backward pass to save memory. selective recomputes the parts in "
            "recompute_modules, full recomputes whole layers."
        ),
    )
    recompute_modules: Annotated[tuple[RecomputedPart, ...], LIST] | None = free(
        needs="model.recompute=selective",
        default=None,
        description=(
            "Parts of a layer that recompute=selective recomputes. None selects mlp and moe, and without Transformer "
            "Engine's layers also core_attn. moe_act is the experts' activation function. layernorm has no effect on "
            "norms that Transformer Engine fuses into a linear layer."
        ),
    )
    recompute_num_layers: PositiveInt | None = free(
        needs="model.recompute=full",
        default=None,
        description=(
            "With recompute=full, recompute only this many layers of each model chunk, the first ones. None recomputes "
            "all layers."
        ),
    )
    router: RouterConfig = ruled(
        needs="a model with experts", default=RouterConfig(), description="Training of the routers of MoE models."
    )
    grouped_experts: bool | None = free(
        needs=("a model with experts", _TE),
        default=None,
        description="Compute all experts of a layer in one grouped GEMM. On with Transformer Engine if unset.",
    )
    fused_permutation: bool | None = free(
        needs=("a model with experts", _TE),
        default=None,
        description="Use fused kernels to send tokens to their experts and back. On with Transformer Engine if unset.",
    )

    def recomputed(self, *, uses_te: bool) -> tuple[str, ...]:
        """Return the parts of a layer that recompute=selective recomputes; () otherwise."""
        if self.recompute != "selective":
            return ()
        # Transformer Engine's attention keeps no scores, so recomputing it saves nearly nothing.
        return self.recompute_modules or (("mlp", "moe") if uses_te else ("core_attn", "mlp", "moe"))

    def _problems(self) -> Iterator[str]:
        parts = self.recompute_modules
        if parts is not None and (not parts or len(set(parts)) < len(parts)):
            yield f"model.recompute_modules={list(parts)}: must name at least one part, each once; leave it out"
        if parts is not None and "moe_act" in parts and not self.grouped_experts:
            yield (
                f"model.recompute_modules={list(parts)}: moe_act needs model.grouped_experts=true; set it, or use moe"
            )

    @property
    def recorded_lora(self) -> dict[str, Any] | None:
        """Return the values of lora for a checkpoint's manifest."""
        return None if self.lora is None else self.lora.model_dump(mode="json")

    @property
    def resolved_dtype(self) -> Literal["float32", "bfloat16"]:
        """Return dtype, after checks.resolve_dtype has set it for the device."""
        assert self.dtype is not None, "model.dtype is not resolved"
        return self.dtype


class TeacherConfig(Section):
    """A model of the policy's tokenizer to distil from; it computes in model.dtype, in the policy's layout."""

    path: FilePath = Field(
        description=(
            "Folder of a Hugging Face checkpoint or a converted Megatron checkpoint. With a url its config and "
            "tokenizer are enough."
        )
    )
    url: Annotated[str, Field(pattern=r"^https?://[^/]+$")] | None = Field(
        default=None,
        description=(
            "Address of an SGLang server that serves the teacher, such as http://host:30000. None loads the "
            "teacher into the ranks."
        ),
    )


class GuardConfig(Section):
    """Watch for spikes of gradient norms per layer, and for train-inference mismatch; see megatron/precision.py."""

    grad_spike: Annotated[PositiveFloat, Field(gt=1)] | None = Field(
        default=10.0,
        description=(
            "Warn if a layer's gradient norm exceeds this multiple of its recent median. None turns the check off."
        ),
    )
    history: Annotated[int, Field(ge=4, le=100_000)] = Field(
        default=32, description="Number of optimizer steps in the median of gradient norms."
    )
    fall_back: bool = ruled(
        needs=_FP8,
        excludes=("precision.fp8_parameters", _DELAYED),
        default=False,
        description=(
            "With FP8, compute the outer decoder layers in bf16 after a spike, and all layers after another one."
        ),
    )
    layers: PositiveInt = Field(
        default=2, description="Number of decoder layers at each end of the model that fall back to bf16 first."
    )
    steps: PositiveInt = Field(default=20, description="Number of optimizer steps that a fallback lasts.")


class PrecisionConfig(Section):
    """FP8 for the linear layers of attention and MLP; norms, router, embedding and output layer stay in model.dtype."""

    fp8: Literal["e4m3", "hybrid"] | None = ruled(
        needs="precision.fp8_reference=true or precision.fp8_recipe=tensorwise|blockwise|mxfp8",
        excludes=("model.dtype=float32", "model.lora, whose base computes in bf16", _LINEAR),
        default=None,
        description=(
            "FP8 format of the linear layers. hybrid uses e5m2 for gradients, None turns FP8 off. Needs "
            "Transformer Engine."
        ),
    )
    fp8_recipe: Literal["delayed", "tensorwise", "blockwise", "mxfp8"] = Field(
        default="tensorwise",
        description=(
            "How FP8 scales are computed. The recipes need different GPUs; an unsuitable GPU is refused with the "
            "recipes that it supports."
        ),
    )
    first_layers_bf16: NonNegativeInt = ruled(
        needs=_FP8,
        excludes=_DELAYED,
        default=0,
        description="Number of decoder layers at the start of the model that stay in bf16.",
    )
    last_layers_bf16: NonNegativeInt = ruled(
        needs=_FP8,
        excludes=_DELAYED,
        default=0,
        description="Number of decoder layers at the end of the model that stay in bf16.",
    )
    fp8_reference: bool = ruled(needs=_FP8, default=False, description="Compute the reference in FP8 too.")
    fp8_parameters: bool = ruled(
        needs=(_FP8, "precision.fp8_reference=true, because no bf16 weights are left"),
        excludes="precision.fp8_recipe=mxfp8, whose weights stay in bf16",
        default=False,
        description=(
            "Store the weights in FP8 and gather them over data-parallel ranks in FP8. Master weights stay float32."
        ),
    )
    # These are Transformer Engine's defaults. Megatron's (1 and most_recent) saturate whenever a maximum grows.
    fp8_amax_history_len: Annotated[int, Field(gt=0, le=1_000_000)] = ruled(
        needs=(_FP8, "precision.fp8_recipe=delayed, because only this recipe has a history"),
        default=1024,
        description="Number of past micro-batches whose maxima set the scale with fp8_recipe=delayed.",
    )
    fp8_amax_compute_algo: Literal["max", "most_recent"] = ruled(
        needs=(_FP8, "precision.fp8_recipe=delayed, because only this recipe has a history"),
        default="max",
        description="Maximum to scale by with fp8_recipe=delayed: the largest or the most recent one of the history.",
    )
    guard: GuardConfig = free(
        default=GuardConfig(), description="Detection of spikes in gradient norms, and fallback from FP8 to bf16."
    )
