"""The wheel contains everything that a run needs. The command line and training work from it without the repository."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tools.benchmarks import kills

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the wheel from a copy of the tracked files, and unpack it."""
    folder = tmp_path_factory.mktemp("wheel")
    (folder / "source").mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE", "grpo_mega"):
        subprocess.run(["cp", "-r", str(ROOT / name), str(folder / "source")], check=True)
    command = [
        sys.executable,
        "-m",
        "build",
        "--wheel",
        "--no-isolation",
        "--outdir",
        str(folder),
        str(folder / "source"),
    ]
    built = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert built.returncode == 0, built.stdout + built.stderr
    [wheel] = folder.glob("grpo_mega-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder / "installed")
    return folder / "installed"


def test_a_wheel_has_only_the_package_and_its_license(installed: Path) -> None:
    [metadata] = installed.glob("grpo_mega-*.dist-info")
    assert "License-Expression: Apache-2.0" in (metadata / "METADATA").read_text()
    assert "Apache License" in (metadata / "licenses" / "LICENSE").read_text()
    assert {path.name for path in installed.iterdir()} == {"grpo_mega", metadata.name}


def test_every_built_in_reward_of_a_wheel_can_be_used(installed: Path) -> None:
    """The wheel's registry resolves each name and does not look outside the package."""
    program = (
        "import grpo_mega; from grpo_mega.rewards import BUILT_IN, resolve_reward; print(grpo_mega.__file__, "
        "[name for name in BUILT_IN if not resolve_reward(name).__module__.startswith('grpo_mega.')])"
    )
    environment = os.environ | {"PYTHONPATH": f"{installed}"}
    ended = subprocess.run(
        [sys.executable, "-c", program], cwd=installed, env=environment, capture_output=True, text=True, timeout=240
    )
    assert ended.stdout == f"{installed / 'grpo_mega' / '__init__.py'} []\n", ended.stdout + ended.stderr


@pytest.mark.full
def test_a_wheel_trains(installed: Path, tmp_path: Path) -> None:
    environment = os.environ | {"PYTHONPATH": f"{installed}", "OMP_NUM_THREADS": "1"}

    def grpo_mega(*arguments: str) -> str:
        command = [sys.executable, "-m", "grpo_mega.cli", *arguments]
        ended = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240)
        assert ended.returncode == 0, ended.stdout + ended.stderr
        return ended.stdout

    assert "usage: grpo-mega" in grpo_mega("--help")
    config = kills.write_inputs(tmp_path, "tp=1")
    rewards = "rewards.functions=[{name: format}]"
    grpo_mega("train", str(config), "--set", f"run_dir={tmp_path / 'run'}", "--set", "steps=1", "--set", rewards)
    assert (tmp_path / "run" / "hf" / "model.safetensors").is_file()
    grpo_mega("report", str(tmp_path / "run"))
    assert "<html" in (tmp_path / "run" / "report.html").read_text()
