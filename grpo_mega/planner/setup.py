"""What is planned: the config, the model's shape and the machine, with what follows from them at once."""

from __future__ import annotations

from dataclasses import dataclass

from grpo_mega.config import Config
from grpo_mega.hardware.cards import ASSUMED, Assumptions, Card
from grpo_mega.hardware.fp8 import length_multiple
from grpo_mega.validation.layout import megatron_layout
from grpo_mega.weights.families import family_of
from grpo_mega.weights.layout import EngineLayout, MegatronLayout
from grpo_mega.weights.spec import Family, ModelShape

ITEMSIZE = {"float32": 4, "bfloat16": 2}


@dataclass(frozen=True)
class Setup:
    """A config that breaks no rule, on a number of GPUs."""

    config: Config
    shape: ModelShape
    experts_per_token: int  # 0: dense
    card: Card
    world_size: int
    gpus_per_node: int
    mean_prompt: float  # tokens
    mean_response: float
    uses_te: bool = True  # Transformer Engine's layers; else Megatron's local ones
    assumed: Assumptions = ASSUMED

    @property
    def family(self) -> Family:
        return family_of(self.shape.model_type)

    @property
    def layout(self) -> MegatronLayout:
        return megatron_layout(self.config.layout, self.world_size)

    @property
    def engine_layout(self) -> EngineLayout:
        tp = self.config.rollout.tp
        return EngineLayout(tp, self.world_size // tp)

    @property
    def itemsize(self) -> int:
        """Of a weight, in bytes."""
        return ITEMSIZE[self.config.model.dtype]

    @property
    def num_nodes(self) -> int:
        return -(-self.world_size // self.gpus_per_node)

    @property
    def ranks_per_node(self) -> int:
        return min(self.world_size, self.gpus_per_node)

    @property
    def is_served(self) -> bool:
        """By SGLang, in processes of its own."""
        return self.config.rollout.engine == "sglang"

    @property
    def takes_turns(self) -> bool:
        """Whether policy and engine give each other the device's memory; with sleep=auto, unless both are found to fit."""
        return self.is_served and self.config.rollout.sleep != "never"

    @property
    def keeps_host_copies(self) -> bool:
        """Whether policy's weights and optimizer state go to the host; the embedded engine stays where it is."""
        return self.takes_turns or self.config.rollout.sleep == "always"

    @property
    def has_reference(self) -> bool:
        return self.config.algorithm.kl_beta > 0

    @property
    def sequence_parts(self) -> int:
        """Into how many parts sequence parallelism cuts what lies between the layers."""
        return self.layout.tp if self.config.layout.sequence_parallel else 1

    @property
    def length_multiple(self) -> int:
        """Return the number whose multiples the lengths of micro-batches are padded to."""
        return length_multiple(self.config.precision, self.layout.tp)

    @property
    def micro_batch_tokens(self) -> int:
        """The longest micro-batch."""
        budget, multiple = self.config.batch.tokens_per_micro_batch, self.length_multiple
        return -(-budget // multiple) * multiple

    @property
    def longest_sample(self) -> int:
        return self.config.data.max_prompt_length + self.config.rollout.max_response_length

    @property
    def mean_sample(self) -> float:
        return self.mean_prompt + self.mean_response
