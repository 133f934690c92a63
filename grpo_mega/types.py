"""The containers that cross package borders: Prompt, PromptDraw, Sample, Group, PackedBatch, StepMetrics.

They are plain dataclasses without behaviour beyond derived sizes. torch is imported only for annotations, so processes
without tensors (reward workers, the command line) stay light.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

# Why a response ended: by itself, or at a limit of tokens, of turns or of time.
FinishReason = Literal["stop", "length", "turns", "deadline"]
StepMetrics = dict[str, float]  # metrics of one step, with names like paths: "reward/mean", "loss/kl", "seconds/update"


@dataclass(frozen=True)
class Prompt:
    """One dataset row, rendered and tokenised.

    `prefill` is the text that the chat template already wrote into the assistant's turn (for example "<think>\\n"). It
    is part of `text` and `token_ids`, and format rewards score it together with the response.
    """

    id: int  # dataset index; with (seed, step, sample index) it sets a rollout's random stream
    text: str
    token_ids: tuple[int, ...]
    answer: str
    prefill: str = ""
    extras: dict[str, Any] = field(default_factory=dict)
    # The row's prompt (also as "prompts") and answer, keyed by column.
    raw_columns: dict[str, Any] = field(default_factory=dict)
    digest: bytes = b""  # digest of the row's prompt, before chat template and system prompt
    undated: str = ""  # identifies the text whatever the date, if the chat template writes one

    @property
    def messages(self) -> list[dict[str, Any]]:
        """Return the chat messages that `text` renders, with the system prompt."""
        prompts = self.raw_columns.get("prompts", self.text)
        return [{"role": "user", "content": prompts}] if isinstance(prompts, str) else list(prompts)


class PromptDraw(NamedTuple):
    """One draw of a prompt, with its dataset and epoch."""

    prompt: Prompt
    source: int = 0  # dataset index; each dataset counts its epochs separately
    epoch: int = 0


class Span(NamedTuple):
    """Response tokens `start` to `end` - 1, generated in one phase using policy `version`."""

    version: int
    start: int
    end: int


class Context(NamedTuple):
    """A rewritten history: from response token `start` on, the model saw `token_ids` instead of prompt and response.

    An agent or a chat template may rewrite a conversation's history, for example remove the thoughts in earlier turns.
    """

    start: int  # index of a response token
    token_ids: tuple[int, ...]


class Segment(NamedTuple):
    """Response tokens `start` to `end` - 1, and their context tokens. A segment is one micro-batch row."""

    context_ids: tuple[int, ...]
    start: int
    end: int

    @property
    def num_tokens(self) -> int:
        return len(self.context_ids) + self.end - self.start


@dataclass(frozen=True)
class Routes:
    """The experts that an engine used for a sample's tokens, from the first token on; see rollout/routes.py."""

    experts: NDArray[Any]  # [tokens, MoE layers, experts per token] uint8 or uint16
    checksum: int  # CRC-32 of the experts' bytes, computed by the recording engine
    # The rank that holds the experts. Other ranks hold an array with the same shape until they receive the experts for
    # the samples that they train. None: every rank holds them.
    rank: int | None = None


def unknown_expert(dtype: Any) -> int:
    """Return the id for an unrecorded expert: the largest number in the numpy or torch type."""
    return int(2 ** (8 * dtype.itemsize) - 1)


@dataclass
class Sample:
    """One response to a prompt, with its log-probs, scores and advantages. It may be unfinished (partial rollouts).

    `response_ids` ends with the end-of-sequence token when the model stopped by itself (finish_reason "stop"). The loss
    includes that token. `rollout_logprobs` contains one entry per response token, temperature-scaled, before top-p and
    top-k. Both are lists on the rank that generated the sample, and arrays after all ranks share it.

    A conversation's response also contains tokens that the policy did not sample: tool results and chat template
    separators. Their log-prob is 0, and they are excluded from losses, means and counts.
    """

    prompt: Prompt
    index: int  # 0 .. group_size - 1
    response_ids: Sequence[int]
    rollout_logprobs: Sequence[float]
    finish_reason: FinishReason | None  # None: unfinished, to be continued
    spans: Sequence[Span] = ()  # in order; they cover the whole response
    scores: dict[str, float | None] = field(default_factory=dict)  # keyed by reward function
    verdicts: dict[str, str] = field(default_factory=dict)
    reward: float | None = None  # weighted sum of the scores
    step_ends: list[int] = field(default_factory=list)  # index of each step's last response token, ascending
    step_rewards: list[float] = field(default_factory=list)  # weighted reward per step
    advantages: Tensor | None = None  # [response_len] float32, 0 on tokens that are not sampled
    old_logprobs: list[float] | None = None  # only for logged samples, after the update; 0 on tokens not sampled
    # Routes for prompt and response without the last token, when replayed; never with contexts.
    routes: Routes | None = None
    sampled: Sequence[tuple[int, int]] = ()  # (start, end) per turn that the policy sampled, ascending; (): all
    contexts: Sequence[Context] = ()  # rewritten histories, by ascending start; the first may replace the prompt
    messages: list[dict[str, Any]] | None = None  # the conversation up to the last turn; None without an agent

    @property
    def is_scored(self) -> bool:
        """Return True if a reward function scored the sample. Other samples are excluded from loss and group
        statistics.
        """
        return self.reward is not None or bool(self.step_rewards)

    @property
    def is_finished(self) -> bool:
        return self.finish_reason is not None

    @property
    def first_version(self) -> int:
        """Return the first token's policy version. It is also the step that seeds the sample's random stream."""
        return self.spans[0].version

    @property
    def policy_version(self) -> int:
        """Return the last token's policy version."""
        return self.spans[-1].version

    @property
    def response_len(self) -> int:
        return len(self.response_ids)

    @property
    def num_sampled(self) -> int:
        """Count response tokens that the policy sampled."""
        return sum(end - start for start, end in self.sampled) if self.sampled else self.response_len

    @property
    def num_turns(self) -> int:
        """Count turns that the policy sampled."""
        return len(self.sampled) or min(1, self.response_len)

    @property
    def last_turn(self) -> int:
        """Return the last turn's first index in the response. Answers are read from this turn."""
        return self.sampled[-1][0] if self.messages is not None and self.sampled else 0

    @property
    def is_truncated(self) -> bool:
        """Return True if a limit ended the response."""
        return self.finish_reason not in (None, "stop")

    @property
    def total_len(self) -> int:
        """Count tokens that the trainer computes: contexts and response, across all segments."""
        return sum(segment.num_tokens for segment in self.segments())

    def segments(self) -> list[Segment]:
        """Return the response's segments in order. There is one, unless a history was rewritten."""
        contexts = list(self.contexts)
        if not contexts or contexts[0].start > 0:
            contexts.insert(0, Context(0, self.prompt.token_ids))
        ends = [*(context.start for context in contexts[1:]), self.response_len]
        return [Segment(c.token_ids, c.start, end) for c, end in zip(contexts, ends, strict=True)]


@dataclass
class Group:
    """All samples for one prompt, ordered by index, or the samples started so far (partial rollouts)."""

    prompt: Prompt
    samples: list[Sample]

    def is_complete(self, group_size: int) -> bool:
        return len(self.samples) == group_size and all(sample.is_finished for sample in self.samples)

    @property
    def num_tokens(self) -> int:
        """Count response tokens, sampled or not."""
        return sum(sample.response_len for sample in self.samples)

    @property
    def oldest_version(self) -> int | None:
        """Return the oldest policy version in the group; None if nothing is generated yet."""
        return min((sample.first_version for sample in self.samples), default=None)


@dataclass(kw_only=True)
class LossVectors:
    """Vectors [T] float32 of a micro-batch that packing and the passes before an update set, and the losses read."""

    loss_mask: Tensor  # 1 on sampled tokens that contribute to the loss
    loss_weights: Tensor  # weight of each token in the mini-batch's loss (0 where loss_mask is 0)
    advantages: Tensor
    rollout_logprobs: Tensor
    # The log-probs of policy, reference and teacher are only on the last pipeline stage.
    old_logprobs: Tensor | None = None
    ref_logprobs: Tensor | None = None
    teacher_logprobs: Tensor | None = None
    # Computed from all tokens of the mini-batch before the update; None or 1 if no method uses them.
    nll_weights: Tensor | None = None  # weights of the negative log-likelihood, from token_weights.py
    covariance_mask: Tensor | None = None  # 1 on the tokens of losses.choose_by_covariance
    importance_mean: float = 1.0  # divisor of the correction's weights


@dataclass
class PackedBatch(LossVectors):
    """One micro-batch: the segments of several samples end to end, then padding, in one row of T tokens.

    With context parallelism a row is this rank's part: two chunks per segment (see batching/layout.py).

    Per-token arrays are aligned to the position that *predicts*: entry t belongs to `targets[t]`, the token after
    `tokens[t]`. Each segment's last position predicts nothing (loss_mask 0). Padding, if any, is the last segment.
    """

    tokens: Tensor  # [T] int64
    targets: Tensor  # [T] int64
    position_ids: Tensor  # [T] int64, from 0 in every segment
    cu_seqlens: Tensor  # [num_segments + 1] int32, covers all T tokens of this rank
    sample_indices: list[int]  # step-wide index of each segment's sample, without padding
    segment_numbers: list[int]  # each segment's position in its sample (Sample.segments), without padding
    lengths: list[int]  # tokens per segment across all context-parallel ranks, without padding
    # With shared prompts, per segment: index of the shared segment that holds all prompt tokens but the last, after all
    # samples' segments. It is -1 if the segment holds its whole context.
    shared_prompt_segments: list[int] | None = None
    cp_size: int = 1  # number of ranks that share the row
    cp_rank: int = 0
    # Per teacher, for a KL over the vocabulary: taught tokens [T] bool, and their last hidden states, on the host.
    teacher_hidden: dict[str, tuple[Tensor, Tensor]] | None = None
    # [T, MoE layers, experts per token] expert ids (see Routes); None if no token has recorded routes
    routes: Tensor | None = None
    # What passes would wait for the device to learn, from batching.layout.to_device.
    num_loss_tokens: int | None = None  # tokens with loss_mask 1
    segment_ids: Tensor | None = None  # [T] int64, see layout.segments
    sequence_ids: Tensor | None = None  # [T] int64, see layout.sequences
    padded_lengths: Tensor | None = None  # [len(lengths) + 1] int64: `lengths`, and 0 for padding
    has_gradients: bool = False  # every token in the loss has a gradient, see layout.note_gradients

    @property
    def num_tokens(self) -> int:
        return int(self.tokens.shape[0])

    @property
    def num_segments(self) -> int:
        return len(self.cu_seqlens) - 1
