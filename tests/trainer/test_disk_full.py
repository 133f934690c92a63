"""When the disk fills up or the run folder is removed in training: a one-line error, and the last checkpoint is
intact.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from grpo_mega.errors import RunFolderError
from grpo_mega.tracking.writers import JsonLinesWriter
from grpo_mega.trainer.folder import reraise_with_run_dir
from tests.helpers.disks import fill, mounted
from tests.helpers.hostile_text import LINE_ENDS
from tests.helpers.runs import losses, run, start, wait_for_step
from tools.benchmarks import kills

pytestmark = pytest.mark.usefixtures("preloaded_python")

MODEL = {
    "num_hidden_layers": 2,
    "hidden_size": 44,
    "intermediate_size": 76,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}
MODEL |= {"layer_types": ["full_attention"] * 2}
STEPS = ("--set", "steps=30", "--set", "checkpoint.interval=4")


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return kills.write_inputs(tmp_path_factory.mktemp("inputs"), "dp=2", **MODEL)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    with mounted(tmp_path / "disk", "48m") as folder:
        yield folder


def errors(output: str) -> list[str]:
    assert "Traceback" not in output, output
    lines = [line for line in output.splitlines() if line.startswith("grpo-mega: ")]
    # A torch that is built for CUDA gets a note at the start of a run.
    return [line for line in lines if not line.startswith("grpo-mega: note: device=auto: torch is built for CUDA ")]


def end(process: subprocess.Popen[str]) -> str:
    output, _ = process.communicate(timeout=240)
    assert process.returncode == 2, output
    return output


@pytest.mark.distributed
@pytest.mark.waiting
def test_a_run_whose_disk_fills_up_ends_in_one_line_and_resumes_later(config: Path, disk: Path) -> None:
    run_dir = disk / "run"
    process = start(config, run_dir, *STEPS)
    wait_for_step(run_dir, 5, process)
    fill(disk)
    (error,) = errors(end(process))
    assert "free" in error and ("No space left on device" in error or "was not written" in error or "MiB free" in error)
    (disk / "filler").unlink()
    code, output = run(config, run_dir, *STEPS, "--resume")
    assert code == 0 and "resumed after step " in output, output
    assert len(losses(run_dir)) == 30


@pytest.mark.distributed
@pytest.mark.waiting
def test_a_run_whose_folder_is_removed_ends_in_one_line(config: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    process = start(config, run_dir, "--set", "steps=2000", "--set", "checkpoint.interval=0")
    wait_for_step(run_dir, 2, process)
    run_dir.rename(tmp_path / "moved")
    assert errors(end(process)) == [
        f"grpo-mega: error: run_dir={run_dir} was removed or moved while the run used it; start a new run"
    ]
    assert not run_dir.exists()


def test_every_file_of_the_log_names_the_folder_once_the_disk_is_full(small_disk: Path) -> None:
    writer = JsonLinesWriter(small_disk)
    writer.write_step(1, {"reward/mean": 1.0})
    fill(small_disk)
    text = LINE_ENDS * 4096
    for write in (
        lambda: writer.write_step(2, dict.fromkeys(map(str, range(9999)), 0.5)),
        lambda: writer.write_samples([{"response": text}]),
        lambda: writer.write_message(text),
        lambda: writer.write_loads(2, [[1] * 9999]),
    ):
        expected = r"run_dir=.* cannot be written \(.*No space left on device\); free its disk"
        with pytest.raises(RunFolderError, match=expected), reraise_with_run_dir(small_disk):
            write()
    assert (small_disk / "metrics.jsonl").read_text().splitlines()[0] == '{"step": 1, "reward/mean": 1.0}'


def test_a_removed_folder_is_noticed_at_the_next_step(tmp_path: Path) -> None:
    writer = JsonLinesWriter(tmp_path / "run")
    shutil.rmtree(tmp_path / "run")
    with pytest.raises(RunFolderError, match="was removed or moved"), reraise_with_run_dir(tmp_path / "run"):
        writer.write_step(1, {"reward/mean": 1.0})


def test_other_system_errors_are_not_changed(tmp_path: Path) -> None:
    with pytest.raises(ConnectionRefusedError), reraise_with_run_dir(tmp_path):
        raise ConnectionRefusedError(111, "Connection refused")
