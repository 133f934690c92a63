"""Records the experts that transformers' own routers choose for the sequences of a batch."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from grpo_mega.rollout.routes import RouterSizes, extended
from grpo_mega.types import Routes, Sample


class Recorder:
    """While it is on, it must be told after every forward pass what that was: `prefilled` or `fed`."""

    def __init__(self, model: Any, routers: RouterSizes | None) -> None:
        """`routers`: those of the model; None for a dense one."""
        self._routers, self._is_on = routers, False
        blocks = [layer.mlp.experts for layer in model.model.layers if hasattr(layer.mlp, "experts")]
        self._chosen: list[Tensor | None] = [None] * len(blocks)  # of the last forward pass, by layer
        for number, experts in enumerate(blocks):
            experts.register_forward_pre_hook(partial(self._note, number))

    def begin(self, num_sequences: int, longest: int, device: torch.device, *, is_on: bool) -> None:
        """Begin a batch, in which each sequence is fed fewer than `longest` tokens after its context."""
        self._is_on = is_on and self._routers is not None
        if self._routers and self._is_on:
            of_token = (len(self._chosen), self._routers.top_k)
            self._contexts: list[Tensor] = [torch.empty(0)] * num_sequences
            self._fed_BT = torch.empty((num_sequences, longest, *of_token), dtype=torch.int16, device=device)

    def prefilled(self, rows: Sequence[int], source: Sequence[int], lengths: Sequence[int]) -> None:
        """The model has read contexts of these lengths, padded on the left; `source`: which of them is that of each row."""
        if self._is_on:
            taken = self._take(len(lengths))
            for row, context in zip(rows, source, strict=True):
                self._contexts[row] = taken[context, taken.shape[1] - lengths[context] :]

    def fed(self, rows: Tensor, position: int) -> None:
        """The model has read the token of these rows at this position after their contexts."""
        if self._is_on:
            self._fed_BT[rows, position] = self._take(len(rows))[:, 0]

    def routes(self, row: int, sample: Sample, num_fed: int) -> Routes | None:
        """Return the sample's routes with those of its context and of the tokens fed; as they are if this is off."""
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
        assert len(layers) == len(self._chosen), "a layer did not tell its experts"
        self._chosen = [None] * len(layers)
        return torch.stack(layers, dim=1).short().unflatten(0, (num_sequences, -1))
