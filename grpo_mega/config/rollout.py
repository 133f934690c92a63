"""The sections of a config for generation and for the weight sync that fills the engines."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from grpo_mega.config.base import LIST, Fraction, NonNegativeInt, NumRanks, PositiveFloat, PositiveInt, Seconds, Section
from grpo_mega.config.server_args import problem_of


class RolloutConfig(Section):
    engine: Literal["embedded", "sglang"] = "embedded"
    """What generates: embedded runs inside the trainer's ranks, sglang starts SGLang servers."""
    tp: NumRanks = 1
    """Ranks per engine: rank r belongs to engine r // tp. Must be 1 for the embedded engine."""
    ep: NumRanks = 1
    """Expert-parallel size inside an engine. Must divide tp."""
    placement: Literal["colocated", "separate"] = "colocated"
    """colocated generates and trains on the same ranks in turns. separate generates on layout.engine_ranks ranks while the
    others train."""
    temperature: PositiveFloat = 1.0
    """Sampling temperature."""
    top_p: Fraction = 1.0
    """Sample from the smallest set of tokens with this total probability. 1 uses all tokens."""
    top_k: NonNegativeInt = 0
    """Sample from this many most likely tokens. 0 uses all tokens."""
    max_response_length: PositiveInt = 1024
    """Maximum number of tokens in a response."""
    stop_token_ids: Annotated[tuple[NonNegativeInt, ...], LIST] = ()
    """Token ids that end a response, in addition to the eos ids of the model, its generation config and the tokenizer. Rewards
    see the text of a token that is named only here."""
    max_concurrent: PositiveInt = 256
    """Maximum number of sequences that an engine decodes at once."""
    oversample: Annotated[float, Field(ge=1, le=1000)] = 1.0
    """Start this many times batch.prompts_per_step prompts, and abort the rest when enough groups are complete. Saves time if
    few responses are long, but prefers short responses (rollout/kept_length, aborted_length)."""
    partial: bool = False
    """Keep aborted groups and resume them in the next step with the updated policy, so that no length is preferred. Needs
    oversample > 1. Use algorithm.recipe=partial to correct for it."""
    max_staleness: Annotated[int, Field(ge=0, le=1000)] = 2
    """Maximum number of policy updates between a group's first token and its training step. Used with partial and with
    placement=separate, where 1 runs one step ahead and 0 alternates."""
    longest_first: bool = False
    """Start one sample per group as a length probe, then start the remaining samples of the groups with the longest probes.
    Shortens a rollout with more sequences than max_concurrent if lengths within a group are similar. Does not change any
    sample."""
    dtype: Literal["float32", "bfloat16"] | None = None
    """Dtype of the engine's weights and computation. None uses model.dtype."""
    quantization: Literal["fp8"] | None = None
    """Quantization of the engine's linear layers. fp8 sends them in blocks of 128 x 128, None does not quantize."""
    routing_replay: bool | Literal["reference"] = False
    """Train each token of an MoE model with the experts that the engine chose for it (R3). reference replays them in the
    reference too."""
    cache_tokens: PositiveInt | None = None
    """Tokens in the KV cache of an SGLang server. None uses what max_concurrent needs on a CPU, and what fits on a GPU."""
    memory_fraction: Fraction | None = None
    """Share of GPU memory for the weights and KV cache of an SGLang server. None uses the server's default."""
    sleep: Literal["auto", "always", "never"] = "auto"
    """Whether an SGLang server frees its GPU memory while the trainer runs. auto frees it unless both fit."""
    max_restarts: NonNegativeInt = 3
    """Maximum number of restarts per SGLang server and run. The run then stops with a checkpoint."""
    start_deadline_s: Seconds = 900.0
    """Maximum number of seconds until an SGLang server answers after its start."""
    stall_deadline_s: Seconds = 60.0
    """Restart an SGLang server that has neither finished a sample nor answered a health check for this many seconds."""
    phase_deadline_s: Seconds = 14400.0
    """Maximum number of seconds of one generation phase of an SGLang server."""
    mismatch_warn: PositiveFloat = 0.02
    """Warn if the KL (k3) between engine and trainer exceeds this many nats per token."""
    mismatch_stop: PositiveFloat | None = 1.0
    """Stop the run if the KL (k3) between engine and trainer exceeds this many nats per token. None never stops."""
    server_args: dict[str, str | int | float | bool] = Field(default={})
    """Additional arguments of the SGLang server, by SGLang's names."""

    @property
    def is_served(self) -> bool:
        """True if SGLang servers generate."""
        return self.engine == "sglang"

    @property
    def is_separate(self) -> bool:
        return self.placement == "separate"

    @property
    def keeps_unfinished(self) -> bool:
        """True if unfinished or surplus complete groups of a step continue in the next one."""
        return self.partial or (self.is_separate and self.max_staleness > 0)

    def num_started(self, prompts_per_step: int) -> int:
        """Return the number of prompts that a step starts or continues."""
        if self.is_separate and self.keeps_unfinished:
            return (1 + self.max_staleness) * prompts_per_step
        return math.ceil(round(prompts_per_step * self.oversample, 6))

    def num_ahead(self, prompts_per_step: int) -> int:
        """Return the number of prompts that are started or continued while a step trains."""
        return self.max_staleness * prompts_per_step if self.is_separate else 0

    def _problems(self) -> Iterator[str]:
        for name in self.server_args:
            if (problem := problem_of(name)) is not None:
                yield f"rollout.server_args.{name} {problem}; remove it"
        if self.tp % self.ep:
            yield f"rollout.ep={self.ep} does not divide rollout.tp={self.tp}; use a divisor of it"
        if self.partial and self.max_staleness == 0:
            yield "rollout.max_staleness=0: must be at least 1 with rollout.partial; raise it, or leave partial out"
        yield from self._unmet(
            "rollout.",
            ("tp", self.is_served, " needs rollout.engine=sglang; the embedded engine spans one rank"),
            ("partial", not self.is_separate, ": must not be with placement=separate (it always continues); leave it out"),
            (
                "oversample",
                not (self.is_separate and self.keeps_unfinished),
                f": must be 1 with placement=separate and max_staleness={self.max_staleness}, because it sets how much is "
                "started; leave it out",
            ),
            ("partial", self.oversample > 1, " needs rollout.oversample > 1, or nothing is left to continue; use 1.25"),
            (
                "longest_first",
                self.oversample == 1 or self.keeps_unfinished,
                f": must not be with oversample={self.oversample}, because it aborts the groups that start last, here always "
                "the short ones; set partial=true, or leave one out",
            ),
        )
        if self.mismatch_stop is not None and self.mismatch_stop < self.mismatch_warn:
            yield f"rollout.mismatch_stop={self.mismatch_stop} is below rollout.mismatch_warn={self.mismatch_warn}; raise it"


class SyncConfig(Section):
    bucket_mib: PositiveFloat = 256.0
    """MiB of weights that a rank sends to its engine at once. Two such buckets are allocated."""
    verify: bool = True
    """Compare checksums of the engine's and the trainer's weights after every sync."""
