"""Samples as arrays and JSON, for the exchange between ranks and for the backlog's file.

Tokens, log-probs and routes of all samples are three arrays, one sample after another. The other fields are one JSON object per
sample. Prompts are not included.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from grpo_mega.types import Prompt, Routes, Sample, Span

FIELDS = ("index", "finish_reason", "scores", "verdicts", "reward", "step_ends", "step_rewards")
TOKENS, LOGPROBS, ROUTES = "tokens", "logprobs", "routes"  # names of the arrays


def arrays_of(samples: Sequence[Sample]) -> dict[str, NDArray[Any]]:
    """Return tokens [T] int32, log-probs [T] float32 and, if there are any, routes [tokens, layers, experts per token]."""
    arrays: dict[str, NDArray[Any]] = {
        TOKENS: np.fromiter(chain.from_iterable(s.response_ids for s in samples), np.int32),
        LOGPROBS: np.fromiter(chain.from_iterable(s.rollout_logprobs for s in samples), np.float32),
    }
    if routes := [s.routes.experts for s in samples if s.routes]:
        arrays[ROUTES] = np.concatenate(routes)
    return arrays


def fields_of(sample: Sample) -> dict[str, Any]:
    """Return the fields that are not in the arrays, and the sample's lengths in the arrays, as JSON values."""
    fields = {name: getattr(sample, name) for name in FIELDS} | {"length": sample.response_len, "spans": list(sample.spans)}
    if sample.routes:
        fields |= {"routed": len(sample.routes.experts), "routes_checksum": sample.routes.checksum}
    return fields


def samples_of(arrays: Mapping[str, NDArray[Any]], rows: Iterable[tuple[Prompt, Mapping[str, Any]]]) -> Iterator[Sample]:
    """Yield the samples. `rows` has the prompt and fields of each, in the order of the arrays.

    Raise ValueError if the lengths differ.
    """
    tokens, logprobs = array("i", arrays[TOKENS].tobytes()), array("f", arrays[LOGPROBS].tobytes())
    start = num_routed = 0
    for prompt, fields in rows:
        end = start + fields["length"]
        kept: dict[str, Any] = {name: fields[name] for name in FIELDS} | {"spans": [Span(*span) for span in fields["spans"]]}
        if "routed" in fields:
            experts = arrays[ROUTES][num_routed : num_routed + fields["routed"]]
            kept["routes"] = Routes(experts, fields["routes_checksum"])
            num_routed += fields["routed"]
        yield Sample(prompt=prompt, response_ids=tokens[start:end], rollout_logprobs=logprobs[start:end], **kept)
        start = end
    if start != len(tokens) or start != len(logprobs):
        raise ValueError(f"{len(tokens)} tokens and {len(logprobs)} log-probs of samples with {start}")
