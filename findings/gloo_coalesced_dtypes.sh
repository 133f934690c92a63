#!/usr/bin/env bash
# torch 2.13.0, gloo: coalesced all-gathers of two dtypes return each other's bytes, without an error.
#
# torch.distributed.distributed_c10d._coalescing_manager merges the collectives inside it into one call. Megatron-core's
# distributed optimizer gathers its buffers of parameters inside this manager. Expected: what the two calls return without it, or an error.
# The same code returns the expected numbers with a single dtype.
#
# Seen on 2026-11-28, two processes on a CPU; rank r gathers arange(8) + 100 r:
#   apart     uint8 [0, 1, 2, 3, 4, 5, 6, 7, 100, 101, 102, 103, 104, 105, 106, 107]
#   coalesced uint8 [0, 0, 128, 63, 0, 64, 64, 64, 200, 66, 202, 66, 204, 66, 206, 66]
#   coalesced bfloat16 [128.0, 64.0, 160.0, 64.0, 192.0, 64.0, 224.0, 64.0, 208.0, 66.0, 210.0, 66.0, 212.0, 66.0, 214.0, 66.0]
# The bytes of the bf16 numbers are read as uint8. Remedy: one dtype per manager, or no manager.
set -euo pipefail

work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT
"${PYTHON:-python3.11}" -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 numpy

cat > "$work/show.py" <<'PYTHON'
import sys
import warnings

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _coalescing_manager

warnings.simplefilter("ignore")


def gather(rank: int, dtypes: list[torch.dtype], is_coalesced: bool) -> list[list[float]]:
    inputs = [torch.arange(8).add(100 * rank).to(dtype) for dtype in dtypes]
    outputs = [torch.zeros(16, dtype=dtype) for dtype in dtypes]
    if is_coalesced:
        with _coalescing_manager(group=dist.group.WORLD, async_ops=False):
            for output, one in zip(outputs, inputs):
                dist.all_gather_into_tensor(output, one)
    else:
        for output, one in zip(outputs, inputs):
            dist.all_gather_into_tensor(output, one)
    return [output.tolist() for output in outputs]


def main(rank: int, store: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    mixed = [torch.uint8, torch.bfloat16]
    apart, together = gather(rank, mixed, False), gather(rank, mixed, True)
    wanted = [0, 1, 2, 3, 4, 5, 6, 7, 100, 101, 102, 103, 104, 105, 106, 107]
    if rank == 0:
        print(f"torch {torch.__version__}")
        print("apart     uint8", apart[0])
        print("coalesced uint8", together[0])
        print("coalesced bfloat16", together[1])
        assert apart == [wanted, wanted], "the plain calls are wrong"
    assert gather(rank, [torch.uint8] * 2, True) == [wanted, wanted], "a single dtype is wrong"
    if together == apart:
        sys.exit("changed: coalesced all-gathers keep dtypes apart")


if __name__ == "__main__":
    torch.multiprocessing.spawn(main, args=(sys.argv[1],), nprocs=2)
PYTHON
GLOO_SOCKET_IFNAME="${GLOO_SOCKET_IFNAME:-lo}" "$work/venv/bin/python" "$work/show.py" "$work/store"
