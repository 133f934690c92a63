"""Decode sequences together, one token each per step. Sequences join and leave between two steps.

The sequences of a cohort share a cache, with padding on the left. A step runs the model once per cohort. `add` makes a
new cohort. `join` first merges all cohorts into one and drops the finished sequences. `cached` returns an ended
sequence's cache, for a later sequence that starts with the same tokens.

`draw` samples the next tokens. Each sample has a separate random stream.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from grpo_mega.rollout.embedded.model import LinearState, RouteRecorder, new_cache
from grpo_mega.rollout.engine import Sampling

COMPACT_BELOW = 0.75  # finished sequences leave the cache when the live share is below this
PREFILL_TOKENS = 2**14  # maximum number of tokens per prefill in `join`, with padding; a longer context runs alone


@dataclass(frozen=True)
class Cached:
    """Keys and values [1, heads, tokens, head size] per layer for a sequence's first tokens."""

    layers: list[tuple[Tensor, Tensor]]

    @property
    def num_tokens(self) -> int:
        return self.layers[0][0].shape[-2]

    def first(self, num_tokens: int) -> Cached:
        return Cached([(keys[..., :num_tokens, :], values[..., :num_tokens, :]) for keys, values in self.layers])


@dataclass(frozen=True)
class Start:
    """A sequence to decode."""

    context: tuple[int, ...]  # one object for sequences in a row shares a prefill
    stream: np.ndarray | None  # [max_new_tokens] uniforms; None for greedy decoding
    max_new_tokens: int
    stop_token_ids: frozenset[int]
    cached: Cached | None = None  # cache for the context's first tokens; at least one token follows


@dataclass
class _Row:
    """A sequence in a batch. A finished sequence may stay there for a while, and its further tokens are ignored."""

    slot: int
    start: Start
    tokens: list[int] = field(default_factory=list)  # sampled so far
    logprobs: list[float] = field(default_factory=list)
    experts: list[Tensor] = field(default_factory=list)  # experts for tokens that the model has read, if recorded
    is_live: bool = True

    @property
    def uniform(self) -> float:
        """Return the number that selects the next token."""
        assert self.start.stream is not None
        return float(self.start.stream[min(len(self.tokens), self.start.max_new_tokens - 1)])


class Decoder:
    """Decodes sequences together. Each sequence has a slot, a number that the caller chooses."""

    def __init__(self, model: Any, sampling: Sampling, recorder: RouteRecorder | None = None) -> None:
        """`recorder` records experts. Contexts must not have a cache then."""
        self.num_steps = 0
        self._model, self._sampling, self._recorder = model, sampling, recorder
        self._cohorts: list[_Cohort] = []
        self._rows: dict[int, _Row] = {}  # by slot
        self._ended: dict[int, tuple[_Cohort, int]] = {}  # cohort and row per slot that ended in the last step

    @property
    def is_running(self) -> bool:
        return bool(self._cohorts)

    @property
    def live_slots(self) -> list[int]:
        return [row.slot for cohort in self._cohorts for row in cohort.rows if row.is_live]

    def add(self, starts: Mapping[int, Start]) -> None:
        """Prefill the contexts of new sequences, keyed by slot, as a new cohort."""
        rows = [_Row(slot, start) for slot, start in starts.items()]
        self._rows |= {row.slot: row for row in rows}
        self._cohorts.append(_Cohort.prefill(self._model, rows, self._recorder))
        for row in rows:
            row.start = replace(row.start, cached=None)  # the cohort has a copy

    def join(self, starts: Mapping[int, Start]) -> None:
        """Let new sequences, keyed by slot, join the running ones in one cohort. Sort them by length before."""
        for part in _prefills(starts):
            self.add(part)
        self._cohorts = [_merged(self._cohorts)]

    def cancel(self, slots: Collection[int]) -> None:
        """Stop decoding the sequences in these slots."""
        for slot in slots:
            self._rows[slot].is_live = False
        self._drop_finished_cohorts()

    def sample(self) -> list[tuple[int, Literal["stop", "length"]]]:
        """Sample one token per sequence. Return the slots whose sequences ended, with the reason."""
        ended = list[tuple[int, Literal["stop", "length"]]]()
        sampling = self._sampling
        self._ended = {}
        for cohort in self._cohorts:
            uniform = None
            if sampling.temperature > 0:
                numbers = [row.uniform for row in cohort.rows]
                uniform = torch.tensor(numbers, dtype=torch.float64, device=self._model.device)
            tokens, logprobs = draw(
                cohort.logits, uniform, temperature=sampling.temperature, top_p=sampling.top_p, top_k=sampling.top_k
            )
            sampled = zip(cohort.rows, tokens.tolist(), logprobs.tolist(), strict=True)
            for number, (row, token, logprob) in enumerate(sampled):
                row.tokens.append(token)
                row.logprobs.append(logprob)
                has_stopped = token in row.start.stop_token_ids
                if row.is_live and (has_stopped or len(row.tokens) == row.start.max_new_tokens):
                    row.is_live = False
                    ended.append((row.slot, "stop" if has_stopped else "length"))
                    self._ended[row.slot] = cohort, number
        self.num_steps += 1
        self._drop_finished_cohorts()
        return ended

    def advance(self) -> None:
        """Feed the sampled tokens to the model."""
        for cohort in self._cohorts:
            cohort.advance(self._model, self._recorder)

    def found(self, slot: int) -> tuple[list[int], list[float]]:
        """Return tokens and log-probs for a slot's sequence, which has just ended or is live."""
        row = self._rows[slot]
        return list(row.tokens), list(row.logprobs)

    def experts(self, slot: int) -> Tensor:
        """Return the recorded experts [tokens, MoE layers, top_k] int16 for all tokens but the last, on the CPU."""
        return torch.cat(self._rows[slot].experts).cpu()

    def cached(self, slot: int) -> Cached | None:
        """Return the cache for a sequence that ended in the last step: context and sampled tokens, without the last.

        Call this before `advance`. Return None if a layer has another kind of cache, such as a sliding window.
        """
        cohort, row = self._ended[slot]
        if any(type(layer) is not DynamicLayer for layer in cohort.cache.layers):
            return None
        start = cohort.mask.shape[1] - int(cohort.mask[row].sum())
        own = slice(row, row + 1), slice(None), slice(start, None)
        return Cached([(layer.keys[own].clone(), layer.values[own].clone()) for layer in cohort.cache.layers])

    def _drop_finished_cohorts(self) -> None:
        self._cohorts = [cohort for cohort in self._cohorts if cohort.num_live]


@dataclass
class _Cohort:
    """Sequences with a common cache: the model's inputs for their next tokens."""

    cache: DynamicCache
    mask: Tensor  # [B, tokens so far]; 0 on the left padding
    logits: Tensor  # [B, vocab] logits for the next token
    rows: list[_Row]

    @property
    def num_live(self) -> int:
        return sum(row.is_live for row in self.rows)

    @classmethod
    def prefill(cls, model: Any, rows: list[_Row], recorder: RouteRecorder | None) -> _Cohort:
        """Run each context once and copy its cache for all sequences in a row that have it."""
        firsts: list[Start] = []  # the first start per context
        source: list[int] = []
        for start in (row.start for row in rows):
            if not firsts or start.context is not firsts[-1].context:
                firsts.append(start)
            source.append(len(firsts) - 1)
        device, cache = model.device, new_cache(model.config)
        num_cached = [start.cached.num_tokens if start.cached else 0 for start in firsts]
        width = max(num_cached)  # columns of cached tokens; new tokens follow, and both have padding on the left
        new = [torch.tensor(start.context[num:]) for start, num in zip(firsts, num_cached, strict=True)]
        masks = [torch.ones(num, dtype=torch.int64) for num in num_cached], [torch.ones_like(tokens) for tokens in new]
        ids, mask = _left_padded(new).to(device), torch.cat(list(map(_left_padded, masks)), dim=1).to(device)
        positions = (mask.cumsum(dim=1) - 1).clamp_(min=0)[:, width:]
        if width:
            _fill(cache, [start.cached for start in firsts], width)
        out = model(
            input_ids=ids,
            attention_mask=mask,
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        if recorder is not None:
            experts = recorder.take(len(firsts))
            for row, number in zip(rows, source, strict=True):
                row.experts.append(experts[number, -len(row.start.context) :])
        if width:
            mask = _moved_left(cache, mask)
        source_B = torch.tensor(source, device=device)
        cache.reorder_cache(source_B)
        return cls(cache, mask[source_B], out.logits[source_B, -1], rows)

    def advance(self, model: Any, recorder: RouteRecorder | None) -> None:
        """Feed the sampled tokens. First drop finished sequences from the cache, if there are enough of them."""
        if self.num_live < COMPACT_BELOW * len(self.rows):
            self.drop_finished()
        self.mask = torch.cat((self.mask, self.mask.new_ones(len(self.mask), 1)), dim=1)
        out = model(
            input_ids=torch.tensor([row.tokens[-1:] for row in self.rows], device=model.device),
            attention_mask=self.mask,
            position_ids=self.mask.sum(dim=1, keepdim=True) - 1,
            past_key_values=self.cache,
            use_cache=True,
        )
        self.logits = out.logits[:, -1]
        if recorder is not None:
            for row, experts in zip(self.rows, recorder.take(len(self.rows)), strict=True):
                row.experts.append(experts)

    def drop_finished(self) -> None:
        keep = torch.tensor([number for number, row in enumerate(self.rows) if row.is_live], device=self.mask.device)
        self.cache.reorder_cache(keep)
        self.mask, self.logits = self.mask[keep], self.logits[keep]
        self.rows = [row for row in self.rows if row.is_live]


def _left_padded(rows: Sequence[Tensor]) -> Tensor:
    return pad_sequence(rows, batch_first=True, padding_side="left")  # type: ignore[arg-type]


def _merged(cohorts: Sequence[_Cohort]) -> _Cohort:
    """Merge the live sequences into one cohort, without unneeded padding."""
    for cohort in cohorts:
        cohort.drop_finished()
    lengths = [int(cohort.mask.sum(dim=1).max()) for cohort in cohorts]
    width = max(lengths)
    cache = cohorts[0].cache
    for layer, *others in zip(*(cohort.cache.layers for cohort in cohorts), strict=True):
        if isinstance(layer, LinearState):
            layer.append(others)
            continue
        layer_width = width
        if layer.is_sliding:  # it has the last tokens only, but counts all of them
            layer_width, layer.cumulative_length = min(width, layer.sliding_window - 1), width
        layer.keys = torch.cat([_fitted(one.keys, layer_width) for one in (layer, *others)])
        layer.values = torch.cat([_fitted(one.values, layer_width) for one in (layer, *others)])
    return _Cohort(
        cache,
        mask=torch.cat([F.pad(cohort.mask, (width - cohort.mask.shape[1], 0)) for cohort in cohorts]),
        logits=torch.cat([cohort.logits for cohort in cohorts]),
        rows=[row for cohort in cohorts for row in cohort.rows],
    )


def _fitted(cached: Tensor, width: int) -> Tensor:
    """Return [B, heads, width, head size]: the last tokens in `cached`, padded on the left if there are too few."""
    return F.pad(cached, (0, 0, width - cached.shape[-2], 0))


def _fill(cache: DynamicCache, parts: Sequence[Cached | None], width: int) -> None:
    """Fill an empty cache with these caches, one per row, padded on the left to `width`."""
    some = next(part for part in parts if part is not None)
    filled = [part or some.first(0) for part in parts]
    for number in range(len(some.layers)):
        pairs = zip(*(part.layers[number] for part in filled), strict=True)
        cache.update(*(torch.cat([_fitted(one, width) for one in of_rows]) for of_rows in pairs), number)


def _moved_left(cache: DynamicCache, mask: Tensor) -> Tensor:
    """Move all padding in a cache to the left, and drop columns that no row needs. Return the moved cache's mask."""
    kept = mask.argsort(dim=1, stable=True)[:, mask.shape[1] - int(mask.sum(dim=1).max()) :]
    for layer in cache.layers:
        layer.keys = layer.keys.take_along_dim(kept[:, None, :, None], 2)
        layer.values = layer.values.take_along_dim(kept[:, None, :, None], 2)
    return mask.gather(1, kept)


def _prefills(starts: Mapping[int, Start]) -> Iterator[dict[int, Start]]:
    """Divide sequences sorted by length into parts with at most PREFILL_TOKENS tokens, including padding."""
    part = dict[int, Start]()
    for slot, start in starts.items():
        if part and (len(part) + 1) * len(start.context) > PREFILL_TOKENS:
            yield part
            part = {}
        part[slot] = start
    if part:
        yield part


_BLOCK = 256  # tokens per partial sum; only these sums need double precision, not the whole vocabulary


def uniforms(*numbers: int, length: int) -> np.ndarray:
    """Return [length] float64 in [0, 1): the random stream (Philox) for a sample or a turn in its conversation.

    It depends only on `numbers`: seed, step, prompt id and sample index, and for a turn its context's checksum. A
    shorter stream is a prefix of a longer one.
    """
    return np.random.Generator(np.random.Philox(np.random.SeedSequence(numbers))).random(length)


def draw(
    logits_BV: Tensor, uniform_B: Tensor | None, *, temperature: float, top_p: float, top_k: int
) -> tuple[Tensor, Tensor]:
    """Return the next tokens [B] and their log-probs [B] float32.

    Log-probs are log-softmax(logits / temperature), before top-p and top-k, as in the trainer. The token is the inverse
    of the cumulative distribution at `uniform_B`. Without `uniform_B`, or at temperature 0, it is the most likely
    token. If logits contain NaN, it is any token in the vocabulary, with log-prob NaN.
    """
    scaled_BV = logits_BV.float() if temperature in (0, 1) else logits_BV.float() / temperature
    max_B1 = scaled_BV.amax(dim=-1, keepdim=True)
    num_rows, vocab = scaled_BV.shape
    num_blocks = -(-vocab // _BLOCK)
    # exp(logits) in blocks, padded with zeros after the vocabulary
    masses_BW = scaled_BV.new_zeros((num_rows, num_blocks * _BLOCK))
    torch.exp(scaled_BV - max_B1, out=masses_BW[:, :vocab])
    masses_BNK = masses_BW.view(num_rows, num_blocks, _BLOCK)
    sums_BN = masses_BNK.sum(dim=-1).double()
    log_total_B = sums_BN.sum(dim=-1).log()
    if uniform_B is None or temperature == 0:
        tokens = scaled_BV.argmax(dim=-1)
    else:
        if top_p < 1 or 0 < top_k < vocab:
            masses_BNK = _filtered(masses_BNK.flatten(1), top_p, top_k).view_as(masses_BNK)
            sums_BN = masses_BNK.sum(dim=-1).double()
        tokens = _locate(masses_BNK, sums_BN, uniform_B.to(sums_BN.device)).clamp_(max=vocab - 1)
    chosen_B1 = scaled_BV.gather(1, tokens[:, None]) - max_B1
    return tokens, (chosen_B1.squeeze(1).double() - log_total_B).float()


def _locate(masses_BNK: Tensor, sums_BN: Tensor, uniform_B: Tensor) -> Tensor:
    """Return the tokens [B] at `uniform_B` in the cumulative distribution, never a token without mass.

    Find the block first, then the token within the block.
    """
    cumulative_BN = sums_BN.cumsum(dim=-1)
    block_B1, wanted_B1 = _search(cumulative_BN, uniform_B[:, None] * cumulative_BN[:, -1:])
    before_B1 = cumulative_BN.gather(1, block_B1) - sums_BN.gather(1, block_B1)
    within_BK = masses_BNK.take_along_dim(block_B1[:, :, None], 1).squeeze(1).double().cumsum(dim=-1)
    # A block's sum was rounded in float32; the sum within the block is in double precision.
    share_B1 = (wanted_B1 - before_B1) / sums_BN.gather(1, block_B1)
    place_B1, _ = _search(within_BK, share_B1.clamp(min=0) * within_BK[:, -1:])
    return (block_B1 * _BLOCK + place_B1).squeeze(1)


def _search(cumulative_BX: Tensor, wanted_B1: Tensor) -> tuple[Tensor, Tensor]:
    """Return the first index [B, 1] with a cumulative mass above the wanted mass, and the wanted mass, kept below the
    total.
    """
    whole_B1 = cumulative_BX[:, -1:]
    wanted_B1 = torch.minimum(wanted_B1, torch.nextafter(whole_B1, torch.zeros_like(whole_B1)))
    # If the masses are NaN, searchsorted returns an index beyond the end.
    return torch.searchsorted(cumulative_BX, wanted_B1, right=True).clamp_(max=cumulative_BX.shape[-1] - 1), wanted_B1


def _filtered(probs_BV: Tensor, top_p: float, top_k: int) -> Tensor:
    """Set masses to zero outside top-k, and outside the smallest set whose share of the mass is top-p, as SGLang."""
    ordered, index = probs_BV.sort(dim=-1, descending=True)
    before = ordered.cumsum(dim=-1) - ordered
    ordered[before >= top_p * ordered.sum(dim=-1, keepdim=True)] = 0
    if top_k:
        ordered[:, top_k:] = 0
    return torch.zeros_like(probs_BV).scatter_(1, index, ordered)
