"""One of four ranks. For each case, real servers receive weights from one trainer layout after another.

`python sync_worker.py RANK 4 FOLDER`. In each layout the policy takes a real optimizer step, is synced to both servers
and exported to FOLDER/CASE/hfN. Each server's samples go to samplesN_tpM.json. sync_oracle.py compares them in another
process, because Megatron-core patches torch in this one.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.distributed import HashStore, PrefixStore

from grpo_mega import config as configs
from grpo_mega.algorithm.advantages import assign_advantages
from grpo_mega.checkpoint_io.model import ModelFiles, read_model_files
from grpo_mega.config import Config, RolloutConfig
from grpo_mega.distributed.device import Device
from grpo_mega.distributed.rendezvous import Rendezvous
from grpo_mega.errors import SyncError
from grpo_mega.megatron import runtime as runtimes
from grpo_mega.megatron.policy import Policy
from grpo_mega.megatron.runtime import Runtime
from grpo_mega.rollout.engine import NoEngine, Receiver, RolloutRequest, StopCondition
from grpo_mega.rollout.routes import RouterSizes
from grpo_mega.rollout.sglang.buckets import HostBuckets
from grpo_mega.rollout.sglang.engine import SGLangEngine
from grpo_mega.rollout.sglang.server import EngineSettings
from grpo_mega.tracking.progress import Timers
from grpo_mega.trainer.batches import pack
from grpo_mega.trainer.colocation import Colocation
from grpo_mega.trainer.export import export_policy
from grpo_mega.trainer.parts import build_adapter_sync, build_policy, build_sync, served_lora
from grpo_mega.types import Group, Prompt, Sample
from grpo_mega.weights.apply import Bucket
from grpo_mega.weights.layout import EngineLayout, ShardLayout, engine_shards
from tests.helpers.models import VOCAB_SIZE, make_model, make_multimodal, save_checkpoint
from tests.helpers.ranks import run_each
from tests.sglang.sync_cases import CASES, LONG, SAMPLING, Case

WORLD_SIZE = 4
SIZES = {"num_hidden_layers": 8, "num_key_value_heads": 4, "intermediate_size": 128}
BUCKET_BYTES = 1 << 16  # small, to fill several buckets
LORA = {"rank": 5, "alpha": 40.0, "targets": ["q", "o", "up", "down"]}
DEADLINE_S = 300.0
PROMPTS = [Prompt(i, "", tuple(range(3 + i, 12 + 3 * i)), "") for i in range(6)]


class Flipping:
    """Wrap an engine and change one byte of one bucket in transit."""

    def __init__(self, engine: Receiver, bucket: int) -> None:
        self._engine, self._bucket = engine, bucket
        self.start_update, self.allocate, self.end_update = engine.start_update, engine.allocate, engine.end_update

    def load(self, bucket: Bucket) -> None:
        if bucket.index == self._bucket and bucket.entries:
            middle = bucket.entries[len(bucket.entries) // 2]
            self.flipped = middle.target
            bucket.values[middle.start] ^= 1
        self._engine.load(bucket)


@contextmanager
def engine_of(
    case: Case, model: ModelFiles, side: ShardLayout, tp: int, runtime: Runtime, folder: Path
) -> Iterator[SGLangEngine | NoEngine]:
    """Yield one server on the first `tp` ranks. It may still be starting."""
    rank = runtime.rank
    if rank >= tp:
        yield NoEngine(side, torch.device("cpu"))
        return
    rollout = RolloutConfig(
        engine="sglang",
        tp=tp,
        ep=case.engine_ep,
        max_concurrent=32,
        cache_tokens=2048,
        quantization="fp8" if case.quantise else None,
        start_deadline_s=DEADLINE_S,
        stall_deadline_s=DEADLINE_S,
    )
    settings = EngineSettings(
        rollout=rollout,
        model_path=model.folder,
        dtype="float32",
        folder=folder,
        context_length=64,
        device_type="cpu",
        rank=rank,
        world_size=tp,
        cores=tuple(sorted(os.sched_getaffinity(0))[:tp]),
        is_hybrid=bool(model.shape.linear_layers),
        routers=RouterSizes.of(model.shape, model.hf_config) if model.shape.num_experts else None,
    )
    settings = replace(settings, lora=served_lora(config_of(case, model.folder.parent, 1), model))
    folder.mkdir(parents=True, exist_ok=True)
    rendezvous = Rendezvous(PrefixStore(f"engine{tp}", runtime.store), rank, WORLD_SIZE)
    engine = SGLangEngine(settings, side, rendezvous, HostBuckets())
    try:
        yield engine
    finally:
        engine.close()


def config_of(case: Case, folder: Path, version: int) -> Config:
    raw: dict[str, Any] = {
        "run_dir": str(folder / "run"),
        "steps": 9,
        "model": {"path": str(folder / "hf0"), "dtype": "float32", "lora": LORA if case.lora else None},
        "data": {"train": "none.jsonl", "max_prompt_length": 32},
        # Only rank 0 leads an engine.
        "rollout": {"engine": "sglang", "tp": WORLD_SIZE, "max_response_length": 12, "temperature": 0.8},
        "sync": {"lora": case.lora or None, "bucket_mib": BUCKET_BYTES / 2**20},
        "batch": {"prompts_per_step": 4, "tokens_per_micro_batch": 96},
        # so every version differs
        "optimizer": {"lr": 1e-2 * version / case.steps},
        "log": {"progress": False},
    }
    configs.apply_override(raw, f"layout={case.layouts[version - 1]}")
    return configs.validate(raw)


def groups() -> list[Group]:
    """Return samples with made-up rewards that give a step a gradient."""
    random = torch.Generator().manual_seed(5)
    found = []
    for prompt in PROMPTS[:4]:
        samples = []
        for index in range(4):
            ids = torch.randint(3, VOCAB_SIZE, (4 + index,), generator=random).tolist()
            samples.append(Sample(prompt, index, ids, [-4.0] * len(ids), "length", reward=float(index % 2)))
        found.append(Group(prompt, samples))
    return found


def take_step(policy: Policy, config: Config) -> None:
    made = groups()
    assign_advantages(made, config.algorithm, max_response_length=config.rollout.max_response_length)
    (metrics,) = policy.update(policy.attach_logprobs(pack(config, made, policy)))
    assert metrics["grad_norm"] > 0 and not metrics["dropped_mini_batches"], metrics


def sync_layout(
    case: Case,
    config: Config,
    runtime: Runtime,
    rendezvous: Rendezvous,
    engines: dict[int, Colocation],
    version: int,
    carried: dict[int, dict[int, Group]],
) -> None:
    model = read_model_files(config.model)
    policy = build_policy(config, model, runtime)
    for _ in range(case.steps):
        take_step(policy, config)
    folder = model.folder.parent
    export_policy(policy, model, folder / f"hf{version}")
    for tp, colocation in engines.items():
        engine = colocation.engine
        colocation.policy = policy
        colocation.sync = build_sync(config, torch.float32, policy.shards, engine.shard_layout, runtime, rendezvous)
        colocation.adapter_sync = build_adapter_sync(config, model, runtime, rendezvous)
        assert (colocation.adapter_sync is not None) == (case.lora == "adapter")
        received = colocation.sync_weights(version)["sync/received_mib"]
        if case.lora == "adapter" and version > 1:
            assert received * 2**20 == missing_bytes(policy, runtime.rank), received
        if runtime.rank == 0:
            assert isinstance(engine, SGLangEngine)
            found = engine.generate(RolloutRequest(fresh_groups(), SAMPLING, step=version))
            assert engine.failure is None, engine.failure
            samples = [sample for i in range(len(PROMPTS)) for sample in found[i].samples]
            assert len(samples) == len(PROMPTS) * SAMPLING.group_size
            assert {sample.policy_version for sample in samples} == {version}
            samples += continued(engine, carried.setdefault(tp, {}), version)
            said = [
                (
                    s.prompt.token_ids,
                    s.response_ids,
                    s.rollout_logprobs,
                    s.spans,
                    s.routes and s.routes.experts.tolist(),
                )
                for s in samples
            ]
            (folder / f"samples{version}_tp{tp}.json").write_text(json.dumps(said))
        rendezvous.all_gather("the next sync", None, DEADLINE_S)
    sync_flipped(policy, engines[max(engines)])
    if case.lora == "adapter" and version == len(case.layouts):
        restart(engines[min(engines)], runtime.rank, version)
        if runtime.rank == 0:
            miss_adapter(engines[max(engines)].engine)


def restart(colocation: Colocation, rank: int, version: int) -> None:
    """Verify that a restarted server gets base and adapter again."""
    engine: Any = colocation.engine

    def responses() -> list[Sequence[int]]:
        greedy = replace(SAMPLING, group_size=1, temperature=0.0)
        found = engine.generate(RolloutRequest(fresh_groups(), greedy, step=version))
        return [sample.response_ids for index in sorted(found) for sample in found[index].samples]

    before = responses()
    if rank == 0:
        engine._fail("ended by the test")
    colocation.recover(version)
    assert engine.version == version and responses() == before and len(before) == (0 if rank else len(PROMPTS))


def missing_bytes(policy: Policy, rank: int) -> int:
    """Return the bytes of the adapter in float32 that the leader does not have."""
    if rank:
        return 0
    own = {piece.box for tensor in policy.lora.shards.rank_shards(0).values() for piece in tensor.pieces}
    total = sum(math.prod(shape) for shape in policy.lora.family.hf_tensors(policy._shape).values())
    return 4 * (total - sum(box.size for box in own))


def miss_adapter(engine: Any) -> None:
    """Verify that samples of the base are an error, and that an unknown adapter is."""
    session = engine._session
    stream, adapter = session._stream, session.adapter
    for name, words in ((None, "the server used none"), ("unknown", "has never been loaded: unknown")):
        named = {} if name is None else {"lora_path": name}
        session._stream = lambda body, named=named: stream({k: v for k, v in body.items() if k != "lora_path"} | named)
        one_group = dict(list(fresh_groups().items())[:1])  # one request, so no other fails later
        found = engine.generate(RolloutRequest(one_group, SAMPLING, step=100))
        assert not found and words in engine.failure, (found, engine.failure)
        assert name or f"must use the adapter {adapter}" in engine.failure
        engine.failure = None


def continued(engine: SGLangEngine, carried: dict[int, Group], version: int) -> list[Sample]:
    """Finish and return the samples that the previous version started. Then start new samples and abort them."""
    whole = engine.generate(RolloutRequest(dict(carried), LONG, step=version))
    assert engine.failure is None and all(group.is_complete(LONG.group_size) for group in whole.values())
    for _ in range(20):  # on a busy machine all samples may end before the stop reaches the server
        stop = StopCondition(Rendezvous(HashStore(), 0, 1), wanted=1)

        def end_at_once(sample: Sample, group: Group, stop: StopCondition = stop) -> None:
            stop.done(len(PROMPTS))

        found = engine.generate(RolloutRequest(fresh_groups(), LONG, version, end_at_once, stop))
        carried.clear()
        carried |= {key: group for key, group in found.items() if not group.is_complete(LONG.group_size)}
        if any(not sample.is_finished for group in carried.values() for sample in group.samples):
            break
    else:
        raise AssertionError("no sample was aborted")
    return [sample for group in whole.values() for sample in group.samples]


def fresh_groups() -> dict[int, Group]:
    return {index: Group(prompt, []) for index, prompt in enumerate(PROMPTS)}


def sync_flipped(policy: Policy, colocation: Colocation) -> None:
    """Verify that every rank reports a flipped byte with the name of its tensor."""
    engine, sync, tensors = colocation.engine, colocation.sync, policy.tensors()
    receiver: Receiver = engine
    bucket = 1
    if colocation.adapter_sync is not None:
        receiver, sync, tensors, bucket = engine.adapter, colocation.adapter_sync, policy.lora.parameters, 0
    spoiled = Flipping(receiver, bucket) if isinstance(engine, SGLangEngine) else receiver
    try:
        sync.sync_weights(tensors, spoiled, version=99)
    except SyncError as error:
        said = str(error)
    else:
        raise AssertionError("a flipped byte went unnoticed")
    assert not hasattr(spoiled, "flipped") or spoiled.flipped in said, said
    assert engine.version != 99 or isinstance(engine, NoEngine)
    sync.sync_weights(tensors, receiver, version=100)  # the failed sync has no lasting effect


def sync_case(case: Case, device: Device, folder: Path) -> None:
    config = config_of(case, folder, 1)
    runtime = runtimes.arrange(config, device)
    if runtime.rank == 0:
        make = make_multimodal if case.family == "qwen3_5" else partial(make_model, case.family)
        save_checkpoint(make(seed=3, **(SIZES | case.changes)), folder / "hf0")
    rendezvous = Rendezvous(runtime.store, runtime.rank, WORLD_SIZE)
    rendezvous.all_gather("the checkpoint", None, DEADLINE_S)
    model = read_model_files(config.model)
    sides = {
        tp: engine_shards(
            model.family, model.shape, EngineLayout(tp, 1, case.engine_ep), WORLD_SIZE, quantise=case.quantise
        )
        for tp in case.engine_tps
    }
    with ExitStack() as stack:
        engines = {
            tp: stack.enter_context(engine_of(case, model, side, tp, runtime, folder / f"engine{tp}"))
            for tp, side in sides.items()
        }
        for engine in engines.values():
            engine.wait_until_ready()
        colocations: dict[int, Any] = {
            tp: Colocation(None, engine, None, rendezvous, Timers(), config.rollout, None, print)  # type: ignore[arg-type]
            for tp, engine in engines.items()
        }
        carried: dict[int, dict[int, Group]] = {}  # unfinished groups of the previous version, keyed by the engine's tp
        for version in range(1, len(case.layouts) + 1):
            config = config_of(case, folder, version)
            sync_layout(case, config, runtimes.arrange(config, device), rendezvous, colocations, version, carried)


def main(rank: int, folder: Path) -> None:
    os.environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": str(WORLD_SIZE),
        "LOCAL_RANK": str(rank),
        "MASTER_ADDR": "127.0.0.1",
    }
    os.environ["MASTER_PORT"] = (folder / "port").read_text()
    torch.set_num_threads(1)
    device = runtimes.join(config_of(CASES["llama"], folder, 1))
    names: list[str] = json.loads((folder / "cases.json").read_text())

    def sync(name: str, rank: int, folder: Path) -> None:
        sync_case(CASES[name], device, folder / name)

    if run_each({name: partial(sync, name) for name in names}, rank, WORLD_SIZE, folder):
        runtimes.stop()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[3]))
    sys.stdout.flush()
    os._exit(0)  # do not wait for ranks that failed
