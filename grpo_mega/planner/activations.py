"""Activations of a rank: what a layer saves for its backward pass, how many of them wait, and what work needs beside.

Two sets of formulas: Megatron's local layers with the parts of megatron/packed.py, and Transformer Engine's (te_layers.py).
Tests compare both with what autograd saves, except for mixtures of experts and MXFP8 ("unproven"). Elements are counted for one
micro-batch of `tokens` tokens; with sequence parallelism what lies between the layers is cut into tp parts.
"""

from __future__ import annotations

from dataclasses import dataclass

from grpo_mega.planner import te_layers
from grpo_mega.planner.figures import Figure, Number, Trust, figure
from grpo_mega.planner.setup import Setup

# Elements that one layer saves. h, q, kv, f, d: hidden, a rank's part of queries, keys and MLP rows, a head's width; s: tp, or
# 1 where the sequence is not cut; r: tokens on this rank's experts, to those of the micro-batch; k: experts of a token.
_NORMS = "2 * h * (8 / b + 1) / s"  # torch's own on a CPU: input and normalised input in float32, and the output
_QK_NORMS = "qk_norms * 8 / b * (q + kv)"
_FORMULAS: dict[tuple[bool, bool], dict[str, str]] = {
    # (Transformer Engine, mixture) -> by recompute
    (False, False): {
        "none": f"{_NORMS} + {_QK_NORMS} + q + 2 * padding * (q + kv) + 4 * d + 5 * f",
        "selective": f"{_NORMS} + {_QK_NORMS} + 3 * q + 3 * kv + 4 * d",
        "full": "h / s",
    },
    (False, True): {
        "none": f"{_NORMS} + {_QK_NORMS} + q + 2 * padding * (q + kv) + 4 * d + r * (2 * h + 5 * f) + k * h / s",
        "selective": f"{_NORMS} + {_QK_NORMS} + 3 * q + 3 * kv + 4 * d",
        "full": "h / s",
    },
    (True, False): te_layers.FORMULAS,
    (True, True): {
        "none": f"{te_layers.ATTENTION['none']} + 2 * h / s + r * (2 * h + 3 * f) + k * h / s",
        "selective": f"{te_layers.ATTENTION['selective']} + 2 * h / s",
        "full": "h / s",
    },
}
PADDING = 1.25  # of segments that attention pads to a common length (packed.MAX_PADDING), at most
TILE_TOKENS, TILE_COLUMNS = 4096, 8192  # of ops/logprobs.py on a GPU


@dataclass(frozen=True)
class Activations:
    """Of one stage."""

    saved: Figure  # waiting for their backward pass
    recomputed: Figure  # of the layer whose backward pass is under way
    work: Figure  # of that layer, what autograd does not keep
    logprobs: Figure  # tiles of logits and the hidden states they are made of; on the last stage
    forward_only: Figure  # of a pass without gradients

    @property
    def kept(self) -> list[Figure]:
        """By autograd, at most."""
        return [self.saved, self.recomputed]

    @property
    def training(self) -> list[Figure]:
        return [*self.kept, self.work, self.logprobs]


def activations(setup: Setup, pp_rank: int) -> Activations:
    is_proven = not setup.shape.num_experts and (not setup.uses_te or te_layers.is_measured(setup.config.precision))
    trust: Trust = "estimate" if is_proven else "unproven"
    sizes = layer_sizes(setup, pp_rank)
    recompute = setup.config.model.recompute
    formulas = _FORMULAS[setup.uses_te, bool(setup.shape.num_experts)]
    layers = layers_in_flight(setup, pp_rank)
    saved = figure(
        "activations saved",
        "B",
        f"tokens * b * (layers * ({formulas[recompute]}) + final * h / s)",
        _used(formulas[recompute], sizes) | {name: sizes[name] for name in ("h", "s")},
        trust=trust,
        layers=layers,
        final=_final_norm(setup) if pp_rank == setup.layout.pp - 1 else 0,
    )
    again = {"none": "0", "selective": f"{formulas['none']} - ({formulas['selective']})", "full": formulas["none"]}[recompute]
    recomputed = figure("activations recomputed", "B", f"tokens * b * ({again})", _used(again, sizes), trust=trust)
    work = figure(
        "a layer at work",
        "B",
        # Gradients of the widest tensors, and the gathered sequence.
        "tokens * b * (2 * f * max(r, 1) + 2 * q + 3 * h)",
        {name: sizes[name] for name in ("tokens", "b", "f", "q", "h", "r")},
        trust=trust,
    )
    forward = figure(
        "a layer at work",
        "B",
        "tokens * b * (3 * f * max(r, 1) + 3 * q + 4 * h)",
        {name: sizes[name] for name in ("tokens", "b", "f", "q", "h", "r")},
    )
    return Activations(saved, recomputed, work, _logprobs(setup, pp_rank), forward)


def layer_sizes(setup: Setup, pp_rank: int) -> dict[str, Number | Figure]:
    """Return what the formulas speak of."""
    shape, layout = setup.shape, setup.layout
    x, o = te_layers.kept_bytes(setup.config.precision, setup.itemsize, _share_in_fp8(setup, pp_rank))
    spread = setup.assumed.expert_imbalance if layout.ep > 1 else 1.0
    return {
        "tokens": setup.micro_batch_tokens,
        "b": setup.itemsize,
        "h": shape.hidden,
        "q": shape.q // layout.tp,
        "kv": max(shape.kv // layout.tp, shape.head_dim),
        "f": (shape.moe_ffn or shape.ffn) // layout.tp,
        "s": setup.sequence_parts,
        "k": setup.experts_per_token,
        "r": setup.experts_per_token * spread if shape.num_experts else 0,
        "d": shape.head_dim,
        "qk_norms": int(setup.family.qk_norm),
        "padding": PADDING,
        "heads": shape.num_heads // layout.tp,
        "x": x,
        "o": o,
    }


def _share_in_fp8(setup: Setup, pp_rank: int) -> float:
    """Return the share of a stage's layers that compute in FP8, where any do."""
    precision, layout, num_layers = setup.config.precision, setup.layout, setup.shape.num_layers
    in_fp8 = range(precision.first_layers_bf16, num_layers - precision.last_layers_bf16)
    layers = [i for chunk in range(layout.vpp) for i in layout.layers_of(num_layers, pp_rank, chunk)]
    return sum(i in in_fp8 for i in layers) / len(layers)


def layers_in_flight(setup: Setup, pp_rank: int) -> int:
    """Layers, times micro-batches, whose activations a stage holds at most (1F1B, interleaved or not)."""
    layout, num_layers = setup.layout, setup.shape.num_layers
    sizes = [len(layout.layers_of(num_layers, pp_rank, chunk)) for chunk in range(layout.vpp)]
    if layout.vpp == 1:
        return sizes[0] * (layout.pp - pp_rank)
    # Warm-up runs (pp - p - 1) * 2 passes and pp for each further chunk, in rounds of pp micro-batches; one more is under way.
    passes = (layout.pp - pp_rank - 1) * 2 + (layout.vpp - 1) * layout.pp + 1
    found = chunk = 0
    while passes > 0:
        found += sizes[chunk % layout.vpp] * min(passes, layout.pp)
        passes, chunk = passes - layout.pp, chunk + 1
    return found


def _final_norm(setup: Setup) -> float:
    """What it saves, in hidden states; its output is among the log-probs' memory."""
    return 2.0 if setup.uses_te else 8 / setup.itemsize


def _logprobs(setup: Setup, pp_rank: int) -> Figure:
    layout, shape = setup.layout, setup.shape
    if pp_rank != layout.pp - 1:
        return figure("log-prob tiles", "B", "0")
    return figure(
        "log-prob tiles",
        "B",
        # Float32 tiles and the tile's gradient in bf16; hidden states whole and chosen, and their gradient in float32.
        "tiles * tile_tokens * tile_columns * 4 + tile_tokens * tile_columns * 2 + tokens * h * (3 * b + 4)",
        tiles=2 if setup.config.algorithm.calculate_entropy else 1,
        tile_tokens=min(TILE_TOKENS, setup.micro_batch_tokens),
        tile_columns=min(TILE_COLUMNS, -(-shape.vocab // layout.tp)),
        tokens=setup.micro_batch_tokens,
        h=shape.hidden,
        b=setup.itemsize,
    )


def _used(formula: str, sizes: dict[str, Number | Figure]) -> dict[str, Number | Figure]:
    """The inputs that a formula names, and the two that all have."""
    words = set("".join(c if c.isalnum() or c == "_" else " " for c in formula).split())
    return {name: value for name, value in sizes.items() if name in words | {"tokens", "b"}}
