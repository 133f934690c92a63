"""A bucket's memory is not reused while the server may still read it. No server starts here."""

from __future__ import annotations

import json
import warnings
from concurrent.futures import Future
from contextlib import nullcontext
from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed import HashStore

from grpo_mega.distributed.rendezvous import Rendezvous
from grpo_mega.rollout.sglang.buckets import DeviceBuckets, HostBuckets
from grpo_mega.rollout.sglang.engine import SGLangEngine
from grpo_mega.rollout.sglang.loader import NUM_BUFFERS, report_path
from grpo_mega.weights.apply import Bucket
from grpo_mega.weights.layout import ShardLayout
from tests.helpers.servers import make_settings


class SlowSession:
    """A session whose server answers a request when the test says so."""

    def __init__(self) -> None:
        self.posted: list[Future[None]] = []

    def post(self, path: str, body: dict[str, Any]) -> None:
        self.posted.append(Future())

    def start(self, _: None) -> Future[None]:
        return self.posted[-1]


def test_a_bucket_is_not_filled_again_before_the_server_has_read_it(tmp_path: Path) -> None:
    settings = make_settings(tmp_path, tmp_path)
    server: Any = SimpleNamespace(url="", private_folder=tmp_path, is_alive=lambda: True)
    engine = SGLangEngine(settings, ShardLayout(((),)), Rendezvous(HashStore(), 0, 1), HostBuckets(), server)
    session: Any = SlowSession()
    engine._session = session
    filled = []
    for index in range(NUM_BUFFERS):
        filled.append(engine.allocate(index, 40))
        filled[index].fill_(index + 1)
        engine.load(Bucket(index, filled[index], (), 0, torch.float32))
        report = {"number": index + 1, "problems": [], "has_failed": False}
        report_path(tmp_path, index + 1, 0).write_text(json.dumps(report))
    again: list[torch.Tensor] = []
    thread = Thread(target=lambda: again.append(engine.allocate(NUM_BUFFERS, 40)), daemon=True)
    thread.start()
    thread.join(0.3)
    assert not again, "allocate returned a buffer that the server was still reading"
    session.posted[0].set_result(None)
    thread.join(30)
    assert again[0].data_ptr() == filled[0].data_ptr() != filled[1].data_ptr()
    assert filled[1].tolist() == [2] * 40 and not session.posted[1].done()
    engine._buckets.close()


def test_buckets_are_outside_expandable_segments_without_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    settings: list[str] = []
    real = torch._C._accelerator_setAllocatorSettings

    def record(setting: str) -> None:
        settings.append(setting)
        real(setting)

    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", record)
    monkeypatch.setattr(torch.cuda, "MemPool", lambda: None)
    monkeypatch.setattr(torch.cuda, "use_mem_pool", lambda pool: nullcontext(settings.append("allocate")))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        DeviceBuckets(64, torch.device("cpu"), has_expandable_segments=True)
        assert settings == ["expandable_segments:False", "allocate", "expandable_segments:True"] * NUM_BUFFERS
        settings.clear()
        DeviceBuckets(64, torch.device("cpu"), has_expandable_segments=False)
        assert settings == ["allocate"] * NUM_BUFFERS
