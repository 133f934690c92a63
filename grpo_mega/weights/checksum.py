"""A checksum of a tensor's bytes that is the same on every device and in every process. Needs only torch.

The elements in their logical order, as bytes, are read as 64-bit little-endian words w_0, w_1, ... (the last word is
filled up with zeros). Modulo 2^64, with BLOCK = 2^20 words, the odd constant A, and `mix(x) = x ^ (x >> 32)` with a
logical shift:

    m_j   = mix(A * (j + 1)) * A | 1                  j = 0 .. BLOCK - 1; odd and without a pattern
    s_b   = sum over j of m_j * mix(A * w_(b BLOCK + j))
    total = (...(num_bytes * A + s_0) * A + s_1 ...) * A + s_last

Each step is a bijection of each single word, because A and m_j are odd. So a change within one word always changes the
checksum. Any other change, such as words in another order, goes unseen with a chance of at most about 2^-32.
"""

from __future__ import annotations

from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

BLOCK = 1 << 20  # words per run of multipliers; part of the definition
_CPU_STEP = 1 << 17  # words per step, small enough for a core's cache
_HALF = (1 << 32) - 1
_A = 0x9E3779B97F4A7C15 - (1 << 64)  # the bits of the golden ratio, as a signed number


@torch.no_grad()
def checksum(tensor: Tensor) -> Tensor:
    """Return a 0-d int64 tensor on the tensor's device, without waiting for it. Any shape, strides and dtype work."""
    data = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    multipliers = _multipliers(BLOCK, data.device)
    step = BLOCK if data.is_cuda else _CPU_STEP
    total = torch.full((), data.numel(), dtype=torch.int64, device=data.device)
    for begin in range(0, data.numel(), 8 * BLOCK):
        total.mul_(_A)
        block = data[begin : begin + 8 * BLOCK]
        for start in range(0, block.numel(), 8 * step):
            part = block[start : start + 8 * step]
            if part.numel() % 8 or part.data_ptr() % 8 or part.storage_offset() % 8:  # no view as int64
                part = F.pad(part, (0, -part.numel() % 8))
            words = _mix(part.view(torch.int64).mul(_A))
            first = start // 8
            total.add_(words.mul_(multipliers[first : first + words.numel()]).sum())
    return total


def _mix(words: Tensor) -> Tensor:
    """Mix in place. The mask turns the arithmetic shift into a logical one."""
    return words.bitwise_xor_((words >> 32).bitwise_and_(_HALF))


@cache
def _multipliers(count: int, device: torch.device) -> Tensor:
    """Return [count] int64, made on the CPU so that every stream of the device may use them."""
    return _mix(torch.arange(1, count + 1).mul_(_A)).mul_(_A).bitwise_or_(1).to(device)
