"""Attention backends that Transformer Engine selects per card, dtype and layout, and inputs that its kernels refuse."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformer_engine
import transformer_engine.pytorch as te
import transformer_engine_torch as tex
from packaging.version import Version
from transformer_engine.pytorch.attention.dot_product_attention import utils

from grpo_mega.distributed.device import Device
from grpo_mega.distributed.kernels import attention_problems
from grpo_mega.errors import ConfigError
from grpo_mega.megatron import loaded_kernels
from grpo_mega.weights.spec import ModelShape
from tests.te_on_cpu.emulated_te import machine

PACKED = {"qkv_layout": "thd_thd_thd", "attn_mask_type": "padding_causal"}


def backends(card: str, **params: Any) -> tuple[bool, bool, bool]:
    """Return if each backend fits: flash-attn (not installed), cuDNN's fused attention, TE's unfused attention."""
    with machine.played(card):
        found = utils.get_attention_backend(utils.AttentionParams(**{"num_heads": 8, "num_gqa_groups": 2} | params))
    flash, fused, unfused = found[-1]
    return bool(flash), bool(fused), bool(unfused)


def test_packed_sequences_need_hopper_without_flash_attention() -> None:
    assert backends("H100", **PACKED)[:2] == (False, True)
    for card in ("A100", "L40S"):
        assert backends(card, **PACKED)[:2] == (False, False)
        assert backends(card, qkv_layout="sbhd_sbhd_sbhd", attn_mask_type="causal")[1]


def test_no_card_has_fused_attention_in_fp32() -> None:
    for card in machine.CARDS:
        for layout in (PACKED, {"qkv_layout": "sbhd_sbhd_sbhd", "attn_mask_type": "causal"}):
            assert not backends(card, qkv_dtype=torch.float32, **layout)[1]


@pytest.mark.parametrize(
    ("dims", "card", "fits"),
    [(128, "A100", True), (256, "A100", False), (256, "H100", True), (264, "H100", False), (100, "H100", False)],
)
def test_wide_heads_need_hopper_and_no_card_takes_odd_ones(dims: int, card: str, fits: bool) -> None:
    layout = {"qkv_layout": "sbhd_sbhd_sbhd", "attn_mask_type": "causal"}
    assert backends(card, head_dim_qk=dims, head_dim_v=dims, **layout)[1] is fits


def attend(dtype: torch.dtype = torch.bfloat16, cu_dtype: torch.dtype = torch.int32, max_seqlen: int = 16) -> Any:
    q, k, v = (torch.randn(32, heads, 16, dtype=dtype) for heads in (4, 2, 2))
    cu = torch.tensor([0, 16, 32], dtype=cu_dtype)
    attention = te.DotProductAttention(
        4, 16, num_gqa_groups=2, attention_dropout=0.0, qkv_format="thd", attn_mask_type="padding_causal"
    )
    return attention(q, k, v, cu_seqlens_q=cu, cu_seqlens_kv=cu, max_seqlen_q=max_seqlen, max_seqlen_kv=max_seqlen)


def test_lengths_must_be_int32_and_within_the_stated_maximum() -> None:
    assert attend().shape == (32, 64)
    with pytest.raises((AssertionError, RuntimeError), match="int32"):
        attend(cu_dtype=torch.int64)
    with pytest.raises(RuntimeError, match="longer than max_seqlen_q"):
        attend(max_seqlen=8)
    x, freqs = torch.randn(8, 2, 16), torch.zeros(4, 1, 1, 16)
    form = tex.NVTE_QKV_Format.NVTE_THD
    for cu, message in (
        (torch.tensor([0, 4, 8]), "int32"),
        (torch.tensor([0, 8], dtype=torch.int32), "past the end of 4"),
    ):
        with pytest.raises(RuntimeError, match=message):
            tex.fused_rope_forward(x, freqs, None, form, False, cu, 1, 0)


def test_fp32_ends_in_an_error_where_no_backend_is_left() -> None:
    """TE 2.11 falls back to its unfused attention; 2.9 and 2.10 have no unfused attention for packed sequences."""
    if Version(transformer_engine.__version__) >= Version("2.11"):
        assert attend(torch.float32).shape == (32, 64)
    else:
        with pytest.raises(ValueError, match="No dot product attention"):
            attend(torch.float32)


def test_the_package_refuses_inputs_that_no_backend_takes() -> None:
    """It also refuses 2.11's unfused attention in bf16 on cards below Hopper, because it would store every score."""
    import transformer_engine

    for card in machine.CARDS.values():
        for dtype in ("bfloat16", "float32"):
            _, fused, unfused = backends(card.name, qkv_dtype=getattr(torch, dtype), **PACKED)
            is_taken = fused or (unfused and dtype == "float32")
            problems = attention_problems(dtype, card.capability, card.name, transformer_engine.__version__, None)
            assert bool(list(problems)) == (not is_taken), (card.name, dtype)


@pytest.mark.parametrize("part", range(4))
def test_wrong_attention_is_refused_before_a_model_is_built(part: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One result of the kernels is wrong: the output, or the gradient of queries, keys or values."""
    shape = ModelShape("qwen2", 2, 64, 128, 6, 2, 24, 304, False, windows=(0, 1, 7))
    device = Device("cpu", torch.device("cpu"))
    loaded_kernels.attention_errors.cache_clear()
    loaded_kernels.check_attention(shape, torch.bfloat16, device)
    name, index = ("fused_attn_fwd", 0) if part == 0 else ("fused_attn_bwd", part - 1)
    kernel = getattr(tex, name)

    def wrong(*args: Any, **kwargs: Any) -> Any:
        found = list(kernel(*args, **kwargs))
        found[index] = found[index] * 1.05
        return found

    monkeypatch.setattr(tex, name, wrong)
    loaded_kernels.attention_errors.cache_clear()
    try:
        with pytest.raises(ConfigError, match=r"cuDNN 9\.\d+\.\d+ is wrong on this card for heads of 24.*=0"):
            loaded_kernels.check_attention(shape, torch.bfloat16, device)
    finally:
        loaded_kernels.attention_errors.cache_clear()


def check_heads(size: int, dtype: torch.dtype, card: str) -> None:
    shape = ModelShape("qwen2", 2, 64, 128, 6, 2, size, 304, False)
    loaded_kernels.attention_errors.cache_clear()
    loaded_kernels.attention_notes.clear()
    with machine.played(card):
        loaded_kernels.check_attention(shape, dtype, Device("cpu", torch.device("cpu")))


def test_the_reason_is_shown_where_fused_attention_is_refused(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Versions before 2.20 give no reason, and those before 2.11 have no other attention for packed samples."""
    monkeypatch.setenv("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "1")  # tests/gpu asks for what older versions lack on a B200
    version = Version(transformer_engine.__version__)
    reason = "a head dimension is above 128" if version >= Version("2.20") else "Disabling FusedAttention"
    check_heads(24, torch.bfloat16, "B200")
    assert not loaded_kernels.attention_notes
    if version < Version("2.11"):
        with pytest.raises(ConfigError, match=f"no attention for heads of 160 in bfloat16 .*{reason}.*; pip uninstall"):
            check_heads(160, torch.bfloat16, "B200")
    else:
        check_heads(160, torch.bfloat16, "B200")
        [note] = loaded_kernels.attention_notes
        assert "stores every score, for heads of 160 in bfloat16" in note and reason in note
    assert "Disabling" not in "".join(capfd.readouterr())


def test_no_attention_at_all_is_one_line_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NVTE_UNFUSED_ATTN", "0")
    with pytest.raises(
        ConfigError, match=r"no attention for heads of 24 in float32 on this card .*Disabling Fused.*; pip"
    ):
        check_heads(24, torch.float32, "H100")
