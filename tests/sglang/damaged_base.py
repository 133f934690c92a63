"""`python damaged_base.py STEP ARGUMENT ...`: run `grpo-mega ARGUMENT ...` as one rank, whose server's base is damaged
between two steps.

Before the sync after step STEP, one element of one of the base's matrices changes in the server's memory, as a faulty
backup of a sleeping server's weights would change it.
"""

from __future__ import annotations

import sys
from typing import Any

from grpo_mega import cli
from grpo_mega.rollout.sglang.engine import SGLangEngine
from grpo_mega.trainer.colocation import Colocation
from grpo_mega.weights.apply import Bucket

STEP = int(sys.argv[1])
load, sync_weights = SGLangEngine.load, Colocation.sync_weights
sent: list[Bucket] = []  # the last bucket of the base; its buffer is not used any more


def load_and_keep(engine: SGLangEngine, bucket: Bucket) -> None:
    sent[:] = [bucket]
    load(engine, bucket)


def damage(engine: Any) -> None:
    """Let the server load one entry of the bucket again, with one changed bit."""
    (bucket,) = sent
    entry = bucket.entries[-1]
    bucket.values[entry.start + 1] ^= 1
    request = {"action": "fill", "slot": bucket.index % 3, "opens": False, "entries": [entry], "verify": False}
    engine._post("damaging", "/begin_weight_update")
    problems = engine._request(request | {"used_bytes": bucket.values.nbytes, "dtype": str(bucket.dtype)})
    engine._post("damaging", "/end_weight_update")
    assert not problems and engine.failure is None, (problems, engine.failure)
    print(f"damaged: {entry.target}", flush=True)


def sync_damaged(colocation: Colocation, version: int) -> Any:
    if version == STEP:
        damage(colocation.engine)
    return sync_weights(colocation, version)


SGLangEngine.load, Colocation.sync_weights = load_and_keep, sync_damaged  # type: ignore[method-assign]
sys.exit(cli.main(sys.argv[2:]))
