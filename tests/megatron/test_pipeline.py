"""Parameters of packed rows for Transformer Engine's attention."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_rows_of_many_lengths_share_a_few_tables_of_rotary_angles() -> None:
    """Megatron caches a table per value of max_seqlen, 32 of them, on the device.

    Run in a separate process, because importing Megatron changes torch.
    """
    result = subprocess.run([sys.executable, __file__], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-2000:]


def run() -> None:
    import torch

    from grpo_mega.megatron.pipeline import te_params

    found = set()
    for longest in range(1, 3000, 7):
        for cp_size in (1, 2):
            cuts = torch.tensor([0, 1, 1 + longest], dtype=torch.int32)
            params = te_params(cuts, cp_size)
            assert params.max_seqlen_q == params.max_seqlen_kv >= longest * cp_size
            assert torch.equal(params.cu_seqlens_q, cuts * cp_size)
            found.add(params.max_seqlen_q)
    assert len(found) == 6, found


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    run()
