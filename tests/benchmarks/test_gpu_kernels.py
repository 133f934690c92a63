"""Test what `tools/benchmarks/gpu --only mfu --profile` reads from a trace. Events are shaped as torch's on an H100."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from tools.benchmarks.gpu import trials
from tools.benchmarks.gpu.kernels import DEVICE, is_product, profiled, short, summarize

GEMM = "nvjet_hsh_256x128_64x4_1x2_h_bz_coopA_NTT"
PASS = "void at::native::vectorized_elementwise_kernel<4, at::native::exp_kernel_cuda(at::TensorIteratorBase&)>"
PRODUCTS = (
    GEMM,
    "nvjet_sm90_tst_128x256_64x4_1x2_h_bz_TNT",
    "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_warpgroupsize1x1x1_execute_segment_k_off_kernel__5x_cublas",
    "ampere_bf16_s16816gemm_bf16_128x128_ldg8_f2f_stages_32x5_tn",
    "void cutlass::Kernel2<cutlass_80_wmma_tensorop_bf16_s161616gemm_bf16_16x16_128x2_tn_align8>(Params)",
    "cutlass3x_sm90_tensorop_s64x128x16gemm_bf16_bf16_f32_void_bf16_128x128x64_2x1x1_0_ntn_align8_warpspecialized",
    "void cutlass::device_kernel<cutlass::gemm::kernel::GemmUniversal<cute::tuple<int, int, int, int>>>(Params)",
    "void cublasLt::splitKreduce_kernel<32, 16, int, float, __nv_bfloat16, float, true, true>(Params)",
    "void gemv2T_kernel_val<int, int, float, float, float, float, 128, 16, 4, 4, false, false>(Params)",
    "void deep_gemm::fp8_gemm_kernel<4096u, 7168u>(float*)",
)
OTHERS = (
    PASS,
    "",
    "Memcpy HtoD (Pinned -> Device)",
    "cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_26_128x64x128_4x1x1_kernel0_0",
    "void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<128, 128, 64, 4, cutlass::bfloat16_t>>(Params)",
    "fmha_cutlassF_bf16_aligned_64x128_rf_sm80(PyTorchMemEffAttention::AttentionKernel<cutlass::bfloat16_t>::Params)",
    "void cutlass::device_kernel<flash::FlashAttnFwdSm90<flash::CollectiveMainloopFwdSm90>>(Params)",
    "void transformer_engine::normalization::rmsnorm_fwd_tuned_kernel<Kernel_traits<__nv_bfloat16>>(Params)",
    "void transformer_engine::gated_act_kernel<8, float, silu>(Params)",
    "void multi_tensor_apply_kernel<TensorListMetadata<4>, AdamFunctor>(Params)",
    "sm80_xmma_fprop_implicit_gemm_bf16bf16_bf16f32_f32_nhwckrsc_nhwc_tilesize128x128x32",
)


def event(name: str, start: float, duration: float, stream: int = 7, category: str = "kernel") -> dict[str, Any]:
    return {"ph": "X", "cat": category, "name": name, "pid": 0, "tid": stream, "ts": start, "dur": duration}


def test_kernels_of_streams_that_overlap_count_once_as_busy_time() -> None:
    rng = random.Random(3)
    events = [
        event(rng.choice((GEMM, PASS)), rng.randrange(900), rng.randrange(1, 40), rng.randrange(3)) for _ in range(61)
    ]
    busy = {t for e in events for t in range(e["ts"], e["ts"] + e["dur"])}
    products = {t for e in events if e["name"] == GEMM for t in range(e["ts"], e["ts"] + e["dur"])}
    found = summarize(events, 1e-3)
    assert found.busy == pytest.approx(len(busy) * 1e-6) and found.products == pytest.approx(len(products) * 1e-6)
    assert sum(seconds for _, seconds, _ in found.largest) > found.busy, "each kernel keeps its own time"


def test_only_what_runs_on_the_device_counts() -> None:
    events: list[dict[str, Any]] = [
        event("phase: update", 0, 1000, category="gpu_user_annotation"),
        event("cudaLaunchKernel", 0, 900, category="cuda_runtime"),
        event("aten::mm", 0, 900, category="cpu_op"),
        {"ph": "M", "name": "process_name", "pid": 0},
        {"ph": "f", "cat": "ac2g", "name": "ac2g", "ts": 5.0},
        event(GEMM, 100.5, 50.25),
        event("Memset (Device)", 200, 4.5, category="gpu_memset"),
        {"ph": "X", "cat": "kernel", "name": PASS, "ts": 300.0},
    ]
    found = summarize(events, 1e-3)
    assert found.busy == pytest.approx(54.75e-6) and found.products == pytest.approx(50.25e-6)
    assert found.largest == [(GEMM, 50.25e-6, 1), ("Memset (Device)", 4.5e-6, 1), (PASS, 0.0, 1)]
    assert DEVICE == ("kernel", "gpu_memcpy", "gpu_memset")


def test_the_ten_largest_kernels_have_their_share_and_calls() -> None:
    events = [
        event(f"kernel {number}", 10 * number + call, 1 + number / 100) for number in range(13) for call in (0, 5)
    ]
    named = [figure for figure in summarize(events, 1e-3).figures("case") if figure.name.startswith("kernel ")]
    assert [figure.name for figure in named] == [f"kernel {i}: kernel {13 - i}" for i in range(1, 11)]
    assert named[0].value == pytest.approx(2.24e-3)
    assert (named[0].unit, named[0].note) == ("ms", "0.224% of the step, 2 calls")


def test_a_step_without_kernels_has_no_busy_time() -> None:
    idle, products = summarize([], 0.5).figures("case")
    assert (idle.name, idle.value, products.value) == ("time without a kernel", 100, 0)


@pytest.mark.parametrize("name", PRODUCTS)
def test_kernels_of_matrix_products_are_recognized(name: str) -> None:
    assert is_product(name)


@pytest.mark.parametrize("name", OTHERS)
def test_attention_and_passes_over_tensors_are_no_products(name: str) -> None:
    assert not is_product(name)


def test_a_name_fits_into_one_cell_of_the_table() -> None:
    assert short("void f<a | b>(int,\n  char)") == "f<a / b>(int, char)" and short(" ") == "without a name"
    assert len(short(PRODUCTS[2])) == 80 and short(PRODUCTS[2]).endswith("...")


def test_the_real_profilers_events_are_read() -> None:
    a = torch.ones(300, 200)
    found = profiled(lambda: a @ a.t(), torch.device("cpu"))
    assert 0 < found.products <= found.busy <= found.step
    assert {"aten::mm": 1}.items() <= {name: calls for name, _, calls in found.largest}.items()


def test_compiled_passes_have_the_values_of_the_products_passes() -> None:
    from grpo_mega.algorithm import logprobs

    generator = torch.Generator().manual_seed(2)
    x, top, factor = (torch.randn(size, generator=generator) for size in ((5, 7), (5,), (5, 1)))
    with trials.fused_passes():
        sums, products = logprobs.exp_sum(x.clone(), top), logprobs.times_exp(x.clone(), top, factor)
    assert torch.equal(sums, logprobs.exp_sum(x.clone(), top))
    assert torch.equal(products, logprobs.times_exp(x.clone(), top, factor))
