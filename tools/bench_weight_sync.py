"""How much a weight sync moves from the trainer's layout to SGLang's, and between which devices.

`python tools/bench_weight_sync.py --dry --model llama-70b --source tp=4,pp=4,dp=4 --target tp=8,engines=8`: plans the sync for
both orders of the trainer's ranks and prints what each moves. --model is llama-70b, qwen3-235b or a config.json; --source also
takes vpp, ep and order. The last line is JSON about the order of --source, with bytes_moved, lower_bound, full_gather_bytes,
between_nodes_bytes and plan_seconds; exit code 1 if the plan moves more than the lower bound, 2 for arguments that do not fit.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn, get_args

from weight_sync_dry import ITEM_BYTES, Dry, dry_run, num_parameters

from grpo_mega.errors import ConfigError, UserError
from grpo_mega.weights.layout import (
    EngineLayout,
    MegatronLayout,
    RankOrder,
    check_engine_layout,
    check_megatron_layout,
)
from grpo_mega.weights.spec import ModelShape, read_config

MODELS: dict[str, dict[str, Any]] = {
    "llama-70b": {
        "model_type": "llama",
        "num_hidden_layers": 80,
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
    },
    "qwen3-235b": {
        "model_type": "qwen3_moe",
        "num_hidden_layers": 94,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "moe_intermediate_size": 1536,
        "num_experts": 128,
        "num_attention_heads": 64,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "vocab_size": 151936,
    },
}
ORDERS: tuple[RankOrder, ...] = get_args(RankOrder)
ROWS: dict[str, Callable[[Dry], str]] = {
    "on the same device, GB": lambda dry: gigabytes(dry.traffic.same_rank),
    "between devices of a node, GB": lambda dry: gigabytes(dry.traffic.same_node),
    "between nodes, GB": lambda dry: gigabytes(dry.traffic.between_nodes),
    "moved in all, GB": lambda dry: gigabytes(dry.traffic.moved),
    "  at the least, GB": lambda dry: gigabytes(dry.lower_bound),
    "  gathered in full instead, GB": lambda dry: gigabytes(dry.full_gather_bytes),
    "sent by a rank, most and mean, GB": lambda dry: most_and_mean(dry.traffic.sent),
    "received by a rank, most and mean, GB": lambda dry: most_and_mean(dry.traffic.received),
    "planned in, s": lambda dry: f"{dry.plan_seconds:.2f}",
}


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{message}; see --help\n")


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    try:
        shape = shape_of(options.model)
        source, target = source_of(options.source), target_of(options.target)
        check_megatron_layout(shape, source)
        check_engine_layout(shape, target.tp)
        if options.ranks_per_node < 1:
            raise ConfigError(f"--ranks-per-node={options.ranks_per_node} must be at least 1; use 8")
        return dry(options.model, shape, source, target, options.ranks_per_node)
    except UserError as error:
        print(error, file=sys.stderr)
        return 2


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dry", action="store_true", required=True, help="plan only")
    parser.add_argument("--model", required=True, help=f"{', '.join(MODELS)}, or the path of a config.json")
    parser.add_argument("--source", required=True, help="the trainer, for example tp=4,pp=4,dp=4,order=tp-pp-dp")
    parser.add_argument("--target", required=True, help="the engines, for example tp=8,engines=8")
    parser.add_argument("--ranks-per-node", type=int, default=8)
    return parser.parse_args(arguments)


def shape_of(model: str) -> ModelShape:
    if model in MODELS:
        return ModelShape.from_hf_config(MODELS[model])
    path = Path(model)
    if path.name != "config.json" or not path.exists():
        raise ConfigError(f"--model={model} is none of {', '.join(MODELS)}; give one of them or the path of a config.json")
    return ModelShape.from_hf_config(read_config(path.parent))


def source_of(text: str) -> MegatronLayout:
    found = pairs("--source", text, ("tp", "pp", "vpp", "dp", "ep", "order"))
    order = found.pop("order", ORDERS[0])
    if order not in ORDERS:
        raise ConfigError(f"--source: order={order} is not known; use {' or '.join(ORDERS)}")
    sizes = {"tp": 1, "pp": 1, "vpp": 1, "dp": 1, "ep": 1} | whole_numbers("--source", found)
    tp, pp, vpp, dp, ep = sizes.values()
    return MegatronLayout(tp, pp, vpp, dp, order, ep=ep)


def target_of(text: str) -> EngineLayout:
    found = whole_numbers("--target", pairs("--target", text, ("tp", "engines")))
    return EngineLayout(found.get("tp", 1), found.get("engines", 1))


def pairs(option: str, text: str, known: tuple[str, ...]) -> dict[str, str]:
    """ "a=1,b=2" as {"a": "1", "b": "2"}."""
    found: dict[str, str] = {}
    for part in text.split(","):
        key, _, value = part.partition("=")
        if key not in known or not value:
            raise ConfigError(f"{option}: {part!r} is not understood; give some of {', '.join(known)} as {known[0]}=2")
        found[key] = value
    return found


def whole_numbers(option: str, found: dict[str, str]) -> dict[str, int]:
    for key, value in found.items():
        if not value.isascii() or not value.isdigit() or int(value) < 1:
            raise ConfigError(f"{option}: {key}={value} must be a whole number above 0; mend it")
    return {key: int(value) for key, value in found.items()}


def dry(model: str, shape: ModelShape, source: MegatronLayout, target: EngineLayout, ranks_per_node: int) -> int:
    """Prints the table and the JSON; returns the exit code."""
    found: dict[RankOrder, Dry] = {}
    for order in ORDERS:
        layout = replace(source, order=order)
        if is_possible(shape, layout):
            found[order] = dry_run(shape, layout, target, ranks_per_node)
    axes = ", ".join(f"{axis}={getattr(source, axis)}" for axis in ("tp", "pp", "vpp", "dp", "ep") if getattr(source, axis) > 1)
    print(f"{model}, {num_parameters(shape) / 1e9:.1f} billion parameters of {ITEM_BYTES} bytes")
    print(f"from {source.world_size} ranks ({axes or 'tp=1'}) to {target.num_engines} engines of tp={target.tp}, ", end="")
    print(f"{ranks_per_node} ranks a node\n")
    print("\n".join(table(found)))
    print("\n" + verdict(found))
    print(json.dumps(result(found[source.order]) | {"order": source.order}))
    return 0 if all(one.traffic.moved == one.lower_bound for one in found.values()) else 1


def is_possible(shape: ModelShape, layout: MegatronLayout) -> bool:
    try:
        check_megatron_layout(shape, layout)
    except ConfigError:
        return False
    return True


def table(found: dict[RankOrder, Dry]) -> list[str]:
    width = max(map(len, ROWS))
    lines = [" " * width + "".join(f"{order:>20}" for order in found)]
    return lines + [f"{name:<{width}}" + "".join(f"{cell(one):>20}" for one in found.values()) for name, cell in ROWS.items()]


def verdict(found: dict[RankOrder, Dry]) -> str:
    """Which order moves fewer bytes between nodes."""
    if len(found) == 1:
        [order] = found
        return f"only the order {order} is possible with experts spread over pipeline stages"
    far = {order: one.traffic.between_nodes for order, one in found.items()}
    best, worst = sorted(far, key=lambda order: far[order])
    if far[best] == far[worst]:
        return f"both orders move {gigabytes(far[best])} GB between nodes"
    saved = 1 - far[best] / far[worst]
    return f"the order {best} moves {saved:.0%} fewer bytes between nodes than {worst}"


def result(one: Dry) -> dict[str, int | float | None]:
    return {
        "bytes_moved": one.traffic.moved,
        "lower_bound": one.lower_bound,
        "full_gather_bytes": one.full_gather_bytes,
        "between_nodes_bytes": one.traffic.between_nodes,
        "plan_seconds": round(one.plan_seconds, 3),
        "seconds": None,
        "full_gather_seconds": None,
    }


def gigabytes(num_bytes: float) -> str:
    return f"{num_bytes / 1e9:.1f}"


def most_and_mean(num_bytes: tuple[int, ...]) -> str:
    return f"{gigabytes(max(num_bytes))} / {gigabytes(sum(num_bytes) / len(num_bytes))}"


if __name__ == "__main__":
    sys.exit(main())
