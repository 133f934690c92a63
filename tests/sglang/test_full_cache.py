"""A server whose KV cache is too small for its samples. It interrupts some of them and computes them again."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch.distributed import HashStore

from grpo_mega.distributed.rendezvous import Rendezvous
from grpo_mega.rollout.engine import RolloutRequest, Sampling
from grpo_mega.rollout.sglang.buckets import HostBuckets
from grpo_mega.rollout.sglang.engine import SGLangEngine
from grpo_mega.rollout.sglang.server import Server
from grpo_mega.types import Group, Prompt
from grpo_mega.weights.layout import ShardLayout
from tests.helpers.servers import make_settings, ready

pytestmark = [pytest.mark.sglang, pytest.mark.usefixtures("preloaded_python")]


@pytest.mark.full
def test_samples_that_a_full_cache_interrupts_are_counted(model: Path, temporary: Path, tmp_path: Path) -> None:
    """32 samples of up to 300 tokens need more than twice the cache."""
    settings = make_settings(model, tmp_path / "engine", cache_tokens=1200, max_concurrent=32)
    groups = {key: Group(Prompt(key, "", (3, 4, 5 + key), ""), []) for key in range(4)}
    request = RolloutRequest(groups, Sampling(8, 1.0, 300, frozenset()), step=0)
    with ready(Server(settings), temporary) as server:
        engine = SGLangEngine(settings, ShardLayout(((),)), Rendezvous(HashStore(), 0, 1), HostBuckets(), server)
        engine.wait_until_ready()
        try:
            found = engine.generate(request)
            assert engine.failure is None
        finally:
            assert engine._session is not None
            engine._session.close()
    assert sum(sample.response_len for group in found.values() for sample in group.samples) > 2 * 1200
    usage = request.usage
    assert (usage.num_ended, usage.most_running) == (32, 32) and 0 < usage.num_retracted < 32, usage
