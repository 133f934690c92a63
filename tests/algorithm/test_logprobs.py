"""vocab_parallel_logprobs on one rank, compared with its oracle. test_logprobs_tp.py covers tensor parallelism."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from grpo_mega.algorithm.logprobs import vocab_parallel_logprobs
from tests.helpers.logprob_cases import Case, assert_equal, of_oracle, of_ours


@st.composite
def cases(draw):
    vocab_size = draw(st.integers(1, 40))
    return Case(
        num_tokens=draw(st.integers(0, 9)),
        vocab_size=vocab_size,
        width=vocab_size + draw(st.integers(0, 5)),
        hidden=draw(st.integers(1, 12)),
        temperature=draw(st.floats(0.3, 3.0)),
        tile=(draw(st.integers(1, 10)), draw(st.integers(1, 45))),
        forbidden=draw(st.sampled_from([0.0, 0.0, 0.5, 0.95])),
        needed=draw(st.sampled_from([1.0, 0.5, 0.0])),
        with_buffer=draw(st.booleans()),
        seed=draw(st.integers(0, 2**31)),
    )


@settings(max_examples=100, deadline=None)
@given(cases())
def test_values_and_gradients_equal_the_oracle_in_float64(case):
    assert_equal(case, of_ours(case), of_oracle(case))


@settings(max_examples=50, deadline=None)
@given(cases())
def test_values_and_gradients_equal_the_oracle_in_float32(case):
    case = replace(case, dtype=torch.float32)
    assert_equal(case, of_ours(case), of_oracle(case))


@settings(max_examples=30, deadline=None)
@given(cases())
def test_bfloat16_has_values_of_float32_and_gradients_rounded_once(case):
    case = replace(case, dtype=torch.bfloat16, forbidden=0.0)
    assert_equal(case, of_ours(case), of_oracle(case))


def test_tiles_of_the_default_size_equal_the_oracle():
    case = Case(num_tokens=1030, vocab_size=4100, width=4101, hidden=8, dtype=torch.float32)
    assert_equal(case, of_ours(case), of_oracle(case))


def inputs(num_tokens=4, vocab_size=7, hidden=3, dtype=torch.float64):
    hidden_TH, weight_VH, targets_T, _ = Case(num_tokens, vocab_size, vocab_size, hidden, dtype).inputs()
    return hidden_TH.requires_grad_(), weight_VH.requires_grad_(), targets_T


@pytest.mark.parametrize("with_entropy", [False, True])
def test_gradients_equal_numeric_gradients(with_entropy):
    hidden, weight, targets = inputs()

    def function(*args):
        options = {"vocab_size": 7, "temperature": 0.6, "with_entropy": with_entropy, "tile": (3, 4)}
        outputs = vocab_parallel_logprobs(*args, targets, **options)
        return outputs if with_entropy else outputs[0]

    assert torch.autograd.gradcheck(function, (hidden, weight))


def test_the_entropy_is_omitted_unless_requested():
    assert vocab_parallel_logprobs(*inputs(), vocab_size=7)[1] is None


@pytest.mark.parametrize("moves", ["hidden", "weight", "entropy"])
def test_gradients_that_are_not_needed_are_not_computed(moves):
    both, alone = inputs(), inputs()
    kwargs = {"vocab_size": 7, "with_entropy": True}
    index = 1 if moves == "entropy" else 0
    alone[0].requires_grad_(moves != "weight")
    alone[1].requires_grad_(moves != "hidden")
    for tensors in (both, alone):
        vocab_parallel_logprobs(*tensors, **kwargs)[index].sum().backward()
    for ours, expected in zip(alone[:2], both[:2], strict=True):
        assert ours.grad is None if not ours.requires_grad else torch.equal(ours.grad, expected.grad)


def test_tokens_that_are_not_needed_are_never_read():
    hidden, weight, targets = inputs()
    needed = torch.tensor([True, False, True, False])
    with torch.no_grad():
        hidden[~needed] = torch.nan
    targets[~needed] = -100
    logprobs, entropy = vocab_parallel_logprobs(
        hidden, weight, targets, vocab_size=7, with_entropy=True, needed_T=needed
    )
    (logprobs.sum() + entropy.sum()).backward()
    assert logprobs[~needed].eq(0).all() and entropy[~needed].eq(0).all() and hidden.grad[~needed].eq(0).all()
    assert logprobs[needed].lt(0).all() and hidden.grad.isfinite().all() and weight.grad.isfinite().all()


def test_tokens_without_an_upstream_gradient_cost_the_backward_nothing():
    hidden, weight, targets = inputs()
    logprobs, _ = vocab_parallel_logprobs(hidden, weight, targets, vocab_size=7)
    with LargestTensor() as largest:
        (logprobs * torch.zeros(4, dtype=torch.float64)).sum().backward()
    assert weight.grad.eq(0).all() and hidden.grad.eq(0).all()
    assert not {"addmm", "mm"} & largest.names


def test_logits_of_minus_infinity_have_logprob_minus_inf_and_no_gradient():
    weight = torch.tensor([[0.0, 1.0], [-1e30, 1.0], [0.0, 2.0]], requires_grad=True)  # -1e30 * 1e30 overflows
    hidden = torch.tensor([[1e30, 0.5], [1e30, -0.5]], requires_grad=True)
    logprobs, entropy = vocab_parallel_logprobs(hidden, weight, torch.tensor([1, 0]), vocab_size=3, with_entropy=True)
    assert logprobs[0] == -torch.inf and logprobs[1].isfinite() and entropy.isfinite().all()
    (logprobs[1] + entropy.sum()).backward()
    assert hidden.grad.isfinite().all() and weight.grad.isfinite().all() and weight.grad[1].eq(0).all()


def test_logits_of_any_size_do_not_overflow_and_have_precise_gradients():
    weight = torch.tensor([[1e6], [0.0], [-1e6]], requires_grad=True)
    hidden = torch.tensor([[1.0], [1e-9], [-1.0]], requires_grad=True)
    logprobs, entropy = vocab_parallel_logprobs(
        hidden, weight, torch.tensor([0, 1, 1]), vocab_size=3, with_entropy=True
    )
    (logprobs.sum() + entropy.sum()).backward()
    assert logprobs[0] == 0 and logprobs[2] == -1e6
    torch.testing.assert_close(entropy[1], torch.tensor(3.0).log(), rtol=1e-5, atol=0)
    assert hidden.grad.isfinite().all() and hidden.grad[0] == 0 and hidden.grad[2] == 1e6


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_row_that_is_not_finite_is_nan_and_does_not_affect_other_rows(value):
    hidden, weight, targets = inputs()
    with torch.no_grad():
        hidden[1, 0] = value
    logprobs, entropy = vocab_parallel_logprobs(hidden, weight, targets, vocab_size=7, with_entropy=True, tile=(2, 3))
    assert logprobs.isnan().tolist() == entropy.isnan().tolist() == [False, True, False, False]


class LargestTensor(TorchDispatchMode):
    """Records the size of the largest tensor that any operation returned, and the names of the operations."""

    def __init__(self):
        super().__init__()
        self.num_elements, self.names = 0, set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.names.add(func.__name__.split(".")[0])
        sizes = [leaf.numel() for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        self.num_elements = max([self.num_elements, *sizes])
        return result


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("needed", [0.7, 1.0])
def test_no_tensor_is_larger_than_the_weight_or_a_tile(dtype, needed):
    """So no [tokens, vocabulary] tensor exists in any dtype. It would have 60 * 100 elements."""
    case = Case(
        num_tokens=60, vocab_size=97, width=100, hidden=4, dtype=dtype, tile=(16, 30), needed=needed, temperature=0.5
    )
    with LargestTensor() as largest:
        of_ours(case)
    assert largest.num_elements == 16 * 30


def test_with_a_gradient_buffer_no_other_tensor_is_larger_than_a_tile():
    hidden, weight, targets = inputs(num_tokens=60, vocab_size=100, hidden=50, dtype=torch.bfloat16)
    buffer = torch.zeros(100, 50)
    with LargestTensor() as largest:
        logprobs, entropy = vocab_parallel_logprobs(
            hidden, weight, targets, vocab_size=100, with_entropy=True, weight_grad_VH=buffer, tile=(20, 20)
        )
        (logprobs.sum() + entropy.sum()).backward()
    assert buffer.ne(0).any() and weight.grad is None
    assert largest.num_elements == 60 * 50  # only the hidden states are this large
