"""The config section of AdamW and its learning rate."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from grpo_mega.config.base import LIST, Momentum, NonNegativeFloat, NonNegativeInt, PositiveFloat, Section


class OptimizerConfig(Section):
    lr: PositiveFloat = Field(default=1e-6, description="Peak learning rate.")
    min_lr: NonNegativeFloat = Field(
        default=0.0, description="Learning rate at the end of the linear or cosine schedule."
    )
    schedule: Literal["constant", "linear", "cosine"] = Field(
        default="constant", description="Schedule of the learning rate after the warm-up."
    )
    warmup_steps: NonNegativeInt = Field(
        default=0, description="Number of optimizer steps in which the learning rate rises linearly to lr."
    )
    weight_decay: NonNegativeFloat = Field(
        default=0.0, description="Decoupled weight decay of matrices and embeddings. Norms and biases have none."
    )
    betas: Annotated[tuple[Momentum, Momentum], LIST] = Field(
        default=(0.9, 0.95), description="Decay rates of Adam's two moments."
    )
    eps: PositiveFloat = Field(default=1e-8, description="Number that Adam adds to the denominator.")
    clip_grad: NonNegativeFloat = Field(
        default=1.0, description="Maximum global L2 norm of the gradient. 0 does not clip."
    )
    moments_dtype: Literal["float32", "bfloat16"] = Field(
        default="float32",
        description="Dtype of Adam's moments. bfloat16 needs Transformer Engine's precision-aware Adam.",
    )
    cpu_offload: bool = Field(
        default=False,
        description=(
            "Keep Adam's float32 masters and moments in host memory, and take optimizer steps on the CPU (Megatron's "
            "hybrid optimizer). Frees 12 bytes per weight of a rank's share on the device, and makes updates slower. "
            "Use it only if nothing else fits: `grpo-mega plan` shows memory and time. Needs model.dtype=bfloat16."
        ),
    )

    def _problems(self) -> Iterator[str]:
        if self.min_lr > self.lr:
            yield f"optimizer.min_lr={self.min_lr} is above optimizer.lr={self.lr}; lower it"
        if self.cpu_offload and self.moments_dtype != "float32":
            yield (
                f"optimizer.moments_dtype={self.moments_dtype}: must be float32 with optimizer.cpu_offload, because"
                " torch's Adam takes the steps; leave one of them out"
            )
