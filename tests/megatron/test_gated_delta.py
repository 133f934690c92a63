"""Linear attention: packed samples do not depend on each other, and gates stay float32 in a bf16 model."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from itertools import accumulate, pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from megatron.core.ssm import gated_delta_net
from torch import Tensor

from grpo_mega.checkpoint_io.model import read_model_files
from grpo_mega.distributed.launch import only_rank
from grpo_mega.megatron import model
from grpo_mega.megatron import runtime as runtimes
from grpo_mega.megatron.attention import pack_params
from grpo_mega.megatron.gated_delta import delta_rule
from grpo_mega.megatron.policy import Policy
from grpo_mega.trainer.parts import build_policy
from tests.distributed.layout_cases import make_config
from tests.helpers.models import make_model, save_checkpoint
from tests.megatron.test_guards import IS_NEW, megatron_source

A_LOG = "model.layers.{}.linear_attn.A_log"
LENGTHS = (1, 63, 64, 65, 129, 60)
SIZES = {"linear_num_key_heads": 3, "linear_num_value_heads": 9, "linear_key_head_dim": 6, "linear_value_head_dim": 5}


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def policy(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Policy]:
    folder: Path = tmp_path_factory.mktemp("hybrid")
    save_checkpoint(make_model("qwen3_5_text", seed=4, **SIZES), folder)
    config = make_config(folder, "tp=1", f"model.dtype={request.param}")
    with only_rank():
        runtime = runtimes.arrange(config, runtimes.join(config))
        yield build_policy(config, read_model_files(config.model), runtime)
        runtimes.stop()


def test_a_packed_sample_depends_on_its_own_rows_only(policy: Policy) -> None:
    """Other neighbours of the same lengths change no bit, because all shapes stay. Without neighbours the shapes
    differ, and so does the rounding on some CPUs: sums of up to CHUNK products in float32, of values up to 3.
    """
    layer = policy.models[0].decoder.layers[0].self_attention
    layer.in_proj.forward = layer.out_proj.forward = lambda x: (x, None)
    width = sum(tensor.shape[0] for name, tensor in layer.named_parameters() if name == "in_proj.weight")
    generator, dtype = torch.Generator().manual_seed(1), policy.models[0].config.params_dtype
    rows, others = torch.randn(2, sum(LENGTHS), 1, width, generator=generator).to(dtype)

    def computed(part: torch.Tensor, *lengths: int) -> torch.Tensor:
        cuts = torch.tensor([0, *lengths]).cumsum(0).int()
        params = pack_params(cuts, torch.zeros(len(part)), None)
        found: torch.Tensor = layer(part, None, packed_seq_params=params)[0]
        return found

    packed = computed(rows, *LENGTHS)
    for start, length in zip(accumulate(LENGTHS, initial=0), LENGTHS, strict=False):
        place = slice(start, start + length)
        mixed = others.clone()
        mixed[place] = rows[place]
        assert torch.equal(computed(mixed, *LENGTHS)[place], packed[place])
        alone = computed(rows[place], length)
        torch.testing.assert_close(packed[place], alone, rtol=torch.finfo(dtype).eps, atol=64 * 2**-23 * 3)
    leaking = computed(rows, sum(LENGTHS))
    assert (leaking - packed)[1:64].abs().max() > 0.1


def recurrence(query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
    """Return the gated delta rule by its definition, token by token."""
    state = value.new_zeros(*key.shape[:1], *key.shape[2:], value.shape[-1])
    outs = []
    for t in range(key.shape[1]):
        state = state * decay[:, t].exp()[..., None, None]
        error = (value[:, t] - torch.einsum("bnkv,bnk->bnv", state, key[:, t])) * beta[:, t, :, None]
        state = state + torch.einsum("bnk,bnv->bnkv", key[:, t], error)
        outs.append(torch.einsum("bnkv,bnk->bnv", state, query[:, t]) * query.shape[-1] ** -0.5)
    return torch.stack(outs, 1)


@pytest.mark.parametrize("num_tokens", [1, 63, 64, 65, 200])
def test_the_delta_rule_equals_its_definition_in_float64(num_tokens: int) -> None:
    generator = torch.Generator().manual_seed(num_tokens)

    def normal(*shape: int) -> Tensor:
        return torch.randn(2, num_tokens, 3, *shape, dtype=torch.float64, generator=generator)

    exact = [F.normalize(normal(7), dim=-1), F.normalize(normal(7), dim=-1), normal(5), -normal().exp() / 20]
    exact = [x.requires_grad_() for x in (*exact, normal().sigmoid())]
    rounded = [x.detach().float().requires_grad_() for x in exact]
    upstream, results = normal(5), []
    for inputs, rule in ((rounded, delta_rule), (exact, recurrence)):
        out = rule(*inputs)
        results.append([out, *torch.autograd.grad(out, inputs, upstream.to(out))])
    for found, expected in zip(*results, strict=True):
        assert (found - expected).abs().max() <= 2e-6 * expected.abs().max()


def check_cuts(cuts: Tensor, num_tokens: int) -> list[tuple[int, int]]:
    """Check the cumulative lengths that FLA gets. Return the start and end of each segment."""
    assert cuts.dtype == torch.int64 and cuts[0] == 0 and cuts[-1] == num_tokens and cuts.diff().min() > 0
    return [*pairwise(cuts.tolist())]


def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: None = None,
    residual: None = None,
    initial_state: None = None,
    output_final_state: bool = False,
    activation: str | None = None,
    backend: str = "triton",
    cu_seqlens: Any = None,
) -> tuple[Tensor, None]:
    """Stand in for the function of FLA 0.4 to 0.6, in float64 and segment by segment."""
    assert x.shape[::2] == (1, len(weight)) and weight.dim() == 2 and x.dtype == weight.dtype
    assert activation == "silu" and bias is residual is initial_state is None
    weight_C1W, padding = weight.double()[:, None], weight.shape[1] - 1
    outs = [
        F.conv1d(F.pad(x[:, a:b].double().mT, (padding, 0)), weight_C1W, groups=len(weight)).mT
        for a, b in check_cuts(cu_seqlens, x.shape[1])
    ]
    return F.silu(torch.cat(outs, 1)).to(x.dtype), None


def chunk_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: None = None,
    initial_state: None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Any = None,
) -> tuple[Tensor, None]:
    """Stand in for the function of FLA 0.4 to 0.6, in float64 and segment by segment."""
    assert q.shape == k.shape and q.shape[:3] == v.shape[:3] == (*g.shape,) == (*beta.shape,) and len(q) == 1
    assert q.dtype == k.dtype == v.dtype and g.dtype == torch.float32 and g.max() <= 0
    assert all(x.is_contiguous() for x in (q, k, v)) and scale is initial_state is None
    torch.testing.assert_close(k.float().norm(dim=-1), torch.ones(k.shape[:3]), rtol=0.02, atol=0.02)
    outs = [
        recurrence(*(x[:, start:end].double() for x in (q, k, v, g, beta)))
        for start, end in check_cuts(cu_seqlens, q.shape[1])
    ]
    return torch.cat(outs, 1).to(q.dtype), None


def test_flas_kernels_read_packed_rows_as_plain_torch_reads_them(
    policy: Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Plain torch convolves and normalizes in float32 also in a bfloat16 model. FLA returns bfloat16 in between."""
    layer = policy.models[0].decoder.layers[0].self_attention
    layer.in_proj.forward = layer.out_proj.forward = lambda x: (x, None)
    weights = {name: tensor for name, tensor in layer.named_parameters() if "proj" not in name}
    width = sum(tensor.shape[0] for name, tensor in layer.named_parameters() if name == "in_proj.weight")
    generator, dtype = torch.Generator().manual_seed(2), policy.models[0].config.params_dtype
    rows = torch.randn(sum(LENGTHS), 1, width, generator=generator).to(dtype).requires_grad_()
    params = pack_params(torch.tensor([0, *LENGTHS]).cumsum(0).int(), torch.zeros(len(rows)), None)

    def computed() -> list[Tensor]:
        out = layer(rows, None, packed_seq_params=params)[0]
        upstream = torch.randn(out.shape, generator=torch.Generator().manual_seed(3)).to(dtype)
        return [out, *torch.autograd.grad(out, (rows, *weights.values()), upstream)]

    expected = computed()
    monkeypatch.setitem(sys.modules, "fla.modules.convolution", SimpleNamespace(causal_conv1d=causal_conv1d))
    monkeypatch.setattr(gated_delta_net, "chunk_gated_delta_rule", chunk_gated_delta_rule)
    assert all(map(torch.equal, computed(), expected)), "FLA has no kernels for a CPU"
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    found = computed()
    monkeypatch.undo()
    for name, mine, exact in zip(("output", "rows", *weights), found, expected, strict=True):
        error = (mine.float() - exact.float()).norm() / exact.float().norm()
        assert 0 < error <= (1e-5 if dtype == torch.float32 else 0.02), (name, error)


@pytest.mark.parametrize("is_cuda", [False, True])
def test_a_gpu_without_flas_kernels_is_noted_in_the_log(
    is_cuda: bool, policy: Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    notes: dict[str, None] = {}
    monkeypatch.setattr(model, "attention_notes", notes)
    monkeypatch.setattr(model, "uses_transformer_engine", lambda _: False)
    monkeypatch.setattr(model, "transformer_config", {}.__getitem__)  # fails, so nothing is built for CUDA
    monkeypatch.setattr(gated_delta_net, "chunk_gated_delta_rule", None)
    runtime = SimpleNamespace(device=SimpleNamespace(is_cuda=is_cuda))
    arguments: Any = (policy._shape, None, None, None, None, None, runtime)
    with pytest.raises(TypeError):
        model.build_chunks(*arguments)
    assert [*notes] == [
        "linear attention: plain torch, which needs more memory; pip install flash-linear-attention"
    ] * is_cuda


def test_decay_parameters_are_float32_in_model_optimizer_and_checkpoint(policy: Policy) -> None:
    """In bfloat16, A_log would lose most of its digits."""
    kept = {name: tensor for name, tensor in policy.parameters.items() if name.endswith(("A_log", "dt_bias"))}
    expected = make_model("qwen3_5_text", seed=4, **SIZES).state_dict()
    assert len(kept) == 6 and all(tensor.dtype is torch.float32 for tensor in kept.values())
    for i in range(3):
        assert torch.equal(kept[f"chunk0.decoder.layers.{i}.self_attention.A_log"], expected[A_LOG.format(i)])
    others = {tensor.dtype for name, tensor in policy.parameters.items() if name not in kept}
    assert others == {policy.models[0].config.params_dtype}


def test_megatron_still_stores_fp32_weights_before_others_in_a_group() -> None:
    """The reason for compat.index_weights_as_stored: the index counts the weights of both dtypes together."""
    source = megatron_source("optimizer/distrib_optimizer.py")
    assert "*shard_fp32_params_this_group,\n                    *shard_fp32_from_float16_params_this_group," in source
    assert 'local_param_group_map[param] = (group_index, len(group_range["params"]) - 1)' in source


def test_megatrons_layer_still_needs_fla_and_packs_only_with_it() -> None:
    """The reasons for compat.patch_gated_delta_net and for GatedDelta.forward. 0.16 packs nothing."""
    if not IS_NEW:
        source = megatron_source("ssm/gated_delta_net.py")
        assert "if not HAVE_FLA:\n            raise ImportError" in source
        assert 'raise NotImplementedError("GDN does not support packed sequence for now.")' in source
        return
    source = megatron_source("ssm/gated_delta_net/common.py")
    assert "if not HAVE_FLA:\n            raise ImportError" in source
    assert '            "gated_delta_rule",\n        )' in source and "Attribute {attr} for GDN is not set" in source
    assert '"cu_seqlens is not supported for torch_chunk_gated_delta_rule for now."' in source
    assert "self.gated_delta_rule = chunk_gated_delta_rule" in megatron_source("ssm/gated_delta_net/gdn.py")


def test_rotary_frequencies_are_no_buffer_so_they_stay_float32(policy: Policy) -> None:
    """Megatron casts a bf16 model's buffers. transformers 5.19 returns a buffer, which a module would adopt."""
    [model] = policy.models
    found, config = model.rotary_pos_emb.inv_freq, make_model("qwen3_5_text", seed=4, **SIZES).config
    width = int(config.head_dim * config.rope_parameters["partial_rotary_factor"])
    exact = config.rope_parameters["rope_theta"] ** -(torch.arange(0, width, 2, dtype=torch.float64) / width)
    assert found.dtype is torch.float32 and not dict(model.rotary_pos_emb.named_buffers())
    torch.testing.assert_close(found.double(), exact, rtol=1e-6, atol=0)
