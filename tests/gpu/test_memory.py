"""Memory that trainer and server share: its measurement, and buckets that another process can open."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from grpo_mega.distributed.device import Device, PeakMemory
from grpo_mega.trainer.colocation import GpuMemory

BUCKETS = """
import multiprocessing, pickle
import torch
import torch.multiprocessing
from multiprocessing.reduction import ForkingPickler
from grpo_mega.rollout.sglang.buckets import DeviceBuckets

def read(connection):
    for _ in range(4):
        values = pickle.loads(connection.recv_bytes())
        connection.send(values[:8].tolist())
        del values

if __name__ == "__main__":
    torch.zeros(64 << 20, device="cuda")  # a segment that can grow
    buckets = DeviceBuckets(1 << 20, torch.device("cuda", 0), has_expandable_segments=True)
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    reader = context.Process(target=read, args=(theirs,))
    reader.start()
    theirs.close()  # then this process notices if the other one has failed
    addresses = []
    for index in range(4):
        values = buckets.allocate(index, 8)
        addresses.append(values.data_ptr())
        values.fill_(index + 1)
        ours.send_bytes(bytes(ForkingPickler.dumps(buckets.finish(index % 2)[2])))
        assert ours.recv() == [index + 1] * 8, index
    assert addresses[:2] == addresses[2:] and len(set(addresses)) == 2
    reader.join()
    assert reader.exitcode == 0
    print("read")
"""


def test_buckets_can_be_opened_by_another_process_where_segments_expand(tmp_path: Path) -> None:
    environment = os.environ | {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    script = tmp_path / "buckets.py"
    script.write_text(BUCKETS)
    result = subprocess.run([sys.executable, str(script)], env=environment, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0 and result.stdout.strip() == "read", result.stderr


def test_the_peak_of_training_and_the_engine_decide_whether_both_fit(device: Device) -> None:
    gib = 1 << 30
    total = torch.cuda.get_device_properties(device.torch_device).total_memory
    memory = GpuMemory(device.torch_device, gib, PeakMemory(device))
    torch.cuda.empty_cache()
    with memory.peak_of_training():
        torch.empty(2 * gib, dtype=torch.uint8, device=device.torch_device)
    assert memory.both_fit()
    assert "peaks at 2." in memory.summary() and "1.0 GiB" in memory.summary()
    crowded = GpuMemory(device.torch_device, total - gib, PeakMemory(device))
    with crowded.peak_of_training():
        torch.empty(2 * gib, dtype=torch.uint8, device=device.torch_device)
    assert not crowded.both_fit()


def test_a_rank_without_a_gpu_of_its_own_is_refused() -> None:
    from grpo_mega.distributed import device as devices
    from grpo_mega.errors import ConfigError

    with pytest.raises(ConfigError, match=f"local rank {torch.cuda.device_count()}"):
        devices.select("auto", torch.cuda.device_count())
    assert devices.select("auto", 0).type == devices.select("cuda", 0).type == "cuda"
    with pytest.raises(ConfigError, match="hide the GPU"):
        devices.select("cpu", 0)
