"""Measure the gain of oversampling with abort of stragglers, and the bias of the kept samples.

`python tools/benchmarks/oversampling` samples phases of --prompts whole groups with a tiny random model. Its response lengths
have a geometric tail (mean --mean-length, truncated at --max-length). Each round has a different step number. First it runs all
prompts of the largest factor to the end. Then, for each factor of --factors, it runs a phase with the same random streams that
starts factor * prompts groups and aborts the rest once enough groups are done. Engine, phase and abort are the trainer's own.

Gain: seconds of a phase without oversampling divided by seconds with it (median over rounds), and the same in decoding steps,
because other processes do not disturb steps. Bias: kept groups compared with all started groups, in the run to the end: mean
response length, mean of a reward that falls with the length (1 up to --mean-length tokens), and mean of a control that does not
depend on the length (share of even tokens before the last). Waste: the share of sampled tokens that are discarded.

Partial rollouts use the smallest factor above 1. They run for --partial-rounds steps, and each step continues the unfinished
groups of the step before. They alternate with phases without oversampling. At the end the rest is run to the end, so that all
started groups have a length.

Longest first (rollout.longest_first) starts only --prompts groups and decodes a quarter of their sequences at once. Here the
lengths within a group are similar. `gain` is in decoding steps of the embedded engine, which decodes one batch after another.
`served_gain` is the gain on a simulated server, which starts another sequence whenever one ends, with the trainer's client and
the same lengths. `unlike` shuffles the lengths over all groups, so probes predict nothing.

--engine sglang starts a real server (about 20 s on a CPU). It has one random stream for all samples. So kept groups are
compared with another draw, the bias is less exact, and `identical`, the gain in tokens and `longest_first` are null. The last
line is JSON. Exit code 1 if a sample differs from the same sample in the run to the end, 2 for invalid arguments.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch.distributed import HashStore
from transformers import Qwen2Config

from grpo_mega import console
from grpo_mega.config import RolloutConfig
from grpo_mega.distributed.device import Device
from grpo_mega.distributed.rendezvous import Rendezvous
from grpo_mega.errors import EngineError
from grpo_mega.rollout.embedded.engine import EmbeddedEngine
from grpo_mega.rollout.engine import Engine, Sampling
from grpo_mega.types import Group, Prompt, Sample
from grpo_mega.weights.families import family_of
from grpo_mega.weights.spec import ModelShape

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))  # for `python tools/benchmarks/oversampling`

from tools.benchmarks.oversampling import longest_first
from tools.benchmarks.oversampling.partial import Partial, rollouts_of

VOCAB = 256
CONFIG = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "tie_word_embeddings": False,
}
PROMPT_LENGTH = 16
DEADLINE_S = 600.0


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{message}; see --help\n")


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    try:
        with tempfile.TemporaryDirectory() as folder, engine_of(options, Path(folder)) as engine:
            bench = Bench(engine, options)
            bench.round(-1, [1.0])  # warm-up: allocations and imports
            rounds = [bench.round(step, options.factors) for step in range(options.rounds)]
            over = Partial(bench.rollouts, options.prompts, started(options.factors[1], options.prompts))
            found = summary(rounds, options) | {"partial": over.measure(options.partial_rounds, options.max_staleness)}
            if isinstance(engine, EmbeddedEngine):
                found["longest_first"] = longest_first.measure(engine, options, over.num_started)
            else:
                found["longest_first"] = None
    except EngineError as error:
        print(error, file=sys.stderr)
        return 2
    show(found, options)
    print(json.dumps(found))
    differs = found["identical"] is False or not (found["longest_first"] or {"identical": True})["identical"]
    return int(differs)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=("embedded", "sglang"), default="embedded")
    parser.add_argument("--factors", default="1.25,1.5,2.0", help="values of rollout.oversample; 1 is always added")
    parser.add_argument("--prompts", type=int, default=16, help="groups that a phase needs")
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--mean-length", type=int, default=48, help="mean tokens per response")
    parser.add_argument("--max-length", type=int, default=448)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--partial-rounds", type=int, default=30)
    parser.add_argument("--max-staleness", type=int, default=RolloutConfig().max_staleness)
    options = parser.parse_args(arguments)
    for name in ("prompts", "group_size", "rounds", "max_length", "partial_rounds", "max_staleness"):
        if getattr(options, name) < 1:
            parser.error(f"--{name.replace('_', '-')}={getattr(options, name)} must be at least 1")
    if not 2 <= options.mean_length <= VOCAB:
        parser.error(f"--mean-length={options.mean_length} must be from 2 to {VOCAB}")
    try:
        factors = sorted({1.0, *map(float, options.factors.split(","))})
    except ValueError:
        parser.error(f"--factors={options.factors} must be numbers, as in 1.25,1.5,2.0")
    if not 1 <= factors[0] < factors[-1] <= 16:
        parser.error(f"--factors={options.factors} must be from 1 to 16, and one above 1")
    options.factors = factors
    return options


class Bench:
    def __init__(self, engine: Engine, options: argparse.Namespace) -> None:
        self.engine, self.options = engine, options
        numbers = random.Random(0)
        self.prompts = [
            Prompt(i, "", tuple(numbers.randrange(VOCAB) for _ in range(PROMPT_LENGTH)), "")
            for i in range(started(options.factors[-1], options.prompts))
        ]
        # Random models give all tokens nearly the same probability.
        stops = frozenset(range(1, 1 + round(VOCAB / options.mean_length)))
        sampling = Sampling(options.group_size, 1.0, options.max_length, stops)
        self.rollouts = rollouts_of(engine, sampling, self.check, DEADLINE_S)

    def round(self, step: int, factors: Sequence[float]) -> dict[str, Any]:
        """Return, by factor, the seconds of its phase and the means over kept and over all started groups."""
        whole = self.phase(step + 1, len(self.prompts), len(self.prompts))
        found: dict[str, Any] = {"lengths": [s.response_len for s in samples_of(whole.values())]}
        for factor in factors:
            num_started = started(factor, self.options.prompts)
            started_at = time.monotonic()
            kept = self.phase(step + 1, num_started, self.options.prompts)
            seconds = time.monotonic() - started_at
            everything = {index: whole[index] for index in range(num_started)}
            found[str(factor)] = {
                "seconds": seconds,
                "tokens_in_turn": sorted(map(longest, everything.values()))[self.options.prompts - 1],
                "identical": all(same(group, whole[index]) for index, group in kept.items()),
                "kept": means(kept.values(), self.options),
                "all": means(everything.values(), self.options),
            } | self.rollouts.flush_stats()
        return found

    def phase(self, step: int, num_started: int, wanted: int) -> dict[int, Group]:
        """Return the kept groups by prompt index."""
        fresh = [Group(prompt, []) for prompt in self.prompts[:num_started]]
        phase = self.rollouts.generate(fresh, step, "", wanted=wanted)
        return {index: phase.mine[index] for index in phase.kept}

    def check(self, _: int) -> None:
        if self.engine.failure:
            raise EngineError(self.engine.failure)


@contextmanager
def engine_of(options: argparse.Namespace, folder: Path) -> Iterator[Engine]:
    config = Qwen2Config(**CONFIG, max_position_embeddings=2 * (PROMPT_LENGTH + options.max_length))
    shape = ModelShape.from_hf_config(config.to_dict())
    num_sequences = started(options.factors[-1], options.prompts) * options.group_size
    if options.engine == "embedded":
        device = Device("cpu", torch.device("cpu"))
        yield EmbeddedEngine(
            config,
            family_of(shape.model_type),
            shape,
            torch.float32,
            device,
            num_sequences,
            rank=0,
            world_size=1,
            verify=False,
        )
        return
    engine = server(config, options, num_sequences, folder)
    try:
        engine.wait_until_ready()
        yield engine
    finally:
        engine.close()


def server(config: Qwen2Config, options: argparse.Namespace, num_sequences: int, folder: Path) -> Engine:
    from grpo_mega.rollout.sglang.buckets import HostBuckets
    from grpo_mega.rollout.sglang.engine import SGLangEngine
    from grpo_mega.rollout.sglang.server import EngineSettings
    from grpo_mega.weights.layout import ShardLayout

    model = folder / "model"
    model.mkdir()
    fields = config.to_dict() | {"architectures": ["Qwen2ForCausalLM"], "eos_token_id": 1, "dtype": "float32"}
    (model / "config.json").write_text(json.dumps(fields))
    deadlines: dict[str, Any] = {"start_deadline_s": DEADLINE_S, "stall_deadline_s": DEADLINE_S, "phase_deadline_s": DEADLINE_S}
    settings = EngineSettings(
        rollout=RolloutConfig(engine="sglang", max_concurrent=num_sequences, **deadlines),
        model_path=model,
        dtype="float32",
        folder=folder,
        context_length=PROMPT_LENGTH + options.max_length + 1,
        device_type="cpu",
        cores=(0, 1),
        verify=False,
    )
    return SGLangEngine(settings, ShardLayout(((),)), Rendezvous(HashStore(), 0, 1), HostBuckets())


def started(factor: float, prompts: int) -> int:
    return RolloutConfig(oversample=factor).num_started(prompts)


def samples_of(groups: Any) -> list[Sample]:
    return [s for group in groups for s in group.samples]


def longest(group: Group) -> int:
    return max(s.response_len for s in group.samples)


def same(found: Group, expected: Group) -> bool:
    return [s.response_ids for s in found.samples] == [s.response_ids for s in expected.samples]


def means(groups: Any, options: argparse.Namespace) -> dict[str, float]:
    samples = samples_of(groups)
    values: dict[str, list[float]] = {
        "length": [s.response_len for s in samples],
        "reward": [float(s.response_len <= options.mean_length) for s in samples],
        "control": [statistics.fmean(t % 2 == 0 for t in s.response_ids[:-1]) for s in samples if s.response_len > 1],
    }
    return {name: statistics.fmean(value or [0.0]) for name, value in values.items()}


def summary(rounds: list[dict[str, Any]], options: argparse.Namespace) -> dict[str, Any]:
    is_seeded = options.engine == "embedded"
    lengths = sorted(length for one in rounds for length in one["lengths"])
    by_factor = {}
    for factor in map(str, options.factors):
        phases, plain = [one[factor] for one in rounds], [one["1.0"] for one in rounds]

        def gain(key: str, phases: list[Any] = phases, plain: list[Any] = plain) -> float:
            return round(statistics.median(before[key] / now[key] for before, now in zip(plain, phases, strict=True)), 3)

        def mean(part: str, key: str, phases: list[Any] = phases) -> float:
            return statistics.fmean(phase[part][key] for phase in phases)

        kept, aborted = (sum(p.get(f"rollout/{name}_tokens", 0) for p in phases) for name in ("kept", "aborted"))
        by_factor[factor] = {
            "seconds": round(statistics.median(phase["seconds"] for phase in phases), 3),
            "gain": gain("seconds"),
            "gain_in_tokens": gain("tokens_in_turn") if is_seeded else None,
            "waste": round(aborted / max(1, kept + aborted), 3),
        }
        for key in ("length", "reward", "control"):
            by_factor[factor] |= {f"{key}_all": round(mean("all", key), 4), f"{key}_kept": round(mean("kept", key), 4)}
        by_factor[factor]["length_bias"] = round(mean("kept", "length") / mean("all", "length") - 1, 4)
    return {
        "engine": options.engine,
        "identical": all(one[str(f)]["identical"] for one in rounds for f in options.factors) if is_seeded else None,
        "length_percentiles": {str(p): lengths[min(len(lengths) - 1, len(lengths) * p // 100)] for p in (50, 90, 99)},
        "factors": by_factor,
    }


def show(found: dict[str, Any], options: argparse.Namespace) -> None:
    print(f"{options.prompts} groups of {options.group_size}; response lengths by percentile {found['length_percentiles']}")
    print(f"{'oversample':>10}{'s':>8}{'gain':>7}{'in tokens':>11}{'waste':>7}{'length':>15}{'reward':>16}{'control':>16}")
    for factor, f in found["factors"].items():
        pairs = "".join(f"{f[f'{key}_all']:>9.{d}f} ->{f[f'{key}_kept']:6.{d}f}"[-16:] for key, d in LOOKS)
        in_tokens = "" if f["gain_in_tokens"] is None else f"{f['gain_in_tokens']:.2f}"
        print(f"{factor:>10}{f['seconds']:8.2f}{f['gain']:7.2f}{in_tokens:>11}{f['waste']:7.2f}{pairs}")
    p = found["partial"]
    print(
        f"partial rollouts at {options.factors[1]}: gain {p['gain_in_seconds']:.2f}, in tokens {p['gain']:.2f}; discarded "
        f"{p['thrown_away']:.1%} of the tokens; mean length {p['length_bias']:+.1%} of all started groups"
    )
    if first := found["longest_first"]:
        served, unlike = first["served_gain"], first["unlike"]["served_gain"]
        print(f"longest first: gain in tokens {first['gain']:.2f}; served {served:.2f}; with shuffled lengths {unlike:.2f}")


LOOKS = (("length", 1), ("reward", 3), ("control", 3))


if __name__ == "__main__":
    console.install()
    sys.exit(main())
