"""Layouts on 4 ranks. Tests compare the planner's arithmetic with their real state."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from grpo_mega.config import Config, validate


@dataclass(frozen=True)
class StateCase:
    """A model of tests/helpers/models.py in a layout."""

    family: str
    layout: dict[str, Any]
    dtype: str = "float32"
    tied: bool = False
    changes: dict[str, Any] = field(default_factory=dict)  # changes of the model's sizes
    recompute: str = "none"

    @property
    def name(self) -> str:
        parts = [self.family, self.dtype, "tied" if self.tied else "untied", self.recompute]
        parts += [f"{k}={v}" for k, v in {**self.layout, **self.changes}.items()]
        return " ".join(parts)

    @property
    def config(self) -> Config:
        return validate(
            {
                "run_dir": "unused",
                "steps": 4,
                "model": {"path": "unused", "dtype": self.dtype, "init": "random", "recompute": self.recompute},
                "layout": self.layout,
                "data": {"train": "unused", "max_prompt_length": 32},
                "rollout": {"max_response_length": 32},
                "batch": {"tokens_per_micro_batch": 512},
            }
        )


_OVERLAP = {"overlap_grad_reduce": True, "overlap_param_gather": True}
_ODD = {"vocab_size": 61, "hidden_size": 24, "head_dim": 6, "num_hidden_layers": 5}
_LAYOUTS: list[dict[str, Any]] = [
    {"dp": 4},
    {"dp": 4, **_OVERLAP},
    {"tp": 2, "dp": 2},
    {"tp": 2, "dp": 2, "sequence_parallel": True, **_OVERLAP},
    {"tp": 4, "sequence_parallel": True},
    {"pp": 2, "dp": 2},
    {"pp": 2, "dp": 2, "order": "tp-pp-dp", **_OVERLAP},
    {"pp": 4},
    {"tp": 2, "pp": 2},
    {"pp": 2, "vpp": 2, "dp": 2},
]

# Each layout with several kinds of models: both dtypes, tied and untied, odd sizes, biases and norms.
DENSE = [
    case
    for layout in _LAYOUTS
    for case in (
        StateCase("qwen2", layout, tied=True, changes={"num_key_value_heads": 4}),
        StateCase("llama", layout, "bfloat16", changes={**_ODD, "num_key_value_heads": 4}),
        StateCase("qwen3", layout, "bfloat16", tied=True, changes={"num_hidden_layers": 4, "vocab_size": 103}),
    )
]
UNEVEN = [
    StateCase("llama", {"pp": 2, "dp": 2, "layers_per_chunk": [3, 1]}),
    StateCase("llama", {"pp": 2, "vpp": 2, "tp": 2, "layers_per_chunk": [1, 2, 1, 1]}, "bfloat16", changes=_ODD),
]
MIXTURES = [
    StateCase("qwen3_moe", {"dp": 4}),
    StateCase("qwen3_moe", {"dp": 4, "ep": 2}, "bfloat16"),
    StateCase("qwen3_moe", {"dp": 4, "ep": 4, **_OVERLAP}),
    StateCase("mixtral", {"dp": 2, "ep": 2, "tp": 2, "sequence_parallel": True}, "bfloat16", tied=True),
    StateCase("mixtral", {"dp": 2, "ep": 2, "pp": 2}, "bfloat16"),
    StateCase("qwen3_moe", {"dp": 2, "ep": 2, "pp": 2, "vpp": 2}, tied=True),
    StateCase("mixtral", {"tp": 2, "dp": 2, "sequence_parallel": True}),
    StateCase("qwen3_moe", {"dp": 2, "pp": 2}, "bfloat16", tied=True),
    StateCase("mixtral", {"tp": 2, "etp": 2, "dp": 2, "ep": 2, "sequence_parallel": True}, "bfloat16", tied=True),
    StateCase("qwen3_moe", {"tp": 2, "ep": 4, "dp": 2, "sequence_parallel": True, **_OVERLAP}),
    StateCase("qwen3_5_moe_text", {"tp": 2, "ep": 4, "dp": 2, "sequence_parallel": True}, "bfloat16"),
    StateCase("qwen3_5_moe_text", {"pp": 2, "ep": 2, "dp": 2, **_OVERLAP}, tied=True),
    StateCase(
        "qwen3_moe",
        {"tp": 4, "etp": 2, "dp": 1, "sequence_parallel": True},
        "bfloat16",
        changes={"num_key_value_heads": 4},
    ),
]
CONTEXT = [
    StateCase("qwen2", {"cp": 2, "dp": 2, **_OVERLAP}, tied=True),
    StateCase("llama", {"cp": 4}, "bfloat16", changes=_ODD),
    StateCase("qwen3_moe", {"cp": 2, "dp": 2, "ep": 4}, "bfloat16"),
]
CASES = [*DENSE, *UNEVEN, *MIXTURES, *CONTEXT]

# Wide enough that most tensors saved by autograd are activations of layers.
_WIDE = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 8,
}
ACTIVATIONS = [
    StateCase("llama", layout, dtype, changes=_WIDE, recompute=recompute)
    for layout, dtype, recompute in (
        ({"dp": 4}, "float32", "none"),
        ({"dp": 4}, "bfloat16", "none"),
        ({"dp": 4}, "bfloat16", "selective"),
        ({"dp": 4}, "bfloat16", "full"),
        ({"tp": 2, "dp": 2}, "float32", "none"),
        ({"tp": 4, "sequence_parallel": True}, "float32", "none"),
        ({"tp": 4, "sequence_parallel": True}, "float32", "selective"),
        ({"tp": 4, "sequence_parallel": True}, "float32", "full"),
        ({"cp": 2, "tp": 2, "sequence_parallel": True}, "bfloat16", "none"),
        ({"cp": 4}, "bfloat16", "selective"),
    )
]
