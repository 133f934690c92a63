"""Training reads the same weights from a converted checkpoint and from its source folder."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from grpo_mega.checkpoint_io.convert import convert_hf_to_mcore
from grpo_mega.checkpoint_io.reader import CheckpointReader, is_finite, open_reader
from grpo_mega.cli.checks.model import check_model_files
from grpo_mega.config import ModelConfig
from grpo_mega.errors import WeightMappingError
from grpo_mega.weights.boxes import Box, region
from grpo_mega.weights.families import family_of
from grpo_mega.weights.spec import ModelShape, read_config
from tests.checkpoint_io.families import CASES, edit_config, save, tensors_of


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("reader")
    source = save(CASES["qwen3_moe"], folder / "hf")
    convert_hf_to_mcore(source, folder / "megatron", show_progress=False)
    return source, folder / "megatron"


def opened(folder: Path) -> CheckpointReader:
    shape = ModelShape.from_hf_config(read_config(folder))
    return open_reader(folder, family_of(shape.model_type), shape)


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_every_box_is_the_same_in_both_forms(folders: tuple[Path, Path], data: st.DataObject) -> None:
    tensors = tensors_of(folders[0])
    name = data.draw(st.sampled_from(sorted(tensors)))
    start = [data.draw(st.integers(0, n - 1)) for n in tensors[name].shape]
    stop = [data.draw(st.integers(a + 1, n)) for a, n in zip(start, tensors[name].shape, strict=True)]
    box = Box(name, tuple(start), tuple(stop))
    with opened(folders[1]) as reader:
        read = reader.read(box)
    assert read.dtype == torch.bfloat16 and torch.equal(read, tensors[name][region(box.start, box.shape)])


def test_the_form_is_detected_from_files_and_names_and_shapes_agree(folders: tuple[Path, Path]) -> None:
    with opened(folders[0]) as hf, opened(folders[1]) as megatron:
        assert hf.names == megatron.names
        expected = {name: hf.shape(name) for name in hf.names}
        assert {name: megatron.shape(name) for name in hf.names} == expected
        megatron.check(expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_only_nan_and_infinity_are_not_finite_even_if_the_sum_overflows(dtype: torch.dtype) -> None:
    values = torch.full((9,), torch.finfo(dtype).max, dtype=dtype)
    assert is_finite(values) and is_finite(torch.zeros_like(values))
    for number in ("nan", "inf", "-inf"):
        values[4] = float(number)
        assert not is_finite(values) and not is_finite(torch.where(values == values[0], 0, values))


def test_nan_stops_training_with_the_tensors_name(tmp_path: Path) -> None:
    source = save(CASES["qwen2"], tmp_path / "hf")
    tensors = tensors_of(source)
    tensors["model.layers.2.self_attn.k_proj.bias"][1] = float("nan")
    save_file(tensors, source / "model.safetensors")
    convert_hf_to_mcore(source, tmp_path / "megatron", show_progress=False)
    with (
        opened(tmp_path / "megatron") as reader,
        pytest.raises(
            WeightMappingError,
            match=r"model.layers.2.self_attn.k_proj.bias .*; fetch it again",
        ),
    ):
        reader.read(Box("model.layers.2.self_attn.k_proj.bias", (0,), (16,)))


def test_a_run_is_checked_against_a_converted_model_before_it_starts(
    folders: tuple[Path, Path], tmp_path: Path
) -> None:
    shape = check_model_files(ModelConfig(path=folders[1]))
    assert (shape.num_layers, shape.num_experts) == (4, 4)
    broken = tmp_path / "megatron"
    broken.mkdir()
    for path in folders[1].iterdir():
        (broken / path.name).write_bytes(path.read_bytes())
    edit_config(broken, num_experts=8, num_local_experts=8)
    with pytest.raises(WeightMappingError, match=r"\[4, 4, 32\], .*config.json .*\[4, 8, 32\]; "):
        check_model_files(ModelConfig(path=broken))


def test_the_check_before_a_run_needs_no_torch(folders: tuple[Path, Path]) -> None:
    code = (
        "import sys; from pathlib import Path; from grpo_mega.cli.checks.model import check_model_files; "
        "from grpo_mega.config import ModelConfig; "
        f"check_model_files(ModelConfig(path=Path({str(folders[1])!r}))); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
