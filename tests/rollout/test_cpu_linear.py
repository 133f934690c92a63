"""Linear layers for decoding on a CPU against torch's product, at sizes below and above the tile and row sizes."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from grpo_mega.rollout.embedded import model as models


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("out", [3, models._TILE, models._TILE + 5])
@pytest.mark.parametrize("shape", [(1, 1), (3, 1), (15, 1), (models.MOST_ROWS, 1), (5, 3), (2, models.MOST_ROWS)])
def test_the_product_equals_torchs(shape: tuple[int, int], out: int, has_bias: bool) -> None:
    torch.manual_seed(0)
    layer = nn.Linear(16, out, bias=has_bias, dtype=torch.float64)
    x = torch.randn(*shape, 16, dtype=torch.float64)
    with torch.inference_mode():
        torch.testing.assert_close(models.linear(layer, x), layer(x))


def test_only_linear_layers_are_replaced() -> None:
    class Own(nn.Linear):
        pass

    model = nn.Sequential(nn.Linear(2, 2), Own(2, 2), nn.LayerNorm(2))
    models.speed_up(model)
    assert ["forward" in vars(module) for module in model] == [True, False, False]
