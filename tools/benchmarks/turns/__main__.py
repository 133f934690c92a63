"""Compare the embedded engine's rollouts: conversations that join a running batch, and single responses.

`python tools/benchmarks/turns [--against CHECKOUT]` measures on one CPU thread, with a dense model of random weights.
All variants take turns; medians of CPU seconds count, because other work on the machine changes them least.

joining    conversations of 1 to 4 turns; a turn joins the running batch, as in training
rounds     the same conversations in closed batches: no turn starts before all turns of the batch have ended
single     single responses of this checkout; with --against they are compared with another checkout's engine

The last line is JSON with joining (seconds of joining / rounds), single (seconds of this / the other checkout; null
without --against), and is_same (tokens and log-probs of single responses are bit-identical in both). Exit code 1 if
joining is above 0.9, single is above 1.03, or they are not the same.
"""

from __future__ import annotations

import contextlib
import json
import queue
import subprocess
import sys
from functools import partial
from os import environ
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))  # for `python tools/benchmarks/turns`

from grpo_mega.errors import UserError
from grpo_mega.paths import user_path
from grpo_mega.rollout.embedded import engine as turn_loop
from grpo_mega.rollout.embedded.engine import EmbeddedEngine
from grpo_mega.rollout.engine import RolloutRequest, Sampling
from grpo_mega.rollout.sessions.session import Asked, Ended, Failed, TurnRequest, TurnResult
from grpo_mega.types import Prompt, Sample, Span
from tools.benchmarks import harness
from tools.benchmarks.turns import responses

LIMITS = {"joining": 0.9, "single": 1.03}
MODEL = {"num_hidden_layers": 4, "hidden_size": 320, "intermediate_size": 864, "num_attention_heads": 5, "head_dim": 64}
MODEL |= {"num_key_value_heads": 5, "vocab_size": 4099, "max_position_embeddings": 8192, "tie_word_embeddings": True}
NEVER = 10**9  # decoding steps; no phase is longer


class Conversations:
    """Conversations of 1 to 4 turns, whose tools answer at once with 5 tokens."""

    def __init__(self) -> None:
        self.events: queue.SimpleQueue[Asked | Ended | Failed] = queue.SimpleQueue()
        self.sampling: Sampling

    def start(self, prompt_index: int, sample_index: int, prompt: Prompt, step: int) -> None:
        self._ask((prompt_index, sample_index), prompt, 0, prompt.token_ids, step)

    def answer(self, request: TurnRequest, result: TurnResult) -> None:
        context, number, key = (*request.context_ids, *result.token_ids, 1, 2, 3, 4, 5), request.number + 1, request.key
        if number <= sum(key) % 4:
            self._ask(key, request.prompt, number, context, request.step)
            return
        spans = [Span(result.version, 0, len(result.token_ids))]
        self.events.put(Ended(key[0], Sample(request.prompt, key[1], result.token_ids, result.logprobs, "stop", spans)))

    def abort(self) -> None:
        """Do nothing: no phase ends early."""

    def _ask(self, key: tuple[int, int], prompt: Prompt, number: int, context: tuple[int, ...], step: int) -> None:
        limits = self.sampling.max_response_length, self.sampling.stop_token_ids
        self.events.put(Asked(TurnRequest(key, prompt, number, context, *limits, step)))


class Checkout:
    """A process that generates single responses with the engine of a checkout."""

    def __init__(self, tree: Path, sizes: dict[str, Any]) -> None:
        command = [sys.executable, responses.__file__, str(tree), json.dumps(sizes)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environ | {"PYTHONPATH": str(tree)}
        )
        self.said: dict[str, Any] = {}

    def generate(self) -> harness.Figures:
        assert self._process.stdin is not None and self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            print(file=self._process.stdin, flush=True)
        if not (line := self._process.stdout.readline()):
            raise harness.RunFailed("a process that generates responses has ended; see above")
        self.said = json.loads(line)
        return {"cpu_seconds": self.said["cpu_seconds"]}

    def close(self) -> None:
        self._process.communicate()


def converse(engine: EmbeddedEngine, sizes: dict[str, Any], join_every: int) -> None:
    turn_loop.JOIN_EVERY = join_every
    sampling, conversations = responses.sampling_of(sizes, sizes["samples"]), Conversations()
    groups = responses.groups_of(sizes)
    found = engine.generate(RolloutRequest(groups, sampling, 0, conversations=conversations))  # type: ignore[arg-type]
    assert all(group.is_complete(sampling.group_size) for group in found.values())


@harness.benchmark
def main(arguments: list[str] | None) -> int:
    parser = harness.Parser(__doc__)
    parser.add_argument(
        "--against", type=user_path, metavar="CHECKOUT", help="root of another checkout of this repository"
    )
    parser.add_argument("--prompts", type=int, default=12, help="number of prompts")
    parser.add_argument("--samples", type=int, default=4, help="samples of each prompt")
    parser.add_argument("--prompt", type=int, default=64, help="mean number of tokens of a prompt")
    parser.add_argument("--length", type=int, default=40, help="mean number of tokens of a turn or response")
    parser.add_argument("--concurrent", type=int, default=32, help="maximum number of sequences at once")
    parser.add_argument("--repeat", type=int, default=5, help="rounds of all variants; medians count")
    options = parser.parse(arguments, prompts=1, samples=1, prompt=1, length=1, concurrent=1, repeat=1)
    if options.against is not None and not (options.against / "grpo_mega").is_dir():
        raise UserError(f"--against={options.against}: must be a checkout with the folder grpo_mega; correct the path")
    sizes = vars(options) | {"model": MODEL, "against": None}
    torch.set_num_threads(1)
    engine, join_every = responses.make_engine(sizes), turn_loop.JOIN_EVERY
    ours = Checkout(harness.ROOT, sizes)
    theirs = Checkout(options.against.resolve(), sizes) if options.against is not None else None
    variants = {
        "joining": harness.timed(partial(converse, engine, sizes, join_every)),
        "rounds": harness.timed(partial(converse, engine, sizes, NEVER)),
        "single": ours.generate,
    } | ({"other": theirs.generate} if theirs else {})
    try:
        found = harness.medians(harness.take_turns(variants, options.repeat, warm_up=1))
    finally:
        turn_loop.JOIN_EVERY = join_every
        for one in filter(None, (ours, theirs)):
            one.close()
    seconds = {name: found[name]["cpu_seconds"] for name in variants}
    same = None if theirs is None else ours.said["checksum"] == theirs.said["checksum"]
    result = {
        "joining": round(seconds["joining"] / seconds["rounds"], 3),
        "single": round(seconds["single"] / seconds["other"], 3) if theirs else None,
        "is_same": same,
        "tokens": ours.said["tokens"],
        "seconds": {name: round(value, 3) for name, value in seconds.items()},
    }
    rows = [("variant", "CPU s"), *((name, f"{value:.3f}") for name, value in seconds.items())]
    problems = ["tokens or log-probs differ between the checkouts"] if same is False else []
    return harness.report(rows, result, limits=LIMITS, problems=problems)


if __name__ == "__main__":
    harness.start(main)
