"""Measure time and memory of log-probs in bf16, forward and backward: 32,768 tokens x 152,064 vocabulary x 4,096
hidden.

 ours               algorithm/logprobs.py, with the weight's gradient added to an existing fp32 buffer, as in the
                    trainer
 ours with entropy  the same, with entropies
 trl                trl.kernels.chunked_logprob, used by TRL's GRPOTrainer; it always computes entropies
 log_softmax        torch.log_softmax on chunks of 1,024 tokens, each recomputed in its backward pass
Memory is the peak above the memory before (hidden states, weight, the weight's gradient). It includes the gradient of
the hidden states (256 MiB). The error is the largest error of the log-probs of some tokens, against float64.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import linear
from torch.utils.checkpoint import checkpoint

from grpo_mega.algorithm.logprobs import vocab_parallel_logprobs
from grpo_mega.distributed import device as devices
from tools.benchmarks.gpu.rank import Figure, Options, extra_gib, seconds_of

EXTRA_TARGET_GIB = 1.0
CHUNK = 1024  # tokens per chunk of log_softmax
TRL_CHUNK = 32768  # columns per tile; equals trl.trainer.utils._CHUNKED_LOGPROB_CHUNK_SIZE
NUM_CHECKED = 8  # tokens compared with float64
PEERS = ("ours", "ours with entropy", "trl", "log_softmax")


class Inputs:
    """The inputs of a peer. `sink_VH` is the buffer for the weight's gradient: fp32 for ours, autograd's bf16 for
    others.
    """

    def __init__(self, num_tokens: int, vocab: int, hidden: int, device: torch.device, *, is_ours: bool) -> None:
        generator = torch.Generator(device).manual_seed(0)

        def normal(*shape: int) -> Tensor:
            return torch.empty(shape, dtype=torch.bfloat16, device=device).normal_(generator=generator)

        self.hidden_TH = normal(num_tokens, hidden).requires_grad_()
        self.weight_VH = normal(vocab, hidden).mul_(2 / hidden**0.5).requires_grad_()
        self.targets_T = torch.randint(0, vocab, (num_tokens,), generator=generator, device=device)
        self.upstream_T = normal(num_tokens).float()
        self.sink_VH = torch.zeros_like(self.weight_VH, dtype=torch.float32 if is_ours else torch.bfloat16)
        self.weight_VH.grad = None if is_ours else self.sink_VH


def run(options: Options) -> list[Figure]:
    device = devices.select("auto", 0).torch_device
    sizes = (64, 500, 16) if options.tiny else (8192, 152_064, 4096) if options.quick else (32_768, 152_064, 4096)
    case = "{:,} tokens x {:,} x {:,}".format(*sizes)
    found: list[Figure] = []
    for name in PEERS:
        try:
            step = step_of(name)
        except ImportError:
            options.say(f"logprobs: {name} skipped: it is not installed")
            continue
        inputs = Inputs(*sizes, device, is_ours=name.startswith("ours"))
        logprobs_T: Tensor | None = None

        def act(step: Callable[[Inputs], Tensor] = step, inputs: Inputs = inputs) -> None:
            nonlocal logprobs_T
            logprobs_T = None
            inputs.hidden_TH.grad = None
            logprobs_T = step(inputs)

        try:
            seconds = seconds_of(act, device, options.repeat)
            logprobs_T = inputs.hidden_TH.grad = None
            gib = extra_gib(act, device)
        except torch.OutOfMemoryError:
            options.say(f"logprobs: {name} skipped: it does not fit into memory")
            continue
        assert logprobs_T is not None
        target = EXTRA_TARGET_GIB if name.startswith("ours") else None
        note = f"largest error {max_error(inputs, logprobs_T):.1e}"
        found.append(Figure("logprobs", case, f"{name}: time", 1e3 * seconds, "ms", note=note))
        found.append(Figure("logprobs", case, f"{name}: extra memory", gib, "GiB", target))
    return found


def step_of(name: str) -> Callable[[Inputs], Tensor]:
    """Return a function that computes log-probs [T] and adds gradients to its inputs. Raise ImportError if it is
    missing.
    """
    if name == "trl":
        from trl.kernels.chunked_logprob import ChunkedLogProbFunction

        def logprobs_of(inputs: Inputs) -> Tensor:
            more = (TRL_CHUNK, None, 1.0, ("log_probs", "entropy"))
            found: Tensor = ChunkedLogProbFunction.apply(
                inputs.hidden_TH, inputs.weight_VH, None, inputs.targets_T, 1.0, *more
            )[0]
            return found

    elif name == "log_softmax":
        logprobs_of = _in_chunks
    else:

        def logprobs_of(inputs: Inputs) -> Tensor:
            return vocab_parallel_logprobs(
                inputs.hidden_TH,
                inputs.weight_VH,
                inputs.targets_T,
                vocab_size=len(inputs.weight_VH),
                with_entropy=name != "ours",
                weight_grad_VH=inputs.sink_VH,
            )[0]

    def step(inputs: Inputs) -> Tensor:
        logprobs_T = logprobs_of(inputs)
        logprobs_T.backward(inputs.upstream_T.to(logprobs_T.dtype))
        return logprobs_T.detach()

    return step


def _in_chunks(inputs: Inputs) -> Tensor:
    def one(hidden_nH: Tensor, targets_n: Tensor) -> Tensor:
        logits_nV = linear(hidden_nH, inputs.weight_VH).float()
        return torch.log_softmax(logits_nV, dim=-1).gather(1, targets_n[:, None]).squeeze(1)

    chunks = zip(inputs.hidden_TH.split(CHUNK), inputs.targets_T.split(CHUNK), strict=True)
    return torch.cat([checkpoint(one, *chunk, use_reentrant=False) for chunk in chunks])


@torch.no_grad()
def max_error(inputs: Inputs, logprobs_T: Tensor) -> float:
    """Return the largest difference of some tokens' log-probs from float64, in nats."""
    sample_N = torch.arange(0, len(logprobs_T), max(1, len(logprobs_T) // NUM_CHECKED), device=logprobs_T.device)
    hidden_NH = inputs.hidden_TH[sample_N].double()
    logits_NV = torch.cat([hidden_NH @ rows.double().t() for rows in inputs.weight_VH.split(8192)], dim=1)
    exact_N = torch.log_softmax(logits_NV, dim=-1).gather(1, inputs.targets_T[sample_N, None]).squeeze(1)
    return float((logprobs_T[sample_N].double() - exact_N).abs().max())
