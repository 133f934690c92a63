"""Recorded experts on their way from an engine to the trainer: parsed, extended, cut, shared, stored, packed."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed import HashStore

from grpo_mega.batching.pack import PackingSpec, pack_mini_batches
from grpo_mega.distributed.device import Device
from grpo_mega.errors import EngineError, MismatchError
from grpo_mega.rollout.backlog import Backlog, gather_samples, pack_groups
from grpo_mega.rollout.embedded.engine import EmbeddedEngine
from grpo_mega.rollout.engine import RolloutRequest, Sampling
from grpo_mega.rollout.routes import RouterSizes, cut, is_intact, parsed, with_routes_of
from grpo_mega.rollout.sglang import client
from grpo_mega.trainer.batches import attach_routes, check_routes, share_live
from grpo_mega.types import Group, PackedBatch, Prompt, Routes, Sample, Span
from grpo_mega.weights.families import family_of
from grpo_mega.weights.layout import MegatronLayout
from grpo_mega.weights.spec import ModelShape
from tests.helpers.models import make_model

ROUTERS = RouterSizes(num_layers=5, num_dense=2, num_experts=11, top_k=3)
MANY = replace(ROUTERS, num_experts=256)
PROMPT = Prompt(4, "", (7, 8, 9), "")


def experts(num_tokens: int, routers: RouterSizes = ROUTERS, seed: int = 0) -> np.ndarray[Any, Any]:
    """Return experts as a server reports them: int32, for all layers."""
    random = np.random.default_rng(seed)
    chosen = [random.permutation(routers.num_experts)[: routers.top_k] for _ in range(num_tokens * routers.num_layers)]
    return np.array(chosen, np.int32).reshape(num_tokens, routers.num_layers, routers.top_k)


def encoded(numbers: np.ndarray[Any, Any]) -> str:
    return base64.b64encode(numbers.tobytes()).decode()


def routes(num_tokens: int, routers: RouterSizes = ROUTERS, seed: int = 0) -> Routes:
    return with_routes_of(None, parsed(encoded(experts(num_tokens, routers, seed)), routers, num_tokens))


def sample(index: int, response: int, routed: Routes | None) -> Sample:
    made = Sample(PROMPT, index, list(range(response)), [0.0] * response, "stop", [Span(3, 0, response)], routes=routed)
    made.advantages = torch.zeros(response)
    return made


@pytest.mark.parametrize(("routers", "size"), [(ROUTERS, 1), (MANY, 2), (replace(ROUTERS, num_experts=255), 1)])
def test_a_servers_answer_loses_its_dense_layers_and_half_of_its_bytes(routers: RouterSizes, size: int) -> None:
    told = experts(6, routers)
    told[0, 2, 0], told[0, 2, 1:] = routers.num_experts - 1, (0, 1)
    found = parsed(encoded(told), routers, 6)
    assert found.itemsize == size and (found == told[:, 2:]).all()


@pytest.mark.parametrize(
    ("spoil", "problem"),
    [
        (lambda told: told[:-1], "75 experts of a sample instead of"),
        (lambda told: np.where(told == 10, 11, told), "to 11 of 11"),
        (lambda told: np.where(told == 4, -1, told), "experts -1 to"),
        (lambda told: np.concatenate((told[..., :1], told[..., :1], told[..., 2:]), axis=-1), "an expert twice"),
    ],
)
def test_an_answer_that_no_router_can_have_given_is_refused(spoil: Any, problem: str) -> None:
    with pytest.raises(EngineError, match=problem):
        parsed(encoded(spoil(experts(6)).astype(np.int32)), ROUTERS, 6)


def test_a_resumed_sample_keeps_the_experts_that_made_its_log_probs() -> None:
    first, later = routes(4, seed=1), routes(9, seed=2)
    whole = with_routes_of(first, later.experts)
    assert (whole.experts[:4] == first.experts).all() and (whole.experts[4:] == later.experts[4:]).all()
    assert is_intact(whole) and not is_intact(replace(whole, experts=later.experts))
    shorter = cut(whole, 6)
    assert (shorter.experts == whole.experts[:6]).all() and is_intact(shorter)


def answer(tokens: int, meta: dict[str, Any]) -> dict[str, Any]:
    entries = [[-1.0, token, None] for token in range(tokens)]
    told = {"output_token_logprobs": entries, "finish_reason": {"type": "length"}, "weight_version": "5"}
    return {"output_ids": list(range(tokens)), "meta_info": told | meta}


@pytest.mark.parametrize(
    "meta",
    [{"num_retractions": 1}, {"routed_experts": None}],
    ids=["computed again for lack of cache", "aborted while it waited"],
)
def test_experts_of_another_computation_than_the_log_probs_are_not_used(meta: dict[str, Any]) -> None:
    sampling = Sampling(4, 1.0, 9, frozenset(), with_routes=True)
    first = client.extended(sample(0, 0, None), answer(4, {"routed_experts": encoded(experts(6))}), sampling, ROUTERS)
    assert first.routes is not None and (first.routes.experts == experts(6)[:, 2:]).all()
    told = {name: v for name, v in ({"routed_experts": encoded(experts(9, seed=5))} | meta).items() if v is not None}
    again = client.extended(first, answer(3, told), sampling, ROUTERS)
    assert again.routes is not None and (again.routes.experts[:6] == first.routes.experts).all()
    assert (again.routes.experts[6:] == 255).all() and len(again.routes.experts) == again.total_len - 1 == 9
    live = [share_live([one], OneRank()) for one in (again, sample(0, 7, None))]  # type: ignore[arg-type]
    assert live == pytest.approx([4 / 10, 1])


@pytest.fixture
def single_rank() -> Iterator[None]:
    torch.distributed.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("routers", [ROUTERS, MANY])
def test_ranks_share_experts_in_one_or_two_bytes_and_checkpoints_keep_them(
    routers: RouterSizes, single_rank: None, tmp_path: Path
) -> None:
    samples = [sample(0, 40, routes(42, routers)), sample(1, 1, None), sample(2, 5, routes(6, routers, seed=3))]
    group = Group(PROMPT, samples)
    bare = Group(PROMPT, [replace(s, routes=None) for s in samples])
    numbers = sum(s.routes.experts.size for s in samples if s.routes)
    added = len(pack_groups({0: group})) - len(pack_groups({0: bare}))
    assert added < numbers * routers.dtype.itemsize + 500
    shared = gather_samples({0: group}, {0: PROMPT}, (), "x")[0]
    [(name, content)] = Backlog(1, (group,)).files().items()
    (tmp_path / name).write_bytes(content)
    kept = Backlog.read(tmp_path, 1, lambda _: PROMPT).groups[0]
    for found in (shared, kept):
        for theirs, ours in zip(found.samples, samples, strict=True):
            assert (theirs.routes is None) == (ours.routes is None)
            if ours.routes and theirs.routes:
                assert theirs.routes.experts.dtype == routers.dtype and is_intact(theirs.routes)
                assert (theirs.routes.experts == ours.routes.experts).all()


class OneRank:
    device, rank, dp_rank, layout = Device("cpu", torch.device("cpu")), 0, 0, MegatronLayout()

    @staticmethod
    def max(values: torch.Tensor) -> torch.Tensor:
        return values

    sum = max


def packed(samples: list[Sample]) -> list[list[PackedBatch]]:
    weights = [[1.0] * len(samples)]
    return pack_mini_batches([samples], weights, PackingSpec(1, 0, 24, length_multiple=3))


def test_a_packed_row_has_its_samples_experts_and_a_changed_byte_is_found(single_rank: None) -> None:
    samples = [
        sample(0, 9, routes(11)),
        sample(1, 4, None),
        sample(2, 6, routes(7, seed=1)),
        sample(3, 2, routes(4, seed=2)),
    ]
    batches = packed(samples)
    attach_routes(batches, samples, OneRank())  # type: ignore[arg-type]
    check_routes(batches, samples, OneRank())  # type: ignore[arg-type]
    known = 0
    for batch in batches[0]:
        assert batch.routes is not None and len(batch.routes) == batch.num_tokens
        for index, start in zip(batch.sample_indices, batch.cu_seqlens.tolist(), strict=False):
            recorded = samples[index].routes
            wanted = recorded.experts if recorded else np.empty((0, 3, 3), np.uint8)
            assert (batch.routes[start : start + len(wanted)].numpy() == wanted).all()
            assert (batch.routes[start + len(wanted) : start + samples[index].total_len] == 255).all()
            known += len(wanted)
    assert known == 11 + 7 + 4 and len(batches[0]) > 1
    batch = next(batch for batch in batches[0] if batch.sample_indices[0] != 1)
    assert batch.routes is not None
    batch.routes[1, 2, 0] = (batch.routes[1, 2, 0] + 1) % 11
    with pytest.raises(
        MismatchError, match=r"experts of sample \d of prompt 4 differ from the experts that its engine"
    ):
        check_routes(batches, samples, OneRank())  # type: ignore[arg-type]


def test_the_embedded_engine_records_only_on_request_and_resumes() -> None:
    """The policy is the same, so a resumed sample has the experts of an uninterrupted one."""
    model = make_model("qwen3_moe", seed=3)
    shape = ModelShape.from_hf_config(model.config.to_dict())
    cpu = Device("cpu", torch.device("cpu"))
    engine = EmbeddedEngine(
        model.config, family_of("qwen3_moe"), shape, torch.float32, cpu, 8, rank=0, world_size=1, verify=True
    )
    with torch.no_grad():
        for name, tensor in sorted(engine.tensors().items()):
            tensor.copy_(torch.randn(tensor.shape, generator=torch.Generator().manual_seed(len(name))) * 0.3)
    engine.version = 3
    prompts = {0: PROMPT, 1: replace(PROMPT, id=5, token_ids=(3, 3, 4, 1, 2))}
    sampling = Sampling(3, 1.0, 12, frozenset({0}), with_routes=True)
    fresh = {key: Group(prompt, []) for key, prompt in prompts.items()}
    bare = engine.generate(RolloutRequest(fresh, replace(sampling, with_routes=False), step=3))
    assert all(s.routes is None for group in bare.values() for s in group.samples)
    whole = engine.generate(RolloutRequest(fresh, sampling, step=3))
    earlier = {
        key: Group(group.prompt, [half(s) if s.response_len > 5 else s for s in group.samples])
        for key, group in whole.items()
    }
    assert any(s.finish_reason is None for group in earlier.values() for s in group.samples)
    resumed = engine.generate(RolloutRequest(earlier, sampling, step=4))
    for key, group in whole.items():
        for before, after in zip(group.samples, resumed[key].samples, strict=True):
            assert before.routes and after.routes and before.response_ids == list(after.response_ids)
            assert len(after.routes.experts) == after.total_len - 1 and after.routes.checksum == before.routes.checksum


def half(whole: Sample) -> Sample:
    routed = cut(whole.routes, len(whole.prompt.token_ids) + 4) if whole.routes else None
    ids, logprobs = whole.response_ids[:5], whole.rollout_logprobs[:5]
    spans = [Span(3, 0, 5)]
    return replace(whole, response_ids=ids, rollout_logprobs=logprobs, spans=spans, finish_reason=None, routes=routed)
