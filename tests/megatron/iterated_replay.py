"""Iterated steps, with a reference that follows the policy, against a float64 replay with only transformers and torch's
AdamW.

restore_worker.py runs the cases: two ranks take all steps and save during an iteration; one and three ranks continue
from there.
"""

from __future__ import annotations

import copy
import functools
import math
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from offload_worker import Trainee, make_config_of, make_groups
from torch import Tensor

from grpo_mega.checkpoint_io.dcp_read import read_metadata
from grpo_mega.checkpoint_io.reader import random_reader
from grpo_mega.checkpoint_io.slices import ITEM_BYTES
from grpo_mega.cli.checks.machine import CARDS
from grpo_mega.cli.planner.job import PlannedJob
from grpo_mega.cli.planner.memory import checkpoint_bytes, host_memory
from grpo_mega.types import Group, Sample
from grpo_mega.weights.boxes import Box, region
from grpo_mega.weights.families import family_of
from grpo_mega.weights.spec import ModelShape
from tests.helpers.models import make_config, make_model

KL_BETA, LR, EPS, WEIGHT_DECAY = 0.5, 4e-3, 1e-4, 0.01
STEPS, SYNC_STEPS, SAVED_STEP = 5, 2, 3
LAYOUTS = ("tp=2", "pp=2", "dp=2,overlap_grad_reduce=true,overlap_param_gather=true")
ALPHAS = (1.0, 0.3)
# by world size: layout, layout of the checkpoint
GOING_ON = {1: {"tp=1": LAYOUTS[2]}, 3: {"dp=3": LAYOUTS[1], "pp=3": LAYOUTS[0]}}
SIZES = {
    "num_hidden_layers": 5,
    "hidden_size": 44,
    "intermediate_size": 76,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 304,
    "tie_word_embeddings": True,
}


class Replay:
    def __init__(self, alpha: float) -> None:
        self.model = make_model("qwen2", **SIZES).double().requires_grad_(True)
        shape = ModelShape.from_hf_config(make_config("qwen2", **SIZES).to_dict())
        read = random_reader(family_of("qwen2").hf_tensors(shape), seed=3, std=0.15)
        with torch.no_grad():
            for name, p in self.model.named_parameters():
                p.copy_(read(Box(name, (0,) * p.dim(), tuple(p.shape))))
        self.start, self.reference, self.alpha = copy.deepcopy(self.model), copy.deepcopy(self.model), alpha
        kept = [p for p in self.model.parameters() if p.dim() == 1]
        rest = [p for p in self.model.parameters() if p.dim() > 1]
        groups: list[dict[str, Any]] = [
            {"params": rest, "weight_decay": WEIGHT_DECAY},
            {"params": kept, "weight_decay": 0.0},
        ]
        self.adam = torch.optim.AdamW(groups, lr=LR, betas=(0.9, 0.95), eps=EPS)
        self.metrics: list[dict[str, float]] = []
        for step in range(STEPS):
            self.step(make_groups(step))
            if step % SYNC_STEPS == SYNC_STEPS - 1:
                with torch.no_grad():
                    for ref, p in zip(self.reference.parameters(), self.model.parameters(), strict=True):
                        ref.copy_(alpha * p + (1 - alpha) * ref)

    def step(self, groups: list[Group]) -> None:
        """Take one optimizer step per group."""
        with torch.no_grad():
            old = [[logprobs(self.model, s) for s in g.samples] for g in groups]
            references = [[logprobs(self.reference, s) for s in g.samples] for g in groups]
        for group, olds, refs in zip(groups, old, references, strict=True):
            rewards = torch.tensor([s.reward for s in group.samples], dtype=torch.float64)
            num_tokens = sum(s.response_len for s in group.samples)
            self.adam.zero_grad()
            total = kl_sum = torch.zeros((), dtype=torch.float64)
            for sample, reward, before, ref in zip(group.samples, rewards, olds, refs, strict=True):
                advantage = (reward - rewards.mean()) / (rewards.std() + 1e-6)
                now = logprobs(self.model, sample)
                ratio = torch.exp(now - before)
                gain = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
                kl = torch.exp(ref - now) - 1 - (ref - now)
                total, kl_sum = (
                    total + (KL_BETA * kl - gain).sum() / num_tokens,
                    kl_sum + kl.detach().sum() / num_tokens,
                )
            total.backward()
            norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.metrics.append({"kl/mean": float(kl_sum), "grad_norm": float(norm)})
            self.adam.step()


replay_of = functools.cache(Replay)


def logprobs(model: Any, sample: Sample) -> Tensor:
    tokens = torch.tensor([*sample.prompt.token_ids, *sample.response_ids])
    table = model(tokens[None]).logits[0, len(sample.prompt.token_ids) - 1 : -1].log_softmax(-1)
    return table.gather(1, tokens[len(sample.prompt.token_ids) :, None])[:, 0]


def trainee_of(layout: str, alpha: float, dtype: str = "float32") -> Trainee:
    algorithm = f"algorithm={{group_size: 4, kl_beta: {KL_BETA}, ref_model_sync_steps: {SYNC_STEPS}"
    optimizer = f"optimizer={{lr: {LR}, eps: {EPS}, weight_decay: {WEIGHT_DECAY}}}"
    config = make_config_of(f"{layout} {dtype}", f"{algorithm}, ref_model_mixup_alpha: {alpha}}}", optimizer)
    return Trainee(config, **SIZES)


def check_all_steps(layout: str, rank: int, folder: Path) -> None:
    for alpha in ALPHAS:
        trainee = trainee_of(layout, alpha)
        name = f"iterated {layout} {alpha}"
        found = take_steps(trainee, 0, SAVED_STEP)
        if rank == 0:
            (folder / name).mkdir()
        dist.barrier()
        trainee.away()
        trainee.policy.save(folder / name)
        found += take_steps(trainee, SAVED_STEP, STEPS)
        replay = replay_of(alpha)
        start, end = replay.start.state_dict(), replay.model.state_dict()
        if rank == 0:
            torch.save((replay.metrics, start, end), folder / f"replay {alpha}.pt")
        compare(trainee, found, replay.metrics, start, end)
        check_plan(trainee, folder / name)


def check_plan(trainee: Trainee, state: Path) -> None:
    """Compare the planned bytes of a checkpoint and of the average with the actual bytes."""
    policy, config = trainee.policy, trainee.config
    setup = PlannedJob(config, policy._shape, 0, CARDS["h100"], 2, 1, 32.0, 32.0, uses_te=False)
    is_saved = {name: t for name, t in read_metadata(state).items() if not name.endswith((".step", "_extra_state"))}
    saved = {name: math.prod(t.shape) * ITEM_BYTES[t.dtype] for name, t in is_saved.items()}
    assert sum(saved.values()) == checkpoint_bytes(setup), saved
    averages = [figure for figure in host_memory(setup).other if figure.label == "reference's average"]
    assert policy._reference is not None
    held = torch.tensor(sum(t.nbytes for t in (policy._reference._average or {}).values()))
    dist.all_reduce(held, dist.ReduceOp.MAX)
    assert averages == ([int(held)] if config.algorithm.averages_reference else [])


def check_going_on(layout: str, saved: str, rank: int, folder: Path) -> None:
    for alpha in ALPHAS:
        metrics, start, end = torch.load(folder / f"replay {alpha}.pt")
        trainee = trainee_of(layout, alpha)
        trainee.away()
        trainee.policy.restore(folder / f"iterated {saved} {alpha}")
        found = take_steps(trainee, SAVED_STEP, STEPS)
        compare(trainee, found, metrics[-len(found) :], start, end)


def take_steps(trainee: Trainee, first: int, end: int) -> list[dict[str, float]]:
    """Take steps like train_step, and move the policy to the host after each step."""
    metrics = []
    for step in range(first, end):
        metrics += trainee.update(step)
        if trainee.config.algorithm.ends_iteration(step + 1):
            before = trainee.checksum()
            trainee.policy.refresh_reference()
            assert trainee.checksum() == before, "refresh_reference changed the policy"
        trainee.away()
    return metrics


def compare(
    trainee: Trainee, found: list[dict[str, float]], metrics: list[dict[str, float]], start: Any, end: Any
) -> None:
    for ours, theirs in zip(found, metrics, strict=True):
        for name, value in theirs.items():
            assert abs(ours[name] - value) <= 2e-5 * max(abs(value), 1e-2), (name, ours[name], value)
    trainee.policy.memory.onload_weights()
    error, moved = torch.zeros(2, dtype=torch.float64)
    for local, held in trainee.policy.shards.rank_shards(dist.get_rank()).items():
        for piece in held.pieces:
            where = region(piece.box.start, piece.box.shape)
            before, after = (t[piece.box.tensor][where] for t in (start, end))
            ours = trainee.policy.tensors()[local].detach()[region(piece.offset, piece.box.shape)].double()
            error, moved = error + (ours - after).square().sum(), moved + (after - before).square().sum()
    assert error.sqrt() < 1e-5 * moved.sqrt(), float(error.sqrt() / moved.sqrt())


def check_average_is_kept_in_fp32(rank: int, folder: Path) -> None:
    """In bf16 a slow average would not move, so it is fp32. The reference weights are the average, rounded once."""
    share = 2.0**-7
    trainee = trainee_of(LAYOUTS[-1], share, "bfloat16")
    expected = {name: p.detach().double() for name, p in trainee.policy.parameters.items()}
    for step in range(3):
        trainee.update(step)
        trainee.policy.refresh_reference()
        expected = {
            n: (1 - share) * mean + share * trainee.policy.parameters[n].double() for n, mean in expected.items()
        }
    reference = trainee.policy._reference
    assert reference is not None
    found = reference.tensors()
    with trainee.policy.memory.with_weights(reference.weights):
        for name, p in trainee.policy.parameters.items():
            torch.testing.assert_close(found[name].double(), expected[name], rtol=1e-6, atol=1e-9)
            assert torch.equal(p, found[name].bfloat16()), name
    differing = [(found[n] != p.float()).any() for n, p in trainee.policy.parameters.items()]
    assert sum(map(bool, differing)) > len(differing) / 2


def cases(world_size: int) -> dict[str, Any]:
    if world_size == 2:
        found: dict[str, Any] = {f"iterated: {layout}": partial(check_all_steps, layout) for layout in LAYOUTS}
        return found | {"iterated: average in fp32": check_average_is_kept_in_fp32}
    return {
        f"iterated: on with {layout}": partial(check_going_on, layout, saved)
        for layout, saved in GOING_ON.get(world_size, {}).items()
    }
