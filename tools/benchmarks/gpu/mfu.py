"""Measure the MFU of a training step with the trainer's own Policy.update, on one GPU.

A step has 4 micro-batches of 16,384 tokens in segments of 4,096 (512 of them prompt), forward and backward, and one
optimizer step. Weights are random. cli/planner/state.py counts its FLOPs with a formula that you can check by hand: 6
per token and weight that multiplies it, 12 q per pair of a query and a visible key, nothing for recomputation. MFU is
this count divided by the median seconds of a step and by the card's dense peak in bf16, or in FP8 for FP8. If a model
does not fit, it gets fewer layers, and the case says how many.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from grpo_mega.batching.pack import pack_mini_batches
from grpo_mega.config import Config
from grpo_mega.distributed.launch import only_rank
from grpo_mega.errors import ConfigError
from grpo_mega.megatron import runtime as runtimes
from grpo_mega.megatron.policy import Policy
from grpo_mega.types import PackedBatch, Prompt, Sample, StepMetrics
from grpo_mega.weights.boxes import Box
from grpo_mega.weights.families import family_of
from grpo_mega.weights.spec import ModelShape
from tools.benchmarks.flops import count_flops
from tools.benchmarks.gpu.kernels import profiled
from tools.benchmarks.gpu.models import hf_config_of, layers_that_fit, peak_tflops, shape_of
from tools.benchmarks.gpu.rank import Figure, Options, config_of, seconds_of
from tools.benchmarks.gpu.trials import TRIALS, no_more

MFU_TARGET, FP8_TARGET = 50.0, 1.3
# Sections of the config by case. The first word is the precision.
CASES: dict[str, dict[str, Any]] = {
    "bf16": {},
    "bf16 with optimizer.cpu_offload": {"optimizer": {"cpu_offload": True}},
    "fp8 tensorwise": {"precision": {"fp8": "hybrid", "fp8_recipe": "tensorwise"}},
    "fp8 blockwise": {"precision": {"fp8": "e4m3", "fp8_recipe": "blockwise"}},
}
RECOMPUTED: dict[str, dict[str, Any]] = {
    "selective": {"recompute": "selective"},
    "selective, also core_attn": {"recompute": "selective", "recompute_modules": ["core_attn", "mlp"]},
    "full": {"recompute": "full"},
    "full, one layer": {"recompute": "full", "recompute_num_layers": 1},
}


@dataclass(frozen=True)
class Work:
    """One optimizer step."""

    prompt_tokens: int = 512
    segment_tokens: int = 4096
    segments: int = 4  # segments per micro-batch
    micro_batches: int = 4

    @property
    def tokens(self) -> int:
        return self.segment_tokens * self.segments

    def flops(self, shape: ModelShape) -> float:
        num_outputs = self.segments * (self.segment_tokens - self.prompt_tokens)
        found = count_flops(shape, [self.segment_tokens] * self.segments, num_outputs=num_outputs)
        return self.micro_batches * found.training


def run(options: Options) -> Iterator[Figure]:
    work = Work(8, 32, 2, 2) if options.tiny else Work()
    models = ["tiny"] if options.tiny else ["qwen2.5-1.5b", "qwen3-4b", "qwen3-8b", "llama-3.1-8b"]
    with only_rank():
        config = config_of(Path("unused"), {"path": "unused", "dtype": "bfloat16"})
        device = runtimes.join(config)
        try:
            for model in models[:1] if options.quick or options.profile or options.trial else models:
                if options.profile or options.trial:
                    yield from _closer(model, work, device, options)
                    continue
                yield from _model(model, work, device, options)
        finally:
            runtimes.stop()


def _model(model: str, work: Work, device: Any, options: Options) -> Iterator[Figure]:
    """Measure one model in each case that the card supports, with the layers that fit in bf16 or fewer."""
    layers: int | None = None
    bf16: tuple[int, float] | None = None  # (layers, throughput) in bf16
    for precision, settings in CASES.items():
        try:
            layers, seconds = _fitting(model, layers, work, settings, device, options.repeat)
        except ConfigError as error:
            options.say(f"mfu: {model} in {precision} skipped: {error}")
            continue
        shape = shape_of(model, layers)
        rate = work.tokens * work.micro_batches / seconds
        tflops = work.flops(shape) / seconds / 1e12
        card = torch.cuda.get_device_name() if device.is_cuda else "CPU"
        peak = peak_tflops(card, precision.split()[0])
        case = f"{model}, {shape.num_layers} of {shape_of(model).num_layers} layers, {precision}"
        note = f"{tflops:.3g} TFLOP/s, {work.flops(shape) / 1e12:.4g} TFLOP in {seconds:.4g} s"
        target = MFU_TARGET if precision == "bf16" else None
        share = None if peak is None else 100 * tflops / peak
        yield Figure("mfu", case, "of the dense peak", share, "%", target, "more", note)
        yield Figure("mfu", case, "throughput", rate, "tokens/s")
        if precision == "bf16":
            bf16 = layers, rate
        elif bf16 is not None and bf16[0] == layers:
            least = FP8_TARGET if precision.startswith("fp8") else None
            yield Figure("mfu", case, "throughput against bf16", rate / bf16[1], "times", least, "more")
        else:
            options.say(f"mfu: {case} cannot be compared: bf16 was measured with other layers, or not at all")
    if bf16 is not None:
        yield from _recomputed(model, *bf16, work, device, options)


def _recomputed(model: str, layers: int, rate: float, work: Work, device: Any, options: Options) -> Iterator[Figure]:
    """Yield the throughput with recomputation in bf16, relative to `rate` without."""
    for name, settings in RECOMPUTED.items():
        seconds = _measure(model, layers, work, {}, device, options.repeat, settings)
        share = None if seconds is None else work.tokens * work.micro_batches / seconds / rate
        yield Figure("mfu", f"{model}, recompute {name}", "throughput against none", share, "times")


def _closer(model: str, work: Work, device: Any, options: Options) -> Iterator[Figure]:
    """Profile a step in bf16, or compare it with a trial's."""
    layers, _ = _fitting(model, None, work, {}, device, 1)
    case = f"{model}, {layers} of {shape_of(model).num_layers} layers, bf16"
    if options.profile:
        yield from profiled(_step(model, layers, work, _config(work), device)[1], device.torch_device).figures(case)
        return
    trial, found = TRIALS[options.trial], []
    for change, prepare in ((nullcontext, no_more), (trial.change, trial.prepare)):
        try:
            with change():
                policy, act = _step(model, layers, work, _config(work), device)
                norm = act()[0]["grad_norm"]
                prepare(policy, work.tokens)
                found.append((norm, seconds_of(act, device.torch_device, options.repeat)))
        except ConfigError as error:
            options.say(f"mfu: {case}, {options.trial} skipped: {error}")
            return
        del policy, act
        gc.collect()
    (norm, seconds), (norm_then, seconds_then) = found
    case, note = f"{case}, {options.trial}", f"{trial.what}: {seconds_then:.4g} s, without {seconds:.4g} s"
    yield Figure("mfu", case, "time against the product's", seconds_then / seconds, "times", note=note)
    note = f"{norm_then:.6g}, without {norm:.6g}; of a first step"
    yield Figure("mfu", case, "difference of the gradient's norm", 100 * abs(norm_then / norm - 1), "%", 1.0, note=note)


def _config(work: Work, model: Mapping[str, Any] = MappingProxyType({}), **settings: Any) -> Config:
    return config_of(
        Path("unused"),
        {"path": "unused", "dtype": "bfloat16"} | dict(model),
        data={"train": "unused", "max_prompt_length": work.prompt_tokens},
        rollout={"max_response_length": work.segment_tokens - work.prompt_tokens},
        batch={"tokens_per_micro_batch": work.tokens},
        **settings,
    )


def _fitting(
    model: str, layers: int | None, work: Work, settings: dict[str, Any], device: Any, repeat: int
) -> tuple[int, float]:
    """Return the number of layers that fit, and the median seconds. Raise ConfigError if none fits."""
    free = torch.cuda.mem_get_info()[0] if device.is_cuda else None
    layers = layers or layers_that_fit(shape_of(model), work.tokens, free)
    while True:
        seconds = _measure(model, layers, work, settings, device, repeat)
        gc.collect()  # a policy has reference cycles
        if device.is_cuda:
            torch.cuda.empty_cache()
        if seconds is not None:
            return layers, seconds
        if layers == 1:
            raise ConfigError(f"no layer of {model} fits into the device's memory; free it, or leave the model out")
        layers = max(1, layers * 4 // 5)


def _measure(
    model: str,
    layers: int,
    work: Work,
    settings: dict[str, Any],
    device: Any,
    repeat: int,
    recompute: Mapping[str, Any] = MappingProxyType({}),
) -> float | None:
    """Return the median seconds of a step; None if memory runs out."""
    config = _config(work, recompute, **settings)
    try:
        return seconds_of(_step(model, layers, work, config, device)[1], device.torch_device, repeat)
    except torch.OutOfMemoryError:
        return None


def _step(
    model: str, layers: int, work: Work, config: Config, device: Any
) -> tuple[Policy, Callable[[], list[StepMetrics]]]:
    """Return a new policy, and a function that runs one optimizer step of it."""
    policy = random_policy(hf_config_of(model, layers), config, runtimes.arrange(config, device))
    [batches] = policy.attach_logprobs(make_batches(policy, shape_of(model).vocab, work))
    # An update notes its log-probs in a batch.
    return policy, lambda: policy.update([[replace(batch) for batch in batches]])


def random_policy(hf_config: Any, config: Config, runtime: runtimes.Runtime) -> Policy:
    """Return a policy with random weights, made directly on the device."""
    device = runtime.device.torch_device
    generator = torch.Generator(device).manual_seed(0)

    def read(box: Box) -> Tensor:
        if box.tensor.endswith(("norm.weight", ".bias")):
            return torch.full(box.shape, float(box.tensor.endswith("norm.weight")), device=device)
        return torch.empty(box.shape, device=device).normal_(0.0, 0.02, generator=generator)

    shape = ModelShape.from_hf_config(hf_config.to_dict())
    policy = Policy(config, shape, family_of(shape.model_type), hf_config, runtime)
    policy.load(read)
    return policy


def make_batches(policy: Policy, vocab: int, work: Work) -> list[list[PackedBatch]]:
    """Return one mini-batch of full micro-batches of random tokens. Half of the samples have a positive advantage."""
    generator = torch.Generator().manual_seed(0)
    samples = []
    for number in range(work.segments * work.micro_batches):
        tokens = torch.randint(0, vocab, (work.segment_tokens,), generator=generator).tolist()
        response = tokens[work.prompt_tokens :]
        prompt = Prompt(number, "", tuple(tokens[: work.prompt_tokens]), "")
        sample = Sample(prompt, 0, response, [-1.0] * len(response), "length", reward=1.0)
        sample.advantages = torch.full((len(response),), 1.0 if number % 2 else -1.0)
        samples.append(sample)
    weights = [1 / sum(s.response_len for s in samples)] * len(samples)
    return pack_mini_batches([samples], [weights], replace(policy.packing, token_budget=work.tokens))
