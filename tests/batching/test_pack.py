"""Packing: the layout of a micro-batch, fillers, equal shapes on all ranks, and unpacking to samples."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_mega.batching.layout import from_samples, response_places
from grpo_mega.batching.pack import PackingSpec, pack_mini_batches, split
from grpo_mega.errors import PlanError
from grpo_mega.types import Group, Prompt, Sample


def make_sample(prompt_ids, response_ids, prompt_id=0, advantage=0.0):
    prompt = Prompt(id=prompt_id, text="", token_ids=tuple(prompt_ids), answer="")
    logprobs = [-0.01 * token for token in response_ids]
    sample = Sample(prompt, 0, list(response_ids), logprobs, "stop", reward=0.0)
    sample.advantages = torch.full((len(response_ids),), advantage)
    return sample


def make_samples(shapes):
    """Return samples of (prompt length, response length). All tokens are different and nonzero."""
    samples, token = [], 1
    for i, (prompt_len, response_len) in enumerate(shapes):
        ids = range(token, token + prompt_len + response_len)
        samples.append(make_sample(ids[:prompt_len], ids[prompt_len:], i, advantage=float(i + 1)))
        token += prompt_len + response_len
    return samples


def pack_one(samples, weights=None, **options):
    weights = weights or [0.25] * len(samples)
    spec = PackingSpec(**({"dp_size": 1, "dp_rank": 0, "token_budget": 1000} | options))
    return pack_mini_batches([samples], [weights], spec)[0]


def test_a_micro_batch_of_two_samples_and_padding_equals_a_worked_example():
    first, second = make_sample([1, 2, 3], [4, 5], advantage=1.5), make_sample([6], [7, 8, 9], advantage=-2.0)
    (batch,) = pack_one([first, second], [0.5, 0.125], length_multiple=4)
    assert batch.tokens.tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 9, 0, 0, 0]
    assert batch.targets.tolist() == [2, 3, 4, 5, 0, 7, 8, 9, 0, 0, 0, 0]
    assert batch.position_ids.tolist() == [0, 1, 2, 3, 4, 0, 1, 2, 3, 0, 1, 2]
    assert batch.cu_seqlens.tolist() == [0, 5, 9, 12]
    assert batch.loss_mask.tolist() == [0, 0, 1, 1, 0, 1, 1, 1, 0, 0, 0, 0]
    assert batch.loss_weights.tolist() == [0, 0, 0.5, 0.5, 0, 0.125, 0.125, 0.125, 0, 0, 0, 0]
    assert batch.advantages.tolist() == [0, 0, 1.5, 1.5, 0, -2, -2, -2, 0, 0, 0, 0]
    expected = [0, 0, -0.04, -0.05, 0, -0.07, -0.08, -0.09, 0, 0, 0, 0]
    torch.testing.assert_close(batch.rollout_logprobs, torch.tensor(expected))
    assert batch.sample_indices == [0, 1]
    assert batch.old_logprobs is None and batch.ref_logprobs is None
    assert {x.dtype for x in (batch.tokens, batch.targets, batch.position_ids)} == {torch.int64}
    assert batch.cu_seqlens.dtype == torch.int32
    assert {x.dtype for x in (batch.loss_mask, batch.loss_weights, batch.advantages)} == {torch.float32}


def test_two_context_parallel_ranks_have_the_chunks_worked_out_by_hand():
    """Five tokens are padded to eight in chunks of two, one token to four in chunks of one. Eight padding tokens
    follow.
    """
    first, second = make_sample([1, 2, 3], [4, 5], advantage=1.5), make_sample([6], [], advantage=-2.0)
    outer, inner = (pack_one([first, second], cp_size=2, cp_rank=rank, length_multiple=5)[0] for rank in (0, 1))
    assert outer.tokens.tolist() == [1, 2, 0, 0, 6, 0, 0, 0, 0, 0]
    assert inner.tokens.tolist() == [3, 4, 5, 0, 0, 0, 0, 0, 0, 0]
    assert outer.targets.tolist() == [2, 3, 0, 0, 0, 0, 0, 0, 0, 0]
    assert inner.targets.tolist() == [4, 5, 0, 0, 0, 0, 0, 0, 0, 0]
    assert outer.position_ids.tolist() == [0, 1, 6, 7, 0, 3, 0, 1, 6, 7]
    assert inner.position_ids.tolist() == [2, 3, 4, 5, 1, 2, 2, 3, 4, 5]
    assert (
        outer.cu_seqlens.tolist() == inner.cu_seqlens.tolist() == [0, 4, 6, 10]
        and outer.cu_seqlens.dtype == torch.int32
    )
    assert inner.loss_mask.tolist() == [1, 1] + [0] * 8 and not outer.loss_mask.any()
    assert inner.advantages.tolist() == [1.5, 1.5] + [0] * 8
    assert outer.sample_indices == inner.sample_indices == [0, 1]


def test_without_padding_the_last_segment_is_a_sample():
    (batch,) = pack_one([make_sample([1, 2], [3, 4])])
    assert batch.cu_seqlens.tolist() == [0, 4]


def test_a_rank_without_samples_gets_fillers_of_the_same_length():
    samples = make_samples([(2, 5)])
    batches = [pack_one(samples, dp_size=3, dp_rank=rank, length_multiple=4) for rank in range(3)]
    assert sorted(len(b[0].sample_indices) for b in batches) == [0, 0, 1]
    (filler,) = next(b for b in batches if not b[0].sample_indices)
    assert filler.num_tokens == 8 and filler.cu_seqlens.tolist() == [0, 8]
    assert filler.loss_mask.sum() == 0 and filler.loss_weights.sum() == 0 and filler.tokens.sum() == 0


def test_a_sample_of_weight_zero_does_not_train():
    (batch,) = pack_one(make_samples([(2, 3), (1, 2)]), [0.0, 0.5])
    assert batch.loss_mask.tolist() == [0, 0, 0, 0, 0, 1, 1, 0]


def test_sample_indices_count_through_all_mini_batches():
    samples = make_samples([(1, 2)] * 5)
    mini_batches = pack_mini_batches([samples[:2], samples[2:]], [[1.0] * 2, [1.0] * 3], PackingSpec(1, 0, 100))
    assert [[b.sample_indices for b in micro_batches] for micro_batches in mini_batches] == [[[0, 1]], [[2, 3, 4]]]


def test_prompts_and_responses_are_kept_apart_for_empty_responses_too():
    (batch,) = pack_one(make_samples([(3, 0), (1, 1)]), length_multiple=2)
    assert batch.loss_mask.tolist() == [0, 0, 0, 1, 0, 0]


def test_a_sample_without_a_value_per_token_is_refused():
    sample = make_sample([1], [2, 3])
    sample.rollout_logprobs = [-0.1]
    with pytest.raises(AssertionError, match=r"sample 0 .*rollout_logprobs"):
        pack_one([sample])


def test_advantages_that_are_not_assigned_yet_are_nan():
    sample = make_sample([1], [2, 3])
    sample.advantages = None
    (batch,) = pack_one([sample])
    assert batch.advantages.isnan().tolist() == [True, True, False]
    assert from_samples([torch.tensor([0.5, -0.5])], batch, [sample]).tolist() == [0.5, -0.5, 0]


def test_mini_batches_are_contiguous_runs_of_whole_groups():
    samples = make_samples([(1, 1)] * 10)
    groups = [Group(samples[i].prompt, samples[i : i + 2]) for i in range(0, 10, 2)]
    runs = split(groups, 2)
    assert [s for run in runs for s in run] == samples
    assert [len(run) for run in runs] == [4, 6]
    assert [len(run) for run in split(groups, 5)] == [2] * 5


def test_more_mini_batches_than_groups_are_refused():
    with pytest.raises(PlanError, match=r"batch.mini_batches=3 .* 1"):
        split([Group(make_sample([1], [2]).prompt, [])], 3)


SHAPES = st.lists(st.tuples(st.integers(1, 6), st.integers(0, 9)), min_size=1, max_size=14)
LAYOUT = {
    "shapes": SHAPES,
    "dp_size": st.integers(1, 4),
    "token_budget": st.integers(15, 60),
    "length_multiple": st.sampled_from([1, 2, 8]),
    "micro_batch_multiple": st.integers(1, 3),
    "cp_size": st.sampled_from([1, 2, 3]),
}


@settings(max_examples=80, deadline=None)
@given(**LAYOUT)
def test_all_ranks_together_have_every_token_once_in_equal_shapes(shapes, dp_size, token_budget, **options):
    samples = make_samples(shapes)
    options["token_budget"], cp_size = token_budget, options["cp_size"]
    places = [(dp_rank, cp_rank) for dp_rank in range(dp_size) for cp_rank in range(cp_size)]
    ranks = [pack_one(samples, dp_size=dp_size, dp_rank=dp, cp_rank=cp, **options) for dp, cp in places]
    assert len({len(batches) for batches in ranks}) == 1 and len(ranks[0]) % options["micro_batch_multiple"] == 0
    batches = [batch for rank in ranks for batch in rank]
    (num_tokens,) = {batch.num_tokens for batch in batches}
    multiple = options["length_multiple"] * (2 if cp_size > 1 and options["length_multiple"] == 1 else 1)
    assert num_tokens % multiple == 0 and num_tokens < token_budget + multiple
    assert sorted(i for batch in batches for i in batch.sample_indices) == sorted(list(range(len(samples))) * cp_size)
    assert sum(int(batch.loss_mask.sum()) for batch in batches) == sum(s.response_len for s in samples)
    held = sorted(token for batch in batches for token in batch.tokens.tolist() if token)
    assert held == sorted(token for s in samples for token in (*s.prompt.token_ids, *s.response_ids))
    for batch in batches:
        assert batch.cu_seqlens[0] == 0 and batch.cu_seqlens[-1] == num_tokens
        trained = batch.loss_mask > 0
        assert batch.targets[trained].equal(batch.tokens[trained] + 1)  # tokens count up in make_samples
        if cp_size == 1:
            assert not trained[batch.cu_seqlens[1:].long() - 1].any()


@settings(max_examples=80, deadline=None)
@given(**LAYOUT)
def test_values_go_from_packed_rows_to_samples_and_back_unchanged(shapes, dp_size, cp_size, **options):
    samples = make_samples(shapes)
    targets, values_of = ([torch.full((s.response_len,), torch.nan) for s in samples] for _ in range(2))
    rows = []
    for dp_rank, cp_rank in ((dp, cp) for dp in range(dp_size) for cp in range(cp_size)):
        for batch in pack_one(samples, dp_size=dp_size, dp_rank=dp_rank, cp_size=cp_size, cp_rank=cp_rank, **options):
            values = torch.randn(batch.num_tokens)
            rows.append((batch, values))
            for index, places in zip(batch.sample_indices, response_places(batch, samples), strict=True):
                for in_row, in_response in places:
                    assert values_of[index][in_response].isnan().all()  # other ranks do not have these values
                    targets[index][in_response] = batch.targets[in_row].float()
                    values_of[index][in_response] = values[in_row]
    assert [row.tolist() for row in targets] == [sample.response_ids for sample in samples]
    for batch, values in rows:
        packed = from_samples(values_of, batch, samples)
        assert packed.equal(values * batch.loss_mask)


def test_a_row_of_samples_passes_gradients_back_to_them():
    samples = make_samples([(2, 3), (1, 2)])
    (batch,) = pack_one(samples, length_multiple=4)
    rows = [torch.zeros(s.response_len, requires_grad=True) for s in samples]
    (from_samples(rows, batch, samples) * torch.arange(batch.num_tokens)).sum().backward()
    assert [row.grad.tolist() for row in rows] == [[1, 2, 3], [5, 6]]
