"""Rows of samples.jsonl: a sample's text, rewards and per-token numbers.

`token_ends[i]` is the number of characters of `response` up to the end of token i. `rollout_logprobs` are the engine's
log-probs. `mismatch` is the trainer's old log-prob minus the engine's, omitted if the sample was not trained. `advantages` is
present only if they differ between tokens, and `spans` (version, first token, end) only with several policies. The first whole
groups of a step are logged; prompts come in random order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from grpo_mega.types import Group, Sample

Decode = Callable[[Sequence[int]], str]

_LOGPROB_DIGITS = 5  # decimal places
_REPLACEMENT = "\ufffd"  # decoded form of an incomplete character


def num_logged(groups: Sequence[Group], samples_per_step: int) -> int:
    """Return the number of logged samples: whole groups until there are at least `samples_per_step`."""
    count = 0
    for group in groups:
        if count >= samples_per_step:
            break
        count += len(group.samples)
    return count


class SampleRows:
    """Creates rows; caches the text of single tokens."""

    def __init__(self, samples_per_step: int) -> None:
        self._samples_per_step = samples_per_step
        self._texts: dict[int, str] = {}

    def of(self, step: int, groups: Sequence[Group], decode: Decode) -> list[dict[str, Any]]:
        """Return the rows of the logged samples of a step."""
        flat = [(group_index, sample) for group_index, group in enumerate(groups) for sample in group.samples]
        return [
            self._row(step, group_index, s, decode) for group_index, s in flat[: num_logged(groups, self._samples_per_step)]
        ]

    def _row(self, step: int, group_index: int, sample: Sample, decode: Decode) -> dict[str, Any]:
        response = decode(sample.response_ids)
        advantages = sample.advantages.tolist() if sample.advantages is not None else []
        row = {
            "step": step,
            "prompt_id": sample.prompt.id,
            "group": group_index,
            "index": sample.index,
            "policy_version": sample.policy_version,
            "prompt": sample.prompt.text,
            "response": response,
            "answer": sample.prompt.answer,
            "finish_reason": sample.finish_reason,
            "reward": sample.reward,
            "rewards": sample.scores,
            "verdicts": sample.verdicts,
            "advantage": sum(advantages) / len(advantages) if advantages else None,
            "token_ends": self._token_ends(sample.response_ids, response, decode),
            "rollout_logprobs": [round(v, _LOGPROB_DIGITS) for v in sample.rollout_logprobs],
        }
        if len(sample.spans) > 1:
            row["spans"] = [list(span) for span in sample.spans]
        if len(set(advantages)) > 1:
            row["advantages"] = [_short(v) for v in advantages]
        if sample.old_logprobs is not None:
            pairs = zip(sample.old_logprobs, sample.rollout_logprobs, strict=True)
            row["mismatch"] = [_short(old - rollout) for old, rollout in pairs]
        return row

    def _token_ends(self, token_ids: Sequence[int], text: str, decode: Decode) -> list[int] | None:
        texts = []
        for token in token_ids:
            if token not in self._texts:
                self._texts[token] = decode([token])
            texts.append(self._texts[token])
        return _ends(texts) if "".join(texts) == text else token_ends(token_ids, text, decode)


def token_ends(token_ids: Sequence[int], text: str, decode: Decode) -> list[int] | None:
    """Return the token ends for tokenizers whose token texts depend on their neighbours.

    Each token is decoded together with the few tokens before it. A character of several tokens belongs to the last one. Return
    None if the pieces do not add up to `text`.
    """
    texts = []
    start = told = 0  # tokens from `start` on are decoded; tokens before `told` already have their text
    for i in range(len(token_ids)):
        before, now = decode(token_ids[start:told]), decode(token_ids[start : i + 1])
        is_whole = not now.endswith(_REPLACEMENT) or i + 1 == len(token_ids)
        texts.append(now[len(before) :] if is_whole else "")
        if is_whole:
            start, told = told, i + 1
    return _ends(texts) if "".join(texts) == text else None


def _ends(texts: Sequence[str]) -> list[int]:
    ends, end = [], 0
    for text in texts:
        end += len(text)
        ends.append(end)
    return ends


def _short(value: float) -> float:
    """Round to three digits: enough for a colour, and a quarter of the file size."""
    return float(f"{value:.3g}")
