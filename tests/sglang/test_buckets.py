"""A bucket's memory is not reused while the server may still read it. No server starts here."""

from __future__ import annotations

import json
from concurrent.futures import Future
from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from typing import Any

import torch
from torch.distributed import HashStore

from grpo_mega.distributed.rendezvous import Rendezvous
from grpo_mega.rollout.sglang.buckets import HostBuckets
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
