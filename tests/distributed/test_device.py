"""The device layer on a CPU: reported memory, and a GPU that torch cannot use."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from grpo_mega import config as configs
from grpo_mega.cli.checks import Machine, find_all
from grpo_mega.distributed import device as devices
from grpo_mega.distributed import environment
from grpo_mega.distributed.device import Device, PeakMemory
from grpo_mega.errors import ConfigError

pytestmark = pytest.mark.usefixtures("preloaded_python")

CPU = Device("cpu", torch.device("cpu"))


def test_a_peak_is_reported_once_although_the_memory_is_freed() -> None:
    with open("/proc/self/clear_refs", "w") as file:
        try:
            file.write("5")
            file.flush()
        except OSError:
            pytest.skip("this kernel does not let a process reset its peak")
    peak = PeakMemory(CPU)
    before = peak.take()
    torch.ones(64 << 20, dtype=torch.uint8).sum()
    during, after = peak.take(), peak.take()
    assert during - before > 60 << 20 and after < during - (30 << 20)


ROOT = Path(__file__).resolve().parents[2]
SIGNS = (
    "dev/nvidia0",
    "dev/nvidiactl",
    "proc/driver/nvidia/version",
    "proc/driver/nvidia/gpus/0000:1b:00.0/information",
)


@pytest.fixture
def tools(tmp_path: Path) -> Path:
    """Return a folder for PATH with an nvidia-smi that finds no driver."""
    folder = tmp_path / "tools"
    folder.mkdir()
    (folder / "nvidia-smi").write_text("#!/bin/sh\necho cannot communicate with the NVIDIA driver >&2; exit 9\n")
    (folder / "nvidia-smi").chmod(0o755)
    return folder


@pytest.mark.parametrize("sign", SIGNS)
def test_a_gpu_is_detected_by_files_of_its_driver(sign: str, tmp_path: Path) -> None:
    assert environment.gpu_sign({}, tmp_path) is None
    (tmp_path / sign).parent.mkdir(parents=True)
    (tmp_path / sign).touch()
    found = environment.gpu_sign({}, tmp_path)
    assert found is not None and f"/{sign}".startswith(found)
    for hidden in ("", "-1", " "):
        assert environment.gpu_sign({"CUDA_VISIBLE_DEVICES": hidden}, tmp_path) is None
    assert environment.gpu_sign({"CUDA_VISIBLE_DEVICES": "0,1"}, tmp_path) == found


def test_a_card_without_a_driver_or_device_files_is_detected_on_the_bus(tmp_path: Path) -> None:
    def plug(address: str, vendor: str, kind: str) -> None:
        device = tmp_path / "sys/bus/pci/devices" / address
        device.mkdir(parents=True)
        (device / "vendor").write_text(f"{vendor}\n")
        (device / "class").write_text(f"{kind}\n")

    plug("0000:00:02.0", "0x8086", "0x030000")  # another vendor's display
    plug("0000:1b:00.1", "0x10de", "0x040300")  # the audio device of a card
    assert environment.gpu_sign({}, tmp_path) is None
    plug("0000:1b:00.0", "0x10de", "0x030200")
    assert environment.gpu_sign({}, tmp_path) == "/sys/bus/pci/devices/0000:1b:00.0"
    assert environment.gpu_sign({"CUDA_VISIBLE_DEVICES": ""}, tmp_path) is None


def test_a_torch_for_cuda_on_a_machine_without_a_gpu_is_named_in_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    def notes(device: str, cuda: str | None) -> list[str]:
        config = configs.load(ROOT / "examples" / "quickstart.yaml", [f"device={device}"])
        found = find_all(config, Machine(1, 1, cuda=cuda)).notes
        return [note for note in found if "built for CUDA 13.0" in note]

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert len(notes("auto", "13.0")) == 1
    assert not notes("auto", None) and not notes("cpu", "13.0")


def test_a_rank_does_not_train_on_the_cpu_if_a_gpu_is_unusable(tools: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if torch.cuda.is_available():
        pytest.skip("torch sees a GPU here")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.setenv("PATH", str(tools))
    with pytest.raises(ConfigError, match=r"device=auto: .*nvidia.*; .*device: cpu"):
        devices.select("auto", 0)
    assert devices.select("cpu", 0).type == "cpu"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert devices.select("auto", 0).type == "cpu"


@pytest.mark.parametrize("command", ["train", "check", "eval"])
def test_an_unusable_gpu_is_refused_before_any_rank_starts(command: str, tools: Path, tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("torch sees a GPU here")
    config = tmp_path / "config.yaml"
    data = "{train: none.jsonl, heldout: none.jsonl}"
    config.write_text(f"{{run_dir: {tmp_path}/run, steps: 1, model: {{path: none}}, data: {data}}}")
    words = [command, str(config), *(["--layouts", "tp=2"] if command == "check" else [])]
    variables = os.environ | {"PATH": f"{tools}:{os.environ['PATH']}", "CUDA_VISIBLE_DEVICES": "0"}
    run = [sys.executable, "-m", "grpo_mega.cli", *words]
    done = subprocess.run(run, cwd=ROOT, env=variables, capture_output=True, text=True)
    assert done.returncode == 2 and "grpo-mega: error: device=auto: " in done.stderr, done.stderr
    assert done.stderr.count("device=auto") == 1 and not (tmp_path / "run").exists()
    done = subprocess.run(run, cwd=ROOT, env=variables | {"CUDA_VISIBLE_DEVICES": ""}, capture_output=True, text=True)
    assert done.returncode == 2 and "device" not in done.stderr, done.stderr
