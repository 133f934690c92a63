"""Several optimizer steps on one rank against a float64 replay: transformers' model, the loss written out, torch's
AdamW.

This file writes out GRPO's loss; the oracles of tools/conformance have the losses of the other recipes. A replay uses
no code of the trainer.
"""

from __future__ import annotations

import copy
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from grpo_mega import config as configs
from grpo_mega.cli.commands.check import Case, Outcome, run_cases
from grpo_mega.types import Group, Prompt, Sample
from tests.helpers.models import make_model, save_checkpoint
from tools.conformance import oracle_advantages, oracle_losses

TEMPERATURE, KL_BETA, ENTROPY_BONUS, CLIP_EPS = 0.9, 0.3, 0.02, 0.2
MINI_BATCHES, EPOCHS, PROMPTS, GROUP_SIZE = 2, 3, 4, 3
LR, BETAS, EPS, WEIGHT_DECAY, CLIP_GRAD = 4e-3, (0.8, 0.97), 1e-4, 3.0, 0.25
SIZES = {
    "num_hidden_layers": 5,
    "hidden_size": 44,
    "intermediate_size": 76,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 111,
}
# Settings that reach both sides of each recipe's limits with few tokens. clip_cov must not sample tokens.
RECIPES: dict[str, dict[str, Any]] = {
    "dr_grpo": {},
    "dapo": {"overlong_buffer": 0.4},
    "gspo": {"ratio_clip_eps_low": 0.02, "ratio_clip_eps_high": 0.03},
    "gspo_token": {"ratio_clip_eps_low": 0.02, "ratio_clip_eps_high": 0.03},
    "cispo": {"ratio_clip_eps_high": 0.2},
    "sapo": {},
    "gmpo": {"ratio_clip_eps": 0.1},
    "rloo": {},
    "reinforce_plus_plus": {},
    "reinforce_plus_plus_baseline": {},
    "process_supervision": {},
    "mt_grpo": {},
    "opo": {},
    "pass_at_k": {"pass_k": 2},
    "gdpo": {},
    "lite_ppo": {},
    "clip_cov": {"ratio_clip_eps": 0.2, "cov_share": 1.0, "cov_low": 0.05, "cov_high": 0.3},
    "kl_cov": {"cov_share": 0.2},
    "partial": {"correction": {"max_importance": 1.2}},
    "opd": {"distill_beta": 0.3},
    "opd reverse": {"distill_beta": 0.3, "distill_kl": "reverse"},
    "opd forward": {"distill_kl": "forward", "adv_type": "grpo"},
    "decoupled_ppo": {"correction": {"mask_high": 1.3, "batch_normalize": True}},
    "grpo": {
        "kl_penalty_type": "low_var_kl+",
        "positive_nll": 0.1,
        "positive_above": 0.4,
        "distill_beta": 0.1,
        "correction": {
            "importance": "sequence",
            "min_importance": 0.7,
            "max_importance": 1.4,
            "batch_normalize": True,
            "reject": "seq_max_k3",
            "reject_above": 0.06,
            "off_policy_threshold": 0.05,
        },
    },
}


class Replay:
    """The steps in float64 with only transformers and torch. `model` has the weights after the steps."""

    def __init__(self, model: Any, groups: list[Group]) -> None:
        self.model = copy.deepcopy(model).double().requires_grad_(True)
        self.grad_norms: list[float] = []
        self.clipped: list[float] = []  # per step: fraction of ratios outside 1 -+ CLIP_EPS
        with torch.no_grad():
            self.old = {id(s): self.logprobs(s)[0] for g in groups for s in g.samples}
        kept = {n: p for n, p in self.model.named_parameters() if n.endswith(("norm.weight", ".bias"))}
        rest = [p for n, p in self.model.named_parameters() if n not in kept]
        assert len(kept) == 5 * 5 + 1 and len(rest) == 5 * 7 + 1  # tied embeddings are one parameter
        decay = [{"params": rest, "weight_decay": WEIGHT_DECAY}, {"params": [*kept.values()], "weight_decay": 0.0}]
        self.adam = torch.optim.AdamW(decay, lr=LR, betas=BETAS, eps=EPS)
        size = len(groups) // MINI_BATCHES
        for _ in range(EPOCHS):
            for i in range(0, len(groups), size):
                self.step(groups[i : i + size])

    def step(self, groups: list[Group]) -> None:
        self.adam.zero_grad()
        num_scored = sum(s.reward is not None for g in groups for s in g.samples)
        num_clipped = num_tokens = 0.0
        for group in groups:
            rewards = torch.tensor([s.reward for s in group.samples if s.reward is not None], dtype=torch.float64)
            for sample in group.samples:
                if sample.reward is None:
                    continue
                advantage = (sample.reward - rewards.mean()) / (rewards.std() + 1e-6)
                logprobs, entropy = self.logprobs(sample)
                old = reference = self.old[id(sample)]  # there is no step between start and rollout
                ratio = torch.exp(logprobs - old)
                policy = torch.minimum(ratio * advantage, ratio.clamp(1 - CLIP_EPS, 1 + CLIP_EPS) * advantage)
                kl = torch.exp(reference - logprobs) - 1 - (reference - logprobs)
                (-(policy - KL_BETA * kl + ENTROPY_BONUS * entropy).mean() / num_scored).backward()
                num_clipped += float(((ratio - 1).abs() > CLIP_EPS).sum())
                num_tokens += len(ratio)
        self.grad_norms.append(float(torch.nn.utils.clip_grad_norm_(self.model.parameters(), CLIP_GRAD)))
        self.clipped.append(num_clipped / num_tokens)
        self.adam.step()

    def take(self, loss: Tensor) -> None:
        """Take an optimizer step down the gradient of `loss`."""
        self.adam.zero_grad()
        loss.backward()
        self.grad_norms.append(float(torch.nn.utils.clip_grad_norm_(self.model.parameters(), CLIP_GRAD)))
        self.adam.step()

    def logprobs(self, sample: Sample) -> tuple[Tensor, Tensor]:
        """Return the log-probs of the response tokens, and the entropies at their positions."""
        table = self.table(sample)
        return table.gather(1, torch.tensor(sample.response_ids)[:, None])[:, 0], -(table.exp() * table).sum(-1)

    def table(self, sample: Sample) -> Tensor:
        """Return the log-probs of all tokens at each position of the response."""
        tokens = torch.tensor([*sample.prompt.token_ids, *sample.response_ids])
        logits = self.model(tokens[None]).logits[0, len(sample.prompt.token_ids) - 1 : -1] / TEMPERATURE
        return torch.log_softmax(logits, -1)


class RecipeReplay(Replay):
    """The steps with any recipe's advantages and loss, computed by the oracles."""

    def __init__(self, model: Any, groups: list[Group], config: configs.Config) -> None:
        flat = config.algorithm.model_dump()
        flat |= flat["correction"] | {"max_response_length": config.rollout.max_response_length}
        flat |= {name: flat[name] or flat["ratio_clip_eps"] for name in ("ratio_clip_eps_low", "ratio_clip_eps_high")}
        flat["reward_weights"] = {function.name: function.weight for function in config.rewards.functions}
        a, b = (
            {f.name: flat[f.name] for f in fields(c)}
            for c in (oracle_losses.Settings, oracle_advantages.AdvantageSettings)
        )
        self.settings = oracle_losses.Settings(**a | ({"kl_beta": 0.0} if flat["kl_in"] == "reward" else {}))
        make = oracle_advantages.Scored
        scored = [
            [make(s.response_len, s.reward, s.step_rewards, s.step_ends, scores=s.scores) for s in g.samples]
            for g in groups
        ]
        for one in (s for g in scored for s in g):  # at the start the policy equals the reference
            one.logprobs = one.ref_logprobs = [0.0] * one.length
        rows = oracle_advantages.advantages(scored, oracle_advantages.AdvantageSettings(**b))
        self.advantages = {
            id(s): row
            for g, of_group in zip(groups, rows, strict=True)
            for s, row in zip(g.samples, of_group, strict=True)
        }
        self.teacher = {} if not config.teachers else taught_tables(groups, config)
        super().__init__(model, groups)

    def teachers_part(self, sample: Sample) -> tuple[list[float], list[Tensor]] | tuple[()]:
        """Return the teacher's log-probs of the response, and the KL over the vocabulary."""
        if not self.teacher:
            return ()
        q, p = self.teacher[id(sample)], self.table(sample)
        is_reverse = self.settings.distill_kl == "reverse"
        kl = (p.exp() * (p - q)).sum(-1) if is_reverse else (q.exp() * (q - p)).sum(-1)
        return q.gather(1, torch.tensor(sample.response_ids)[:, None])[:, 0].tolist(), [*kl]

    def step(self, groups: list[Group]) -> None:
        responses = []
        for sample in (s for g in groups for s in g.samples if s.is_scored or self.teacher):
            logprobs, entropy = self.logprobs(sample)
            old = self.old[id(sample)].tolist()
            responses.append(
                oracle_losses.Response(
                    [*logprobs],
                    old,
                    sample.rollout_logprobs,
                    self.advantages[id(sample)],
                    [1] * len(old),
                    old,
                    [*entropy],
                    sample.reward,
                    *self.teachers_part(sample),
                )
            )
        self.take(oracle_losses.minibatch_loss(responses, self.settings))


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, dict[str, tuple[Outcome, Replay]]]:
    """Return the start model, and the trainer's outcome and its replay per case."""
    folder = tmp_path_factory.mktemp("replay")
    model = make_model("qwen2", seed=3, tied=True, **SIZES)
    save_checkpoint(model, folder / "model")
    # Teachers of other families and sizes. One has a larger vocabulary than the policy.
    save_checkpoint(make_model("qwen3", seed=5, **SIZES | {"vocab_size": 123, "num_hidden_layers": 3}), folder / "big")
    save_checkpoint(make_model("llama", seed=6, vocab_size=SIZES["vocab_size"]), folder / "small")
    groups = make_groups(model)
    torch.save(groups, folder / "groups.pt")
    all_configs = {"written out": make_config(folder / "model")}
    all_configs |= {
        recipe: make_config(folder / "model", recipe=recipe.split()[0], **own) for recipe, own in RECIPES.items()
    }
    outcomes = run_cases([Case(name, config) for name, config in all_configs.items()], folder)
    replays = [Replay(model, groups), *(RecipeReplay(model, groups, all_configs[recipe]) for recipe in RECIPES)]
    return model, dict(zip(all_configs, zip(outcomes, replays, strict=True), strict=True))


def test_metrics_of_every_step_equal_the_replay(played: Any) -> None:
    _, cases = played
    outcome, replay = cases["written out"]
    assert all(norm > 1.2 * CLIP_GRAD for norm in replay.grad_norms), replay.grad_norms
    assert replay.clipped[-1] > 0.05, replay.clipped
    for name, (outcome, replay) in cases.items():
        assert len(outcome.updates) == MINI_BATCHES * EPOCHS
        assert [m["grad_norm"] for m in outcome.updates] == pytest.approx(replay.grad_norms, rel=2e-5), name


def test_weights_after_several_steps_equal_the_replay(played: Any) -> None:
    """Compare the movement of each tensor. Norms and biases move too, but do not decay."""
    model, cases = played
    outcome, replay = cases["written out"]
    found, end = weights_of(outcome), replay.model.state_dict()
    assert found.keys() == end.keys()
    for name, values in end.items():
        moved = values - model.state_dict()[name].double()
        assert moved.abs().max() > LR, name
        error = (found[name].double() - values).norm() / moved.norm()
        assert error < 2e-4, (name, float(error))


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_recipe_moves_the_weights_as_its_replay_does(played: Any, recipe: str) -> None:
    model, cases = played
    outcome, replay = cases[recipe]
    found, start, end = weights_of(outcome), model.state_dict(), replay.model.state_dict()
    moved = torch.cat([(values - start[name]).flatten() for name, values in end.items()])
    error = torch.cat([(values - found[name]).flatten() for name, values in end.items()])
    assert error.norm() < 1e-5 * moved.norm(), float(error.norm() / moved.norm())


def test_the_replayed_recipes_reach_both_sides_of_their_limits(played: Any) -> None:
    shares = {
        "grpo": ("correction/truncated", "correction/rejected", "correction/off_policy"),
        "decoupled_ppo": ("correction/masked",),
        "clip_cov": ("clip/chosen", "clip/fraction_low", "clip/fraction_high"),
        "kl_cov": ("clip/chosen",),
        **dict.fromkeys(("dapo", "gspo", "cispo", "gmpo", "rloo"), ("clip/fraction",)),
    }
    for recipe, names in shares.items():
        outcome, _ = played[1][recipe]
        for name in names:
            assert any(0.01 < metrics[name] < 0.9 for metrics in outcome.updates), (recipe, name, outcome.updates)
    assert all(metrics["loss/nll"] > 0.01 for metrics in played[1]["grpo"][0].updates)


def taught_tables(groups: list[Group], config: configs.Config) -> dict[int, Tensor]:
    """Return each sample's log-probs by its teacher, at the policy's temperature, over the policy's vocabulary."""
    found = {}
    for name, settings in config.teachers.items():
        model = AutoModelForCausalLM.from_pretrained(settings.path, dtype=torch.float64)
        for sample in (s for g in groups for s in g.samples):
            if config.data.teacher_column is None or sample.prompt.extras["teacher"] == name:
                tokens = torch.tensor([*sample.prompt.token_ids, *sample.response_ids])
                with torch.no_grad():
                    logits = model(tokens[None]).logits[0, len(sample.prompt.token_ids) - 1 : -1, : SIZES["vocab_size"]]
                found[id(sample)] = torch.log_softmax(logits / TEMPERATURE, -1)
    return found


def weights_of(outcome: Outcome) -> dict[str, Tensor]:
    return AutoModelForCausalLM.from_pretrained(outcome.checkpoint, dtype=torch.float32).state_dict()


def make_config(model: Path, **algorithm: Any) -> configs.Config:
    teachers = {"opd": ["big"], "grpo": ["big", "small"]}.get(algorithm.get("recipe", ""), [])
    teachers += ["small"] * (algorithm.get("distill_kl") == "forward")
    return configs.validate(
        {
            "run_dir": "unused",
            "steps": 1,
            "model": {"path": str(model), "dtype": "float32"},
            "teachers": {name: {"path": str(model.parent / name)} for name in teachers},
            "data": {
                "train": "unused",
                "max_prompt_length": 12,
                "teacher_column": "teacher" if len(teachers) > 1 else None,
            },
            "rollout": {"max_response_length": 20, "temperature": TEMPERATURE},
            "algorithm": {
                "group_size": GROUP_SIZE,
                "kl_beta": KL_BETA,
                "calculate_entropy": True,
                "entropy_bonus": ENTROPY_BONUS,
                "kl_clamp": None,
                **(algorithm or {"ratio_clip_eps": CLIP_EPS}),
            },
            "batch": {
                "prompts_per_step": PROMPTS,
                "mini_batches": MINI_BATCHES,
                "epochs": EPOCHS,
                "tokens_per_micro_batch": 80,
            },
            "optimizer": {
                "lr": LR,
                "betas": list(BETAS),
                "eps": EPS,
                "weight_decay": WEIGHT_DECAY,
                "clip_grad": CLIP_GRAD,
            },
        }
    )


def make_groups(model: Any) -> list[Group]:
    """Return random responses of different lengths with log-probs near the model's; one sample has no reward."""
    generator = torch.Generator().manual_seed(11)

    def ints(n: int) -> list[int]:
        return torch.randint(2, SIZES["vocab_size"], (n,), generator=generator).tolist()

    groups = []
    for g in range(PROMPTS):
        prompt = Prompt(g, "", tuple(ints(3 + g)), "", extras={"teacher": "small" if g == 1 else "big"})
        samples = []
        for i in range(GROUP_SIZE):
            tokens = ints(5 + 4 * i + g)
            reward, score, *steps = torch.rand(4, generator=generator).tolist()
            with torch.no_grad():
                logits = model(torch.tensor([[*prompt.token_ids, *tokens]])).logits[0, len(prompt.token_ids) - 1 : -1]
            logprobs = (logits / TEMPERATURE).log_softmax(-1).gather(1, torch.tensor(tokens)[:, None])[:, 0]
            logprobs += 0.15 * torch.randn(len(tokens), generator=generator)
            scores: dict[str, float | None] = {"accuracy": float(reward > 0.5), "format": score}
            sample = Sample(prompt, i, tokens, logprobs.tolist(), "stop", (), scores, reward=reward)
            sample.step_rewards, sample.step_ends = steps[: 1 + i % 2], [2, 4][: 1 + i % 2]
            samples.append(sample)
        groups.append(Group(prompt, samples))
    groups[2].samples[0].reward, groups[2].samples[0].step_rewards, groups[2].samples[0].step_ends = None, [], []
    return groups
