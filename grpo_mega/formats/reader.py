"""Slices of a Megatron distributed checkpoint under Hugging Face names: what training reads a model from, in any layout."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from grpo_mega.errors import WeightMappingError
from grpo_mega.formats.dcp_read import is_distributed_checkpoint
from grpo_mega.formats.hf_files import check_shapes
from grpo_mega.formats.hf_io import CheckpointReader
from grpo_mega.formats.megatron_weights import MegatronWeights
from grpo_mega.formats.slices import target_of
from grpo_mega.formats.sources import Files
from grpo_mega.formats.stream import Streamer, has_nonfinite, torch_dtype
from grpo_mega.weights.boxes import Box, Index, Piece
from grpo_mega.weights.spec import Family, ModelShape


class MegatronReader:
    """Reads as `CheckpointReader` does, and raises what it raises. A context manager."""

    def __init__(self, folder: Path, family: Family, shape: ModelShape) -> None:
        self._weights = MegatronWeights(folder, family, shape)
        self._files = Files()
        self._streamer = Streamer(self._files)

    def __enter__(self) -> MegatronReader:
        return self

    def __exit__(self, *exc: object) -> None:
        self._files.close()
        self._weights.close()

    @property
    def names(self) -> set[str]:
        return set(self._weights.shapes())

    def shape(self, name: str) -> Index:
        return self._weights.shapes()[name]

    def read(self, box: Box) -> Tensor:
        """The box's elements in the checkpoint's dtype. Raises WeightMappingError if one of them is NaN or infinite."""
        target = target_of(box.tensor, box.shape, (Piece(box, "", (0,) * len(box.shape)),), self._weights, None)
        values = torch.empty(box.shape, dtype=torch_dtype(target.dtype))
        data, offset = values.view(-1).view(torch.uint8), 0
        for block in self._streamer.blocks(target):
            if has_nonfinite(block, target.dtype):
                raise WeightMappingError(
                    f"{self._weights.folder}: {box.tensor} holds NaN or infinity; take another checkpoint or convert it again"
                )
            data[offset : offset + len(block)].copy_(torch.frombuffer(block, dtype=torch.uint8))
            offset += len(block)
        return values

    def check(self, expected: Mapping[str, Index]) -> None:
        """Raises WeightMappingError for the first tensor that is missing, has a wrong shape, or is not known."""
        check_shapes(self._weights.folder, self._weights.shapes(), expected)


def open_reader(folder: Path, family: Family, shape: ModelShape) -> CheckpointReader | MegatronReader:
    """The reader of a model's folder, whichever form its weights have. Raises WeightMappingError."""
    return MegatronReader(folder, family, shape) if is_distributed_checkpoint(folder) else CheckpointReader(folder)
