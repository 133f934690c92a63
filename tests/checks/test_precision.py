"""Settings for which FP8 training is refused, before anything is started."""

import re
from dataclasses import replace

import pytest
import torch

from grpo_mega.cli.checks.layout import layout_problems
from grpo_mega.cli.checks.precision import (
    bf16_layer_problems,
    block_problems,
    environment,
    moments_problems,
    resolve_dtype,
    variable_problems,
)
from grpo_mega.config import LayoutConfig, OptimizerConfig, PrecisionConfig, validate
from grpo_mega.distributed.kernels import (
    RECIPES,
    attention_problems,
    card_problems,
    context_problems,
    cuda_problems,
    exchange_problems,
    length_multiple,
    transformer_engine_problems,
)
from grpo_mega.errors import ConfigError, raise_all
from grpo_mega.weights.spec import ModelShape

LLAMA_70B = ModelShape("llama", 80, 8192, 28672, 64, 8, 128, 128256, tied=False)
QWEN_72B = replace(LLAMA_70B, model_type="qwen2", ffn=29568)
RAW = {"run_dir": "r", "steps": 1, "model": {"path": "m"}, "data": {"train": "t"}}


def precision(recipe: str = "blockwise") -> PrecisionConfig:
    return PrecisionConfig.model_validate({"fp8": "hybrid", "fp8_recipe": recipe, "fp8_reference": True})


@pytest.mark.parametrize(
    ("is_gpu", "recorded", "dtype", "reason"),
    [
        (True, None, "bfloat16", "this job runs on GPUs"),
        (False, None, "float32", "this job runs on a CPU"),
        (True, "float32", "float32", "the run started with it"),
        (False, "bfloat16", "bfloat16", "the run started with it"),
    ],
)
def test_an_unset_dtype_is_the_runs_or_follows_the_device(
    is_gpu: bool, recorded: str | None, dtype: str, reason: str
) -> None:
    config, note = resolve_dtype(validate(RAW), is_gpu, recorded)
    assert (config.model.dtype, note) == (dtype, f"model.dtype={dtype}, because it is not set and {reason}")
    assert resolve_dtype(config, not is_gpu) == (config, None)


def test_another_key_that_needs_bfloat16_is_named_on_a_cpu() -> None:
    config = validate(RAW | {"precision": {"fp8": "hybrid"}})
    assert resolve_dtype(config, True)[0].model.dtype == "bfloat16"
    with pytest.raises(ConfigError, match=r"precision.fp8=hybrid conflicts with model.dtype=float32"):
        resolve_dtype(config, False)


def test_without_fp8_nothing_is_asked_for() -> None:
    bf16 = PrecisionConfig()
    raise_all(transformer_engine_problems(bf16, None))
    raise_all(card_problems(bf16, None, "a CPU"))
    raise_all(block_problems(bf16, LayoutConfig(tp=8), QWEN_72B))


@pytest.mark.parametrize(
    ("recipe", "found", "message"),
    [
        ("tensorwise", None, "precision.fp8='hybrid' needs Transformer Engine; install it"),
        ("tensorwise", "2.1.0", "needs Transformer Engine 2.2, found 2.1.0; .* or use delayed or mxfp8"),
        ("blockwise", "2.2.0+cu12", "needs Transformer Engine 2.3"),
        ("mxfp8", "1.13", "needs Transformer Engine 2.1, found 1.13; .* or use delayed$"),
    ],
)
def test_a_missing_or_old_transformer_engine_is_named_with_its_recipes(
    recipe: str, found: str | None, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        raise_all(transformer_engine_problems(precision(recipe), found))


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_present_transformer_engine_and_card_are_taken(recipe: str) -> None:
    raise_all(transformer_engine_problems(precision(recipe), "2.11.0"))
    raise_all(card_problems(precision(recipe), (10, 0), "B200"))


@pytest.mark.parametrize(
    ("recipe", "capability", "name", "message"),
    [
        ("tensorwise", None, "a CPU", "needs a GPU, and this run is on a CPU"),
        ("tensorwise", (8, 0), "A100", "needs an L40, H100, H200 or later, found A100; leave precision.fp8 out"),
        ("blockwise", (8, 9), "L40", "needs an H100, H200 or later, found L40; use delayed or tensorwise$"),
        ("mxfp8", None, "a CPU", "precision.fp8='hybrid' needs a GPU, and this run is on a CPU; leave"),
        ("mxfp8", (9, 0), "H200", "needs a B200, GB200 or B300, found H200; use delayed or tensorwise or blockwise$"),
        ("mxfp8", (12, 0), "RTX 5090", "found RTX 5090; use delayed or tensorwise or blockwise$"),
    ],
)
def test_a_card_without_the_recipe_is_named_with_those_that_it_has(
    recipe: str, capability: tuple[int, int] | None, name: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        raise_all(card_problems(precision(recipe), capability, name))


def test_a_cuda_too_old_for_blocks_is_named_with_the_recipes_that_it_has() -> None:
    raise_all(cuda_problems(precision("blockwise"), "12.9"))
    raise_all(cuda_problems(precision("blockwise"), "13.0"))
    raise_all(cuda_problems(precision("blockwise"), None))
    raise_all(cuda_problems(precision("tensorwise"), "12.6"))
    raise_all(cuda_problems(PrecisionConfig(), "11.8"))
    message = (
        "precision.fp8_recipe='blockwise' needs CUDA 12.9, found torch with CUDA 12.6; .* or use delayed or tensorwise"
    )
    with pytest.raises(ConfigError, match=message):
        raise_all(cuda_problems(precision("blockwise"), "12.6"))


@pytest.mark.parametrize(
    ("section", "layout", "message"),
    [
        (
            {"first_layers_bf16": 3},
            {"pp": 2},
            r"first_layers_bf16=3: must be at most 2, the 5 layers.*layout.pp=2; lower it",
        ),
        (
            {"last_layers_bf16": 2},
            {"pp": 3},
            r"last_layers_bf16=2: must be at most 1, the 5 layers.*layout.pp=3; lower it",
        ),
        (
            {"first_layers_bf16": 2, "last_layers_bf16": 3},
            {},
            r"leave none of the 5 layers in FP8; lower one, or leave",
        ),
        ({"first_layers_bf16": 2, "last_layers_bf16": 2}, {"pp": 2}, None),
        ({"first_layers_bf16": 4}, {}, None),
    ],
)
def test_only_bf16_layers_that_megatron_refuses_are_one_line(
    section: dict[str, int], layout: dict[str, int], message: str | None
) -> None:
    """Megatron's own config is the oracle, except where no layer would be left in FP8."""
    found = PrecisionConfig.model_validate({"fp8": "hybrid", **section})
    problems = list(bf16_layer_problems(found, LayoutConfig.model_validate(layout), 5))
    assert len(problems) == (message is not None)
    assert message is None or re.search(message, problems[0])
    assert not list(bf16_layer_problems(PrecisionConfig(), LayoutConfig(pp=5), 5))

    from grpo_mega.megatron.precision import megatron_settings

    def build() -> None:
        from megatron.core.transformer.transformer_config import TransformerConfig

        TransformerConfig(
            num_layers=5,
            hidden_size=32,
            num_attention_heads=2,
            pipeline_model_parallel_size=layout.get("pp", 1),
            pipeline_dtype=torch.bfloat16,
            params_dtype=torch.bfloat16,
            bf16=True,
            **megatron_settings(found),
        )

    if message is None or "leave none" in message:
        build()
    else:
        with pytest.raises(ValueError, match="must be between 0 and number of layers per pipeline stage"):
            build()


def test_blocks_that_would_straddle_ranks_are_refused() -> None:
    raise_all(block_problems(precision(), LayoutConfig(tp=8), LLAMA_70B))
    raise_all(block_problems(precision(), LayoutConfig(tp=1), QWEN_72B))
    raise_all(block_problems(precision("tensorwise"), LayoutConfig(tp=2), QWEN_72B))
    expected = (
        r"layout.tp=2 cuts the 29568 rows of the MLP \(29568 / 128 = 231 blocks\) inside a block .*; use"
        r" layout.tp=1, or"
    )
    with pytest.raises(ConfigError, match=expected):
        raise_all(block_problems(precision(), LayoutConfig(tp=2), QWEN_72B))
    with pytest.raises(ConfigError, match=r"no whole blocks of 128.*; use another recipe"):
        raise_all(block_problems(precision(), LayoutConfig(tp=1), replace(LLAMA_70B, ffn=300)))


def test_blocks_of_32_that_straddle_ranks_or_end_early_are_refused() -> None:
    mxfp8 = precision("mxfp8")
    raise_all(block_problems(mxfp8, LayoutConfig(tp=4, sequence_parallel=True), QWEN_72B))
    for shape, tp, line in (
        (
            QWEN_72B,
            8,
            r"layout.tp=8 cuts the 29568 rows of the MLP \(29568 / 32 = 924 blocks\) inside .*'mxfp8'",
        ),
        (
            replace(LLAMA_70B, hidden=8200),
            1,
            "'mxfp8': must have a hidden size that 32 divides, found 8200; use",
        ),
        (replace(LLAMA_70B, kv_lora=520), 1, "must have a key latent size that 32 divides, found 520; use another"),
    ):
        with pytest.raises(ConfigError, match=line):
            raise_all(block_problems(mxfp8, LayoutConfig(tp=tp), shape))


def test_nvfp4_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"precision.fp8_recipe='nvfp4': must be .*'mxfp8'; use one of them"):
        validate(RAW | {"precision": {"fp8": "e4m3", "fp8_recipe": "nvfp4"}})


def test_blocks_that_sequence_parallel_ranks_cannot_gather_are_refused() -> None:
    """Transformer Engine asserts it in the first forward pass."""
    odd = replace(LLAMA_70B, hidden=8200)
    raise_all(block_problems(precision(), LayoutConfig(tp=8), odd))
    layout = LayoutConfig(tp=8, sequence_parallel=True)
    raise_all(block_problems(precision(), layout, LLAMA_70B))
    raise_all(block_problems(precision("tensorwise"), layout, odd))
    with pytest.raises(
        ConfigError, match=r"^layout\.sequence_parallel=true: must have a hidden size that 128 .* 8200;"
    ):
        raise_all(block_problems(precision(), layout, odd))


@pytest.mark.parametrize(
    ("section", "dtype", "message"),
    [
        ({"fp8_reference": True}, "bfloat16", "precision.fp8_reference=true needs precision.fp8; set it"),
        ({"first_layers_bf16": 2}, "bfloat16", "precision.first_layers_bf16=2 needs precision.fp8"),
        (
            {"fp8": "e4m3", "fp8_recipe": "delayed", "last_layers_bf16": 1},
            "bfloat16",
            "last_layers_bf16=1 conflicts with precision.fp8_recipe=delayed",
        ),
        (
            {"fp8": "e4m3", "fp8_recipe": "delayed", "fp8_reference": True, "guard": {"fall_back": True}},
            "bfloat16",
            "guard.fall_back=true conflicts with precision.fp8_recipe=delayed",
        ),
        ({"fp8_parameters": True}, "bfloat16", "precision.fp8_parameters=true needs precision.fp8"),
        ({"guard": {"fall_back": True}}, "bfloat16", "precision.guard.fall_back=true needs precision.fp8"),
        (
            {"fp8": "e4m3", "fp8_parameters": True},
            "bfloat16",
            "precision.fp8_parameters=true needs precision.fp8_reference=true",
        ),
        (
            {"fp8": "e4m3", "fp8_parameters": True, "fp8_reference": True, "guard": {"fall_back": True}},
            "bfloat16",
            "guard.fall_back=true conflicts with precision.fp8_parameters=true",
        ),
        (
            {"fp8": "e4m3", "fp8_recipe": "mxfp8", "fp8_parameters": True, "fp8_reference": True},
            "bfloat16",
            "precision.fp8_parameters=true conflicts with precision.fp8_recipe=mxfp8, whose weights stay in bf16;",
        ),
        ({"fp8_amax_history_len": 16}, "bfloat16", "precision.fp8_amax_history_len=16 needs precision.fp8; set it"),
        (
            {"fp8": "e4m3", "fp8_amax_compute_algo": "most_recent"},
            "bfloat16",
            "most_recent needs precision.fp8_recipe=delayed",
        ),
        ({"fp8": "e4m3"}, "float32", "precision.fp8=e4m3 conflicts with model.dtype=float32"),
    ],
)
def test_settings_that_contradict_each_other_are_one_clear_line(
    section: dict[str, object], dtype: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        validate(RAW | {"precision": section, "model": {"path": "m", "dtype": dtype}})


def test_an_optimizer_of_less_memory_needs_transformer_engine_and_bf16() -> None:
    aware = OptimizerConfig(moments_dtype="bfloat16")
    raise_all(moments_problems(OptimizerConfig(), None))
    raise_all(moments_problems(aware, "2.11.0"))
    for found, text in ((None, "found none"), ("2.0", r"found 2\.0")):
        with pytest.raises(
            ConfigError, match=r"optimizer.moments_dtype=bfloat16 needs Transformer Engine 2.1 or later, " + text
        ):
            raise_all(moments_problems(aware, found))
    with pytest.raises(ConfigError, match=r"conflicts with model\.dtype=float32; use bfloat16"):
        validate(RAW | {"optimizer": {"moments_dtype": "bfloat16"}, "model": {"path": "m", "dtype": "float32"}})


@pytest.mark.parametrize(
    ("dtype", "capability", "engine", "flash", "message"),
    [
        (
            "float32",
            (9, 0),
            "2.9.0",
            None,
            r"model.dtype=float32: .* Engine 2.11 or later.* found 2.9.0; .*bfloat16$",
        ),
        ("float32", (8, 0), "2.10.0+cu12", "2.8.3", "model.dtype=float32: .* found 2.10.0"),
        (
            "bfloat16",
            (8, 0),
            "2.10.0",
            None,
            r"device='A100': .*9\.0.*, found 8\.0 and no flash-attn; pip install 'flash-attn",
        ),
        ("bfloat16", (8, 9), "2.11.0", "2.1.0", "found 8.9 and flash-attn 2.1.0; pip install"),
        ("float32", (8, 0), "2.11.0", None, None),
        ("float32", (9, 0), None, None, None),
        ("bfloat16", (8, 0), None, None, None),
        ("bfloat16", (8, 0), "2.9.0", "2.8.3", None),
        ("bfloat16", (9, 0), "2.9.0", None, None),
    ],
)
def test_a_gpu_without_attention_for_packed_samples_is_refused(
    dtype: str, capability: tuple[int, int], engine: str | None, flash: str | None, message: str | None
) -> None:
    def check() -> None:
        raise_all(attention_problems(dtype, capability, "A100", engine, flash))

    if message is None:
        check()
        return
    with pytest.raises(ConfigError, match=message) as caught:
        check()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("layout", "dtype", "version", "message"),
    [
        (
            {"cp": 2},
            "float32",
            "2.11.0",
            r"layout\.cp=2: must be 1 with model\.dtype=float32 .*; use bfloat16, or raise layout\.tp",
        ),
        (
            {"cp": 2, "cp_comm_type": "a2a"},
            "bfloat16",
            "2.9.0",
            r"layout\.cp_comm_type=a2a: must have .* 2\.10 .* found 2\.9\.0",
        ),
        (
            {"cp": 2, "tp": 8, "cp_comm_type": "a2a"},
            "bfloat16",
            "2.11.0",
            r"a cp that divides the 1 key-value heads .*cp=2; use",
        ),
        ({"cp": 8, "cp_comm_type": "a2a"}, "bfloat16", "2.10.0", None),
        ({"cp": 16}, "bfloat16", "2.9.0", None),
        ({"cp_comm_type": "a2a"}, "float32", "2.9.0", None),
        ({"cp": 2, "cp_comm_type": "a2a"}, "bfloat16", None, None),
    ],
)
def test_context_parallelism_that_transformer_engine_lacks_is_refused(
    layout: dict[str, object], dtype: str, version: str | None, message: str | None
) -> None:
    config = validate(RAW | {"layout": layout, "model": {"path": "m", "dtype": dtype}})
    problems = [
        *context_problems(config),
        *exchange_problems(config.layout, version),
        *layout_problems(config.layout, LLAMA_70B),
    ]
    assert len(problems) == (message is not None) and all(re.search(str(message), problem) for problem in problems), (
        problems
    )
    assert not any("\n" in problem for problem in problems)


def test_blockwise_training_and_fp8_rollouts_have_the_same_scales() -> None:
    fp8 = {"precision": {"fp8": "hybrid", "fp8_recipe": "blockwise"}}
    served = {"rollout": {"quantization": "fp8"}}
    assert environment(validate(RAW | fp8 | served)) == {"NVTE_FP8_BLOCK_SCALING_FP32_SCALES": "1"}
    assert environment(validate(RAW | fp8)) == environment(validate(RAW | served)) == {}


def test_lengths_are_multiples_of_whole_blocks_on_every_tp_rank() -> None:
    def of(**precision: str) -> int:
        return length_multiple(PrecisionConfig.model_validate(precision), LayoutConfig(tp=4))

    assert of() == 64
    assert [of(fp8="e4m3", fp8_recipe=recipe) for recipe in ("tensorwise", "blockwise", "mxfp8")] == [64, 512, 128]


FP8 = {"model": {"path": "m", "dtype": "bfloat16"}, "precision": {"fp8": "hybrid", "fp8_recipe": "tensorwise"}}
BLOCKS = FP8 | {"precision": {"fp8": "hybrid", "fp8_recipe": "blockwise"}}
FLOAT32 = {"model": {"path": "m", "dtype": "float32"}}
SERVED = {"model": {"path": "m", "dtype": "bfloat16"}, "rollout": {"engine": "sglang", "temperature": 0.7}}
SERVED_BLOCKS = BLOCKS | {"rollout": {"engine": "sglang", "quantization": "fp8"}}
NO_ATTENTION = {"NVTE_FLASH_ATTN": "0", "NVTE_FUSED_ATTN": "0", "NVTE_UNFUSED_ATTN": "0"}


@pytest.mark.parametrize(
    ("raw", "variables", "line"),
    [
        (SERVED, NO_ATTENTION, "NVTE_UNFUSED_ATTN=0: contradicts NVTE_FLASH_ATTN=0 NVTE_FUSED_ATTN=0; unset it"),
        (SERVED, NO_ATTENTION | {"NVTE_FUSED_ATTN": "1"}, None),
        (FLOAT32, {"NVIDIA_TF32_OVERRIDE": "1"}, "NVIDIA_TF32_OVERRIDE=1: contradicts model.dtype=float32; unset it"),
        (FLOAT32, {"NVIDIA_TF32_OVERRIDE": "0"}, None),
        (FLOAT32, {"NVTE_BACKWARD_OVERRIDE": "high_precision"}, None),
        (FP8, {"NVIDIA_TF32_OVERRIDE": "1"}, None),
        (
            FP8,
            {"NVTE_BACKWARD_OVERRIDE": "dequantized"},
            "NVTE_BACKWARD_OVERRIDE=dequantized: contradicts precision.fp8=hybrid precision.fp8_recipe=tensorwise;"
            " unset it",
        ),
        (
            SERVED_BLOCKS,
            {"NVTE_FP8_BLOCK_SCALING_FP32_SCALES": "0"},
            "NVTE_FP8_BLOCK_SCALING_FP32_SCALES=0: contradicts precision.fp8=hybrid precision.fp8_recipe=blockwise"
            " rollout.quantization=fp8; unset it",
        ),
        (SERVED_BLOCKS, {"NVTE_FP8_BLOCK_SCALING_FP32_SCALES": "1"}, None),
        (BLOCKS, {"NVTE_FP8_BLOCK_SCALING_FP32_SCALES": "0"}, None),
        (
            SERVED,
            {"SGLANG_RETURN_ORIGINAL_LOGPROB": "True"},
            "SGLANG_RETURN_ORIGINAL_LOGPROB=True: contradicts rollout.engine=sglang rollout.temperature=0.7; unset it",
        ),
        (SERVED, {"SGLANG_RETURN_ORIGINAL_LOGPROB": "false"}, None),
        (SERVED_BLOCKS, {"SGLANG_RETURN_ORIGINAL_LOGPROB": "1"}, None),  # the temperature is 1
        (
            SERVED,
            {"DETERMINISTIC": "1", "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "1"},
            "NVTE_ALLOW_NONDETERMINISTIC_ALGO=1: contradicts DETERMINISTIC=1; unset it",
        ),
        (
            SERVED,
            {"DETERMINISTIC": "1", "CUBLAS_WORKSPACE_CONFIG": ":0:0"},
            "CUBLAS_WORKSPACE_CONFIG=:0:0: contradicts DETERMINISTIC=1; unset it",
        ),
        (SERVED, {"DETERMINISTIC": "1", "CUBLAS_WORKSPACE_CONFIG": ":16:8"}, None),
        (SERVED, {"CUBLAS_WORKSPACE_CONFIG": ":0:0", "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "1"}, None),
    ],
)
def test_a_variable_that_contradicts_the_config_is_refused(
    raw: dict[str, object], variables: dict[str, str], line: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert list(variable_problems(validate(RAW | raw))) == ([line] if line else [])
