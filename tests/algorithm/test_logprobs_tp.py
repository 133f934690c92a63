"""vocab_parallel_logprobs at TP1, TP2 and TP4, compared with its oracle."""

from functools import cache
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from grpo_mega.algorithm.logprobs import vocab_parallel_logprobs
from tests.helpers.logprob_cases import Case, assert_equal, of_oracle, of_ours
from tests.helpers.ranks import ranks

CASES = {
    "float64": Case(7, 16, 16),
    "temperature and tiles": Case(7, 13, 16, temperature=0.7, tile=(3, 2)),
    "last ranks with padding only": Case(5, 5, 20, temperature=1.3, tile=(2, 4)),
    "one row for all but the first rank": Case(5, 2, 4),
    "minus infinity": Case(9, 30, 32, temperature=0.5, tile=(4, 5), forbidden=0.6),
    "all but the targets of minus infinity": Case(9, 30, 32, tile=(4, 5), forbidden=1.0),
    "masked tokens": Case(12, 30, 32, tile=(5, 3), needed=0.5),
    "all tokens masked": Case(12, 30, 32, needed=0.0),
    "no tokens": Case(0, 16, 16),
    "gradient buffer": Case(12, 30, 32, tile=(5, 3), needed=0.5, with_buffer=True),
    "float32": Case(40, 120, 128, hidden=24, dtype=torch.float32, temperature=0.8, tile=(16, 10)),
    "float32 minus infinity": Case(40, 120, 128, dtype=torch.float32, forbidden=0.5, tile=(7, 100)),
    "bfloat16": Case(40, 120, 128, hidden=24, dtype=torch.bfloat16, temperature=0.8, tile=(16, 10), with_buffer=True),
}


@ranks(4)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("tp_size", [1, 2, 4])
def test_any_vocabulary_split_has_values_and_gradients_of_the_oracle(
    rank: int, folder: Path, tp_size: int, name: str
) -> None:
    case = CASES[name]
    tp_rank, group = rank % tp_size, _group(rank, tp_size)
    assert_equal(case, of_ours(case, tp_rank, tp_size, group), of_oracle(case), tp_rank, tp_size)


@ranks(4)
def test_forward_needs_two_all_reduces_and_backward_none(rank: int, folder: Path) -> None:
    """Even with several tiles and entropy."""
    calls = []
    all_reduce = dist.all_reduce
    dist.all_reduce = lambda *args, **kwargs: (calls.append(args), all_reduce(*args, **kwargs))[1]
    hidden, weight = torch.ones(20, 3, requires_grad=True), torch.ones(4, 3, requires_grad=True)
    targets = torch.zeros(20, dtype=torch.int64)
    logprobs, _ = vocab_parallel_logprobs(
        hidden, weight, targets, vocab_size=16, tp_group=dist.group.WORLD, with_entropy=True, tile=(2, 3)
    )
    assert len(calls) == 2, calls
    logprobs.sum().backward()
    assert len(calls) == 2, calls
    dist.all_reduce = all_reduce


@cache
def _group(rank: int, tp_size: int) -> dist.ProcessGroup:
    """Return the rank's group of consecutive ranks. Every rank creates every group."""
    groups = [dist.new_group(range(start, start + tp_size)) for start in range(0, 4, tp_size)]
    return groups[rank // tp_size]
