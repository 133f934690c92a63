"""Loss, gradient and metrics do not depend on how a mini-batch is split into micro-batches and distributed over
ranks.
"""

import math

import pytest
import torch

from grpo_mega.algorithm.inputs import LossInputs
from grpo_mega.algorithm.losses import OBJECTIVES, accumulate, finalize
from grpo_mega.algorithm.token_weights import token_weights
from grpo_mega.batching.layout import from_samples, segments
from grpo_mega.batching.pack import PackingSpec, pack_mini_batches
from grpo_mega.types import Group, Prompt, Sample
from tests.helpers.losses import assigned, loss_of

OPTIONS = {"clip_low": 0.2, "clip_high": 0.28, "kl_beta": 0.05, "kl_penalty_type": "low_var_kl", "entropy_bonus": 0.01}
AGGREGATIONS = ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"]
LAYOUTS = [  # (dp_size, token_budget, length_multiple, micro_batch_multiple)
    (1, 10_000, 1, 1),
    (1, 40, 1, 1),
    (1, 64, 8, 3),
    (2, 64, 16, 1),
    (3, 45, 4, 2),
    (64, 100, 1, 1),
]


def make_samples(generator):
    """Return six groups of four samples with responses of 0 to 20 tokens."""
    groups = []
    for prompt_id in range(6):
        prompt = Prompt(prompt_id, "", tuple(range(1, 2 + prompt_id)), "")
        lengths = torch.randint(0, 21, (4,), generator=generator).tolist()
        rewards = torch.rand(4, generator=generator).tolist()
        groups.append(
            Group(
                prompt,
                [Sample(prompt, i, [3] * lengths[i], [-1.0] * lengths[i], "stop", reward=rewards[i]) for i in range(4)],
            )
        )
    return assigned(groups)


class Policy:
    """A fake model with fixed random values for each response token, independent of packing."""

    def __init__(self, samples, generator):
        def uniform(low, high):
            return [
                torch.rand(s.response_len, generator=generator, dtype=torch.float64) * (high - low) + low
                for s in samples
            ]

        self.samples = samples
        self.old = uniform(-4, -0.7)
        self.logprobs = [
            (o + d).requires_grad_() for o, d in zip(self.old, uniform(-math.log(2), math.log(2)), strict=True)
        ]
        self.ref = [x.detach() + d for x, d in zip(self.logprobs, uniform(-1, 1), strict=True)]
        self.entropy = [e.requires_grad_() for e in uniform(0, 3)]

    def inputs(self, batch):
        def packed(values):
            return from_samples(values, batch, self.samples).double()

        return LossInputs(
            logprobs=packed(self.logprobs),
            old_logprobs=packed(self.old),
            ref_logprobs=packed(self.ref),
            rollout_logprobs=batch.rollout_logprobs.double(),
            advantages=batch.advantages.double(),
            loss_mask=batch.loss_mask.double(),
            loss_weights=batch.loss_weights.double(),
            segments=segments(batch),
            num_segments=batch.num_segments,
            entropy=packed(self.entropy),
            covariance_mask=packed([(old > -1.5).double() for old in self.old]),
        )


def loss_gradient_and_metrics(policy, weights, layout, **more):
    dp_size, token_budget, length_multiple, micro_batch_multiple = layout
    outputs = []
    for dp_rank in range(dp_size):
        (batches,) = pack_mini_batches(
            [policy.samples],
            [weights],
            PackingSpec(dp_size, dp_rank, token_budget, length_multiple, micro_batch_multiple),
        )
        outputs += [loss_of(policy.inputs(batch), **OPTIONS, **more) for batch in batches]
    loss = torch.stack([output.loss for output in outputs]).sum()
    gradients = torch.autograd.grad(loss, policy.logprobs + policy.entropy)
    return loss.detach(), torch.cat(gradients), finalize(*accumulate(outputs))


@pytest.mark.parametrize("kind", AGGREGATIONS)
@pytest.mark.parametrize("layout", LAYOUTS[1:])
def test_loss_gradient_and_metrics_do_not_depend_on_packing_or_ranks(kind, layout):
    generator = torch.Generator().manual_seed(0)
    samples = make_samples(generator)
    policy = Policy(samples, generator)
    lengths = [s.response_len for s in samples]
    weights = token_weights(lengths, kind, max_response_length=20, num_samples=len(samples), num_tokens=sum(lengths))
    expected = loss_gradient_and_metrics(policy, weights, LAYOUTS[0])
    actual = loss_gradient_and_metrics(policy, weights, layout)
    torch.testing.assert_close(actual[0], expected[0], rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(actual[1], expected[1], rtol=1e-12, atol=1e-14)
    assert actual[2] == pytest.approx(expected[2], rel=1e-12, abs=1e-14)
    assert actual[2]["num_tokens"] == sum(lengths) and actual[2]["clip/fraction"] > 0.1


CORRECTIONS = [
    {"importance": "token", "mask": "geometric", "mask_low": 0.93, "mask_high": 1.08},
    {"importance": "sequence", "max_importance": 5.0, "veto_below": 0.6},
    {"mask": "token", "mask_low": 0.7, "mask_high": 1.5},
    {"mask": "sequence", "mask_low": 0.5, "mask_high": 2.0},
    {"reject": "seq_max_k3", "reject_above": 0.2, "off_policy_threshold": 0.01},
]


@pytest.mark.parametrize("loss_type", OBJECTIVES)
@pytest.mark.parametrize("correction", CORRECTIONS, ids=lambda c: "-".join(map(str, c.values())))
def test_losses_over_whole_responses_do_not_depend_on_packing(loss_type, correction):
    generator = torch.Generator().manual_seed(0)
    samples = make_samples(generator)
    policy = Policy(samples, generator)
    for sample, old in zip(samples, policy.old, strict=True):
        sample.rollout_logprobs = (old + 0.3 * torch.randn(len(old), generator=generator)).tolist()
    weights = token_weights(
        [s.response_len for s in samples], "token-mean", max_response_length=20, num_samples=24, num_tokens=100
    )
    expected = loss_gradient_and_metrics(policy, weights, LAYOUTS[0], loss_type=loss_type, correction=correction)
    actual = loss_gradient_and_metrics(policy, weights, LAYOUTS[3], loss_type=loss_type, correction=correction)
    torch.testing.assert_close(actual[0], expected[0], rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(actual[1], expected[1], rtol=1e-12, atol=1e-14)
    assert actual[2] == pytest.approx(expected[2], rel=1e-12, abs=1e-14)
    assert all(0 < value < 1 for name, value in actual[2].items() if name in ("correction/masked", "correction/vetoed"))


def naive_seq_mean_token_mean(policy):
    """Compute DeepSeekMath eq. 3 in Python floats, looping over samples and tokens without padding."""
    total = 0.0
    for i, sample in enumerate(policy.samples):
        terms = []
        for t in range(sample.response_len):
            cur, old, ref = (float(x[i][t].detach()) for x in (policy.logprobs, policy.old, policy.ref))
            advantage = float(sample.advantages[t])
            ratio = math.exp(cur - old)
            clipped = min(max(ratio, 1 - OPTIONS["clip_low"]), 1 + OPTIONS["clip_high"])
            kl = math.exp(ref - cur) - (ref - cur) - 1
            objective = min(ratio * advantage, clipped * advantage)
            entropy = float(policy.entropy[i][t].detach())
            terms.append(-objective + OPTIONS["kl_beta"] * kl - OPTIONS["entropy_bonus"] * entropy)
        total += sum(terms) / max(len(terms), 1)
    return total / len(policy.samples)


def test_from_rewards_to_loss_the_packed_path_equals_the_oracle():
    generator = torch.Generator().manual_seed(1)
    samples = make_samples(generator)
    policy = Policy(samples, generator)
    lengths = [s.response_len for s in samples]
    weights = token_weights(
        lengths, "seq-mean-token-mean", max_response_length=20, num_samples=len(samples), num_tokens=sum(lengths)
    )
    loss = loss_gradient_and_metrics(policy, weights, (2, 50, 8, 1))[0]
    # The batch stores weights in float32.
    assert loss.item() == pytest.approx(naive_seq_mean_token_mean(policy), rel=1e-6)
