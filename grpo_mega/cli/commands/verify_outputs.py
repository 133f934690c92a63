"""Compute the outputs of each layer of a checkpoint's model on fixed prompts, in fp32.

transformers runs a Hugging Face folder, Megatron-core runs a Megatron checkpoint. If the outputs agree, both have the
same names and row order. transformers is the oracle. It runs in a separate process,
`python -m grpo_mega.cli.commands.verify_outputs HF_DIR OUT`, because the patches that Megatron needs without a GPU
change torch's constructors.
"""

import os
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable
from functools import partial
from itertools import chain
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from grpo_mega.checkpoint_io.detect import Checkpoint, find_checkpoint
from grpo_mega.checkpoint_io.reader import open_reader
from grpo_mega.distributed.launch import only_rank
from grpo_mega.errors import ConfigError
from grpo_mega.processes import host_room, private_folder
from grpo_mega.rollout.embedded.model import scale_attention
from grpo_mega.text import filter_output
from grpo_mega.weights.apply import load_shards

TOLERANCE = 1e-4  # relative to a layer's largest output; fp32 errors are about 1e-6
_BYTES_PER_PARAMETER = 10  # fp32 weights, Megatron's gradient buffer, and a margin
PROMPT_LENGTHS = (7, 19)

Outputs = dict[str, Tensor]  # [tokens, width] for each layer in order, the logits last


def fits(checkpoint: Checkpoint) -> bool:
    """Return True if the model fits into free memory."""
    family, shape = checkpoint.model()
    return _BYTES_PER_PARAMETER * sum(map(prod, family.hf_tensors(shape).values())) < host_room().available


def outputs(checkpoint: Checkpoint) -> Outputs:
    """Compute the outputs. Raise ConfigError if the checkpoint is quantized, or if its model cannot be run."""
    if checkpoint.is_megatron:
        return _by_megatron(checkpoint)
    if "quantization_config" in checkpoint.config():
        raise ConfigError(f"{checkpoint.path} is quantized; convert it, and verify the result")
    with private_folder() as folder:
        out = folder / "outputs.pt"
        command = [sys.executable, "-m", "grpo_mega.cli.commands.verify_outputs", str(checkpoint.weights), str(out)]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        if done.returncode:
            raise ConfigError(f"transformers cannot run {checkpoint.path} ({done.stderr.strip().splitlines()[-1]})")
        return torch.load(out)


def first_difference(a: Outputs, b: Outputs) -> tuple[str, float] | None:
    """Return the first layer whose outputs differ by more than TOLERANCE, and its difference relative to its largest
    output.
    """
    for name, values in a.items():
        difference = float((values - b[name]).abs().max() / values.abs().max().clamp_min(1e-30))
        if not difference <= TOLERANCE:
            return name, difference
    return None


def prompts(vocab: int) -> list[list[int]]:
    """Return random token ids. They depend only on the vocabulary's size."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(0, vocab, (length,), generator=generator).tolist() for length in PROMPT_LENGTHS]


@torch.no_grad()
def _by_transformers(checkpoint: Checkpoint) -> Outputs:
    from transformers import AutoModelForCausalLM

    # Use the plain loop over experts. transformers' default, torch.grouped_mm, needs rows that are a multiple of 16
    # bytes.
    own = {"experts_implementation": "eager"} if checkpoint.model()[1].num_experts else {}
    model = AutoModelForCausalLM.from_pretrained(checkpoint.weights, dtype=torch.float32, **own).eval()
    scale_attention(model)
    vocab = checkpoint.model()[1].vocab
    outputs = _Recorded(model.model.layers)
    for tokens in prompts(vocab):
        logits = model(torch.tensor([tokens])).logits
        outputs["logits"].append(logits)  # after the layers, because the first difference is named
    return outputs.joined(vocab)


class _Recorded(defaultdict[str, list[Tensor]]):
    """The outputs of each layer, one tensor per prompt, as the model runs."""

    def __init__(self, layers: Iterable[torch.nn.Module]) -> None:
        super().__init__(list)

        def keep(name: str, module: Any, inputs: Any, output: Any) -> None:
            self[name].append((output[0] if isinstance(output, tuple) else output).detach())

        for number, layer in enumerate(layers):
            layer.register_forward_hook(partial(keep, f"layer {number}"))

    def joined(self, vocab: int) -> Outputs:
        """Return the outputs of all prompts' tokens, without padded tokens and logits beyond the vocabulary."""
        outputs = {
            name: torch.cat([v.reshape(-1, v.shape[-1])[:n] for v, n in zip(values, PROMPT_LENGTHS, strict=True)])
            for name, values in self.items()
        }
        return outputs | {"logits": outputs["logits"][:, :vocab]}


def _by_megatron(checkpoint: Checkpoint) -> Outputs:
    from grpo_mega import config as configs
    from grpo_mega.batching.pack import pack_mini_batches
    from grpo_mega.checkpoint_io.model import read_model_files
    from grpo_mega.megatron import runtime as runtimes
    from grpo_mega.megatron.model import output_weight
    from grpo_mega.megatron.policy import Policy
    from grpo_mega.types import Prompt, Sample

    config = configs.Config.model_validate(
        {
            "steps": 1,
            "device": "cpu",
            "run_dir": "unused",
            "data": {"train": "unused"},
            "model": {"path": str(checkpoint.side), "dtype": "float32"},
        }
    )
    samples = []
    vocab = checkpoint.model()[1].vocab
    for number, tokens in enumerate(prompts(vocab)):
        prompt = Prompt(number, "", (tokens[0],), "")
        sample = Sample(prompt, 0, tokens[1:], [0.0] * (len(tokens) - 1), "stop", reward=1.0)
        sample.advantages = torch.zeros(len(tokens) - 1)
        samples.append(sample)
    with only_rank():
        runtime = runtimes.start(config)
        try:
            model = read_model_files(config.model)
            policy = Policy(config, model.shape, model.family, model.hf_config, runtime)
            with open_reader(checkpoint.weights, model.family, model.shape) as reader:
                load_shards(policy.shards.rank_shards(0), policy.tensors(), reader.read)
            outputs = _Recorded(policy.models[0].decoder.layers)
            mini_batches = pack_mini_batches([[s] for s in samples], [[1.0]] * len(samples), policy.packing)

            def keep_logits(hidden: Tensor, batch: Any) -> None:
                outputs["logits"].append(hidden @ output_weight(policy.models[-1]).t())

            policy.pipeline.forward(list(chain.from_iterable(mini_batches)), keep_logits)
        finally:
            runtimes.stop()
    return outputs.joined(vocab)


if __name__ == "__main__":
    filter_output()
    torch.save(_by_transformers(find_checkpoint(Path(sys.argv[1]))), sys.argv[2])
