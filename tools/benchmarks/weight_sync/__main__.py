"""Measure the bytes and seconds of a weight sync from the trainer's layout to SGLang's, compared with a full gather.

`python tools/benchmarks/weight_sync` runs on processes of this machine. It alternates the sync of a Llama of 160
million parameters from TP2.PP2 to two engines of TP2, and the transport of a full gather of all weights to all ranks.
--model is a known model or a config.json; --layers reduces its layers. --source is the trainer's layout, for example
tp=2,pp=2,vpp=1,dp=1,ep=1,order=tp-dp-pp. --target is the engines' layout on the same ranks, for example tp=2,engines=2.
The sync is the trainer's own, with verification, but the receiver is not a server. rank.py describes receiver and full
gather. --dry starts nothing. It accepts layouts of any size and plans both orders of the trainer's ranks:
`--dry --model llama-70b --source tp=4,pp=4,dp=4 --target tp=8,engines=8`.

The last line is JSON. bytes_moved is the sum of bytes that ranks received from other ranks. lower_bound counts the
weights that an engine needs and its rank does not have. full_gather_bytes counts all weights on all ranks minus the
weights that each has. ratio is bytes_moved / full_gather_bytes. Also between_nodes_bytes, plan_seconds, and the medians
seconds, unproven_seconds and full_gather_seconds (of the slowest rank; null with --dry). Exit code 1 if more bytes
moved than the lower bound or if a tensor was filled wrongly, 2 for invalid arguments.
"""

from __future__ import annotations

import argparse
import json
import math
import pickle
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import get_args

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))  # for `python tools/benchmarks/weight_sync`

from grpo_mega.distributed.launch import run_ranks
from grpo_mega.errors import ConfigError, UserError, raise_all
from grpo_mega.paths import user_path
from grpo_mega.weights.families import family_of
from grpo_mega.weights.layout import (
    EngineLayout,
    MegatronLayout,
    RankOrder,
    engine_layout_problems,
    engine_shards,
    megatron_layout_problems,
    megatron_shards,
)
from grpo_mega.weights.spec import ModelShape, read_config
from tools.benchmarks import harness
from tools.benchmarks.gpu.models import MODELS
from tools.benchmarks.weight_sync.dry import ITEM_BYTES, Dry, Spec, dry_run, num_elements, num_parameters

ORDERS: tuple[RankOrder, ...] = get_args(RankOrder)
SIZES = ("tp", "pp", "vpp", "dp", "ep")
BUCKET_MIB, DRY_BUCKET_MIB = 32, 256  # small, so a small model needs several rounds; and the default of sync.bucket_mib
WORKER = Path(__file__).with_name("rank.py")
PROCESS_BYTES = 400 << 20  # memory of a rank without weights
BUFFERS = 5  # buckets that a rank holds for the sync
ROWS: dict[str, Callable[[Dry], str]] = {
    "on the same device, GB": lambda dry: gigabytes(dry.traffic.same_rank),
    "between devices of a node, GB": lambda dry: gigabytes(dry.traffic.same_node),
    "between nodes, GB": lambda dry: gigabytes(dry.traffic.between_nodes),
    "moved in all, GB": lambda dry: gigabytes(dry.traffic.moved),
    "  at the least, GB": lambda dry: gigabytes(dry.lower_bound),
    "  gathered in full instead, GB": lambda dry: gigabytes(dry.full_gather_bytes),
    "sent by a rank, most and mean, GB": lambda dry: most_and_mean(dry.traffic.sent),
    "received by a rank, most and mean, GB": lambda dry: most_and_mean(dry.traffic.received),
    "rounds": lambda dry: str(dry.num_rounds),
    "planned in, s": lambda dry: f"{dry.plan_seconds:.2f}",
}
PATHS = ("sync", "unproven", "full_gather")  # unproven: without checksums at either end


@harness.benchmark
def main(arguments: list[str] | None) -> int:
    options = parse(arguments)
    spec = spec_of(options)
    if not options.dry:
        check_spec(spec)
    print_title(options.model, spec)
    return dry(spec) if options.dry else measured(spec, options.repeat)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = harness.Parser(__doc__)
    parser.add_argument("--dry", action="store_true", help="plan only, for both orders of the trainer's ranks")
    parser.add_argument("--model", default="llama-160m", help=f"{', '.join(MODELS)}, or the path of a config.json")
    parser.add_argument("--layers", type=int, help="number of layers; default: all of the model's")
    parser.add_argument("--source", default="tp=2,pp=2", help="the trainer, for example tp=4,pp=4,dp=4,order=tp-pp-dp")
    parser.add_argument("--target", default="tp=2,engines=2", help="the engines, for example tp=8,engines=8")
    parser.add_argument("--ranks-per-node", type=int, default=8)
    parser.add_argument("--bucket-mib", type=int, help=f"default: {BUCKET_MIB}, with --dry {DRY_BUCKET_MIB}")
    parser.add_argument("--repeat", type=int, default=5, help="measured runs of each path")
    options = parser.parse(arguments, layers=1, ranks_per_node=1, bucket_mib=1, repeat=1)
    options.bucket_mib = options.bucket_mib or (DRY_BUCKET_MIB if options.dry else BUCKET_MIB)
    return options


def spec_of(options: argparse.Namespace) -> Spec:
    shape = shape_of(options.model)
    if options.layers:
        if options.layers > shape.num_layers:
            raise ConfigError(f"--layers={options.layers} is more than the model's {shape.num_layers}; use fewer")
        shape = replace(shape, num_layers=options.layers)
    source, target = source_of(options.source), target_of(options.target)
    if shape.num_experts:  # the full gather knows experts only in this form
        source = replace(source, etp=source.tp)
    raise_all(megatron_layout_problems(shape, source))
    raise_all(engine_layout_problems(shape, target.tp, target.ep))
    return Spec(shape, source, target, options.ranks_per_node, options.bucket_mib << 20)


def print_title(model: str, spec: Spec) -> None:
    shape, source, target = spec.shape, spec.source, spec.target
    size = f"{num_parameters(shape) / 1e9:.2f} billion parameters of {ITEM_BYTES} bytes"
    print(f"{model}, {shape.num_layers} layers, {size}")
    axes = [f"{axis}={getattr(source, axis)}" for axis in SIZES if axis == "tp" or getattr(source, axis) > 1]
    print(
        f"from {source.world_size} ranks ({', '.join(axes)}) to {target.num_engines} engines of tp={target.tp},"
        f" ep={target.ep}, {spec.ranks_per_node} ranks per node, buckets of {spec.bucket_bytes >> 20} MiB\n",
        flush=True,
    )


def shape_of(model: str) -> ModelShape:
    if model in MODELS:
        return ModelShape.from_hf_config(MODELS[model])
    path = user_path(model)
    if path.name != "config.json" or not path.exists():
        raise ConfigError(
            f"--model={model} is none of {', '.join(MODELS)}; give one of them or the path of a config.json"
        )
    return ModelShape.from_hf_config(read_config(path.parent))


def source_of(text: str) -> MegatronLayout:
    found = pairs("--source", text, (*SIZES, "order"))
    order = found.pop("order", ORDERS[0])
    if order not in ORDERS:
        raise ConfigError(f"--source: order={order} is not known; use {' or '.join(ORDERS)}")
    tp, pp, vpp, dp, ep = (dict.fromkeys(SIZES, 1) | whole_numbers("--source", found)).values()
    return MegatronLayout(tp, pp, vpp, dp, order, ep=ep)


def target_of(text: str) -> EngineLayout:
    found = whole_numbers("--target", pairs("--target", text, ("tp", "engines", "ep")))
    return EngineLayout(found.get("tp", 1), found.get("engines", 1), found.get("ep", 1))


def pairs(option: str, text: str, known: tuple[str, ...]) -> dict[str, str]:
    """Parse "a=1,b=2" as {"a": "1", "b": "2"}."""
    found = dict(part.partition("=")[::2] for part in text.split(","))
    for key, value in found.items():
        if key not in known or not value:
            part = f"{key}={value}"
            raise ConfigError(f"{option}: {part!r} is not understood; give some of {', '.join(known)} as {known[0]}=2")
    return found


def whole_numbers(option: str, found: dict[str, str]) -> dict[str, int]:
    for key, value in found.items():
        if not value.isdecimal() or int(value) < 1:
            raise ConfigError(f"{option}: {key}={value} must be a whole number above 0")
    return {key: int(value) for key, value in found.items()}


def dry(spec: Spec) -> int:
    """Plan in each possible order of the trainer's ranks. Print the table and the JSON. Return the exit code."""
    layouts = {order: replace(spec.source, order=order) for order in ORDERS}
    found = {
        order: dry_run(replace(spec, source=layout))
        for order, layout in layouts.items()
        if not any(megatron_layout_problems(spec.shape, layout))
    }
    rows = [("", *found), *((name, *map(cell, found.values())) for name, cell in ROWS.items())]
    print(verdict(found))
    wrong = [order for order, one in found.items() if one.traffic.moved != one.lower_bound]
    problems = [f"{order}: moves more than the lower bound" for order in wrong]
    planned = found[spec.source.order]
    return harness.report(rows, result(spec, planned, planned.traffic.moved, {}), problems=problems)


def measured(spec: Spec, repeat: int) -> int:
    """Run on local processes. Print the table and the JSON. Return the exit code."""
    planned, (rounds, problems) = dry_run(spec), measure(spec, repeat)
    found = harness.medians(rounds)
    moved, gathered = (int(found[path]["bytes"]) for path in ("sync", "full_gather"))

    def spread(path: str) -> str:
        seconds = [one["seconds"] for one in rounds[path]]
        return f"{found[path]['seconds']:.3f} ({min(seconds):.3f} to {max(seconds):.3f})"

    rows = [
        ("", "this sync", "without proof", "full gather"),
        ("received by all ranks, MB", megabytes(moved), "", megabytes(gathered)),
        ("  at the least, MB", megabytes(planned.lower_bound), "", megabytes(planned.full_gather_bytes)),
        ("  of it between nodes, MB", megabytes(planned.traffic.between_nodes), "", ""),
        (f"seconds, median of {repeat}", *map(spread, PATHS)),
        ("seconds of all cores", *(f"{found[path]['cpu_seconds']:.3f}" for path in PATHS)),
        ("planned in, s", f"{planned.plan_seconds:.3f}", "", ""),
    ]
    if not problems:
        print("every sync filled the engines' tensors as a direct fill does, bit for bit")
    if {one["bytes"] for path in ("sync", "unproven") for one in rounds[path]} != {planned.lower_bound}:
        problems.append("the sync moved more than the lower bound")
    seconds = {path: found[path]["seconds"] for path in PATHS}
    return harness.report(rows, result(spec, planned, moved, seconds), problems=problems)


def verdict(found: dict[RankOrder, Dry]) -> str:
    """Say which order of ranks moves fewer bytes between nodes."""
    if len(found) == 1:
        [order] = found
        return f"only the order {order} is possible with experts spread over pipeline stages"
    far = {order: one.traffic.between_nodes for order, one in found.items()}
    best, worst = sorted(far, key=lambda order: far[order])
    if far[best] == far[worst]:
        return f"both orders move {gigabytes(far[best])} GB between nodes"
    saved = 1 - far[best] / far[worst]
    return f"recommended: layout.order={best}, which moves {saved:.0%} fewer bytes between nodes than {worst}"


def result(spec: Spec, planned: Dry, moved: int, seconds: dict[str, float]) -> dict[str, int | float | str | None]:
    names = {"seconds": "sync", "unproven_seconds": "unproven", "full_gather_seconds": "full_gather"}
    return {
        "bytes_moved": moved,
        "lower_bound": planned.lower_bound,
        "full_gather_bytes": planned.full_gather_bytes,
        "ratio": round(moved / planned.full_gather_bytes, 4) if planned.full_gather_bytes else None,
        "between_nodes_bytes": planned.traffic.between_nodes,
        "plan_seconds": round(planned.plan_seconds, 3),
        **{name: round(seconds[path], 4) if seconds else None for name, path in names.items()},
        "order": spec.source.order,
    }


def gigabytes(num_bytes: float) -> str:
    return f"{num_bytes / 1e9:.1f}"


def megabytes(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:.1f}"


def most_and_mean(num_bytes: tuple[int, ...]) -> str:
    return f"{gigabytes(max(num_bytes))} / {gigabytes(sum(num_bytes) / len(num_bytes))}"


def check_spec(spec: Spec) -> None:
    """Raise ConfigError if this machine cannot run the sync."""
    ranks, engine_ranks = spec.source.world_size, spec.target.world_size
    if engine_ranks > ranks:
        raise ConfigError(
            f"--target needs {engine_ranks} ranks and --source has {ranks}; measured engines share the trainer's, "
            "so use fewer engines, or --dry"
        )
    [line] = [line for line in Path("/proc/meminfo").read_text().splitlines() if line.startswith("MemAvailable")]
    needed, free = bytes_needed(spec), int(line.split()[1]) << 10
    if needed > free:
        raise ConfigError(
            f"{ranks} ranks with these weights need {needed / 1e9:.0f} GB, and {free / 1e9:.0f} GB of memory are free; "
            "use fewer --layers, or --dry"
        )


def bytes_needed(spec: Spec) -> int:
    family, ranks = family_of(spec.shape.model_type), spec.source.world_size
    trainer = megatron_shards(family, spec.shape, spec.source)
    engines = engine_shards(family, spec.shape, spec.target, ranks)
    # The full gather packs a shard and pads it. The comparison with a direct fill holds the largest tensor twice.
    weights = 3 * sum(map(num_elements, trainer.blocks)) + sum(map(num_elements, engines.blocks))
    compared = 2 * max(map(math.prod, family.hf_tensors(spec.shape).values()))
    return ITEM_BYTES * (weights + ranks * compared) + ranks * (PROCESS_BYTES + BUFFERS * spec.bucket_bytes)


def measure(spec: Spec, repeat: int) -> tuple[dict[str, list[harness.Figures]], list[str]]:
    """Start the ranks. Return the figures of each round by path, and problems. Raise UserError."""
    with tempfile.TemporaryDirectory(prefix="weight_sync_") as name:
        folder = Path(name)
        (folder / "spec.pkl").write_bytes(pickle.dumps(spec))
        code = run_ranks([sys.executable, str(WORKER), str(folder), str(repeat)], spec.source.world_size, folder)
        if code:
            raise UserError(f"the ranks ended with code {code}; try fewer --layers or ranks")
        found = json.loads((folder / "result.json").read_text())
        return found["rounds"], found["problems"]


if __name__ == "__main__":
    harness.start(main)
