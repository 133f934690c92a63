"""Layers for multi-token prediction (DeepSeek-V3, arXiv 2412.19437, section 2.2), stored after the other layers.

These layers are neither trained nor served. Conversions keep them. An exported policy gets them from its source model.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

_LAYER = re.compile(r"model\.layers\.\d+\.")
_MARK = "eh_proj.weight"  # only these layers have it: it joins a token's hidden state and the next token's embedding
KEY = "untouched."  # prefix of the keys of their tensors in a Megatron checkpoint


def extra_names(names: Iterable[str]) -> list[str]:
    """Return the sorted names of the tensors of such layers among `names`."""
    known = set(names)
    layers = {name: match[0] for name in known if (match := _LAYER.match(name))}
    return sorted(name for name, layer in layers.items() if layer + _MARK in known)
