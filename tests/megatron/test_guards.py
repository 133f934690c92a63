"""Cases that Megatron silently gets wrong, and patches that a CPU needs: each is guarded, and each patch is still
needed.

Guards with numeric effects are tested elsewhere: interleaving at pp=2 and gradient norms over tensor-parallel ranks in
tests/distributed/test_layouts.py, Adam's step counts in tests/run/test_resume.py.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.helpers import preloaded

Run = Callable[[str], "subprocess.CompletedProcess[str]"]

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
    return model.transformer_config(shape, family_of("qwen2"), hf_config, configs.validate(raw), runtime)
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


@pytest.mark.full
def test_interleaved_stages_use_no_batched_sends_and_outputs_are_kept() -> None:
    result = python(
        PRELUDE
        + "c = config(MegatronLayout(pp=2, vpp=2))\n"
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


def test_megatron_leaves_uninitialized_tensor_parallel_weights_unmarked() -> None:
    """The reason for the marks in model._build: Megatron marks weights when it initializes them, and the gradient norm
    uses the marks."""
    source = megatron_source("tensor_parallel/layers.py")
    constructor = source.split("class RowParallelLinear")[1].split("def forward")[0]
    before_bias = constructor.split("if bias:")[0]
    assert "set_tensor_model_parallel_attributes" not in before_bias


def test_latent_attention_still_assumes_te_if_its_wrapper_is_importable() -> None:
    """The reason for compat.patch_latent_attention: Megatron then calls isinstance with a name that is no class."""
    head, body = megatron_source("transformer/multi_latent_attention.py").split("HAVE_TE = True")
    assert (
        "import transformer_engine" not in head
        and "HAVE_TE\n            and isinstance(self.linear_proj, TELinear)" in body
    )


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
def test_importing_megatron_imports_no_compiler_thanks_to_the_patch() -> None:
    code = (
        "import importlib.util, sys, torch; import grpo_mega.megatron.policy; "
        "assert 'torch._inductor.compile_fx' not in sys.modules; ours = vars(sys.modules.pop('megatron.core.jit')); "
        "import megatron.core.jit; theirs = vars(megatron.core.jit); "
        "assert {name for name in theirs if name.endswith(('fuser', 'decorator'))} <= ours.keys(); "
        "theirs['jit_fuser'](abs); assert 'torch._inductor.compile_fx' in sys.modules, 'the patch is no longer needed'"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


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
