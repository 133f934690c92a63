"""The sampler: streams that depend only on four numbers, and draws that follow the filtered distribution."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from grpo_mega.rollout.embedded.decoder import draw, uniforms

NO_FILTER = {"temperature": 1.0, "top_p": 1.0, "top_k": 0}


def random_logits(rows: int, vocab: int, seed: int) -> Tensor:
    return 2 * torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed))


def allowed(logits: Tensor, temperature: float, top_p: float, top_k: int) -> dict[int, float]:
    """Return the oracle: the tokens of one row that may be sampled with their probabilities, most likely first."""
    probabilities = torch.softmax(logits.double() / temperature, dim=0).tolist()
    ranked = sorted(range(len(probabilities)), key=lambda v: -probabilities[v])
    reached, kept = 0.0, []
    for v in ranked[: top_k or None]:
        if kept and reached >= top_p:
            break
        kept.append(v)
        reached += probabilities[v]
    return {v: probabilities[v] / reached for v in kept}


def test_equal_numbers_give_equal_uniforms_and_streams_extend_each_other() -> None:
    short, long = uniforms(1, 2, 3, 4, length=5), uniforms(1, 2, 3, 4, length=50)
    assert short.dtype == np.float64
    assert (short == long[:5]).all()
    assert ((long >= 0) & (long < 1)).all()


def test_each_number_changes_the_uniforms_and_no_global_generator_moves() -> None:
    np.random.seed(0)
    torch.manual_seed(0)
    before = np.random.get_state()[1].copy(), torch.get_rng_state()
    streams = {tuple(uniforms(*numbers, length=3)) for numbers in itertools.product(range(3), repeat=4)}
    assert len(streams) == 81
    assert (np.random.get_state()[1] == before[0]).all()
    assert torch.equal(torch.get_rng_state(), before[1])


def test_uniforms_of_neighbouring_samples_are_independent() -> None:
    first = np.array([uniforms(0, 0, prompt, index, length=1)[0] for prompt in range(60) for index in range(50)])
    assert abs(first.mean() - 0.5) < 0.02
    assert abs(first.std() - 12**-0.5) < 0.02
    assert abs(np.corrcoef(first[:-1], first[1:])[0, 1]) < 0.05


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_without_randomness_the_most_likely_token_is_taken(temperature: float) -> None:
    logits = random_logits(50, 30, seed=1)
    uniform = torch.rand(50) if temperature == 0 else None
    tokens, logprobs = draw(logits, uniform, temperature=temperature, top_p=1.0, top_k=0)
    assert torch.equal(tokens, logits.argmax(dim=1))
    expected = torch.log_softmax(logits.double() / (temperature or 1.0), dim=1).gather(1, tokens[:, None])[:, 0]
    torch.testing.assert_close(logprobs.double(), expected, rtol=0, atol=1e-6)


# (temperature, top_p, top_k)
FILTERS = [(1, 1, 0), (0.5, 1, 0), (1.7, 1, 0), (1, 1, 4), (1, 0.6, 0), (0.8, 0.7, 5), (1.3, 0.95, 3), (1, 0.01, 0)]


@pytest.mark.parametrize(("temperature", "top_p", "top_k"), FILTERS)
def test_evenly_spread_uniforms_draw_tokens_as_often_as_the_naive_twin(
    temperature: float, top_p: float, top_k: int
) -> None:
    """Draw with 20,000 uniforms on a grid: frequencies are exact up to one or two grid steps, without chance."""
    num = 20_000
    logits = random_logits(1, 13, seed=2)
    grid = (torch.arange(num, dtype=torch.float64) + 0.5) / num
    tokens, logprobs = draw(logits.expand(num, -1), grid, temperature=temperature, top_p=top_p, top_k=top_k)
    expected = allowed(logits[0], temperature, top_p, top_k)
    frequencies = torch.bincount(tokens, minlength=13) / num
    for v in range(13):
        assert frequencies[v].item() == pytest.approx(expected.get(v, 0.0), abs=2 / num)
    unfiltered = torch.log_softmax(logits[0].double() / temperature, dim=0)
    torch.testing.assert_close(logprobs.double(), unfiltered[tokens], rtol=0, atol=1e-6)


def test_streams_of_many_samples_draw_by_the_distribution() -> None:
    num, logits = 4000, random_logits(1, 6, seed=3)
    uniform = torch.tensor(np.array([uniforms(5, 1, n // 8, n % 8, length=2)[1] for n in range(num)]))
    tokens, _ = draw(logits.expand(num, -1), uniform, **NO_FILTER)
    expected = torch.softmax(logits[0], dim=0)
    deviation = (expected * (1 - expected) / num).sqrt()
    assert ((torch.bincount(tokens, minlength=6) / num - expected).abs() < 4 * deviation).all()


@settings(max_examples=100, deadline=None)
@given(
    seed=st.integers(0, 2**20),
    uniform=st.floats(0, 1, exclude_max=True) | st.sampled_from([0.0, 1 - 2**-53, 2**-1074]),
    scale=st.sampled_from([0.1, 1.0, 30.0, 500.0]),
    temperature=st.floats(0.05, 3),
    top_p=st.floats(0.01, 1),
    top_k=st.integers(0, 12),
)
def test_a_token_without_probability_is_never_drawn(
    seed: int, uniform: float, scale: float, temperature: float, top_p: float, top_k: int
) -> None:
    logits = scale * random_logits(1, 9, seed)
    logits[0, [0, 4, 8]] = -torch.inf  # the first, the last and a middle token
    chance = torch.tensor([uniform], dtype=torch.float64)
    token, logprob = draw(logits, chance, temperature=temperature, top_p=top_p, top_k=top_k)
    assert torch.softmax(logits[0] / temperature, dim=0)[token] > 0
    assert torch.isfinite(logprob).all()
    ranked = logits[0].argsort(descending=True).tolist()
    assert ranked.index(token.item()) < (top_k or 9)


def test_top_k_of_one_and_a_tiny_top_p_are_greedy() -> None:
    logits = random_logits(20, 11, seed=4)
    uniform = torch.linspace(0, 0.999, 20, dtype=torch.float64)
    for top_p, top_k in ((1.0, 1), (1e-6, 0)):
        tokens, _ = draw(logits, uniform, temperature=1.0, top_p=top_p, top_k=top_k)
        assert torch.equal(tokens, logits.argmax(dim=1))


def test_bfloat16_logits_give_float32_logprobs() -> None:
    logits = random_logits(4, 10, seed=5).bfloat16()
    tokens, logprobs = draw(logits, torch.full((4,), 0.3, dtype=torch.float64), **NO_FILTER)
    expected = torch.log_softmax(logits.double(), dim=1).gather(1, tokens[:, None])[:, 0]
    assert (tokens.dtype, logprobs.dtype) == (torch.int64, torch.float32)
    torch.testing.assert_close(logprobs.double(), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("vocab", [255, 256, 257, 1000])
@pytest.mark.parametrize("filters", [NO_FILTER, {"temperature": 0.7, "top_p": 0.9, "top_k": 40}])
def test_a_draw_over_several_blocks_equals_one_cumulative_sum(vocab: int, filters: dict[str, float]) -> None:
    logits = random_logits(64, vocab, seed=vocab)
    logits[:, vocab // 3 : vocab // 2] = -torch.inf  # whole blocks may have no probability
    uniform = torch.rand(64, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    uniform[:2] = torch.tensor([0.0, 1 - 2**-53], dtype=torch.float64)
    tokens, logprobs = draw(logits, uniform, **filters)  # type: ignore[arg-type]
    for row in range(64):
        chances = allowed(logits[row], **filters)  # type: ignore[arg-type]
        in_order = sorted(chances)
        cumulative = np.cumsum([chances[v] for v in in_order])
        place = int(np.searchsorted(cumulative, uniform[row].item() * cumulative[-1], side="right"))
        near = [in_order[min(max(p, 0), len(in_order) - 1)] for p in (place - 1, place, place + 1)]
        token = int(tokens[row])
        assert token == near[1] or (token in near and min(abs(cumulative - uniform[row].item())) < 1e-6)
    expected = torch.log_softmax(logits.double() / filters["temperature"], dim=-1).gather(1, tokens[:, None]).squeeze(1)
    torch.testing.assert_close(logprobs.double(), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("vocab", [7, 300])
def test_nan_logits_give_a_valid_token_and_a_logprob_of_nan(vocab: int) -> None:
    logits = random_logits(3, vocab, seed=0)
    logits[1] = torch.nan
    for filters in (NO_FILTER, {"temperature": 1.0, "top_p": 0.5, "top_k": 3}, {**NO_FILTER, "temperature": 0.0}):
        tokens, logprobs = draw(logits, torch.full((3,), 0.5, dtype=torch.float64), **filters)  # type: ignore[arg-type]
        assert ((tokens >= 0) & (tokens < vocab)).all()
        assert logprobs.isnan().tolist() == [False, True, False]
