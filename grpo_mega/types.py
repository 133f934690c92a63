"""The containers that cross package borders: Prompt, Turn, Sample, Group, PackedBatch, StepMetrics.

Plain dataclasses without behaviour beyond derived sizes. torch is imported for annotations only, so that processes without
tensors (reward workers, the command line) stay light.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

FinishReason = Literal["stop", "length"]
StepMetrics = dict[str, float]  # the metrics of one step; names are path-like: "reward/mean", "loss/kl", "seconds/update"


@dataclass(frozen=True)
class Prompt:
    """One row of a data set, rendered and tokenised.

    `prefill` is the text that the chat template already wrote into the assistant's turn (for example "<think>\\n"); it is part
    of `text` and `token_ids`, and format rewards score it together with the response.
    """

    id: int  # index in the data set; with (seed, step, sample index) it fixes the random stream of a rollout
    text: str
    token_ids: tuple[int, ...]
    answer: str
    prefill: str = ""
    extras: dict[str, Any] = field(default_factory=dict)
    given: dict[str, Any] = field(default_factory=dict)  # the row's prompt, also as "prompts", and answer, by their columns


class Turn(NamedTuple):
    """A prompt as the data's order draws it: once in every epoch of its set."""

    prompt: Prompt
    source: int = 0  # number of its set, each of which has epochs of its own
    epoch: int = 0


class Span(NamedTuple):
    """Response tokens `start` to `end` - 1, which the policy of `version` generated in one phase."""

    version: int
    start: int
    end: int


@dataclass(frozen=True)
class Routes:
    """The experts that an engine used for the tokens of a sample, from its first; see rollout/routes.py."""

    experts: NDArray[Any]  # [tokens, MoE layers, experts per token] uint8 or uint16
    checksum: int  # CRC-32 of the experts' bytes, from where they were recorded


def unknown_expert(dtype: Any) -> int:
    """Return the number that stands for an expert that was not recorded: the largest of the type, numpy's or torch's."""
    return int(2 ** (8 * dtype.itemsize) - 1)


@dataclass
class Sample:
    """One response to a prompt, with its log-probs, scores and advantages; or as much of it as there is (partial rollouts).

    `response_ids` ends with the end-of-sequence token if the model stopped by itself (finish_reason "stop"); that token is
    part of the response and of the loss. `rollout_logprobs` has one entry per response token, temperature-scaled, before
    top-p and top-k. Both are lists where the sample was generated, and arrays once all ranks share it.
    """

    prompt: Prompt
    index: int  # 0 .. group_size - 1
    response_ids: Sequence[int]
    rollout_logprobs: Sequence[float]
    finish_reason: FinishReason | None  # None: unfinished, to be continued
    spans: Sequence[Span] = ()  # of the whole response, in their order
    scores: dict[str, float | None] = field(default_factory=dict)  # by reward function
    verdicts: dict[str, str] = field(default_factory=dict)
    reward: float | None = None  # weighted sum of the scores
    step_ends: list[int] = field(default_factory=list)  # index of the response token at which each step ends, ascending
    step_rewards: list[float] = field(default_factory=list)  # of those steps, weighted
    advantages: Tensor | None = None  # [response_len] float32
    old_logprobs: list[float] | None = None  # of logged samples, after the update
    routes: Routes | None = None  # of prompt and response, up to the last token but one, if they are to be replayed

    @property
    def is_scored(self) -> bool:
        """Return True if a reward function scored the sample; other samples are excluded from the loss and group statistics."""
        return self.reward is not None or bool(self.step_rewards)

    @property
    def is_finished(self) -> bool:
        return self.finish_reason is not None

    @property
    def begun_by(self) -> int:
        """Return the version of the policy that began the response; also the step in which it did, which its random stream
        depends on."""
        return self.spans[0].version

    @property
    def policy_version(self) -> int:
        """Return the version of the policy that ended the response."""
        return self.spans[-1].version

    @property
    def response_len(self) -> int:
        return len(self.response_ids)

    @property
    def total_len(self) -> int:
        return len(self.prompt.token_ids) + len(self.response_ids)


@dataclass
class Group:
    """All samples of one prompt, in the order of their index; or those that were begun so far (partial rollouts)."""

    prompt: Prompt
    samples: list[Sample]

    def is_complete(self, group_size: int) -> bool:
        return len(self.samples) == group_size and all(sample.is_finished for sample in self.samples)

    @property
    def num_tokens(self) -> int:
        """Return the number of response tokens."""
        return sum(sample.response_len for sample in self.samples)

    @property
    def begun_by(self) -> int | None:
        """Return the oldest version of a policy that generated part of it; None if there is none yet."""
        return min((sample.begun_by for sample in self.samples), default=None)


@dataclass
class PackedBatch:
    """One micro-batch: several samples laid end to end, then padding, in one row of T tokens.

    With context parallelism a row is this rank's part: two chunks of every segment, see batching/layout.py.

    Per-token arrays are aligned to the position that *predicts*: entry t belongs to `targets[t]`, the token after `tokens[t]`.
    The last position of every segment predicts nothing (loss_mask 0). If there is padding it is the last segment.
    """

    tokens: Tensor  # [T] int64
    targets: Tensor  # [T] int64
    position_ids: Tensor  # [T] int64, from 0 in every segment
    cu_seqlens: Tensor  # [num_segments + 1] int32, covers all T tokens of this rank
    loss_mask: Tensor  # [T] float32, 1 on response tokens that contribute to the loss
    loss_weights: Tensor  # [T] float32, the weight of each token in the loss of the mini-batch (0 where loss_mask is 0)
    advantages: Tensor  # [T] float32
    rollout_logprobs: Tensor  # [T] float32
    sample_indices: list[int]  # index in the step of each segment's sample, without padding
    lengths: list[int]  # tokens of each sample, on all ranks that share the row, without padding
    # With shared prompts: of each sample the index of the segment, after those of all samples, that has its prompt but for the
    # last token; the sample's own segment has the rest, and -1 says that this is all.
    trunks: list[int] | None = None
    cp_size: int = 1  # ranks that share the row
    cp_rank: int = 0
    old_logprobs: Tensor | None = None  # [T] float32; only on the last pipeline stage
    ref_logprobs: Tensor | None = None  # [T] float32; only on the last pipeline stage
    teacher_logprobs: Tensor | None = None  # [T] float32; only on the last pipeline stage
    # By teacher, for a KL over the vocabulary: the tokens that it teaches [T] bool, and their last hidden states, on the host.
    teacher_hidden: dict[str, tuple[Tensor, Tensor]] | None = None
    # What some methods take from the whole mini-batch, see LossInputs.
    nll_weights: Tensor | None = None  # [T] float32
    is_chosen: Tensor | None = None  # [T] float32
    importance_mean: float = 1.0
    routes: Tensor | None = None  # [T, MoE layers, experts per token], as Routes has them; None: not known for any token

    @property
    def num_tokens(self) -> int:
        return int(self.tokens.shape[0])

    @property
    def num_segments(self) -> int:
        return len(self.cu_seqlens) - 1
