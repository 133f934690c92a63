"""Variants of losses and advantages, compared with values of other trainers on the same tensors.

peer_figures.yaml names each trainer's function and commit. Its values have ten digits.
"""

import itertools
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml

from grpo_mega.algorithm.losses import choose_by_covariance, policy_loss
from tools.conformance import adapter, cases

FIGURES = yaml.safe_load(Path(__file__).with_name("peer_figures.yaml").read_text())
LENGTHS = [7, 3, 1, 5, 9]
RESPONSES = cases.responses(300, LENGTHS)
LOSS = cases.LOSS_SETTINGS | {"loss_agg_func": "token-mean"}  # ratios are clipped at 0.8 and 1.28


def assert_same(found, name, tolerance=1e-8):
    assert adapter.differences(FIGURES[name], found, tolerance) == []


@pytest.mark.parametrize("loss_type", ["clip_cov", "kl_cov"])
def test_covariance_losses_equal_verl_with_the_same_log_probs(loss_type):
    """verl chooses tokens by log-probs of the updated policy, within the micro-batch. The test passes the same
    log-probs.
    """
    settings = LOSS | {"loss_type": loss_type} | cases.OWN_SETTINGS[loss_type]
    packed, a = adapter.pack(RESPONSES, settings), adapter.algorithm_config(settings)
    now = replace(packed, old_logprobs=packed.logprobs.detach())
    packed = replace(packed, covariance_mask=choose_by_covariance(now, a, torch.Generator()))
    loss = policy_loss(packed, a).loss
    (gradients,) = torch.autograd.grad(loss, packed.logprobs)
    rows = [row[:-1].tolist() for row in gradients.split([n + 1 for n in LENGTHS])]
    assert_same({"loss": loss.item(), "gradients": rows}, f"verl {loss_type}")
    assert 2 < packed.covariance_mask.sum() < 12


def test_the_straight_through_penalty_equals_verl():
    case = next(c for c in cases.kl_cases() if c["name"] == "kl: low_var_kl+")
    assert_same(adapter.ours("kl", case["inputs"], case["settings"]), "verl low_var_kl+")


def test_the_adaptive_kl_coefficient_equals_verl():
    (case,) = cases.beta_cases()
    assert_same(adapter.ours("beta", case["inputs"], case["settings"]), "verl AdaptiveKLController")


@pytest.mark.parametrize(
    ("reject", "above"),
    itertools.chain.from_iterable(
        ((f"{level}_k2", above), (f"{level}_k3", above))
        for level, above in {"token": 0.05, "seq_sum": 0.4, "seq_mean": 0.08, "seq_max": 0.17}.items()
    ),
)
def test_rejected_tokens_equal_verl(reject, above):
    found = adapter.ours(
        "correction", {"responses": RESPONSES}, {"correction": {"reject": reject, "reject_above": above}}
    )
    assert {"kept": found["kept"]} == FIGURES[f"verl {reject}"]
    assert {x for row in found["kept"] for x in row} == {0, 1}


@pytest.mark.parametrize(
    ("correction", "name"),
    [
        ({"importance": "token", "max_importance": 1.3, "batch_normalize": True}, "verl batch_normalize token"),
        ({"importance": "sequence", "max_importance": 1.5, "batch_normalize": True}, "verl batch_normalize sequence"),
        (
            {"importance": "icepop", "mask_low": 0.7, "mask_high": 1.4, "batch_normalize": True},
            "verl batch_normalize icepop",
        ),
        ({"importance": "token", "min_importance": 0.8, "max_importance": 1.3}, "slime tis_clip_low"),
    ],
)
def test_importance_weights_equal_other_trainers(correction, name):
    found = adapter.ours("correction", {"responses": RESPONSES}, {"correction": correction})
    assert_same({"importance": found["importance"]}, name)


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({"correction": {"importance": "icepop", "mask_low": 0.0, "mask_high": 1.5}}, "AReaL decoupled mask"),
        (
            {"correction": {"importance": "token", "min_importance": 0.8, "max_importance": 1.3}},
            "AReaL decoupled clamp",
        ),
    ],
)
def test_decoupled_ppo_equals_areal(settings, name):
    found = adapter.ours("loss", {"responses": RESPONSES}, LOSS | settings)
    assert_same(found, name, 1e-7)  # AReaL's weights are in float32


def test_off_policy_masking_excludes_the_same_responses_as_slime():
    """slime's delta is relative to the sampling policy, as with --use-rollout-logprobs."""
    figures = FIGURES["slime opsm"]
    responses = cases.responses(figures["seed"], [*LENGTHS, 4])
    reinforce = LOSS | {"loss_type": "reinforce", "correction": {"off_policy_threshold": 0.05}}
    found = adapter.ours("loss", {"responses": responses}, reinforce)
    assert [[float(x != 0) for x in row] for row in found["gradients"]] == figures["kept"]


def test_the_likelihood_of_correct_answers_equals_nemo_rl():
    rewarded = [item | {"reward": reward} for item, reward in zip(RESPONSES, (1.0, 0.0, 0.4, 0.0, 0.7), strict=True)]
    without = adapter.ours("loss", {"responses": RESPONSES}, LOSS)
    found = adapter.ours("loss", {"responses": rewarded}, LOSS | {"positive_nll": 0.1})
    rows = zip(found["gradients"], without["gradients"], strict=True)
    added = [[x - y for x, y in zip(*pair, strict=True)] for pair in rows]
    assert_same({"loss": found["loss"] - without["loss"], "gradients": added}, "NeMo-RL positive_example_nll")


GROUPS = cases.with_scores([cases.samples(301, [3, 5, 1, 4]), cases.samples(302, [2, 8, 6])])
# In TRL all groups have the same size. In NeMo-RL every reward function applies to every sample.
THREES = [GROUPS[0][:3], GROUPS[1]]
for group in GROUPS:
    group[2]["scores"]["format"] = 0.25


@pytest.mark.parametrize(
    ("groups", "settings", "name"),
    [
        (GROUPS, {"adv_type": "pass_at_k"}, "verl grpo_passk normalised"),
        (GROUPS, {"adv_type": "pass_at_k", "normalize_by_std": False}, "verl grpo_passk plain"),
        (GROUPS, {"adv_type": "opo"}, "verl opo"),
        (GROUPS, {"adv_type": "grpo_leave_one_out"}, "NeMo-RL leave-one-out"),
        (GROUPS, {"adv_type": "gdpo", "std_eps": 1e-6}, "NeMo-RL gdpo"),
        (THREES, {"adv_type": "gdpo", "std_eps": 1e-4}, "TRL normalize_then_sum"),
        (THREES, {"adv_type": "grpo", "std_over": "batch", "std_eps": 1e-4}, "TRL scale_rewards batch"),
    ],
)
def test_advantages_of_responses_equal_other_trainers(groups, settings, name):
    settings = cases.ADVANTAGE_SETTINGS | settings | {"reward_weights": cases.REWARD_WEIGHTS}
    found = adapter.ours("advantages", {"groups": groups}, settings)["advantages"]
    assert [row[0] for group in found for row in group] == pytest.approx(FIGURES[name], rel=2e-6, abs=1e-7)


def test_advantages_of_turns_equal_mt_grpo():
    """Each response has two turns. The first turn has a separate reward."""
    turns = zip([(2, 3), (1, 4), (4, 2)], [0.2, 0.9, 0.5], [1.0, 0.0, 0.3], strict=True)
    group = [cases.stepped(x + y, [turn], [x - 1]) | {"reward": outcome} for (x, y), turn, outcome in turns]
    settings = cases.ADVANTAGE_SETTINGS | {"adv_type": "grpo_turn", "std_eps": 1e-4}
    (found,) = adapter.ours("advantages", {"groups": [group]}, settings)["advantages"]
    for row, figures in zip(found, FIGURES["MT-GRPO"], strict=True):
        assert row == pytest.approx(figures, rel=1e-6)


def test_clip_cov_draws_its_tokens_from_the_candidates():
    settings = LOSS | {"loss_type": "clip_cov"} | cases.OWN_SETTINGS["clip_cov"]
    packed = adapter.pack(RESPONSES, settings)
    few = adapter.algorithm_config(settings | {"cov_share": 0.08})  # 2 of 25 tokens are chosen
    drawn = [choose_by_covariance(packed, few, torch.Generator().manual_seed(seed)) for seed in range(40)]
    assert all(choice.sum() == 2 and (packed.covariance_mask[choice > 0] == 1).all() for choice in drawn)
    assert torch.equal(torch.stack(drawn).amax(0), packed.covariance_mask) and packed.covariance_mask.sum() > 3
    again = choose_by_covariance(packed, few, torch.Generator().manual_seed(3))
    assert torch.equal(again, drawn[3])
