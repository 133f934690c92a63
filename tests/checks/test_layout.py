"""Settings that are refused before an engine is built."""

import importlib.util
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from grpo_mega.cli.checks.layout import engine_rank_problems
from grpo_mega.cli.checks.machine import Machine
from grpo_mega.cli.checks.violations import cut_problems
from grpo_mega.config import Config, RolloutConfig
from grpo_mega.rollout.sglang.requirements import CPU_ROWS, compiler_problems, padding_problems
from grpo_mega.weights.spec import ModelShape

SHAPE = ModelShape("qwen2", 2, 64, 128, 8, 2, 8, 100, tied=False)


@pytest.mark.parametrize(
    ("shape", "tp", "message"),
    [
        (replace(SHAPE, ffn=48), 1, "pads an MLP of 48 rows on a CPU, where rollout.tp=1 wants a multiple of 32"),
        (replace(SHAPE, ffn=96), 2, "pads an MLP of 96 rows on a CPU, where rollout.tp=2 wants a multiple of 64"),
        (replace(SHAPE, num_experts=4, moe_ffn=24), 1, "pads an MLP of 24 rows"),
        (replace(SHAPE, num_experts=4, moe_ffn=32, ffn=48, num_dense=1), 1, "pads an MLP of 48 rows"),
        (SHAPE, 4, "pads 2 key-value heads on a CPU, where rollout.tp=4 does not divide them"),
    ],
)
def test_a_model_that_a_server_would_pad_on_a_cpu_is_refused(shape: ModelShape, tp: int, message: str) -> None:
    assert re.search(message, next(padding_problems(shape, tp)))


@pytest.mark.parametrize(
    ("section", "problem"),
    [
        ({"layout": {"cp": 2}}, "layout.cp=2 conflicts with a sliding window of qwen2; raise layout.tp or layout.pp"),
        (
            {"batch": {"share_prompts": True}},
            "batch.share_prompts=true conflicts with a sliding window of qwen2; leave share_prompts out",
        ),
        ({"layout": {"tp": 2, "pp": 2}}, None),
    ],
)
def test_shared_prompts_and_cp_are_refused_with_sliding_windows(section: Any, problem: str | None) -> None:
    config = Config.model_validate(
        {"run_dir": "r", "steps": 1, "model": {"path": "m"}, "data": {"train": "d"}, **section}
    )
    assert not list(cut_problems(config, SHAPE))
    found = list(cut_problems(config, replace(SHAPE, windows=(0, 9))))
    assert [text.startswith(problem or "") for text in found] == [True] * (problem is not None)


@pytest.mark.parametrize("tp", [1, 2])
def test_one_that_fits_is_not(tp: int) -> None:
    assert not list(padding_problems(SHAPE, tp))


def test_the_multiple_is_sglangs() -> None:
    spec = importlib.util.find_spec("sglang")
    if spec is None or spec.origin is None:
        pytest.skip("SGLang is not installed; examples/quickstart.sh --engine sglang installs it")
    source = (Path(spec.origin).parent / "srt/configs/update_config.py").read_text(encoding="utf-8")
    assert re.findall(r"^DEFAULT_MOE_PADDING_SIZE = (\d+)$", source, re.MULTILINE) == [str(CPU_ROWS)]


def test_a_server_on_a_gpu_needs_the_compiler_that_it_calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    served = RolloutConfig(engine="sglang")
    [problem] = compiler_problems(served, Machine(1, 1).compiler)
    assert problem.startswith("rollout.engine='sglang' needs nvcc on every node")
    assert not list(compiler_problems(RolloutConfig(), Machine(1, 1).compiler))
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "nvcc").touch(mode=0o755)
    assert not list(compiler_problems(served, Machine(1, 1).compiler))


@pytest.mark.parametrize(
    ("tp", "world_size", "per_node", "engine_ranks", "problem"),
    [
        (2, 16, 8, 8, None),
        (2, 3, 3, 2, None),  # on one node an engine may begin anywhere
        (4, 14, 8, 8, "an engine of 4 ranks would span two nodes of 8 ranks, since it comes after 6 trainer ranks"),
        (4, 12, 8, 6, "rollout.tp=4 does not divide the job's 6 engine ranks"),
        (4, 12, 6, 0, "rollout.tp=4 does not divide each node's 6 ranks"),
    ],
)
def test_an_engine_lies_on_one_node_also_after_trainer_ranks(
    tp: int, world_size: int, per_node: int, engine_ranks: int, problem: str | None
) -> None:
    found = list(engine_rank_problems(tp, world_size, per_node, engine_ranks))
    assert [problem in text for text in found] == [True] if problem else not found
