"""A patch of the models of transformers 5.12. tests/rollout/test_embedded.py fails when the patch is no longer
needed.
"""

from __future__ import annotations

import math
from typing import Any


def scale_attention(model: Any) -> None:
    """Multiply the scale of DeepSeek-V2's attention by the square of YaRN's mscale, as DeepSeek's own code does.

    transformers applies this factor only to DeepSeek-V3.
    """
    rope = model.config.rope_parameters
    if model.config.model_type != "deepseek_v2" or not rope.get("mscale_all_dim") or rope["factor"] <= 1:
        return
    mscale = 0.1 * rope["mscale_all_dim"] * math.log(rope["factor"]) + 1
    for layer in model.model.layers:
        layer.self_attn.scaling *= mscale**2
