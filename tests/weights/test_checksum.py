"""The checksum against an oracle in Python integers, and the changes that it must detect."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_mega.weights import checksum as module
from grpo_mega.weights.checksum import checksum

A = 0x9E3779B97F4A7C15
MASK = (1 << 64) - 1
FEW_WORDS = 3  # block size for the comparison with the twin, so small tensors have several blocks

contents = st.binary(max_size=150).map(lambda data: torch.tensor(list(data), dtype=torch.uint8))


def mix(x: int) -> int:
    return x ^ (x >> 32)


def spread(w: int) -> int:
    return w ^ (w >> 37)


def naive(data: bytes, block: int) -> int:
    """Compute the docstring's formula word by word, as int64."""
    words = [int.from_bytes(data[i : i + 8], "little") for i in range(0, len(data), 8)]
    total = len(data)
    for start in range(0, len(words), block):
        total = total * A & MASK
        for j, word in enumerate(words[start : start + block]):
            multiplier = mix(A * (j + 1) & MASK) * A & MASK | 1
            total = (total + multiplier * spread(word)) & MASK
    return total - (1 << 64) if total >> 63 else total


@settings(max_examples=200, deadline=None)
@given(contents, st.integers(1, 4))
def test_it_is_the_formula_however_many_blocks_are_summed_at_once(data: torch.Tensor, num_blocks: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "BLOCK", FEW_WORDS)
        patch.setattr(module, "_CPU_BLOCKS", num_blocks)
        assert checksum(data).item() == naive(bytes(data.tolist()), FEW_WORDS)


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 9), st.integers(1, 9), st.integers(0, 3), st.integers(1, 4))
def test_it_is_the_formula_for_rows_with_gaps(height: int, width: int, gap: int, num_blocks: int) -> None:
    whole = torch.randint(0, 256, (height, 3, width + gap), dtype=torch.uint8)
    data = whole[:, ::2, :width]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "BLOCK", FEW_WORDS)
        patch.setattr(module, "_CPU_BLOCKS", num_blocks)
        assert checksum(data).item() == naive(bytes(data.flatten().tolist()), FEW_WORDS)


def test_it_is_the_formula_over_more_than_a_block() -> None:
    """Computed by a closed form, because the twin would take minutes: a block of zeros, then the words 1, 2, 3."""
    data = torch.zeros(module.BLOCK + 3, dtype=torch.int64)
    data[module.BLOCK :] = torch.tensor([1, 2, 3])
    last = sum((mix(A * (j + 1) & MASK) * A & MASK | 1) * (j + 1) for j in range(3))
    assert checksum(data).item() & MASK == (data.nbytes * A * A + last) & MASK


@settings(max_examples=100, deadline=None)
@given(contents.filter(lambda t: t.numel()), st.data())
def test_every_flipped_bit_is_noticed(data: torch.Tensor, draw: st.DataObject) -> None:
    changed = data.clone()
    changed[draw.draw(st.integers(0, data.numel() - 1))] ^= 1 << draw.draw(st.integers(0, 7))
    assert checksum(changed) != checksum(data)


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 1000), st.sampled_from([torch.bfloat16, torch.float32, torch.float8_e4m3fn]), st.data())
def test_rows_in_another_order_are_noticed(seed: int, dtype: torch.dtype, draw: st.DataObject) -> None:
    rows = torch.randn(6, 7, generator=torch.Generator().manual_seed(seed)).to(dtype).view(torch.uint8)
    order = draw.draw(st.permutations(range(6)))
    changed = rows[order]
    assert (checksum(changed) == checksum(rows)) == torch.equal(changed, rows)


@pytest.mark.parametrize("exponent", range(64))
def test_swapped_words_that_differ_in_one_bit_are_noticed(exponent: int) -> None:
    """A plain sum with odd multipliers fails in the top bits."""
    bit = 1 << exponent if exponent < 63 else -(1 << 63)
    words = torch.tensor([5, 5 ^ bit, 7, 5 ^ bit, 5])
    sums = {
        checksum(words[list(order)]).item()
        for order in ((0, 1, 2, 3, 4), (1, 0, 2, 3, 4), (1, 0, 2, 4, 3), (0, 1, 2, 4, 3))
    }
    assert len(sums) == 4


@pytest.mark.parametrize("width", [8, 16, 32, 64])
@pytest.mark.parametrize("is_sign", [False, True])
def test_swapped_words_whose_elements_all_differ_in_one_bit_are_noticed(width: int, is_sign: bool) -> None:
    """Copying the upper half of a word to the lower one would let the changes of two elements cancel out."""
    change = sum(1 << (start + is_sign * (width - 1)) for start in range(0, 64, width))
    words = torch.tensor([5, (5 ^ change) - ((5 ^ change) >> 63 << 64), 7])
    assert checksum(words) != checksum(words[[1, 0, 2]])
    far = torch.zeros(module.BLOCK + 2, dtype=torch.int64)
    far[:2], far[-1] = words[:2], words[1]
    assert checksum(far) != checksum(torch.cat((far[-1:], far[1:-1], far[:1])))


def test_length_counts_and_shape_strides_and_place_in_memory_do_not() -> None:
    assert len({checksum(torch.zeros(n, dtype=torch.uint8)).item() for n in range(20)}) == 20
    values = torch.randn(6, 10).bfloat16()
    expected = checksum(values)
    assert checksum(values.reshape(4, 15)) == expected
    assert checksum(values.t().contiguous().t()) == expected
    around = torch.zeros(8, 15, dtype=torch.bfloat16)
    around[1:7, 3:13] = values
    assert checksum(around[1:7, 3:13]) == expected
    odd = torch.zeros(61, dtype=torch.bfloat16)  # not aligned to words
    odd[1:] = values.reshape(-1)
    assert checksum(odd[1:]) == expected
    assert checksum(torch.nn.Parameter(values)) == expected


@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.int64, torch.float64, torch.bfloat16, torch.float8_e5m2, torch.complex64]
)
@pytest.mark.parametrize("shape", [(), (0,), (3,), (5, 3)])
def test_any_dtype_and_shape_has_one(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = torch.ones(shape).to(dtype)
    found = checksum(tensor)
    assert (found.shape, found.dtype) == ((), torch.int64)
    data = bytes(tensor.reshape(-1).view(torch.uint8).tolist())
    assert found.item() == naive(data, module.BLOCK)


def test_another_process_with_only_torch_finds_the_same(tmp_path: Path) -> None:
    values = torch.arange(1000).bfloat16()
    torch.save(values, tmp_path / "values.pt")
    (tmp_path / "alone.py").write_text(Path(module.__file__).read_text())
    code = "import torch, alone; print(alone.checksum(torch.load('values.pt')).item())"
    ran = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert int(ran.stdout) == checksum(values).item()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("num_bytes", [1, 4096, 8 * module.BLOCK, 20 * module.BLOCK + 3])
def test_a_gpu_finds_the_same(num_bytes: int) -> None:
    data = torch.randint(0, 256, (num_bytes,), dtype=torch.uint8)
    assert checksum(data.cuda()).item() == checksum(data).item()
