"""Transformer Engine's context parallelism over packed sequences: rows of a rank, their positions, and attention."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformer_engine
import transformer_engine_torch as tex
from transformer_engine.pytorch.attention.rope import apply_rotary_pos_emb

from grpo_mega.batching.layout import chunks_of
from tests.helpers.ranks import FORKED, Results, launch
from tests.te_on_cpu.emulated_te import launcher

LENGTHS = (12, 24, 60, 36)  # multiples of 2 * 3 ranks, some with an odd number of tokens per chunk
CU = torch.tensor([0, *LENGTHS], dtype=torch.int32).cumsum(0, dtype=torch.int32)
CASES = ("p2p over 2", "p2p over 4", "a2a over 2", "a2a over 4", "all_gather", "a2a+p2p")


def rows_of(rank: int) -> torch.Tensor:
    rows = torch.arange(sum(LENGTHS)).split(LENGTHS)
    return torch.cat([part[list(chunk)] for part in rows for chunk in chunks_of(len(part), 3, rank)])


@pytest.mark.parametrize("rank", range(3))
def test_a_rank_has_the_rows_that_transformer_engine_expects(rank: int) -> None:
    assert torch.equal(tex.thd_get_partitioned_indices(CU, sum(LENGTHS), 3, rank).long(), rows_of(rank))


@pytest.mark.parametrize("rank", range(3))
def test_rows_of_a_rank_rotate_by_their_positions_in_the_whole_sequence(rank: int) -> None:
    """Without fusion TE selects the angles of a rank's rows in Python. Compare both with rows of the whole sequence."""
    angles = torch.outer(torch.arange(max(LENGTHS)).float(), 10_000 ** (-torch.arange(0, 16, 2) / 16))
    freqs = torch.cat((angles, angles), -1)[:, None, None]
    whole = torch.randn(sum(LENGTHS), 3, 16, generator=torch.Generator().manual_seed(2))
    expected = apply_rotary_pos_emb(whole, freqs, tensor_format="thd", fused=True, cu_seqlens=CU)[rows_of(rank)]
    for is_fused in (True, False):
        x = whole[rows_of(rank)].requires_grad_()
        found = apply_rotary_pos_emb(x, freqs, tensor_format="thd", fused=is_fused, cu_seqlens=CU, cp_size=3, cp_rank=rank)
        assert (found - expected).abs().max() < 1e-5
        found.backward(expected)  # the transpose of a rotation undoes it
        assert x.grad is not None and (x.grad - x).abs().max() < 1e-5


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    worker, command = (
        Path(__file__).with_name("context_worker.py"),
        launcher.command(transformer_engine.__version__, str(FORKED)),
    )
    return launch(worker, 4, tmp_path_factory.mktemp("ranks"), command=command)


@pytest.mark.distributed
@pytest.mark.parametrize("case", CASES)
def test_attention_over_ranks_is_that_of_fp64_or_refused(case: str, results: Results) -> None:
    assert not results[case], "\n".join(results[case])
