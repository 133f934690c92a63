"""`transformer_engine_torch`, the compiled extension of Transformer Engine, emulated in plain torch on a CPU.

Like csrc at v2.11, with the changes of v2.16 and v2.20 in separate modules: names, argument order, the buffers that
exist after quantization (on a Hopper card, of MXFP8 on a Blackwell card), layouts of scales, bits of FP8 casts, and
errors for inputs that cuBLASLt, cuDNN or a kernel refuses. Different: the order of additions, roundings inside kernels,
speed. Any other attribute raises NotImplementedError with its name.
"""

from __future__ import annotations

import importlib.machinery
import types
from typing import Any

from packaging.version import Version

from tests.te_on_cpu.emulated_te.extension import (
    attention,
    blocks,
    casts,
    context,
    missing,
    names,
    norms,
    optimizers,
    others,
    positions,
    products,
    since_2_16,
    since_2_20,
)

NAME = "transformer_engine_torch"
PARTS = (names, casts, blocks, products, norms, positions, attention, context, optimizers, others)
LATER = (("2.16", since_2_16), ("2.20", since_2_20))


class _Missing(NotImplementedError, AttributeError):
    """Also an AttributeError, so hasattr returns False."""


def module(version: str) -> types.ModuleType:
    """Return the emulated extension of a version. Put it into sys.modules under NAME before Transformer Engine is
    imported."""
    extension: Any = types.ModuleType(NAME, __doc__)
    extension.__spec__ = importlib.machinery.ModuleSpec(NAME, None)
    extension.__dict__.update(missing.functions())
    later = [part for first, part in LATER if Version(version) >= Version(first)]
    for part in (*PARTS, *later):
        own = {
            k: v
            for k, v in vars(part).items()
            if not k.startswith("_") and getattr(v, "__module__", None) == part.__name__
        }
        extension.__dict__.update(own)
    extension.__getattr__ = _raise
    return extension


def _raise(name: str) -> Any:
    raise _Missing(f"{NAME}.{name} is not emulated")
