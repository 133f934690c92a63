"""The sections of a config for generation and for the weight sync that fills the engines."""

from __future__ import annotations

import math
from typing import Annotated, Literal

from pydantic import Field, model_validator

from grpo_mega.config.base import LIST, Fraction, NonNegativeInt, NumRanks, PositiveFloat, PositiveInt, Seconds, Section
from grpo_mega.config.server_args import problem_of


class RolloutConfig(Section):
    engine: Literal["embedded", "sglang"] = "embedded"
    tp: NumRanks = 1  # ranks per engine: rank r serves engine r // tp; 1 for the embedded engine
    ep: NumRanks = 1  # parts in which an engine's ranks hold the experts of an MoE model; a divisor of tp, often tp itself
    # separate: layout.engine_ranks ranks generate for the next steps while the others train; colocated: all do both in turns
    placement: Literal["colocated", "separate"] = "colocated"
    temperature: PositiveFloat = 1.0
    top_p: Fraction = 1.0
    top_k: NonNegativeInt = 0  # 0: off
    max_response_length: PositiveInt = 1024  # tokens
    # In addition to all eos ids of the model, its generation config and the tokenizer. Rewards see the text of a token that is
    # named here alone, such as </answer>, at the end of the response.
    stop_token_ids: Annotated[tuple[NonNegativeInt, ...], LIST] = ()
    max_concurrent: PositiveInt = 256  # sequences that an engine decodes at once
    # A step begins oversample * batch.prompts_per_step prompts, and aborts the rest once enough groups are complete: faster if
    # few responses are long, but biased towards short ones (rollout/kept_length, aborted_length). Needs room in max_concurrent.
    oversample: Annotated[float, Field(ge=1, le=1000)] = 1.0
    # Keep what is aborted, and continue it in the next step with the policy of then: nothing is thrown away, and no length
    # preferred. Correct for it with algorithm.recipe=partial. Needs oversample > 1.
    partial: bool = False
    # partial or separate: steps after its first token by which a group is trained. With placement=separate groups of so many
    # steps are begun ahead of the one that trains: 1 is one step ahead, 0 generates and trains in turns.
    max_staleness: Annotated[int, Field(ge=0, le=1000)] = 2
    # Begin one sample of each group first, then the others of the groups with the longest: no long response begins last. For
    # more sequences than max_concurrent, with responses that are alike within a group; samples are the same.
    longest_first: bool = False
    dtype: Literal["float32", "bfloat16"] | None = None  # of the engine's weights and computation; None: model.dtype
    quantization: Literal["fp8"] | None = None  # linear layers are sent in blocks of 128 x 128; see weights/
    # Train each token of an MoE model with the experts that the engine chose for it (R3), since trainer and engine choose
    # differently where two are close; the scores are the trainer's. The reference chooses by itself, except with "reference".
    routing_replay: bool | Literal["reference"] = False
    # The keys below apply to engine=sglang only.
    cache_tokens: PositiveInt | None = None  # KV cache; None: as many as max_concurrent needs (CPU) or as fit (GPU)
    memory_fraction: Fraction | None = None  # share of GPU memory for weights and KV cache; None: the server's default
    sleep: Literal["auto", "always", "never"] = "auto"  # free GPU memory while training; auto: unless both fit
    max_restarts: NonNegativeInt = 3  # per server and run; then the run stops with a checkpoint
    start_deadline_s: Seconds = 900.0
    stall_deadline_s: Seconds = 60.0  # a server without a finished sample or a healthy answer for so long hangs
    phase_deadline_s: Seconds = 14400.0  # of one generation phase
    mismatch_warn: PositiveFloat = 0.02  # KL (k3) of engine and trainer, nats per token, above which a step warns
    mismatch_stop: PositiveFloat | None = 1.0  # the same, above which the run stops; None: never
    server_args: dict[str, str | int | float | bool] = Field(default={})  # more arguments of SGLang, by its names

    @property
    def is_served(self) -> bool:
        """True if SGLang servers generate."""
        return self.engine == "sglang"

    @property
    def is_separate(self) -> bool:
        return self.placement == "separate"

    @property
    def carries(self) -> bool:
        """True if groups that a step leaves unfinished, or whole, go on in the next one."""
        return self.partial or (self.is_separate and self.max_staleness > 0)

    def num_begun(self, prompts_per_step: int) -> int:
        """Return the number of prompts that a step begins, or continues."""
        if self.is_separate and self.carries:
            return (1 + self.max_staleness) * prompts_per_step
        return math.ceil(round(prompts_per_step * self.oversample, 6))

    def num_ahead(self, prompts_per_step: int) -> int:
        """Return the number of prompts that are begun, or continued, while a step trains."""
        return self.max_staleness * prompts_per_step if self.is_separate else 0

    @model_validator(mode="after")
    def _check(self) -> RolloutConfig:
        for name in self.server_args:
            if (problem := problem_of(name)) is not None:
                raise ValueError(f"rollout.server_args.{name} {problem}; remove it")
        if not self.is_served and self.tp > 1:
            raise ValueError(f"rollout.tp={self.tp} needs rollout.engine=sglang; the embedded engine spans one rank")
        if self.tp % self.ep:
            raise ValueError(f"rollout.ep={self.ep} does not divide rollout.tp={self.tp}; use a divisor of it")
        if self.is_separate and self.partial:
            raise ValueError("rollout.partial=true: must not be with placement=separate, which always continues; leave it out")
        if self.is_separate and self.carries and self.oversample > 1:
            raise ValueError(
                f"rollout.oversample={self.oversample}: must be 1 with placement=separate and "
                f"max_staleness={self.max_staleness}, which says how much is begun; leave it out"
            )
        if self.partial and self.max_staleness == 0:
            raise ValueError("rollout.max_staleness=0: must be at least 1 with rollout.partial; raise it, or leave partial out")
        if self.partial and self.oversample == 1:
            raise ValueError("rollout.partial=true needs rollout.oversample > 1, or nothing is left to continue; use 1.25")
        if self.longest_first and self.oversample > 1 and not self.carries:
            raise ValueError(
                f"rollout.longest_first=true: must not be with oversample={self.oversample}, which aborts what begins last, "
                "here always the short groups; set partial=true, or leave one out"
            )
        if self.mismatch_stop is not None and self.mismatch_stop < self.mismatch_warn:
            raise ValueError(
                f"rollout.mismatch_stop={self.mismatch_stop} is below rollout.mismatch_warn={self.mismatch_warn}; raise it"
            )
        return self


class SyncConfig(Section):
    bucket_mib: PositiveFloat = 256.0  # weights that a rank sends to its engine at once; two buckets are allocated
    prove: bool = True  # compare checksums of the engine's and the trainer's weights after every sync
