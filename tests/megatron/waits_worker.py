"""Run the passes of an update on a card that is not there (helpers/fake_card.py), for each line of JSON on stdin.

A case has `model`, fields of a config.json, and sections of a config. Print JSON per case: where the host first waits
in the passes for log-probs and for the update ("" for nowhere), and the number of operations on the card.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from grpo_mega.batching.layout import note_gradients, to_device
from grpo_mega.batching.pack import pack_mini_batches
from grpo_mega.distributed.device import Device
from grpo_mega.types import PackedBatch, Prompt, Sample
from grpo_mega.weights.families import family_of
from grpo_mega.weights.spec import ModelShape
from tests.helpers import fake_card, rehearsal
from tools.benchmarks.gpu.rank import config_of

HOST = torch.device("cpu")


def make_samples() -> list[Sample]:
    """Return two samples of each of four prompts, with different lengths."""
    samples = []
    for number in range(8):
        prompt = Prompt(number // 2, "", tuple(range(3, 8 + number // 2)), "")
        response = [2 + token % 90 for token in range(11 + 6 * number)]
        sample = Sample(prompt, number % 2, response, [-1.0] * len(response), "stop", reward=1.0)
        sample.advantages = torch.full((len(response),), 1.0 if number % 2 else -1.0)
        samples.append(sample)
    return samples


def run(case: dict[str, Any]) -> dict[str, Any]:
    from transformers import AutoConfig

    from grpo_mega.megatron import runtime as runtimes
    from grpo_mega.megatron.policy import Policy

    has_old, zeros = case.pop("old_logprobs", False), case.pop("zeros", False)
    hf_config = AutoConfig.for_model(**case.pop("model"))
    shape = ModelShape.from_hf_config(hf_config.to_dict())
    settings = {"path": "unused", "dtype": "bfloat16"} | case.pop("settings", {})
    lengths = {"data": {"train": "unused", "max_prompt_length": 16}, "rollout": {"max_response_length": 64}}
    sections = {"batch": {"tokens_per_micro_batch": 96} | case.pop("batch", {})} | lengths | case
    config = config_of(Path("unused"), settings, **sections)
    runtime = runtimes.arrange(config, Device("cpu", torch.device("card", 0)))
    with fake_card.fake_tensors(), torch.device("card"):
        policy = Policy(config, shape, family_of(shape.model_type), hf_config, runtime)
    samples = make_samples()
    if zeros:
        samples[3].advantages = torch.zeros(samples[3].response_len)
    [packed] = pack_mini_batches([samples], [[1 / 300] * len(samples)], policy.packing)
    if config.algorithm.positive_nll:
        for batch in packed:
            batch.nll_weights, batch.advantages = batch.loss_mask / 300, torch.zeros_like(batch.advantages)
    batches = [to_device(batch, HOST) for batch in packed]
    assert len(batches) > 2
    if has_old:
        for batch in batches:
            batch.old_logprobs = torch.zeros_like(batch.advantages)
    note_gradients(batches, policy.algorithm)
    params = [policy.pipeline.packed_seq_params_of(batch) for batch in batches]
    found: dict[str, Any] = {"num_micro_batches": len(batches)}
    for name in ("logprobs", "update"):
        with fake_card.fake_tensors():
            moved: list[PackedBatch] = [fake_card.on_card(batch) for batch in batches]
            if config.algorithm.kl_beta:
                moved = [replace(batch, ref_logprobs=torch.empty_like(batch.advantages)) for batch in moved]
            of_batch = dict(zip(map(id, moved), fake_card.on_card(params), strict=True))
            policy.pipeline.packed_seq_params_of = lambda batch, of=of_batch: of[id(batch)]  # type: ignore[method-assign]
            found[name], watch = "", fake_card.Watch()
            try:
                with watch:
                    if name == "logprobs":
                        policy.pipeline.forward(moved, lambda hidden, batch: policy._logprobs(hidden, batch)[0])
                    else:
                        policy.pipeline.forward_backward(moved, policy._loss)
            except fake_card.HostWaits as error:
                found[name] = str(error)
            found[f"{name}_operations"] = watch.num_operations
    return found


def main() -> None:
    rehearsal.send_nothing()  # before Megatron imports functions of torch.distributed by name
    fake_card.install()
    from grpo_mega.megatron import runtime as runtimes

    for line in sys.stdin:
        dist.init_process_group("fake", store=dist.HashStore(), rank=0, world_size=1)
        print(json.dumps(run(json.loads(line))), flush=True)
        runtimes.stop()


if __name__ == "__main__":
    main()
