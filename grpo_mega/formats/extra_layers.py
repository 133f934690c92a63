"""Layers for multi-token prediction (DeepSeek-V3, arXiv 2412.19437, section 2.2), which follow the others in a checkpoint.

They are neither trained nor served. Conversions keep them, and an exported policy has those of the model that it came from.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

_LAYER = re.compile(r"model\.layers\.\d+\.")
_MARK = "eh_proj.weight"  # of these layers alone: it joins a token's hidden state and the next token's embedding
KEY = "untouched."  # begins the keys of their tensors in a Megatron checkpoint


def extra_names(names: Iterable[str]) -> list[str]:
    """Return the names of such layers' tensors among those of a checkpoint's tensors, sorted."""
    known = set(names)
    layers = {name: match[0] for name in known if (match := _LAYER.match(name))}
    return sorted(name for name, layer in layers.items() if layer + _MARK in known)
