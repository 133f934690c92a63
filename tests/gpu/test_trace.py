"""A trace on a GPU has its kernels and a snapshot of its memory."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import pytest
import torch

from grpo_mega.distributed.device import Device
from grpo_mega.tracking.progress import Timers
from grpo_mega.tracking.run_log import RunLog
from grpo_mega.trainer.tracing import Tracer


@pytest.mark.rehearsed
def test_a_trace_has_the_devices_kernels_and_a_snapshot_of_its_memory(device: Device, tmp_path: Path) -> None:
    timers = Timers()
    tracer = Tracer(range(1, 2), tmp_path / "trace", 0, device, timers, RunLog())
    for step in (1, 2):
        with tracer.step(step), timers("update"):
            a = torch.ones(256, 256, device=device.torch_device)
            (a @ a).sum().item()
    folder = tmp_path / "trace"
    snapshots = ["step-000001-rank-0.pickle"] * device.is_cuda
    assert sorted(p.name for p in folder.iterdir()) == ["step-000001-rank-0.json", *snapshots, "step-000001.json"]
    events = json.loads((folder / "step-000001-rank-0.json").read_text())["traceEvents"]
    names = {event["name"] for event in events}
    assert "phase: update" in names and "aten::mm" in names
    if device.is_cuda:
        assert any(event.get("cat") == "kernel" for event in events)
        snapshot = pickle.loads((folder / snapshots[0]).read_bytes())
        assert any(snapshot["device_traces"])
