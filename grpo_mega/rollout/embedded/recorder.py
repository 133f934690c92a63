"""Records the experts that the routers of a transformers model choose for the sequences of a batch."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from grpo_mega.rollout.routes import RouterSizes, extended
from grpo_mega.types import Routes, Sample


class Recorder:
    """Records experts by hooks. While it is on, the engine must call `prefilled` or `fed` after every forward pass."""

    def __init__(self, model: Any, routers: RouterSizes | None) -> None:
        """`routers`: the model's routers; None for a dense model."""
        self._routers, self._is_on = routers, False
        blocks = [layer.mlp.experts for layer in model.model.layers if hasattr(layer.mlp, "experts")]
        self._chosen: list[Tensor | None] = [None] * len(blocks)  # experts chosen in the last forward pass, by MoE layer
        for number, experts in enumerate(blocks):
            experts.register_forward_pre_hook(partial(self._note, number))

    def start(self, num_sequences: int, longest: int, device: torch.device, *, is_on: bool) -> None:
        """Start a batch. The model reads fewer than `longest` tokens of each sequence after its context."""
        self._is_on = is_on and self._routers is not None
        if self._routers and self._is_on:
            of_token = (len(self._chosen), self._routers.top_k)
            self._contexts: list[Tensor] = [torch.empty(0)] * num_sequences
            self._fed_BT = torch.empty((num_sequences, longest, *of_token), dtype=torch.int16, device=device)

    def prefilled(self, rows: Sequence[int], source: Sequence[int], lengths: Sequence[int]) -> None:
        """Record a prefill of contexts with these lengths, padded on the left. `source` has the index of each row's context."""
        if self._is_on:
            taken = self._take(len(lengths))
            for row, context in zip(rows, source, strict=True):
                self._contexts[row] = taken[context, taken.shape[1] - lengths[context] :]

    def fed(self, rows: Tensor, position: int) -> None:
        """Record that the model has read one token of each of these rows, at this position after the context."""
        if self._is_on:
            self._fed_BT[rows, position] = self._take(len(rows))[:, 0]

    def routes(self, row: int, sample: Sample, num_fed: int) -> Routes | None:
        """Return the sample's routes, extended by its context and the tokens fed. Return them unchanged if recording is off."""
        if not self._routers or not self._is_on:
            return sample.routes
        experts = torch.cat((self._contexts[row], self._fed_BT[row, :num_fed])).cpu().numpy()
        return extended(sample.routes, experts.astype(self._routers.dtype))

    def _note(self, number: int, module: Any, inputs: tuple[Tensor, ...]) -> None:
        if self._is_on:
            assert self._chosen[number] is None, "the experts of a forward pass were not taken"
            self._chosen[number] = inputs[1]

    def _take(self, num_sequences: int) -> Tensor:
        """Return the experts of the last forward pass [sequences, tokens, MoE layers, top_k] int16."""
        layers = [chosen for chosen in self._chosen if chosen is not None]
        assert len(layers) == len(self._chosen), "a layer did not report its experts"
        self._chosen = [None] * len(layers)
        return torch.stack(layers, dim=1).short().unflatten(0, (num_sequences, -1))
