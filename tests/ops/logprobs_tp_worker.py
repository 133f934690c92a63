"""One of the ranks that test_logprobs_tp.py starts: `logprobs_tp_worker.py RANK WORLD_SIZE STORE_FILE`; fails by exception."""

import sys

import torch
import torch.distributed as dist

from grpo_mega.ops.logprobs import vocab_parallel_logprobs
from grpo_mega.ops.reference import logprobs_and_entropy

# (tokens, vocabulary, width of a rank's shard, dtype, temperature, tile, share of -inf); width 8 of 5: rank 1 has padding only
CASES = [
    (7, 16, 8, torch.float64, 1.0, 1024, 0.0),
    (7, 13, 8, torch.float64, 0.7, 3, 0.0),
    (5, 8, 8, torch.float64, 1.0, 2, 0.0),
    (5, 5, 8, torch.float64, 1.3, 2, 0.3),
    (9, 30, 16, torch.float64, 0.5, 4, 0.6),
    (9, 30, 16, torch.float64, 0.5, 4, 0.95),
    (40, 60, 32, torch.float32, 0.8, 16, 0.0),
    (40, 60, 32, torch.float32, 1.0, 7, 0.5),
    (40, 60, 32, torch.bfloat16, 0.8, 16, 0.0),
    (1, 2, 1, torch.float64, 1.0, 1, 0.0),
    (0, 16, 8, torch.float64, 1.0, 4, 0.0),
]
TOLERANCES = {torch.float64: (1e-12, 1e-12), torch.float32: (1e-5, 1e-5), torch.bfloat16: (1e-5, 2**-8)}


def check(case, seed, rank, world_size):
    num_tokens, vocab_size, width, dtype, temperature, tile, forbidden = case
    generator = torch.Generator().manual_seed(seed)
    full = torch.randn(num_tokens, width * world_size, generator=generator, dtype=torch.float64) * 3
    targets = torch.randint(0, vocab_size, (num_tokens,), generator=generator)
    is_forbidden = torch.rand(full.shape, generator=generator) < forbidden
    is_forbidden[torch.arange(num_tokens), targets] = False
    full[is_forbidden] = -torch.inf
    full[:, vocab_size:] = torch.nan
    full = full.to(dtype)
    weights = torch.randn(2, num_tokens, generator=generator, dtype=torch.float64)

    columns = slice(rank * width, (rank + 1) * width)
    shard = full[:, columns].clone().requires_grad_()
    options = {"vocab_size": vocab_size, "temperature": temperature}
    logprobs, entropy = vocab_parallel_logprobs(
        shard, targets, tp_group=dist.group.WORLD, with_entropy=True, tile=tile, **options
    )
    (weights.to(logprobs.dtype) * torch.stack([logprobs, entropy])).sum().backward()

    twin = full.double().requires_grad_()
    twin_logprobs, twin_entropy = logprobs_and_entropy(twin, targets, **options)
    (weights * torch.stack([twin_logprobs, twin_entropy])).sum().backward()

    value_tolerance, gradient_tolerance = TOLERANCES[dtype]
    for actual, expected in [(logprobs, twin_logprobs), (entropy, twin_entropy)]:
        torch.testing.assert_close(actual.double(), expected, rtol=value_tolerance, atol=value_tolerance)
    gradient = shard.grad.double()
    torch.testing.assert_close(gradient, twin.grad[:, columns], rtol=gradient_tolerance, atol=min(gradient_tolerance, 1e-5))


def check_collectives():
    """However many tiles and whatever is asked for, the forward costs two all-reduces and the backward none."""
    calls = []
    all_reduce = dist.all_reduce
    dist.all_reduce = lambda *args, **kwargs: (calls.append(args), all_reduce(*args, **kwargs))[1]
    logits = torch.zeros(20, 8, requires_grad=True)
    targets = torch.zeros(20, dtype=torch.int64)
    logprobs, _ = vocab_parallel_logprobs(logits, targets, vocab_size=16, tp_group=dist.group.WORLD, with_entropy=True, tile=2)
    assert len(calls) == 2, calls
    logprobs.sum().backward()
    assert len(calls) == 2, calls
    dist.all_reduce = all_reduce


def main():
    rank, world_size, store_path = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    torch.set_num_threads(1)
    store = dist.FileStore(store_path, world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    for seed, case in enumerate(CASES):
        try:
            check(case, seed, rank, world_size)
        except Exception as error:
            raise AssertionError(f"rank {rank}, case {case}: {error}") from error
    check_collectives()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
