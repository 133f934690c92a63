"""Every loss, aggregation and correction compared with the oracle, on ragged mini-batches split into micro-batches."""

import itertools
import math
import random
from dataclasses import replace

import pytest
import torch

from grpo_mega.algorithm.losses import OBJECTIVES, policy_loss
from grpo_mega.config import AlgorithmConfig
from tools.conformance import adapter, cases, oracle_losses

VECTORS = ("logprobs", "old_logprobs", "ref_logprobs", "rollout_logprobs", "advantages", "entropy")
LEAVES = ("logprobs", "entropy")
PENALTIES = itertools.cycle(cases.PENALTIES)


def random_responses(seed, lengths=(5, 0, 3, 1, 6, 2), *, by_token=False):
    """Return responses like the conformance cases, with masked tokens. `by_token`: advantages differ within a
    response.
    """
    responses = cases.responses(seed, list(lengths), has_gaps=True)
    rng = random.Random(seed)
    for item in responses if by_token else []:
        item["advantages"] = [rng.uniform(-2, 2) for _ in item["mask"]]
    return responses


def ours(responses, settings, num_parts=1, seed=0):
    """Return the loss and its gradients for log-probs and entropy, with responses shuffled and split into
    `num_parts`.
    """
    whole = adapter.pack(responses, settings)
    whole.entropy.requires_grad_()
    order = list(range(len(responses)))
    random.Random(seed).shuffle(order)
    total = torch.zeros((), dtype=torch.float64)
    for members in [order[part::num_parts] for part in range(num_parts)]:
        where = torch.cat([(whole.segments == member).nonzero()[:, 0] for member in members])
        numbers = torch.tensor([members.index(member) for member in whole.segments[where].tolist()])
        present = [name for name in ("covariance_mask", "nll_weights") if getattr(whole, name) is not None]
        vectors = {name: getattr(whole, name)[where] for name in (*VECTORS, "loss_mask", "loss_weights", *present)}
        part = replace(whole, **vectors, segments=numbers, num_segments=len(members))
        total = total + policy_loss(part, adapter.algorithm_config(settings)).loss
    gradients = torch.autograd.grad(total, [whole.logprobs, whole.entropy], allow_unused=True)
    zeros = torch.zeros_like(whole.logprobs)
    return total.detach(), *[zeros if g is None else g for g in gradients]


def by_oracle(responses, settings):
    """Return the same values from the oracle. A position without a gradient follows each response, as in our layout."""
    items = [
        oracle_losses.Response(
            **item
            | {name: [torch.tensor(x, dtype=torch.float64, requires_grad=True) for x in item[name]] for name in LEAVES}
        )
        for item in responses
    ]
    loss = oracle_losses.minibatch_loss(items, adapter.oracle_settings(settings))
    result = [loss.detach()]
    for name in LEAVES:
        leaves = [leaf for item in items for leaf in [*getattr(item, name), torch.zeros(())]]
        wanted = [leaf for leaf in leaves if leaf.requires_grad]
        found = iter(torch.autograd.grad(loss, wanted, allow_unused=True, retain_graph=True))
        values = [next(found) if leaf.requires_grad else None for leaf in leaves]
        result.append(torch.tensor([0.0 if value is None else float(value) for value in values], dtype=torch.float64))
    return result


@pytest.mark.parametrize("aggregation", cases.AGGREGATIONS)
@pytest.mark.parametrize("loss_type", OBJECTIVES)
def test_loss_and_gradients_equal_the_oracle_with_any_micro_batches(loss_type, aggregation):
    corrections = [{}, *cases.CORRECTIONS.values()]
    for seed, (correction, kind) in enumerate(zip(corrections, PENALTIES, strict=False)):
        settings = cases.LOSS_SETTINGS | {
            "loss_type": loss_type,
            "loss_agg_func": aggregation,
            "kl_beta": 0.3,
            "kl_penalty_type": kind,
            "entropy_bonus": 0.1,
            "correction": correction,
            **(cases.OWN_SETTINGS[loss_type] if loss_type in ("clip_cov", "kl_cov") else {}),
        }
        responses = random_responses(seed, by_token=seed % 2 == 1)
        expected = by_oracle(responses, settings)
        assert expected[1].abs().max() > 1e-3
        for num_parts in (1, 3):
            for actual, wanted in zip(ours(responses, settings, num_parts, seed), expected, strict=True):
                torch.testing.assert_close(actual, wanted, rtol=1e-11, atol=1e-13)


def test_random_batches_reach_both_sides_of_every_limit():
    """Ratios are on both sides of both clips, and tokens and responses are kept and dropped, for both signs."""
    responses = [item for seed in range(8) for item in random_responses(seed)]
    tokens = [
        (item["logprobs"][t] - item["old_logprobs"][t], item["advantages"][t] > 0)
        for item in responses
        for t in range(len(item["mask"]))
        if item["mask"][t]
    ]
    for low, high in [(math.log(0.8), math.log(1.28)), (-0.2, 0.28), (-math.inf, math.log(1.5))]:
        is_where = {(value < low, value > high, positive) for value, positive in tokens}
        assert len(is_where) == (6 if low > -math.inf else 4)
    for correction in cases.CORRECTIONS.values():
        rows = adapter.expected("correction", {"responses": responses}, {"correction": correction})["kept"]
        kept = {value for row, item in zip(rows, responses, strict=True) for value in used(row, item)}
        assert kept == ({0.0, 1.0} if correction.keys() & {"mask", "reject", "veto_below"} else {1.0})


def used(row, item):
    return [value for value, mask in zip(row, item["mask"], strict=True) if mask]


@pytest.mark.parametrize("loss_type", sorted(OBJECTIVES.keys() - {"cispo", "gspo_token"}))
def test_gradients_of_losses_without_stop_gradient_equal_numeric_ones(loss_type):
    settings = cases.LOSS_SETTINGS | {"loss_type": loss_type, "kl_beta": 0.1, "entropy_bonus": 0.1}
    inputs = adapter.pack(cases.responses(3, [4, 3, 2]), settings)
    kept = inputs.loss_mask > 0  # masked tokens are NaN

    def loss(logprobs, entropy):
        full = [torch.zeros_like(inputs.logprobs).masked_scatter(kept, values) for values in (logprobs, entropy)]
        return policy_loss(replace(inputs, logprobs=full[0], entropy=full[1]), adapter.algorithm_config(settings)).loss

    leaves = [values.detach()[kept].clone().requires_grad_() for values in (inputs.logprobs, inputs.entropy)]
    assert torch.autograd.gradcheck(loss, leaves)


@pytest.mark.parametrize("aggregation", cases.AGGREGATIONS)
@pytest.mark.parametrize("loss_type", OBJECTIVES)
def test_on_policy_every_loss_has_the_gradient_of_reinforce(loss_type, aggregation):
    responses = [item | {"old_logprobs": item["logprobs"]} for item in cases.responses(4, [4, 1, 6])]
    settings = cases.LOSS_SETTINGS | {"loss_type": loss_type, "loss_agg_func": aggregation}
    _, gradient, _ = ours(responses, settings)
    _, expected, _ = ours(responses, settings | {"loss_type": "reinforce"})
    torch.testing.assert_close(gradient, expected, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("loss_type", OBJECTIVES)
@pytest.mark.parametrize("old", [-math.inf, math.inf, -1e4, 1e4])
def test_infinite_ratios_have_finite_losses_and_gradients(loss_type, old):
    for correction, dtype in itertools.product([{}, *cases.CORRECTIONS.values()], [torch.float32, torch.float64]):
        responses = cases.responses(5, [3, 1, 2])
        responses[0]["old_logprobs"][1] = responses[1]["old_logprobs"][0] = old
        responses[2]["advantages"] = [0.0, 0.0]
        settings = cases.LOSS_SETTINGS | {"loss_type": loss_type, "kl_beta": 0.1, "correction": correction}
        settings |= {"kl_penalty_type": "low_var_kl_weighted"}
        inputs = adapter.pack(responses, settings)
        vectors = {name: getattr(inputs, name).detach().to(dtype) for name in (*VECTORS, "loss_mask", "loss_weights")}
        inputs = replace(inputs, **vectors)
        inputs.logprobs.requires_grad_()
        loss = policy_loss(inputs, adapter.algorithm_config(settings)).loss
        (gradient,) = torch.autograd.grad(loss, inputs.logprobs)
        assert loss.isfinite() and gradient.isfinite().all()


@pytest.mark.parametrize("loss_type", OBJECTIVES)
def test_masked_nan_tokens_and_empty_responses_contribute_exactly_nothing(loss_type):
    for correction in [{}, *cases.CORRECTIONS.values()]:
        settings = cases.LOSS_SETTINGS | {"loss_type": loss_type, "kl_beta": 0.1, "entropy_bonus": 0.1}
        settings |= {"correction": correction, "loss_agg_func": "seq-mean-token-sum"}
        with_nan = random_responses(6)
        assert any(math.isnan(x) for item in with_nan for x in item["logprobs"])
        with_ones = [item | {name: [1.0 if x != x else x for x in item[name]] for name in VECTORS} for item in with_nan]
        without = [item | {name: used(item[name], item) for name in (*VECTORS, "mask")} for item in with_nan]
        loss, gradient, of_entropy = ours(with_nan, settings)
        for actual, expected in zip(ours(with_ones, settings), (loss, gradient, of_entropy), strict=True):
            assert torch.equal(actual, expected)
        torch.testing.assert_close(ours(without, settings)[0], loss, rtol=1e-13, atol=1e-15)
        masked = torch.tensor([x == 0 for item in with_nan for x in [*item["mask"], 0]])
        assert gradient[masked].eq(0).all() and of_entropy[masked].eq(0).all()


@pytest.mark.parametrize("loss_type", OBJECTIVES)
def test_a_mini_batch_without_trained_tokens_has_zero_loss_and_gradient(loss_type):
    settings = cases.LOSS_SETTINGS | {"loss_type": loss_type, "kl_beta": 0.1, "entropy_bonus": 0.1}
    all_masked = [item | {"mask": [0] * len(item["mask"])} for item in cases.responses(7, [3, 0, 2])]
    no_tokens = cases.responses(7, [0, 0])
    for responses, correction in itertools.product([all_masked, no_tokens], [{}, *cases.CORRECTIONS.values()]):
        loss, *gradients = ours(responses, settings | {"correction": correction})
        assert loss == 0 and all(gradient.eq(0).all() for gradient in gradients)


@pytest.mark.parametrize("loss_type", ["gspo", "gspo_token", "gmpo"])
def test_a_dropped_token_does_not_count_in_the_mean_ratio_of_its_response(loss_type):
    """The remaining tokens have the same loss as a shorter response, except for the divisor of length means."""
    responses = cases.responses(8, [4])
    (item,) = responses
    item["rollout_logprobs"] = list(item["old_logprobs"])
    item["rollout_logprobs"][2] += 1.0  # the ratio becomes 0.37
    settings = cases.LOSS_SETTINGS | {"loss_type": loss_type, "loss_agg_func": "seq-mean-token-sum"}
    dropped, gradient, _ = ours(responses, settings | {"correction": {"mask": "token"}})
    rest = [{name: [*values[:2], *values[3:]] for name, values in item.items()}]
    alone, alone_gradient, _ = ours(rest, settings)
    torch.testing.assert_close(dropped, alone, rtol=1e-13, atol=0)
    assert gradient[2] == 0
    torch.testing.assert_close(gradient[[0, 1, 3]], alone_gradient[:3], rtol=1e-13, atol=0)


def test_losses_have_the_papers_defaults():
    a = AlgorithmConfig()
    assert (a.clip_low, a.clip_high, a.ratio_clip_c) == (0.2, 0.2, 3.0)
    assert (a.sapo_tau_positive, a.sapo_tau_negative) == (1.0, 1.05)
    assert a.loss_type == "actor" and a.kl_beta == 0.0
