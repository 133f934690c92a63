"""A checkpoint with a program inside: the program does not run, and the error is one line."""

from __future__ import annotations

import hashlib
import io
import json
import pickle
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import BytesStorageMetadata

from grpo_mega.checkpoint_io.dcp_read import check_extra_state
from tests.helpers.runs import run
from tools.benchmarks import kills

pytestmark = [pytest.mark.distributed, pytest.mark.waiting, pytest.mark.usefixtures("preloaded_python")]
ROOT = Path(__file__).resolve().parents[2]
MODEL = {
    "num_hidden_layers": 2,
    "hidden_size": 44,
    "intermediate_size": 76,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}
MODEL |= {"layer_types": ["full_attention"] * 2}


class Program:
    """An object that creates a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self._path = str(path)

    def __reduce__(self) -> tuple[Any, ...]:
        return open, (self._path, "w")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Train one step. Return the config and the run folder."""
    folder = tmp_path_factory.mktemp("trained")
    config = kills.write_inputs(folder, "tp=1", **MODEL)
    code, output = run(config, folder / "run", "--set", "steps=1", "--set", "checkpoint.interval=1")
    assert code == 0, output
    return config, folder / "run"


def in_metadata(state: Path, program: Program) -> None:
    metadata = pickle.loads((state / ".metadata").read_bytes())
    metadata.planner_data = program
    (state / ".metadata").write_bytes(pickle.dumps(metadata))


def in_common(state: Path, program: Program) -> None:
    """Megatron 0.19 writes no such file, but reads it."""
    path = state / "common.pt"
    torch.save((torch.load(path) if path.exists() else {}) | {"more": program}, path)


def in_an_object_among_the_tensors(state: Path, program: Program) -> None:
    metadata = pickle.loads((state / ".metadata").read_bytes())
    objects = {key for key, saved in metadata.state_dict_metadata.items() if isinstance(saved, BytesStorageMetadata)}
    assert objects
    content = io.BytesIO()
    torch.save(program, content)
    for index, info in metadata.storage_data.items():
        if index.fqn in objects:
            file = state / info.relative_path
            metadata.storage_data[index] = _StorageInfo(
                info.relative_path, file.stat().st_size, len(content.getvalue())
            )
            file.write_bytes(file.read_bytes() + content.getvalue())
    (state / ".metadata").write_bytes(pickle.dumps(metadata))


def damaged(state: Path, program: Program) -> None:
    in_common(state, program)
    (state / "common.pt").write_bytes((state / "common.pt").read_bytes()[:37])


def copy_with(source: Path, target: Path, change: Any, program: Program) -> Path:
    """Copy a run, change its checkpoint and update the checksums. Return the checkpoint."""
    shutil.copytree(source, target)
    checkpoint = target / "checkpoints" / (target / "checkpoints" / "latest").read_text().strip()
    change(checkpoint / "state", program)
    manifest = json.loads((checkpoint / "checkpoint.json").read_text())
    manifest["checksums"] = {
        name: hashlib.sha256((checkpoint / "state" / name).read_bytes()).hexdigest() for name in manifest["checksums"]
    }
    (checkpoint / "checkpoint.json").write_text(json.dumps(manifest))
    return checkpoint


@pytest.mark.parametrize("change", [in_metadata, in_common, in_an_object_among_the_tensors, damaged])
def test_a_program_in_a_checkpoint_does_not_run_on_resume(
    trained: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Any
) -> None:
    config, source = trained
    has_run = tmp_path / "it ran"
    run_dir = tmp_path / "run"
    checkpoint = copy_with(source, run_dir, change, Program(has_run))
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")  # users set this for other programs
    code, output = run(config, run_dir, "--set", "steps=2", "--set", "checkpoint.interval=1", "--resume")
    assert not has_run.exists()
    errors = [line for line in output.splitlines() if line.startswith("grpo-mega: error: ")]
    assert code == 2 and len(errors) == 1 and str(checkpoint) in errors[0] and "Traceback" not in output, output


@pytest.mark.parametrize(
    "change",
    [in_metadata, *(pytest.param(c, marks=pytest.mark.full) for c in (in_common, in_an_object_among_the_tensors))],
)
def test_a_program_in_a_checkpoint_does_not_run_in_tools(
    trained: tuple[Path, Path], tmp_path: Path, change: Any
) -> None:
    _, source = trained
    has_run = tmp_path / "it ran"
    run_dir = tmp_path / "run"
    checkpoint = copy_with(source, run_dir, change, Program(has_run))
    commands = [
        ["-m", "grpo_mega.cli", "export", str(run_dir), str(tmp_path / "out")],
        ["-m", "grpo_mega.cli", "eval", str(run_dir), "--step", "1"],
        ["tools/inspect_checkpoint.py", str(checkpoint)],
        ["tools/convert_mcore_to_hf.py", str(checkpoint), str(tmp_path / "converted")],
        ["tools/verify_checkpoint.py", str(checkpoint), str(run_dir / "hf")],
    ]
    for command in commands:
        result = subprocess.run([sys.executable, *command], capture_output=True, text=True, cwd=ROOT)
        assert "Traceback" not in result.stderr and "usage" not in result.stderr, (command, result.stderr)
        assert not has_run.exists(), command


def test_only_scales_and_recipes_are_accepted_as_layer_state(tmp_path: Path) -> None:
    state = {"scale_fwd": torch.ones(3), "amax_history_fwd": torch.zeros(5, 3), "extra_fp8_variables": {"num_gemms": 1}}
    check_extra_state(pickle.dumps(state))
    # In a rank Megatron 0.19 loads the tensors, and delayed scaling has a recipe of Megatron.
    check_extra_state(b"cmegatron.core.safe_globals\nsafe_load_from_bytes\n(C\x01PtR.")
    check_extra_state(b"cmegatron.core.extensions.transformer_engine\nTEDelayedScaling\n)\x81.")
    with pytest.raises(pickle.UnpicklingError, match=r"it names _?io\.open, unexpected in the state of a layer"):
        check_extra_state(pickle.dumps(state | {"recipe": Program(tmp_path / "it ran")}))
    assert not (tmp_path / "it ran").exists()
