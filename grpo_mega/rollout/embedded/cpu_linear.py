"""Linear layers on a CPU for the few rows of decoding. They multiply one tile of the weight's rows at a time.

torch takes up to twice as long for 16 rows and a whole vocabulary, because its library is tuned for products of many rows.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

MOST_ROWS = 64  # with more rows torch is as fast
_TILE = 4096  # weight rows per tile


def speed_up(model: nn.Module) -> None:
    """Replace the forward of every linear layer of an untrained model by `linear`."""
    for module in model.modules():
        if type(module) is nn.Linear:
            module.forward = partial(linear, module)  # type: ignore[method-assign]


def linear(layer: nn.Linear, x: Tensor) -> Tensor:
    """Apply a layer to [..., in] and return [..., out]. Devices other than the CPU use torch's product."""
    rows_RI = x.reshape(-1, x.shape[-1])
    num_rows = len(rows_RI)
    if num_rows > MOST_ROWS or x.device.type != "cpu":
        return F.linear(x, layer.weight, layer.bias)
    rows_RI = F.pad(rows_RI, (0, 0, 0, _padded(num_rows) - num_rows))
    out_OR = torch.empty((layer.out_features, len(rows_RI)), dtype=x.dtype, device=x.device)
    for weight_oI, out_oR in zip(layer.weight.split(_TILE), out_OR.split(_TILE), strict=True):
        torch.mm(weight_oI, rows_RI.t(), out=out_oR)
    out_RO = out_OR[:, :num_rows].t().contiguous()
    if layer.bias is not None:
        out_RO += layer.bias
    return out_RO.view(*x.shape[:-1], -1)


def _padded(num_rows: int) -> int:
    """Round up to 1, 2, 4, 8 or a multiple of 16, because 15 rows take twice as long as 16."""
    return -(-num_rows // 16) * 16 if num_rows > 8 else 1 << max(num_rows - 1, 0).bit_length()
