"""A checksum of a tensor's bytes that is the same on every device and in every process. Needs only torch.

The elements in their logical order, as bytes, are read as 64-bit little-endian words w_0, w_1, ... (the last word is
filled up with zeros). Modulo 2^64, with BLOCK = 2^17 words, the odd constant A, and the logical shift >>:

    m_j   = mix(A * (j + 1)) * A | 1                  j = 0 .. BLOCK - 1, mix(x) = x ^ (x >> 32); odd, without a pattern
    s_b   = sum over j of m_j * spread(w_(b BLOCK + j)),  spread(w) = w ^ (w >> 37)
    total = (...(num_bytes * A + s_0) * A + s_1 ...) * A + s_last

Each step is a bijection of each single word, because A and m_j are odd. So a change within one word always changes the
checksum. Any other change, such as words in another order, goes unseen with a chance of at most about 2^-32.

`spread` is necessary, because a product with 2^63 is the same for every odd m_j. It copies the upper bits of a word to
the lower ones. 37 is coprime to the widths of elements, so equal changes of all elements of a word do not cancel out.

A CPU's speed is limited by passes over its cache, a GPU's by passes over its memory and by launches. There are five
passes, of which a CPU's `dot` combines two. A CPU takes a block at a time, which fits its cache, and copies only a
block's rows of a tensor that is not contiguous.
"""

import math
from collections.abc import Iterator
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

BLOCK = 1 << 17  # words per run of multipliers; part of the definition
_SHIFT = 37
_A = 0x9E3779B97F4A7C15 - (1 << 64)  # the bits of the golden ratio, as a signed number
_CPU_BLOCKS, _GPU_BLOCKS = 1, 32  # blocks at a time


@torch.no_grad()
def checksum(tensor: Tensor) -> Tensor:
    """Return a 0-d int64 tensor on the tensor's device, without waiting for it. Any shape, strides and dtype work."""
    multipliers, most = _multipliers(BLOCK, tensor.device), _GPU_BLOCKS if tensor.is_cuda else _CPU_BLOCKS
    total = torch.full((), tensor.numel() * tensor.element_size(), dtype=torch.int64, device=tensor.device)
    position = 0  # within the block
    for words in _pieces(tensor.detach(), most * BLOCK):
        while words.numel():
            num_blocks = 1 if position else max(1, min(words.numel() // BLOCK, most))
            part, words = words.tensor_split([num_blocks * BLOCK - position])
            spread = (part >> _SHIFT).bitwise_and_((1 << 64 - _SHIFT) - 1).bitwise_xor_(part)
            if position == 0:
                total.mul_(_power(num_blocks))
            if num_blocks > 1:
                sums = spread.view(num_blocks, BLOCK).mul_(multipliers).sum(dim=1)
                total.add_(sums.mul_(_powers(num_blocks, tensor.device)).sum())
            else:
                used = multipliers[position : position + part.numel()]
                total.add_(spread.mul_(used).sum() if tensor.is_cuda else torch.dot(spread, used))
            position = (position + part.numel()) % BLOCK
    return total


def _pieces(data: Tensor, num_words: int) -> Iterator[Tensor]:
    """Yield the words [N] int64 of the data in order, in pieces of about `num_words`."""
    if data.is_cuda or data.is_contiguous():
        data = data.contiguous().view(-1).view(torch.uint8)
    row_bytes = data[:1].numel() * data.element_size()
    unit = 8 // math.gcd(8, row_bytes or 8)  # rows that fill whole words
    step = max(1, 8 * num_words // max(1, row_bytes * unit)) * unit
    for start in range(0, len(data), step):
        piece = data[start : start + step].contiguous().view(-1).view(torch.uint8)
        if piece.numel() % 8 or piece.data_ptr() % 8 or piece.storage_offset() % 8:  # no view as int64
            piece = F.pad(piece, (0, -piece.numel() % 8))
        yield piece.view(torch.int64)


@cache
def _multipliers(count: int, device: torch.device) -> Tensor:
    """Return [count] int64, made on the CPU so that every stream of the device may use them."""
    words = torch.arange(1, count + 1).mul_(_A)
    words.bitwise_xor_((words >> 32).bitwise_and_((1 << 32) - 1))  # the mask turns the shift into a logical one
    return words.mul_(_A).bitwise_or_(1).to(device)


@cache
def _powers(count: int, device: torch.device) -> Tensor:
    """Return A^(count - 1), ..., A, 1 as [count] int64."""
    return torch.tensor([_power(count - 1 - i) for i in range(count)], device=device)


def _power(exponent: int) -> int:
    """Return A^exponent modulo 2^64 as a signed number."""
    power = pow(_A, exponent, 1 << 64)
    return power - (power >> 63 << 64)
