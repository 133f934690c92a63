"""Measure the time of a training step by phase: `python tools/benchmarks/throughput CONFIG [--steps N] [--synthetic
LENGTHS]`.

The benchmark runs the trainer's own steps as `grpo-mega train CONFIG` would, in any layout. It starts the ranks of the
layout, or is one of them under torchrun. For each phase it prints seconds, the plan's estimate, share, tokens/s,
TFLOP/s, MFU and peak memory. It does not evaluate or export. It does not touch the run's folder; it makes and removes
RUN_DIR-throughput. Without CONFIG it runs the quickstart's recipe on a model with random weights, with a checkpoint
every other step.

--synthetic LENGTHS replaces sampling by random tokens with lengths from a distribution (fixed:512, uniform:16,1024,
lognormal:mean=256,sigma=0.8,max=1024 or file:LIST.json; default: log-normal with a mean of a quarter of the longest)
and random rewards that make every group train. Everything after sampling is real, including the sync of weights to the
engine. The rows sample and reward are then "-" and the step excludes them. CONFIG must come before --synthetic.

seconds    mean over ranks and measured steps, so phases sum to the step; low, median and high are the quartiles
           over the steps
idle       waiting for other ranks, subtracted from its phase: rendezvous, and neighbours in a pipeline (with the
           transfer). It excludes waiting inside collectives of tensors, and pipeline waits if layout.vpp is above 1
reward     scoring after sampling has ended; scoring during sampling costs no time
tokens/s   tokens of prompts and responses; for sample only responses. TFLOP/s and MFU use the model's FLOPs
           (cli/planner/state.py)
GiB        peak memory of a rank: its process on a CPU, its tensors on a GPU

--against FILE compares with an earlier --out FILE: a phase is the same if medians differ by less than 5 % or the
quartiles overlap. The two runs must have equal settings, except for the layout. The last line is JSON. Exit code 1 if
phases and wall time are more than 2 % apart, 2 for an error that the user can fix.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))  # for `python tools/benchmarks/throughput`

from grpo_mega import config as configs
from grpo_mega import paths
from grpo_mega.cli import checks
from grpo_mega.cli.checks.machine import CARDS
from grpo_mega.config import Config
from grpo_mega.distributed.environment import uses_gpu
from grpo_mega.distributed.launch import only_rank, run_ranks
from grpo_mega.errors import EXIT_USER_ERROR, ConfigError
from grpo_mega.paths import user_path
from grpo_mega.trainer import folder as run_folder
from tools.benchmarks import harness
from tools.benchmarks.throughput import result as results
from tools.benchmarks.throughput import synthetic

RAW_FILE = "throughput.json"  # file in the run's folder with the ranks' measurements
FOLDER = "GRPO_MEGA_THROUGHPUT"  # variable with the path of config.yaml, set for ranks started here


@harness.benchmark
def main(arguments: list[str] | None) -> int:
    argv = sys.argv[1:] if arguments is None else arguments
    options = parse(argv)
    if FOLDER in os.environ:
        return measure(configs.load(Path(os.environ[FOLDER])), options)
    before = None if options.against is None else results.read_result(options.against)
    if options.out is not None and not options.out.absolute().parent.is_dir():
        raise ConfigError(f"--out={options.out}: its folder does not exist; make it, or name another file")
    with recipe(options) as config:
        lengths = synthetic.lengths_of(options.synthetic, config.rollout.max_response_length)
        drawn = None if lengths is None else lengths.text
        if before is not None:
            results.check_comparable(results.settings(config, drawn), before, options.against)
        if os.environ.get("RANK", "0") != "0":
            return measure(config, options)
        raw, code = claimed(config, options, argv)
        if raw is None:
            return code
        found = results.result(raw, config, drawn, options.gpu)
    if before is not None:
        phases = results.compare(found, before)
        found["against"] = {"file": str(options.against), "differs": results.differing(found, before), "phases": phases}
    print("\n" + _title(found) + "\n")
    if options.out is not None:
        options.out.write_text(json.dumps(found) + "\n")
    wrong = results.problem(found)
    return harness.report(_rows(found), found, footer=_figures(found), problems=[wrong] if wrong else [])


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = harness.Parser(__doc__)
    parser.add_argument("config", type=user_path, nargs="?", metavar="CONFIG", help="default: the quickstart's")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override a value of the file")
    parser.add_argument("--steps", type=int, default=5, metavar="N", help="measured steps; default: 5")
    parser.add_argument("--warmup", type=int, default=1, metavar="N", help="steps before the measured ones; default: 1")
    parser.add_argument("--synthetic", nargs="?", const="", metavar="LENGTHS", help="no sampling: random responses")
    parser.add_argument("--gpu", choices=sorted(CARDS), help="card to predict for; default: this machine's")
    parser.add_argument("--out", type=user_path, metavar="FILE", help="also write the JSON there")
    parser.add_argument("--against", type=user_path, metavar="FILE", help="compare with a file written by --out")
    return parser.parse(arguments, steps=1, warmup=0)


@contextmanager
def recipe(options: argparse.Namespace) -> Iterator[Config]:
    """Yield the config to measure. Without CONFIG, first make the quickstart's task in a temporary folder."""
    if options.config is not None:
        yield settled(configs.load(options.config, options.set), options)
        return
    if "RANK" in os.environ:
        raise ConfigError("CONFIG is missing, and ranks of torchrun share no temporary folder; name a config")
    with tempfile.TemporaryDirectory(prefix="bench_throughput_") as name:
        folder = Path(name)
        write_task(folder)
        overrides = [f"run_dir={folder / 'run'}", f"model.path={folder / 'model'}"]
        overrides += [f"data.{part}={folder / part}.jsonl" for part in ("train", "heldout")]
        overrides += ["checkpoint.interval=2", "model.init=random", *options.set]
        yield settled(configs.load(harness.ROOT / "examples" / "quickstart.yaml", overrides), options)


def settled(config: Config, options: argparse.Namespace) -> Config:
    """Return the config with a separate run_dir, enough steps, and no progress bar, wandb, profile or report."""
    raw = config.model_dump(mode="json")
    raw["run_dir"] = f"{config.run_dir}-throughput"
    raw["steps"] = options.warmup + options.steps + 1  # one more, because the last step saves a checkpoint
    raw["log"] |= {"progress": False, "wandb": False, "profile": None, "report_interval": 0}
    if options.synthetic is not None:
        raw["rollout"] = synthetic.settings(config)
    return checks.resolve_dtype(configs.validate(raw), uses_gpu(config.device, os.environ))[0]


def write_task(folder: Path) -> None:
    """Write the quickstart's data, and its model with random weights."""
    import random

    sys.path.append(str(harness.ROOT / "examples"))
    import arithmetic  # type: ignore[import-not-found]
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    train, heldout = arithmetic.make_problems(random.Random(0))
    tokenizer = arithmetic.make_tokenizer()
    arithmetic.save(folder, arithmetic.make_model(tokenizer), tokenizer, train, heldout)


def claimed(config: Config, options: argparse.Namespace, argv: Sequence[str]) -> tuple[dict[str, Any] | None, int]:
    """Return the measurements of ranks started here, or of torchrun's ranks if this is their rank 0; or None and the
    exit code.

    If a rank fails, the folder with its logs stays.
    """
    is_rank = "RANK" in os.environ
    if config.rollout.is_separate:
        raise ConfigError("rollout.placement=separate: must be colocated here; train, and read seconds/step")
    checks.check_config(config, checks.this_machine(config.layout, os.environ if is_rank else None))
    if config.run_dir.exists():
        raise ConfigError(f"{config.run_dir} exists; its run failed or still runs; remove it, or set another run_dir")
    code = EXIT_USER_ERROR
    try:
        with run_folder.lock_run_dir(config, resume=False, command=["bench_throughput", *argv]):
            if is_rank:
                code = measure(config, options)
            elif config.layout.world_size == 1:
                with only_rank():
                    code = measure(config, options)
            else:
                code = started(config, argv)
            raw = json.loads((config.run_dir / RAW_FILE).read_text()) if code == 0 else None
            return raw, code
    finally:
        if code in (0, EXIT_USER_ERROR):
            shutil.rmtree(config.run_dir, ignore_errors=True)
        elif options.config is not None:
            print(f"{config.run_dir} is left as it was", file=sys.stderr)


def started(config: Config, argv: Sequence[str]) -> int:
    """Start the layout's ranks and return their exit code."""
    path = config.run_dir / paths.CONFIG_FILE
    os.environ[FOLDER] = str(path)
    try:
        return run_ranks(
            [sys.executable, str(Path(__file__).resolve()), *argv], config.layout.world_size, config.run_dir / "logs"
        )
    finally:
        del os.environ[FOLDER]


def measure(config: Config, options: argparse.Namespace) -> int:
    """Measure as one rank and return the exit code. Rank 0 writes the measurements of all ranks to the run's folder."""
    from grpo_mega.cli.checks.precision import environment

    for name, value in environment(config).items():
        os.environ.setdefault(name, value)
    import grpo_mega.megatron  # noqa: F401  # this import applies patches, so it must come first
    from tools.benchmarks.throughput import rank

    lengths = synthetic.lengths_of(options.synthetic, config.rollout.max_response_length)
    raw = rank.measure(config, lengths, warmup=options.warmup, steps=options.steps)
    if raw is not None:
        (config.run_dir / RAW_FILE).write_text(json.dumps(raw))
    return 0


def _text(value: Any, form: str) -> str:
    """Format a value; "-" is an unknown one."""
    return "-" if value is None else format(value, form)


COLUMNS = {  # key in the result, and format
    "seconds": ("seconds", ",.3f"),
    "plan": ("predicted_seconds", ",.3f"),
    "share": ("share", ".1%"),
    "median": ("median", ",.3f"),
    "low": ("low", ",.3f"),
    "high": ("high", ",.3f"),
    "slowest": ("slowest_rank", ",.3f"),
    "tokens/s": ("tokens_per_second", ",.0f"),
    "/s/GPU": ("tokens_per_second_per_gpu", ",.0f"),
    "TFLOP/s": ("tflops", ".3g"),
    "MFU": ("mfu", ".1%"),
    "GiB": ("peak_memory_gib", ".2f"),
}
COMPARED = {"before": ",.3f", "ratio": ".2f", "verdict": "s"}  # with --against


def _rows(found: Mapping[str, Any]) -> list[list[str]]:
    """Return the titles, a row per phase, and the step's row."""
    against = found["against"]["phases"] if "against" in found else None
    rows = [["phase", *COLUMNS, *(COMPARED if against else ())]]
    for name, row in [*found["phases"].items(), ("step", found["step"])]:
        more = [_text(against[name][key], form) for key, form in COMPARED.items()] if against else []
        rows.append([name, *(_text(row[key], form) for key, form in COLUMNS.values()), *more])
    return rows


def _title(found: Mapping[str, Any]) -> str:
    layout = ", ".join(
        f"{name}={size}" for name, size in found["layout"].items() if name == "tp" or size not in (1, "tp-dp-pp")
    )
    what = found["card"] or f"CPU, {found['threads']} threads per rank"
    responses = f"synthetic responses ({found['synthetic']})" if found["synthetic"] is not None else "sampled responses"
    return (
        f"{found['world_size']} ranks ({layout}) on {what}; {found['steps']} steps of {found['samples']:.0f}"
        f" {responses}"
    )


def _figures(found: Mapping[str, Any]) -> list[str]:
    """Return lines with the figures of batch, pipeline, sync and comparison."""
    plan = found["plan"]

    def with_plan(value: float | None, key: str, form: str, unit: float = 1) -> str:
        texts = [_text(None if one is None else one / unit, form) for one in (value, plan.get(key))]
        return "{} (plan {})".format(*texts)

    def rate(name: str) -> str:
        return "-" if found[name] is None else f"{found[name] / 1e9:.3g} GB/s"

    per_gpu = found["step"]["tokens_per_second_per_gpu"]
    lines = [
        f"tokens/s/GPU of the step {with_plan(per_gpu, 'tokens_per_second_per_gpu', ',.0f')}; "
        f"MFU of the update {_text(found['phases']['update']['mfu'], '.1%')}",
        f"micro-batches per rank {with_plan(found['micro_batches'], 'micro_batches', ',.1f')}; "
        f"padding waste {with_plan(found['padding_waste'], 'padding_waste', '.1%')}; "
        f"busiest data-parallel rank {_text(found['dp_imbalance'], '.1%')} above the mean",
        f"calculated bubble {with_plan(found['bubble'], 'bubble', '.1%')}; "
        f"measured, with transfers, {_text(found['bubble_measured'], '.1%')}",
        f"sync fills the engines with {found['sync_bytes'] / 1e6:,.1f} MB at {rate('sync_bytes_per_second')}; "
        f"MB between ranks {with_plan(found['sync_received_bytes'], 'sync_moved_bytes', ',.1f', 1e6)}"
        f" at {rate('sync_received_bytes_per_second')}",
        f"peak: {found['peak']['source']}",
        f"plan: {plan['source']}",
        f"phases cover {found['phases_cover']:.1%} of the step's wall time",
    ]
    if (against := found.get("against")) is not None:
        lines.append(f"against {against['file']}: " + ("; ".join(against["differs"]) or "the same layout and machine"))
    return lines


if __name__ == "__main__":
    harness.start(main)
