"""Generate single responses with the embedded engine of the checkout in PYTHONPATH, once per line of input.

`python responses.py CHECKOUT JSON` prints one line of JSON per line of input: CPU seconds, number of tokens, and a
checksum of all tokens and log-probs. JSON has the sizes of __main__.py.
"""

from __future__ import annotations

import json
import sys
import time
import zlib
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen3Config

import grpo_mega
from grpo_mega.distributed.device import Device
from grpo_mega.rollout.embedded.engine import EmbeddedEngine
from grpo_mega.rollout.engine import RolloutRequest, Sampling
from grpo_mega.types import Group, Prompt
from grpo_mega.weights.families import family_of
from grpo_mega.weights.spec import ModelShape


def make_engine(sizes: dict[str, Any]) -> EmbeddedEngine:
    """Return an engine with random weights, the same in every checkout."""
    torch.manual_seed(0)
    config = Qwen3Config(**sizes["model"])
    shape, cpu = ModelShape.from_hf_config(config.to_dict()), Device("cpu", torch.device("cpu"))
    engine = EmbeddedEngine(
        config,
        family_of("qwen3"),
        shape,
        torch.float32,
        cpu,
        sizes["concurrent"],
        rank=0,
        world_size=1,
        verify=False,
    )
    engine.version = 0
    return engine


def sampling_of(sizes: dict[str, Any], group_size: int) -> Sampling:
    """Return sampling that stops after `length` tokens on average, because random models choose every token alike."""
    stops = frozenset(range(0, sizes["model"]["vocab_size"], sizes["length"]))
    return Sampling(group_size, 1.0, 4 * sizes["length"], stops, seed=1)


def groups_of(sizes: dict[str, Any]) -> dict[int, Group]:
    vocab, generator = sizes["model"]["vocab_size"], torch.Generator().manual_seed(1)
    lengths = torch.randint(1, 2 * sizes["prompt"], (sizes["prompts"],), generator=generator).tolist()
    ids = [tuple(torch.randint(vocab, (length,), generator=generator).tolist()) for length in lengths]
    return {index: Group(Prompt(index, "", token_ids, ""), []) for index, token_ids in enumerate(ids)}


def main(tree: Path, sizes: dict[str, Any]) -> None:
    assert Path(grpo_mega.__file__).is_relative_to(tree), f"{grpo_mega.__file__} is not of {tree}"
    torch.set_num_threads(1)
    engine, sampling = make_engine(sizes), sampling_of(sizes, sizes["samples"])
    for _ in sys.stdin:
        started_at = time.process_time()
        found = engine.generate(RolloutRequest(groups_of(sizes), sampling, step=0))
        seconds = time.process_time() - started_at
        samples = [sample for index in sorted(found) for sample in found[index].samples]
        said = repr([(list(sample.response_ids), list(sample.rollout_logprobs)) for sample in samples])
        num_tokens = sum(sample.response_len for sample in samples)
        print(
            json.dumps({"cpu_seconds": seconds, "tokens": num_tokens, "checksum": zlib.crc32(said.encode())}),
            flush=True,
        )


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve(), json.loads(sys.argv[2]))
