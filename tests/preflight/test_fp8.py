"""Environment variables that Transformer Engine reads, and the lengths that each recipe needs."""

from grpo_mega.config import PrecisionConfig, validate
from grpo_mega.preflight.fp8 import environment, length_multiple

RAW = {"run_dir": "r", "steps": 1, "model": {"path": "m"}, "data": {"train": "t"}}


def test_blockwise_training_and_fp8_rollouts_have_the_same_scales() -> None:
    fp8 = {"precision": {"fp8": "hybrid", "fp8_recipe": "blockwise"}}
    served = {"rollout": {"quantization": "fp8"}}
    assert environment(validate(RAW | fp8 | served)) == {"NVTE_FP8_BLOCK_SCALING_FP32_SCALES": "1"}
    assert environment(validate(RAW | fp8)) == environment(validate(RAW | served)) == {}


def test_lengths_are_multiples_of_whole_blocks_on_every_tp_rank() -> None:
    def of(**precision: str) -> int:
        return length_multiple(PrecisionConfig.model_validate(precision), tp=4)

    assert of() == 64
    assert [of(fp8="e4m3", fp8_recipe=recipe) for recipe in ("tensorwise", "blockwise", "mxfp8")] == [64, 512, 128]
