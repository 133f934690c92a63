"""An SGLang server on the trainer's GPU: it sleeps and wakes, takes weights by CUDA IPC, and verifies them."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from grpo_mega.distributed.device import Device
from grpo_mega.errors import SyncError
from grpo_mega.weights.apply import Bucket
from tools.benchmarks.gpu.engine import config_for, opened, weight_bytes

Parts = tuple[Any, Any, Any]  # trainer weights, engine, sync


def need_server(device: Device) -> None:
    if device.is_cuda and importlib.util.find_spec("sglang") is None:
        pytest.skip("SGLang is not installed")


@pytest.fixture(scope="module")
def parts(device: Device, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Parts]:
    need_server(device)
    model, kind = ("qwen2.5-0.5b", "sglang") if device.is_cuda else ("tiny", "embedded")
    config = config_for(model, kind, tmp_path_factory.mktemp("served"))
    with opened(model, config, device) as found:
        yield found


@pytest.mark.rehearsed
def test_a_sync_verifies_that_the_server_has_the_weights(parts: Parts) -> None:
    trainer, engine, sync = parts
    for version in (1, 2):
        for tensor in trainer.weights.values():
            tensor.mul_(1.01)
        sync.sync_weights(trainer.weights, engine, version=version)
        assert engine.failure is None and engine.version == version


@pytest.mark.rehearsed
def test_a_bucket_that_is_damaged_on_the_way_is_named(parts: Parts, monkeypatch: pytest.MonkeyPatch) -> None:
    """Change a bucket in the memory that the server reads, after its checksums were taken."""
    trainer, engine, sync = parts
    load = engine.load

    def damaging(bucket: Bucket) -> None:
        bucket.values[0] += 1
        load(bucket)

    monkeypatch.setattr(engine, "load", damaging)
    with pytest.raises(SyncError, match="version 3, at rank 0"):
        sync.sync_weights(trainer.weights, engine, version=3)
    monkeypatch.undo()
    sync.sync_weights(trainer.weights, engine, version=4)
    assert engine.version == 4


@pytest.mark.rehearsed
def test_an_engine_in_fp8_takes_blocks_as_they_are_sent(device: Device, tmp_path: Path) -> None:
    """Start a separate server while no other is awake, and compare values and scales in its memory."""
    need_server(device)
    if device.is_cuda and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("FP8 needs an L40, H100, H200 or later")
    model, kind = ("qwen2.5-1.5b", "sglang") if device.is_cuda else ("tiny-blocks", "embedded")
    config = config_for(model, kind, tmp_path, quantization="fp8", memory_fraction=0.2)
    with opened(model, config, device) as (trainer, engine, sync):
        for version in (1, 2):
            for tensor in trainer.weights.values():
                tensor.mul_(1.01)
            sync.sync_weights(trainer.weights, engine, version=version)
            assert engine.failure is None and engine.version == version


def test_sleep_gives_memory_to_the_device_and_wake_takes_it_again(parts: Parts, device: Device) -> None:
    trainer, engine, sync = parts
    awake = torch.cuda.mem_get_info()[0]
    engine.sleep()
    asleep = torch.cuda.mem_get_info()[0]
    assert asleep - awake > weight_bytes("qwen2.5-0.5b"), "sleep frees the weights and the cache"
    engine.wake_weights()
    weights = torch.cuda.mem_get_info()[0]
    assert asleep - weights >= 0.9 * weight_bytes("qwen2.5-0.5b")
    assert weights - awake > 0, "the cache is still asleep"
    sync.sync_weights(trainer.weights, engine, version=5)
    engine.wake_cache()
    assert torch.cuda.mem_get_info()[0] == pytest.approx(awake, abs=256 << 20)
    assert engine.failure is None and engine.version == 5
