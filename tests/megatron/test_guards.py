"""Cases that Megatron silently gets wrong, and patches that a CPU needs: each is guarded, and each patch is still
needed.

Guards with numeric effects are tested elsewhere: interleaving at pp=2 and gradient norms over tensor-parallel ranks in
tests/distributed/test_layouts.py, Adam's step counts in tests/trainer/test_resume.py.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.helpers import preloaded

Run = Callable[[str], "subprocess.CompletedProcess[str]"]
IS_NEW = int(version("megatron-core").split(".")[1]) > 16  # 0.19.2; the other supported version is 0.16.1

# Each test runs in a separate process, because the patches cannot be undone.
PRELUDE = """
from grpo_mega import config as configs
from grpo_mega.distributed import device
from grpo_mega.megatron import model
from grpo_mega.megatron.runtime import Runtime
from grpo_mega.weights.families import family_of
from grpo_mega.weights.layout import MegatronLayout
from grpo_mega.weights.spec import ModelShape
import torch
import torch.distributed as dist
from types import SimpleNamespace
shape = ModelShape("qwen2", 4, 32, 48, 4, 2, 8, 102, False)
def config(layout, **changes):
    runtime = Runtime(device.Device("cpu", torch.device("cpu")), layout, 0, dist.HashStore())
    raw = {"run_dir": "r", "steps": 1, "model": {"path": "m", "dtype": "bfloat16"}, "data": {"train": "t"}, **changes}
    hf_config = SimpleNamespace(rms_norm_eps=1e-6)
    sections = [getattr(configs.validate(raw), name) for name in ("model", "layout", "precision")]
    return model.transformer_config(shape, family_of("qwen2"), hf_config, *sections, runtime)
"""


def python(code: str) -> subprocess.CompletedProcess[str]:
    """Run a program in a new Python, in which nothing is imported yet."""
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Run a program after PRELUDE."""

    def run(code: str) -> subprocess.CompletedProcess[str]:
        path = tmp_path / "program.py"
        path.write_text(PRELUDE + code)
        return subprocess.run([preloaded.python(), str(path)], capture_output=True, text=True, timeout=120)

    return run


def test_cudnns_attention_is_off_where_this_project_computes(run: Run) -> None:
    """torch chooses among its backends without a word, and some of cuDNN's results are wrong."""
    done = run("print(torch.backends.cuda.cudnn_sdp_enabled(), torch.backends.cuda.flash_sdp_enabled())")
    assert done.stdout.split() == ["False", "True"], done.stderr
    plain = python("import torch; print(torch.backends.cuda.cudnn_sdp_enabled())")
    assert plain.stdout.split() == ["True"], "torch turns it off itself now"


def megatron_source(path: str) -> str:
    spec = find_spec("megatron")
    assert spec is not None and spec.submodule_search_locations
    return (Path(next(iter(spec.submodule_search_locations))) / "core" / path).read_text()


def test_interleaved_stages_use_no_batched_sends_and_outputs_are_kept(run: Run) -> None:
    """Batched sends of gloo swap the two neighbours at pp=2, and freed outputs are still being sent."""
    result = run(
        "c = config(MegatronLayout(pp=2, vpp=2))\n"
        + "assert c.overlap_p2p_comm and not c.batch_p2p_comm, c\n"
        + "assert not c.deallocate_pipeline_outputs\n"
        + "assert c.calculate_per_token_loss\n"
        + "assert not config(MegatronLayout(pp=2)).deallocate_pipeline_outputs\n"
    )
    assert result.returncode == 0, result.stderr


def test_fp8_without_transformer_engine_is_refused_and_not_ignored(run: Run) -> None:
    result = run(
        "from grpo_mega.errors import ConfigError\n"
        + "from grpo_mega.megatron.loaded_kernels import check_kernels\n"
        + "raw = {'run_dir': 'r', 'steps': 1, 'model': {'path': 'm', 'dtype': 'bfloat16'}, 'data': {'train': 't'}}\n"
        + "fp8 = configs.validate(raw | {'precision': {'fp8': 'hybrid'}})\n"
        + "try: check_kernels(fp8, device.Device('cpu', torch.device('cpu')))\n"
        + "except ConfigError as error: print(error)\n"
    )
    assert result.stdout.startswith("precision.fp8='hybrid' needs a GPU, and this run is on a CPU"), result.stderr


@pytest.mark.full
def test_a_reference_in_bf16_has_all_layers_in_bf16_for_its_pass_alone() -> None:
    """Ask Megatron's function, with the config of a GPU run."""
    result = python(
        PRELUDE
        + "from grpo_mega.megatron.precision import megatron_settings, in_bf16\n"
        + "from megatron.core.fp8_utils import is_first_last_bf16_layer\n"
        + "from megatron.core.transformer.transformer_config import TransformerConfig\n"
        + "precision = configs.PrecisionConfig(fp8='hybrid', fp8_recipe='blockwise', last_layers_bf16=1)\n"
        + "c = TransformerConfig(num_layers=4, hidden_size=32, num_attention_heads=4, **megatron_settings(precision))\n"
        + "layers = lambda: [is_first_last_bf16_layer(c, i) for i in range(4)]\n"
        + "assert layers() == [False, False, False, True], layers()\n"
        + "with in_bf16(c): assert all(layers())\n"
        + "assert layers() == [False, False, False, True], layers()\n"
    )
    assert result.returncode == 0, result.stderr


@pytest.mark.full
def test_the_guards_levels_are_the_layers_that_megatron_computes_in_bf16() -> None:
    result = python(
        PRELUDE
        + "from grpo_mega.megatron.precision import Level\n"
        + "from grpo_mega.megatron.precision import megatron_settings, set_level\n"
        + "from megatron.core.fp8_utils import is_first_last_bf16_layer\n"
        + "from megatron.core.transformer.transformer_config import TransformerConfig\n"
        + "guard = configs.GuardConfig(fall_back=True, layers=2)\n"
        + "precision = configs.PrecisionConfig(fp8='hybrid', fp8_recipe='blockwise', last_layers_bf16=1, guard=guard)\n"
        + "c = TransformerConfig(num_layers=8, hidden_size=32, num_attention_heads=4, **megatron_settings(precision))\n"
        + "layers = lambda: [i for i in range(8) if is_first_last_bf16_layer(c, i)]\n"
        + "for level, expected in ((Level.ENDS, [0, 1, 6, 7]), (Level.ALL, list(range(8))), (Level.AS_CONFIGURED,"
        " [7])):\n" + "    set_level(c, precision, level)\n" + "    assert layers() == expected, (level, layers())\n"
    )
    assert result.returncode == 0, result.stderr


@pytest.mark.full
@pytest.mark.parametrize(
    "code",
    [
        "from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed as seed; seed(1)",
        "import torch; torch.zeros(1, device='cuda')",
        "import torch; torch.zeros(1).cuda()",
        "import torch; torch.cuda.current_device()",
    ],
)
def test_without_the_stand_in_for_cuda_a_cpu_run_still_fails(code: str) -> None:
    """If one of these passes, the stand-in in megatron/compat.py can lose a part."""
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    setup = "from megatron.core import parallel_state\n" if "megatron" in code else ""
    assert python(setup + code).returncode != 0


def test_megatron_still_loads_every_entry_of_the_optimizers_state() -> None:
    """The reason for compat.keep_adam_steps_apart: without it a `step` in torch's Adam breaks the load."""
    body = (
        megatron_source("optimizer/distrib_optimizer.py")
        .split("def _set_main_param_and_optimizer_states")[1]
        .split("\n    def ")[0]
    )
    assert "step" not in body


def test_common_state_is_read_from_a_file_or_from_beside_the_tensors(run: Run, tmp_path: Path) -> None:
    """The reason for compat.read_common_state: 0.19 writes no common.pt, and 0.16 reads nothing else."""
    result = run(
        f"import json; from pathlib import Path; folder = Path({str(tmp_path)!r}) / 'state'\n"
        + "from megatron.core.dist_checkpointing import load_common_state_dict\n"
        + "from torch.distributed import checkpoint\n"
        + "parts = checkpoint.FileSystemWriter(folder), checkpoint.DefaultSavePlanner(flatten_state_dict=False)\n"
        + "state = {'common_state/shard_0_1': [{'steps': 7}]}\n"
        + "checkpoint.save(state, storage_writer=parts[0], planner=parts[1], no_dist=True)\n"
        + "backend = {'sharded_backend': 'torch_dist', 'sharded_backend_version': 1}\n"
        + "(folder / 'metadata.json').write_text(json.dumps(backend))\n"
        + "try: print(load_common_state_dict(folder))\n"
        + "except Exception: print('unknown')\n"
        + "model.compat.read_common_state()\n"
        + "with model.compat.only_plain_pickles(): print(load_common_state_dict(folder))\n"
        + "torch.save({'steps': 8}, folder / 'common.pt')\n"
        + "print(load_common_state_dict(folder))\n"
    )
    first = "{'steps': 7}" if IS_NEW else "unknown"
    assert result.stdout.splitlines() == [first, "{'steps': 7}", "{'steps': 8}"], result.stderr


def test_the_hybrid_optimizer_still_copies_only_parameters_on_a_gpu() -> None:
    """The reason for compat.offload_from_any_device: without copies its step on a CPU raises KeyError."""
    source = megatron_source("optimizer/cpu_offloading/hybrid_optimizer.py")
    groups = source.split("def _get_sub_optimizer_param_groups")[1].split("\n    def ")[0]
    assert "if offload_params_numel < offload_threshold and param.is_cuda:" in groups
    assert "gpu_param = self.cpu_copys_map_gpu_param[param]" in source
    checks = megatron_source("optimizer/optimizer_config.py").split("if self.use_precision_aware_optimizer:")[1]
    asks = checks.index("is_te_min_version") < checks.index("if self.optimizer_cpu_offload:")
    assert asks, "optimizer.build can pass use_precision_aware_optimizer to the config"


def test_an_output_layer_still_refuses_fused_weight_gradients_without_apex() -> None:
    """The reason for compat.allow_fused_weight_gradients."""
    constructor = (
        megatron_source("tensor_parallel/layers.py").split("class ColumnParallelLinear")[1].split("def forward")[0]
    )
    assert (
        "if config.gradient_accumulation_fusion and not _grad_accum_fusion_available:\n            raise" in constructor
    )


@pytest.mark.parametrize("kind", ["VocabParallelEmbedding", "ColumnParallelLinear", "RowParallelLinear"])
def test_megatron_leaves_uninitialized_tensor_parallel_weights_unmarked(kind: str) -> None:
    """The reason for compat.mark_sharded_weights: 0.16 marks weights when it initializes them, and the gradient norm
    uses the marks. 0.19 marks all weights, and marking a weight again is an error."""
    source = megatron_source("tensor_parallel/layers.py")
    constructor = source.split(f"class {kind}")[1].split("def forward")[0]
    before_bias = constructor.split("if bias:")[0]
    assert before_bias.count("set_tensor_model_parallel_attributes(") == (2 if IS_NEW else 0)


def test_latent_attention_still_assumes_or_requires_transformer_engine() -> None:
    """The reason for compat.patch_latent_attention. If its wrapper can be imported, 0.16 calls isinstance with a name
    that is no class. 0.19 has modelopt's Linear only beside Transformer Engine."""
    source = megatron_source("transformer/multi_latent_attention.py")
    assert "HAVE_TE\n            and isinstance(self.linear_proj, TELinear)" in source
    if IS_NEW:
        names = source.split("if HAVE_TE:\n")[1].split("else:\n    (\n")[1].split(") = (None, ")[0]
        assert "Linear" in names.replace(",", "").split()
    else:
        assert "import transformer_engine" not in source.split("HAVE_TE = True")[0]


def test_megatron_still_puts_a_second_norm_before_a_query_without_lora(run: Run) -> None:
    """The second reason for compat.patch_latent_attention, which is silent: DeepSeek-V2-Lite has no norm there. 0.16
    builds what the spec says. tests/gpu/test_logits.py compares logits with transformers'."""
    if not IS_NEW:
        assert "resolve_qk_norm_config" not in megatron_source("transformer/multi_latent_attention.py")
        return
    result = run(
        "from megatron.core.transformer.mla_qk_norm_config import QKNormConfigResolver\n"
        + "from megatron.core.transformer.multi_latent_attention import MLASelfAttention\n"
        + "spec = SimpleNamespace(linear_q_proj=int, linear_q_up_proj=None, linear_kv_up_proj=float, q_layernorm=None,"
        " kv_layernorm=None)\n"
        + "megatrons = object.__new__(QKNormConfigResolver)\n"
        + "vars(megatrons).update(submodules=spec, has_q_lora=False, fused_norm_linear_impl=float)\n"
        + "print(megatrons._resolve_mla_qk_layernorm()['linear_q_proj'].__name__)\n"
        + "model.compat.patch_latent_attention()\n"
        + "found = MLASelfAttention._resolve_qk_norm_config(None, spec)\n"
        + "print(*(part.__name__ for part in found.values()))\n"
    )
    assert result.stdout.split() == ["float", "int", "IdentityOp", "float", "IdentityOp", "IdentityOp"], result.stderr


def test_megatron_still_splits_an_unused_table_of_angles_over_ranks() -> None:
    """A second reason for compat.patch_latent_attention."""
    source = megatron_source("models/common/embeddings/yarn_rotary_pos_embedding.py")
    constructor = source.partition("def __init__(")[2].partition("def get_emb")[0]
    assert "self._set_cos_sin_cache(" in constructor and "get_pos_emb_on_this_cp_rank(" in source


@pytest.mark.full
@pytest.mark.parametrize("first", ["import grpo_mega.megatron", "import transformers.models.llama.modeling_llama"])
def test_transformers_loads_the_same_model_before_and_after_the_stand_in(first: str, tmp_path: Path) -> None:
    """transformers builds the model on `torch.device("meta")`, so meta must work with the wrapped factories."""
    code = f"""
{first}
import grpo_mega.megatron, torch
from transformers import LlamaConfig, LlamaForCausalLM
config = LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4)
with torch.device("meta"):
    assert torch.arange(3).is_meta and torch.empty(3).is_meta
model = LlamaForCausalLM(config).eval()
model.save_pretrained({str(tmp_path)!r})
loaded = LlamaForCausalLM.from_pretrained({str(tmp_path)!r}).eval()
frequencies = [dict(m.named_buffers())["model.rotary_emb.inv_freq"] for m in (model, loaded)]
assert torch.equal(*frequencies), frequencies
ids = torch.arange(10)[None]
torch.testing.assert_close(loaded(ids).logits, model(ids).logits, rtol=0, atol=1e-5)
"""
    result = python(code)
    assert result.returncode == 0, result.stderr


@pytest.mark.full
def test_importing_megatron_imports_no_compiler_and_no_triton() -> None:
    """Only Megatron's functions are not compiled."""
    code = (
        "import sys, torch; theirs = torch.compile; import grpo_mega.megatron.policy, megatron.core.jit; "
        "assert not sys.modules['triton'] and 'torch._inductor.compile_fx' not in sys.modules; "
        "assert megatron.core.jit.jit_fuser is torch.compile and torch.compile(abs) is not abs; "
        "assert 'torch._inductor.compile_fx' in sys.modules; del sys.modules['torch._inductor.compile_fx']; "
        "theirs_too = {'__name__': 'megatron.a', 'torch': torch}; "
        "assert eval('torch.compile(abs) is torch.compile(dynamic=True)(abs) is abs', theirs_too); "
        "torch.compile = theirs; del sys.modules['megatron.core.fusions.fused_bias_swiglu']; "
        "megatron.core.jit.enable_jit_fuser(); import megatron.core.fusions.fused_bias_swiglu; "
        "assert 'torch._inductor.compile_fx' in sys.modules, 'the patch is no longer needed'"
    )
    result = python(code)
    assert result.returncode == 0, result.stderr


def test_the_stub_of_tritons_kernels_has_all_names_and_is_still_needed(run: Run) -> None:
    """A CPU has no triton, and 0.19 imports it without a guard. 0.16 does not, so it gets no stub."""
    name = "megatron.core.transformer.moe.ops.paged_stash"
    result = run(f"import sys; print(*vars(sys.modules.get({name!r}, SimpleNamespace())))")
    if not IS_NEW:
        assert result.stdout.split() == [], result.stderr
        return
    source = megatron_source("transformer/moe/ops/paged_stash.py")
    assert "\nimport triton\n" in source, "the stub is no longer needed"
    names = source.split("__all__ = [")[1].split("]")[0].replace('"', "").split(", ")
    assert set(names) <= set(result.stdout.split()), result.stderr


NOTICES = {
    "megatron.core.models.gpt.gpt_model": "GPTModel IS DEPRECATED. Use HybridModel",
    "megatron.core.distributed.distributed_data_parallel": "DistributedDataParallel: full_param_layout not provided",
    "torch.utils.cpp_extension": "No CUDA runtime is found, using CUDA_HOME='/usr/local/cuda'",
}


def test_notices_that_no_user_can_act_on_stay_off_the_console(run: Run) -> None:
    """0.16 has none of them, so nothing is filtered there."""
    sources = [
        megatron_source(f"{name.removeprefix('megatron.core.').replace('.', '/')}.py") for name in [*NOTICES][:2]
    ]
    has_notices = ["GPTModel IS DEPRECATED" in sources[0], "full_param_layout not provided" in sources[1]]
    assert has_notices == [IS_NEW, IS_NEW], "the filters are needed by other versions now"
    result = run(
        f"import logging\nfor name, text in {NOTICES}.items():\n"
        "    logging.getLogger(name).warning(text); logging.getLogger(name).warning('another warning')"
    )
    shown = [text for text in NOTICES.values() if text in result.stderr]
    assert shown == ([] if IS_NEW else [*NOTICES.values()]) and result.stderr.count("another warning") == 3


def test_only_megatrons_own_scheduler_still_applies_wd_mult() -> None:
    """The reason for optimizer.set_rates: without Megatron's scheduler, weight decay reaches norms and biases."""
    uses = "* param_group.get('wd_mult', 1.0)"
    assert uses in megatron_source("optimizer_param_scheduler.py")
    files = ("__init__", "optimizer", "distrib_optimizer", "clip_grads")
    found = [
        name for name in files if re.search(r"\*\s*\w+(\.get\(|\[).wd_mult", megatron_source(f"optimizer/{name}.py"))
    ]
    assert not found, "set_rates would apply it twice"


def test_megatrons_router_replay_still_shares_one_list_of_all_routers() -> None:
    """The reason for routers.Replayed: policy and reference mix, and the backward list keeps the routes of passes
    without recomputation."""
    source = megatron_source("transformer/moe/router_replay.py")
    assert "    global_router_replay_instances: List['RouterReplay'] = []" in source
    assert source.count("replay_backward_list.append(") == source.count("replay_backward_list.pop(") == 1
    assert "return router_replay.get_replay_topk(" in megatron_source("transformer/moe/moe_utils.py")


@pytest.mark.skipif(find_spec("wandb") is None, reason="needs wandb")
def test_megatron_does_not_import_wandb_and_would_without_the_patch() -> None:
    code = "import sys; {}; import megatron.core.timers; print(sys.modules.get('wandb') is not None)"
    assert python(code.format("import grpo_mega.megatron")).stdout.strip() == "False"
    result = python(code.format("from grpo_mega.megatron import compat; del sys.modules['wandb']"))
    assert result.stdout.strip() == "True", f"the patch is no longer needed: {result.stderr}"


@pytest.mark.full
def test_torch_still_unpickles_metadata_without_restriction(tmp_path: Path) -> None:
    code = (
        "import pickle, sys; from pathlib import Path; folder = Path(sys.argv[1])\n"
        "class Program:\n"
        "    def __reduce__(self): return open, (str(folder / 'it ran'), 'w')\n"
        "(folder / '.metadata').write_bytes(pickle.dumps(Program()))\n"
        "from contextlib import nullcontext, suppress; from grpo_mega.megatron import compat\n"
        "from torch.distributed.checkpoint import FileSystemReader\n"
        "with {}, suppress(pickle.UnpicklingError, AttributeError): FileSystemReader(folder).read_metadata()\n"
        "print((folder / 'it ran').exists())"
    ).replace("sys.argv[1]", repr(str(tmp_path)))
    assert python(code.format("compat.only_plain_pickles()")).stdout.strip() == "False"
    result = python(code.format("nullcontext()"))
    assert result.stdout.strip() == "True", f"the patch is no longer needed: {result.stderr}"
