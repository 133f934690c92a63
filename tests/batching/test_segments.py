"""Packing of conversations: one row per segment, masks of sampled tokens, and sums over all segments of a sample."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_mega.algorithm.inputs import LossInputs
from grpo_mega.batching.layout import from_samples, response_places, sampled_mask, sequences
from grpo_mega.batching.pack import PackingSpec, pack_mini_batches
from grpo_mega.config import AlgorithmConfig
from grpo_mega.errors import PlanError
from grpo_mega.types import Context, Prompt, Sample, Segment


def conversation(prompt_id=0, first_token=1, prompt_len=2, runs=((3, 2, 2),), contexts=(), advantage=1.0):
    """Return a sample with tokens that count up. `runs` has the lengths of sampled and inserted runs per segment, and
    `contexts` the length of each later segment's context.
    """
    tokens = iter(range(first_token, 10_000))
    prompt = Prompt(prompt_id, "", tuple(next(tokens) for _ in range(prompt_len)), "")
    response, logprobs, turns, histories = [], [], [], []
    for number, lengths in enumerate(runs):
        if number:
            histories.append(Context(len(response), tuple(next(tokens) for _ in range(contexts[number - 1]))))
        for place, length in enumerate(lengths):
            if place % 2 == 0:
                turns.append((len(response), len(response) + length))
            response += [next(tokens) for _ in range(length)]
            logprobs += [-0.01 * response[-1] * (place % 2 == 0)] * length
    sample = Sample(prompt, 0, response, logprobs, "stop", sampled=turns, contexts=histories, reward=0.0)
    sample.advantages = advantage * sampled_mask(sample)
    return sample


def pack_one(samples, weights=None, **options):
    spec = PackingSpec(**({"dp_size": 1, "dp_rank": 0, "token_budget": 1000} | options))
    return pack_mini_batches([samples], [weights or [0.25] * len(samples)], spec)[0]


def test_a_conversation_of_two_segments_equals_a_worked_example():
    prompt = Prompt(0, "", (1, 2), "")
    sample = Sample(prompt, 0, [3, 4, 5, 6, 7, 8], [-0.3, 0, -0.5, 0, -0.7, -0.8], "stop", reward=1.0)
    sample.sampled, sample.contexts = [(0, 1), (2, 3), (4, 6)], [Context(3, (9, 10, 11))]
    sample.advantages = torch.tensor([1.5, 0, -1, 0, 2, 2])
    assert sample.segments() == [Segment((1, 2), 0, 3), Segment((9, 10, 11), 3, 6)]
    assert (sample.num_sampled, sample.total_len, sample.num_turns, sample.response_len) == (4, 11, 3, 6)
    (batch,) = pack_one([sample], [0.5], length_multiple=4)
    assert batch.tokens.tolist() == [1, 2, 3, 4, 5, 9, 10, 11, 6, 7, 8, 0]
    assert batch.targets.tolist() == [2, 3, 4, 5, 0, 10, 11, 6, 7, 8, 0, 0]
    assert batch.position_ids.tolist() == [0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 5, 0]
    assert batch.cu_seqlens.tolist() == [0, 5, 11, 12]
    assert batch.loss_mask.tolist() == [0, 1, 0, 1, 0, 0, 0, 0, 1, 1, 0, 0]
    assert batch.loss_weights.tolist() == [0, 0.5, 0, 0.5, 0, 0, 0, 0, 0.5, 0.5, 0, 0]
    assert batch.advantages.tolist() == [0, 1.5, 0, -1, 0, 0, 0, 0, 2, 2, 0, 0]
    torch.testing.assert_close(batch.rollout_logprobs, torch.tensor([0, -0.3, 0, -0.5, 0, 0, 0, 0, -0.7, -0.8, 0, 0]))
    assert (batch.sample_indices, batch.segment_numbers, batch.lengths) == ([0, 0], [0, 1], [5, 6])
    assert sequences(batch).tolist() == [0] * 11 + [2]


def test_a_first_context_replaces_the_prompt():
    sample = conversation(runs=[(2,)])
    sample.contexts = [Context(0, (50, 51, 52))]
    (batch,) = pack_one([conversation(1, 100), sample], length_multiple=16)
    assert batch.tokens.tolist() == [*range(100, 109), 50, 51, 52, 3, 4, 0, 0]
    assert sequences(batch).tolist() == [0] * 9 + [1] * 5 + [2] * 2


def test_shared_prompts_leave_rewritten_contexts_in_their_rows():
    plain = [conversation(0, 1, prompt_len=4, runs=[(2,)]) for _ in range(2)]
    rewritten = conversation(0, 1, prompt_len=4, runs=[(2, 1), (3,)], contexts=[5])
    (batch,) = pack_one([plain[0], rewritten, plain[1]], share_prompts=True)
    assert batch.tokens.tolist() == [4, 5, 6, 4, 5, 6, *range(1, 16), 1, 2, 3]
    assert batch.position_ids.tolist() == [3, 4, 5, 3, 4, 5, *range(7), *range(8), 0, 1, 2]
    assert batch.shared_prompt_segments == [4, 4, -1, -1]
    assert (batch.sample_indices, batch.segment_numbers) == ([0, 2, 1, 1], [0, 0, 0, 1])
    values = [torch.arange(1.0, s.response_len + 1) + 100 * i for i, s in enumerate([plain[0], rewritten, plain[1]])]
    row = from_samples(values, batch, [plain[0], rewritten, plain[1]])
    of_contexts = [0, 0, 0, 101, 102, 103, 0, 0, 0, 0, 0, 104, 105, 106, 0]
    assert row.tolist() == [1, 2, 0, 201, 202, 0, *of_contexts, 0, 0, 0]


def test_segments_are_split_unless_the_loss_needs_whole_samples():
    sample = conversation(runs=[(3,), (4,)], contexts=[6])  # rows of 5 and 10 tokens
    assert len(pack_one([sample], token_budget=15)) == 1
    with pytest.raises(PlanError, match="15 tokens"):
        pack_one([sample], token_budget=14)
    batches = pack_one([sample], token_budget=14, keeps_samples_whole=False)
    assert [b.tokens.tolist() for b in batches] == [[6, 7, 8, 9, 10, 11, 12, 13, 14, 15], [1, 2, 3, 4, 5] + [0] * 5]
    assert [(b.sample_indices, b.segment_numbers) for b in batches] == [([0], [1]), ([0], [0])]
    rows = [from_samples([torch.arange(1.0, 8)], batch, [sample]) for batch in batches]
    assert [row[row > 0].tolist() for row in rows] == [[4, 5, 6, 7], [1, 2, 3]]


@pytest.mark.parametrize(
    ("keys", "has_sums"),
    [
        ({}, False),
        *[({"recipe": name}, False) for name in ("dapo", "cispo", "reinforce_plus_plus", "clip_cov", "decoupled_ppo")],
        *[({"recipe": name}, True) for name in ("gspo", "gspo_token", "gmpo")],
        *[({"correction": {"mask": kind}}, kind != "token") for kind in ("token", "sequence", "geometric")],
        ({"correction": {"importance": "sequence"}}, True),
        ({"correction": {"reject": "seq_max_k3", "reject_above": 1.0}}, True),
        ({"correction": {"reject": "token_k3", "reject_above": 1.0}}, False),
        ({"correction": {"veto_below": 0.1}}, True),
        ({"correction": {"off_policy_threshold": 0.1}}, True),
    ],
)
def test_losses_with_sums_over_a_response_need_whole_samples(keys, has_sums):
    assert AlgorithmConfig(**keys).has_sequence_sums == has_sums


def test_sums_over_a_response_cover_all_its_segments():
    samples = [conversation(0, 1, runs=[(2, 2), (3,)], contexts=[4]), conversation(1, 60, runs=[(1, 3, 1)])]
    (batch,) = pack_one(samples)
    zeros = torch.zeros(batch.num_tokens)
    inputs = LossInputs.of_batch(batch, logprobs=zeros, segments=sequences(batch), num_segments=batch.num_segments)
    sums = inputs.sequence_sum(torch.ones(batch.num_tokens))
    means = inputs.sequence_mean(batch.targets.float())
    for start, end, count, mean in ((0, 13, 5, (3 + 4 + 11 + 12 + 13) / 5), (13, 20, 2, (62 + 66) / 2)):
        assert sums[start:end].eq(count).all()
        torch.testing.assert_close(means[start:end], torch.full((end - start,), mean))


SEGMENTS = st.lists(st.lists(st.integers(1, 4), min_size=1, max_size=4), min_size=1, max_size=3)


@settings(max_examples=60, deadline=None)
@given(
    shapes=st.lists(SEGMENTS, min_size=1, max_size=8),
    dp_size=st.integers(1, 3),
    cp_size=st.sampled_from([1, 2, 3]),
    length_multiple=st.sampled_from([1, 8]),
    share_prompts=st.booleans(),
    keeps_samples_whole=st.booleans(),
)
def test_all_ranks_together_train_each_sampled_token_once(shapes, dp_size, cp_size, share_prompts, **options):
    share_prompts = share_prompts and cp_size == 1
    samples, token = [], 1
    for shape in shapes:
        sample = conversation(0 if share_prompts else token, token, 3, shape, [5] * (len(shape) - 1))
        if share_prompts and samples:
            sample.prompt = samples[0].prompt
        samples.append(sample)
        token += 3 + sample.response_len + 5 * (len(shape) - 1)
    trained, values_of = [], [torch.full((s.response_len,), torch.nan) for s in samples]
    for dp_rank, cp_rank in ((dp, cp) for dp in range(dp_size) for cp in range(cp_size)):
        ranks = {"dp_size": dp_size, "dp_rank": dp_rank, "cp_size": cp_size, "cp_rank": cp_rank}
        for batch in pack_one(samples, token_budget=100, share_prompts=share_prompts, **ranks, **options):
            mask = batch.loss_mask > 0
            trained += batch.targets[mask].tolist()
            assert batch.loss_weights.eq(0.25 * mask).all() and batch.advantages.eq(mask).all()
            assert batch.rollout_logprobs[~mask].eq(0).all() and batch.rollout_logprobs[mask].lt(0).all()
            for index, places in zip(batch.sample_indices, response_places(batch, samples), strict=True):
                for in_row, in_response in places:
                    assert values_of[index][in_response].isnan().all()  # no other rank or row has these tokens
                    values_of[index][in_response] = batch.targets[in_row].float()
    assert [row.tolist() for row in values_of] == [sample.response_ids for sample in samples]
    wanted = [t for s in samples for start, end in s.sampled for t in s.response_ids[start:end]]
    assert sorted(trained) == sorted(wanted)
