"""Converted checkpoints load in Megatron in any layout, and Megatron's checkpoints convert back to the same bits.

Four ranks are launched once for all cases. Megatron-core loads, saves and builds the models.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from grpo_mega.checkpoint_io.convert import convert_hf_to_mcore, convert_mcore_to_hf
from grpo_mega.checkpoint_io.detect import describe
from tests.checkpoint_io.families import CASES, assert_same_folder, save
from tests.helpers.ranks import CaseValues, launch

WORKER = Path(__file__).with_name("megatron_worker.py")
LAYOUTS: list[tuple[str, dict[str, Any]]] = [
    ("llama2", {"tp": 2, "pp": 2}),
    ("llama2", {"tp": 4}),
    ("llama2", {"pp": 4, "vpp": 2}),
    ("llama3", {"tp": 2, "pp": 2, "sequence_parallel": True}),
    ("qwen2", {"tp": 4}),
    ("qwen3_moe", {"dp": 4, "ep": 2}),
    ("deepseek_v3", {"tp": 2, "dp": 2, "ep": 4, "sequence_parallel": True}),
    ("deepseek_v2", {"pp": 2, "dp": 2, "ep": 2}),
    ("deepseek_v3_no_dense", {"pp": 4}),
    ("mixtral", {"tp": 2, "dp": 2, "ep": 2, "etp": 2, "sequence_parallel": True}),
    ("qwen3_5_moe_text", {"tp": 2, "pp": 2, "ep": 1, "etp": 2, "sequence_parallel": True}),
]
NAMES = [f"{model} {' '.join(f'{k}{v}' for k, v in layout.items())}" for model, layout in LAYOUTS]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> CaseValues:
    """Return the folder that Megatron saved, keyed by layout number. "<model>-hf" and "<model>-megatron" are next to
    it.
    """
    folder = tmp_path_factory.mktemp("layouts")
    for name in {model for model, _ in LAYOUTS}:
        save(CASES[name], folder / f"{name}-hf")
        convert_hf_to_mcore(folder / f"{name}-hf", folder / f"{name}-megatron", show_progress=False)
    cases = [
        {
            "hf": str(folder / f"{name}-hf"),
            "megatron": str(folder / f"{name}-megatron"),
            "out": str(folder / str(number)),
            "dtype": str(CASES[name].dtype).removeprefix("torch."),
            "layout": layout,
        }
        for number, (name, layout) in enumerate(LAYOUTS)
    ]
    (folder / "cases.json").write_text(json.dumps(cases))
    problems = launch(WORKER, 4, folder)
    found = CaseValues("layout", problems)
    found |= {str(number): folder / str(number) for number in range(len(LAYOUTS)) if not problems[f"layout {number}"]}
    return found


@pytest.mark.parametrize("number", range(len(LAYOUTS)), ids=NAMES)
def test_checkpoints_saved_by_megatron_convert_back_to_the_same_bits(
    saved: CaseValues, tmp_path: Path, number: int
) -> None:
    megatron: Path = saved[str(number)]
    source = megatron.with_name(f"{LAYOUTS[number][0]}-hf")
    convert_mcore_to_hf(megatron, tmp_path / "back", config_folder=source, show_progress=False)
    assert_same_folder(tmp_path / "back", source)


@pytest.mark.parametrize("number", range(len(LAYOUTS)), ids=NAMES)
def test_a_training_checkpoint_converts_without_its_optimizer(saved: CaseValues, tmp_path: Path, number: int) -> None:
    megatron: Path = saved[str(number)]
    source, trained = megatron.with_name(f"{LAYOUTS[number][0]}-hf"), megatron.with_name(f"{number}-trained")
    assert describe(trained, source)["optimizer"] is True
    convert_mcore_to_hf(trained, tmp_path / "back", config_folder=source, show_progress=False)
    assert_same_folder(tmp_path / "back", source)
