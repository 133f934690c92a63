"""vocab_parallel_logprobs on one rank against its naive twin; tensor parallelism is in test_logprobs_tp.py."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from grpo_mega.ops.logprobs import vocab_parallel_logprobs
from grpo_mega.ops.reference import logprobs_and_entropy


def make_case(seed, num_tokens, vocab_size, padding, dtype=torch.float64, scale=3.0, forbidden=0.0):
    """Random logits and targets; padding columns hold NaN, and `forbidden` is the share of -inf (never all of a row)."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(num_tokens, vocab_size + padding, generator=generator, dtype=torch.float64) * scale
    targets = torch.randint(0, vocab_size, (num_tokens,), generator=generator)
    is_forbidden = torch.rand(logits.shape, generator=generator) < forbidden
    is_forbidden[torch.arange(num_tokens), targets] = False
    logits[is_forbidden] = -torch.inf
    logits[:, vocab_size:] = torch.nan
    return logits.to(dtype), targets


def values_and_gradient(function, logits, targets, **options):
    """(logprobs, entropy, gradient) for a random mix of both outputs."""
    logits = logits.clone().requires_grad_()
    logprobs, entropy = function(logits, targets, **options)
    weights = torch.linspace(-1.0, 2.0, 2 * len(targets)).to(logprobs.dtype).reshape(2, -1)
    (weights[0] @ logprobs + weights[1] @ entropy).backward()
    return logprobs.detach(), entropy.detach(), logits.grad


def assert_like_twin(logits, targets, tolerance, *, vocab_size, temperature=1.0, tile=1024):
    ours = values_and_gradient(
        vocab_parallel_logprobs,
        logits,
        targets,
        vocab_size=vocab_size,
        temperature=temperature,
        with_entropy=True,
        tile=tile,
    )
    twin = values_and_gradient(logprobs_and_entropy, logits, targets, vocab_size=vocab_size, temperature=temperature)
    for actual, expected in zip(ours, twin, strict=True):
        torch.testing.assert_close(actual, expected.to(actual.dtype), rtol=tolerance, atol=tolerance)


CASES = {
    "seed": st.integers(0, 2**31),
    "num_tokens": st.integers(1, 9),
    "vocab_size": st.integers(1, 40),
    "padding": st.integers(0, 5),
    "forbidden": st.sampled_from([0.0, 0.5, 0.95]),
}


@settings(max_examples=60, deadline=None)
@given(**CASES, temperature=st.floats(0.3, 3.0), tile=st.integers(1, 10))
def test_values_and_gradients_equal_the_naive_twin_in_float64(
    seed, num_tokens, vocab_size, padding, forbidden, temperature, tile
):
    logits, targets = make_case(seed, num_tokens, vocab_size, padding, forbidden=forbidden)
    assert_like_twin(logits, targets, 1e-12, vocab_size=vocab_size, temperature=temperature, tile=tile)


@settings(max_examples=30, deadline=None)
@given(**CASES, temperature=st.floats(0.3, 3.0), tile=st.integers(1, 10))
def test_values_and_gradients_equal_the_naive_twin_in_float32(
    seed, num_tokens, vocab_size, padding, forbidden, temperature, tile
):
    logits, targets = make_case(seed, num_tokens, vocab_size, padding, torch.float32, forbidden=forbidden)
    assert_like_twin(logits, targets, 1e-5, vocab_size=vocab_size, temperature=temperature, tile=tile)


def test_bfloat16_logits_give_float32_values_and_a_bfloat16_gradient():
    logits, targets = make_case(0, 20, 50, 3, torch.bfloat16)
    options = {"vocab_size": 50, "temperature": 0.7}
    ours = values_and_gradient(vocab_parallel_logprobs, logits, targets, with_entropy=True, tile=7, **options)
    twin = values_and_gradient(logprobs_and_entropy, logits.double(), targets, **options)
    assert [x.dtype for x in ours] == [torch.float32, torch.float32, torch.bfloat16]
    torch.testing.assert_close(ours[0].double(), twin[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(ours[1].double(), twin[1], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(ours[2].double(), twin[2], rtol=2**-8, atol=1e-6)


def test_the_gradient_of_padding_columns_is_zero_even_where_they_hold_nan():
    logits, targets = make_case(1, 6, 10, 4)
    gradient = values_and_gradient(vocab_parallel_logprobs, logits, targets, vocab_size=10, with_entropy=True)[2]
    assert gradient[:, 10:].eq(0).all()
    assert gradient[:, :10].isfinite().all()


def test_forbidden_tokens_of_minus_infinity_have_no_gradient_and_a_forbidden_target_minus_infinity():
    logits = torch.tensor([[0.0, -torch.inf, 1.0], [2.0, -torch.inf, -torch.inf]], requires_grad=True)
    logprobs, entropy = vocab_parallel_logprobs(logits, torch.tensor([1, 0]), vocab_size=3, with_entropy=True)
    assert logprobs.tolist() == [-torch.inf, 0.0]
    assert entropy[1] == 0 and entropy.isfinite().all()
    entropy.sum().backward()
    assert logits.grad.isfinite().all() and logits.grad[0, 1] == 0


def test_logits_of_any_size_do_not_overflow():
    logits = torch.tensor([[1e6, 0.0, -1e6], [-1e6, -1e6, -1e6], [88.0, 90.0, 95.0]], requires_grad=True)
    logprobs, entropy = vocab_parallel_logprobs(logits, torch.tensor([0, 1, 2]), vocab_size=3, with_entropy=True)
    (logprobs.sum() + entropy.sum()).backward()
    assert logprobs[0] == 0 and logits.grad.isfinite().all()
    torch.testing.assert_close(entropy[1], torch.tensor(3.0).log())


@pytest.mark.parametrize("with_entropy", [False, True])
def test_gradients_equal_numeric_gradients(with_entropy):
    logits, targets = make_case(2, 4, 7, 0)

    def function(x):
        outputs = vocab_parallel_logprobs(x, targets, vocab_size=7, temperature=0.6, with_entropy=with_entropy, tile=3)
        return outputs if with_entropy else outputs[0]

    assert torch.autograd.gradcheck(function, logits.requires_grad_())


def test_the_entropy_is_left_out_unless_asked_for():
    logits, targets = make_case(3, 4, 7, 0)
    assert vocab_parallel_logprobs(logits, targets, vocab_size=7)[1] is None


class LargestTensor(TorchDispatchMode):
    """Notes the number of elements of the largest float32 tensor that any operation gave."""

    def __init__(self):
        super().__init__()
        self.num_elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and leaf.dtype == torch.float32:
                self.num_elements = max(self.num_elements, leaf.numel())
        return result


def test_no_float32_tensor_is_larger_than_a_tile():
    logits, targets = make_case(4, 64, 100, 0, torch.bfloat16)
    logits.requires_grad_()
    with LargestTensor() as largest:
        logprobs, entropy = vocab_parallel_logprobs(logits, targets, vocab_size=100, temperature=0.5, with_entropy=True, tile=8)
        (logprobs.sum() + entropy.sum()).backward()
    assert largest.num_elements == 8 * 100
