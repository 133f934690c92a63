"""Measure the gain of oversampling with abort of stragglers, and the bias of the kept samples.

`python tools/benchmarks/oversampling.py` samples phases of --prompts whole groups with a tiny random model. Its
response lengths have a geometric tail (mean --mean-length, truncated at --max-length). Each round has a different step
number. First it runs all prompts of the largest factor to the end. Then, for each factor of --factors, it runs a phase
with the same random streams that starts factor * prompts groups and aborts the rest once enough groups are done.
Engine, phase and abort are the trainer's own.

Gain: seconds of a phase without oversampling divided by seconds with it (median over rounds), and the same in decoding
steps, because other processes do not disturb steps. Bias: kept groups compared with all started groups, in the run to
the end: mean response length, mean of a reward that falls with the length (1 up to --mean-length tokens), and mean of a
control that does not depend on the length (share of even tokens before the last). Waste: the share of sampled tokens
that are discarded.

Partial rollouts use the smallest factor above 1. They run for --partial-rounds steps, and each step continues the
unfinished groups of the step before. They alternate with phases without oversampling. At the end the rest is run to the
end, so that all started groups have a length. The weights do not change, so a continued response must equal the
response that is generated in one go, because both use the same random stream.

--engine sglang starts a real server (about 20 s on a CPU). It has one random stream for all samples. So kept groups are
compared with another draw, the bias is less exact, and `identical` and the gain in tokens are null. The last line is
JSON. Exit code 1 if a sample differs from the same sample in the run to the end, 2 for invalid arguments.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # to run this file as a script

import torch
from torch.distributed import HashStore
from transformers import Qwen2Config

from grpo_mega.config import RolloutConfig
from grpo_mega.distributed.device import Device
from grpo_mega.distributed.rendezvous import Rendezvous
from grpo_mega.errors import EngineError
from grpo_mega.observe.timers import Timers
from grpo_mega.rollout.backlog import Backlog
from grpo_mega.rollout.embedded.engine import EmbeddedEngine
from grpo_mega.rollout.engine import Engine, Sampling
from grpo_mega.rollout.rollouts import Rollouts
from grpo_mega.types import Group, Prompt, Sample, Turn
from grpo_mega.weights.families import family_of
from grpo_mega.weights.spec import ModelShape
from tools.benchmarks import harness

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


@harness.benchmark
def main(arguments: list[str] | None) -> int:
    options = parse(arguments)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    try:
        with tempfile.TemporaryDirectory() as folder, engine_of(options, Path(folder)) as engine:
            bench = Bench(engine, options)
            variants = {
                str(factor): partial(bench.phase_figures, factor, [*range(-1, options.rounds)])
                for factor in options.factors
            }
            rounds = harness.take_turns(variants, options.rounds, warm_up=1)
            found = summary(rounds, options)
            lengths = sorted(
                s.response_len for step in range(options.rounds) for s in samples_of(bench.whole(step).values())
            )
            found["length_percentiles"] = {
                str(p): lengths[min(len(lengths) - 1, len(lengths) * p // 100)] for p in (50, 90, 99)
            }
            found["partial"] = Partial(bench, started(options.factors[1], options.prompts)).measure(
                options.partial_rounds, options.max_staleness
            )
    except EngineError as error:
        print(error, file=sys.stderr)
        return 2
    print(
        f"{options.prompts} groups of {options.group_size}; response lengths by percentile"
        f" {found['length_percentiles']}"
    )
    p = found["partial"]
    print(
        f"partial rollouts at {options.factors[1]}: gain {p['gain_in_seconds']:.2f}, in tokens {p['gain']:.2f};"
        f" discarded {p['thrown_away']:.1%} of the tokens; mean length {p['length_bias']:+.1%} of all started groups"
    )
    problems = ["a sample differs from the same sample in the run to the end"] if found["identical"] is False else []
    return harness.report(rows_of(found), found, problems=problems)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = harness.Parser(__doc__)
    parser.add_argument("--engine", choices=("embedded", "sglang"), default="embedded")
    parser.add_argument("--factors", default="1.25,1.5,2.0", help="values of rollout.oversample; 1 is always added")
    parser.add_argument("--prompts", type=int, default=16, help="groups that a phase needs")
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--mean-length", type=int, default=48, help="mean tokens per response")
    parser.add_argument("--max-length", type=int, default=448)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--partial-rounds", type=int, default=30)
    parser.add_argument("--max-staleness", type=int, default=RolloutConfig().max_staleness)
    names = ("prompts", "group_size", "rounds", "max_length", "partial_rounds", "max_staleness")
    options = parser.parse(arguments, **dict.fromkeys(names, 1))
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
        self.rollouts = rollouts_of(engine, Sampling(options.group_size, 1.0, options.max_length, stops), self.check)
        self.whole = cache(self._whole)

    def phase_figures(self, factor: float, steps: list[int]) -> harness.Figures:
        """Run a phase of the next step. Return its seconds, and means over kept and over all started groups."""
        step = steps.pop(0)
        whole, num_started = self.whole(step), started(factor, self.options.prompts)
        started_at = time.monotonic()
        kept = self.phase(step + 1, num_started, self.options.prompts)
        seconds = time.monotonic() - started_at
        everything = [whole[index] for index in range(num_started)]
        longest = sorted(max(s.response_len for s in group.samples) for group in everything)
        stats = self.rollouts.flush_stats()
        return {
            "seconds": seconds,
            "tokens_in_turn": longest[self.options.prompts - 1],
            "differing": sum(tokens(group) != tokens(whole[index]) for index, group in kept.items()),
            **{name: stats.get(f"rollout/{name}_tokens", 0) for name in ("kept", "aborted")},
            **{f"{name}_kept": value for name, value in means(kept.values(), self.options).items()},
            **{f"{name}_all": value for name, value in means(everything, self.options).items()},
        }

    def _whole(self, step: int) -> dict[int, Group]:
        """Return all groups of a step, run to the end."""
        found = self.phase(step + 1, len(self.prompts), len(self.prompts))
        self.rollouts.flush_stats()
        return found

    def phase(self, step: int, num_started: int, wanted: int) -> dict[int, Group]:
        """Return the kept groups by prompt index."""
        fresh = [Group(prompt, []) for prompt in self.prompts[:num_started]]
        phase = self.rollouts.generate(fresh, step, "", wanted=wanted)
        return {index: phase.mine[index] for index in phase.kept}

    def check(self, _: int) -> None:
        if self.engine.failure:
            raise EngineError(self.engine.failure)


def rollouts_of(engine: Engine, sampling: Sampling, recover: Callable[[int], None]) -> Rollouts:
    """Return rollouts of one rank that score nothing and keep unfinished groups."""
    rollout = RolloutConfig(partial=True, oversample=2.0, phase_deadline_s=DEADLINE_S)
    config: Any = SimpleNamespace(rollout=rollout, log=SimpleNamespace(progress=False))
    scorer: Any = SimpleNamespace(submit=lambda sample: None, submit_group=lambda samples: None)
    return Rollouts(
        config=config,
        engine=engine,
        recover=recover,
        rendezvous=Rendezvous(HashStore(), 0, 1),
        scorer=scorer,
        sampling=sampling,
        decode=str,
        timers=Timers(),
        warn=print,
        ranks=None,
        raise_on_all_ranks=nullcontext,
    )


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
    deadlines: dict[str, Any] = {
        "start_deadline_s": DEADLINE_S,
        "stall_deadline_s": DEADLINE_S,
        "phase_deadline_s": DEADLINE_S,
    }
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


def samples_of(groups: Iterable[Group]) -> list[Sample]:
    return [s for group in groups for s in group.samples]


def tokens(group: Group) -> list[list[int]]:
    return [list(sample.response_ids) for sample in group.samples]


def mean_length(groups: Iterable[Group]) -> float:
    return statistics.fmean(sample.response_len for sample in samples_of(groups))


def means(groups: Iterable[Group], options: argparse.Namespace) -> dict[str, float]:
    samples = samples_of(groups)
    values: dict[str, list[float]] = {
        "length": [s.response_len for s in samples],
        "reward": [float(s.response_len <= options.mean_length) for s in samples],
        "control": [statistics.fmean(t % 2 == 0 for t in s.response_ids[:-1]) for s in samples if s.response_len > 1],
    }
    return {name: statistics.fmean(value or [0.0]) for name, value in values.items()}


def summary(rounds: dict[str, list[harness.Figures]], options: argparse.Namespace) -> dict[str, Any]:
    is_seeded = options.engine == "embedded"
    by_factor = {}
    for factor, phases in rounds.items():

        def gain(key: str, phases: list[harness.Figures] = phases) -> float:
            return round(
                statistics.median(plain[key] / now[key] for plain, now in zip(rounds["1.0"], phases, strict=True)), 3
            )

        mean = {key: statistics.fmean(phase[key] for phase in phases) for key in phases[0]}
        by_factor[factor] = {
            "seconds": round(statistics.median(phase["seconds"] for phase in phases), 3),
            "gain": gain("seconds"),
            "gain_in_tokens": gain("tokens_in_turn") if is_seeded else None,
            "waste": round(mean["aborted"] / max(1, mean["kept"] + mean["aborted"]), 3),
            **{
                f"{key}_{of}": round(mean[f"{key}_{of}"], 4)
                for key in ("length", "reward", "control")
                for of in ("all", "kept")
            },
            "length_bias": round(mean["length_kept"] / mean["length_all"] - 1, 4),
        }
    identical = not any(one["differing"] for all_ in rounds.values() for one in all_) if is_seeded else None
    return {"engine": options.engine, "identical": identical, "factors": by_factor}


def rows_of(found: dict[str, Any]) -> list[Sequence[str]]:
    rows: list[Sequence[str]] = [("oversample", "s", "gain", "in tokens", "waste", "length", "reward", "control")]
    for factor, f in found["factors"].items():
        in_tokens = "" if f["gain_in_tokens"] is None else f"{f['gain_in_tokens']:.2f}"
        digits = {"length": 1, "reward": 3, "control": 3}
        pairs = [f"{f[f'{key}_all']:.{d}f} -> {f[f'{key}_kept']:.{d}f}" for key, d in digits.items()]
        rows.append((factor, f"{f['seconds']:.2f}", f"{f['gain']:.2f}", in_tokens, f"{f['waste']:.2f}", *pairs))
    return rows


class Partial:
    """Steps with partial rollouts that alternate with phases of the same size that run to the end."""

    def __init__(self, bench: Bench, num_started: int) -> None:
        self.engine, self.rollouts = bench.engine, bench.rollouts
        self.wanted, self.num_started = bench.options.prompts, num_started
        self.seconds = self.turns = 0.0  # last phase: wall time, and decoding steps

    def measure(self, num_steps: int, max_staleness: int) -> dict[str, Any]:
        backlog, trained, whole = Backlog(), list[Group](), list[Group]()
        seconds, turns = {"plain": 0.0, "partial": 0.0}, {"plain": 0.0, "partial": 0.0}
        for step in range(num_steps):
            self.engine.version = step
            backlog = backlog.without_stale(step - max_staleness).drawn_up_to(self.num_started, self.draw, ())
            kept, backlog = self.phase(backlog, self.num_started, self.wanted, step, max_staleness)
            trained += kept
            seconds["partial"] += self.seconds
            turns["partial"] += self.turns
            turns_of_step = self.draw(step)
            fresh = Backlog().drawn_up_to(1, lambda _: turns_of_step, ())  # noqa: B023
            plain, _ = self.phase(fresh, self.wanted, self.wanted, step)
            whole += plain
            seconds["plain"] += self.seconds
            turns["plain"] += self.turns
        thrown_away = sum(n for name, n in backlog.ledger.items() if name.startswith("dropped_tokens"))
        left = sum(bool(group.samples) for group in backlog.groups)
        rest, _ = self.phase(backlog, left, left, num_steps)
        expected = {group.prompt.id: tokens(group) for group in whole}
        begun_as_drawn = [g for g in (*trained, *rest) if g.oldest_version == (g.prompt.id - 1) // self.wanted]
        assert begun_as_drawn, "no group started in the step of its draw"
        return {
            "gain": round(turns["plain"] / turns["partial"], 3),
            "gain_in_seconds": round(seconds["plain"] / seconds["partial"], 3),
            "thrown_away": round(thrown_away / max(1, backlog.ledger["begun_tokens"]), 4),
            "length_bias": round(mean_length(trained) / mean_length([*trained, *rest]) - 1, 4),
            "identical": all(tokens(g) == expected[g.prompt.id] for g in begun_as_drawn if g.prompt.id in expected),
        }

    def phase(
        self, backlog: Backlog, num_started: int, wanted: int, step: int, max_staleness: int | None = None
    ) -> tuple[list[Group], Backlog]:
        before = backlog.groups[:num_started]
        must = backlog.needed(step - max_staleness) if max_staleness is not None else ()
        started_at = time.monotonic()
        found = self.rollouts.generate(before, step, "", wanted=wanted, needed=must)
        self.seconds = time.monotonic() - started_at
        after = list(before)
        for index, group in found.mine.items():
            after[index] = group
        self.turns = max((_most_new_tokens(now, then) for now, then in zip(after, before, strict=True)), default=0)
        kept = [after[index] for index in found.kept]
        rest = [group for index, group in enumerate(after) if index not in found.kept]
        return kept, backlog.after_phase(before, kept, rest).trained(kept)

    def draw(self, number: int) -> list[Turn]:
        """Return the prompts of a draw. It has as many as a step trains. Ids are unique and start at 1."""
        numbers = random.Random(number)
        ids = range(1 + number * self.wanted, 1 + (number + 1) * self.wanted)
        return [Turn(Prompt(i, "", tuple(numbers.randrange(VOCAB) for _ in range(PROMPT_LENGTH)), "")) for i in ids]


def _most_new_tokens(now: Group, then: Group) -> int:
    lengths = {sample.index: sample.response_len for sample in then.samples}
    return max((sample.response_len - lengths.get(sample.index, 0) for sample in now.samples), default=0)


if __name__ == "__main__":
    harness.start(main)
