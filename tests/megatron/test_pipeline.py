"""Parameters of packed rows for Transformer Engine's attention."""

from __future__ import annotations

import torch

from grpo_mega.megatron.pipeline import te_params


def test_rows_of_many_lengths_share_a_few_tables_of_rotary_angles() -> None:
    """Megatron caches a table per value of max_seqlen, 32 of them, on the device."""
    found = set()
    for longest in range(1, 3000, 7):
        for cp_size in (1, 2):
            cuts = torch.tensor([0, 1, 1 + longest], dtype=torch.int32)
            params = te_params(cuts, cp_size)
            assert params.max_seqlen_q == params.max_seqlen_kv >= longest * cp_size
            assert torch.equal(params.cu_seqlens_q, cuts * cp_size)
            found.add(params.max_seqlen_q)
    assert len(found) == 6, found
