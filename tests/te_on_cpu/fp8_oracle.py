"""FP8 by definition, in float64 with numpy: the numbers of a format, rounding to the nearest number, scales per block.

It shares no code with the tested modules: it uses neither torch's FP8 dtypes nor the emulated extension.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

Float = NDArray[np.float64]
Bits = NDArray[np.uint8]


@dataclass(frozen=True)
class Format:
    exponent_bits: int
    mantissa_bits: int
    bias: int
    largest: float

    @cached_property
    def magnitudes(self) -> Float:
        """Return the finite non-negative numbers, in the order of their codes."""
        found = []
        for code in range(2 ** (self.exponent_bits + self.mantissa_bits)):
            exponent, mantissa = divmod(code, 2**self.mantissa_bits)
            fraction = mantissa / 2**self.mantissa_bits
            value = (fraction if exponent == 0 else 1 + fraction) * 2.0 ** (max(exponent, 1) - self.bias)
            if value <= self.largest:
                found.append(value)
        return np.array(found)

    def encode(self, values: Float) -> Bits:
        """Return the code of the nearest number: the even code on a tie, the largest finite code above the range."""
        magnitude = np.minimum(np.abs(values), self.largest)
        above = np.searchsorted(self.magnitudes, magnitude).clip(1, len(self.magnitudes) - 1)
        below = above - 1
        up, down = self.magnitudes[above] - magnitude, magnitude - self.magnitudes[below]
        code = np.where((up < down) | ((up == down) & (above % 2 == 0)), above, below)
        return (code + np.where(np.signbit(values), 128, 0)).astype(np.uint8)

    def decode(self, bits: Bits) -> Float:
        return np.where(bits >= 128, -1.0, 1.0) * self.magnitudes[bits % 128]


FORMATS = {"e4m3": Format(4, 3, 7, 448.0), "e5m2": Format(5, 2, 15, 57344.0)}


def to_fp32(values: Float) -> Float:
    """Round float64 numbers to float32, which is the only rounding of a product or quotient of two float32 numbers."""
    with np.errstate(over="ignore"):
        return values.astype(np.float32).astype(np.float64)


def scale_of(
    amax: float, form: Format, *, pow_2: bool = False, at_infinity: float = float(np.finfo(np.float32).max)
) -> float:
    """Return the float32 scale for a largest magnitude; 1 for zero, infinity and NaN."""
    if amax == 0 or not np.isfinite(amax):
        return 1.0
    scale = float(to_fp32(np.array(form.largest) / amax))
    if np.isinf(scale):
        scale = at_infinity
    return float(2.0 ** (np.frexp(scale)[1] - 1)) if pow_2 else scale


def quantise(values: Float, form: Format, scale: float | Float) -> Bits:
    return form.encode(to_fp32(values * scale))


def quantise_blocks(
    values: Float, form: Format, height: int, width: int, *, pow_2: bool, at_infinity: float
) -> tuple[Bits, Float]:
    """Return the bits of a matrix [rows, cols] and the float32 inverse scale of each [height, width] block."""
    rows, cols = values.shape
    bits = np.zeros((rows, cols), dtype=np.uint8)
    inverses = np.zeros((-(-rows // height), -(-cols // width)))
    for i, j in np.ndindex(*inverses.shape):
        part = np.s_[i * height : (i + 1) * height, j * width : (j + 1) * width]
        scale = scale_of(float(np.abs(values[part]).max()), form, pow_2=pow_2, at_infinity=at_infinity)
        bits[part] = quantise(values[part], form, scale)
        inverses[i, j] = to_fp32(np.array(1 / scale))
    return bits, inverses
