"""Nothing lost: stopped and resumed runs end as uninterrupted ones, in the same layout and in others; damage is named.

Each start of a run is mostly imports; runs are shared between tests where they can be.
"""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import bench_kills
import pytest
import torch
from bench_kills import End, read_end

from grpo_mega.megatron.optimizer import separate_steps

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("inputs")
    bench_kills.write_inputs(folder, "tp=1")
    return folder / "config.json"


@pytest.fixture(scope="module")
def whole(inputs: Path) -> End:
    """An uninterrupted run of a single rank."""
    return bench_kills.whole_run(inputs, inputs.parent / "whole")[0]


def start(config: Path, run_dir: Path, *arguments: str) -> subprocess.Popen[str]:
    """A run whose stdout and stderr are read together."""
    return bench_kills.start(config, run_dir, list(arguments), output=subprocess.PIPE)


def run(config: Path, run_dir: Path, *arguments: str) -> tuple[int, str]:
    process = start(config, run_dir, *arguments)
    output, _ = process.communicate(timeout=240)
    return process.returncode, output


def stop_after(config: Path, run_dir: Path, step: int, *arguments: str) -> str:
    """A run that is asked to stop, by its file, once it has logged `step`."""
    process = start(config, run_dir, *arguments)
    wait_for_step(run_dir, step, process)
    (run_dir / "stop").touch()
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0, output
    return output


def wait_for_step(run_dir: Path, step: int, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 300
    while f'{{"step": {step}, ' not in _read(run_dir / "metrics.jsonl"):
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.02)


def losses(run_dir: Path) -> list[float]:
    return [row["loss/total"] for row in metrics(run_dir) if "loss/total" in row]


def metrics(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def test_a_run_stopped_by_its_file_goes_on_as_if_nothing_had_happened(inputs: Path, whole: End, tmp_path: Path) -> None:
    output = stop_after(inputs, tmp_path / "run", 5)
    assert "as asked; go on with the same command and --resume" in output
    assert not (tmp_path / "run" / "stop").exists()
    assert not (tmp_path / "run" / "hf").exists()
    code, output = run(inputs, tmp_path / "run", "--resume")
    assert code == 0 and "resumed after step" in output
    assert read_end(tmp_path / "run") == whole


def test_a_run_that_aborts_stragglers_aborts_the_same_ones_again(inputs: Path, tmp_path: Path) -> None:
    """Though its ranks sample at different speeds: the embedded engine goes by tokens, not by time."""
    settings = ("--set", "layout={dp: 2}", "--set", "rollout.oversample=1.5", "--set", "steps=6")
    bench_kills.finish(bench_kills.start(inputs, tmp_path / "whole", list(settings)), tmp_path / "whole")
    stop_after(inputs, tmp_path / "run", 2, *settings)
    code, output = run(inputs, tmp_path / "run", *settings, "--resume")
    assert code == 0, output
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")
    assert read_end(tmp_path / "run").weights == read_end(tmp_path / "whole").weights
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "rollout/aborted_tokens" in row]
    assert len(steps) == 6
    assert all((row["rollout/begun_groups"], row["rollout/aborted_groups"]) == (6, 2) for row in steps)
    assert all(row["rollout/kept_length"] == pytest.approx(row["response_length/mean"]) for row in steps)
    assert sum(row["rollout/aborted_tokens"] for row in steps) > 0


@pytest.mark.parametrize(("first", "then"), [("{tp: 2, pp: 2}", "{dp: 2}"), ("{pp: 2}", "{tp: 2}")])
def test_a_run_goes_on_in_another_layout_with_the_same_losses(
    inputs: Path, whole: End, tmp_path: Path, first: str, then: str
) -> None:
    stop_after(inputs, tmp_path / "run", 4, "--set", f"layout={first}")
    code, output = run(inputs, tmp_path / "run", "--resume", "--set", f"layout={then}")
    assert code == 0, output
    assert losses(tmp_path / "run") == pytest.approx(losses(inputs.parent / "whole"), abs=1e-5)


@pytest.mark.parametrize("target", ["the launcher", "a rank"])
def test_sigterm_leads_to_a_checkpoint_and_exit_code_0(inputs: Path, tmp_path: Path, target: str) -> None:
    process = start(inputs, tmp_path / "run", "--set", "layout={dp: 2}", "--set", "checkpoint.interval=0")
    wait_for_step(tmp_path / "run", 2, process)
    if target == "a rank":
        ranks = subprocess.run(["pgrep", "-P", str(process.pid)], capture_output=True, text=True, check=True).stdout.split()
        subprocess.run(["kill", "-TERM", ranks[-1]], check=True)
    else:
        process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0, output
    assert "go on with the same command and --resume" in output
    assert (tmp_path / "run" / "checkpoints" / "latest").exists()


def test_a_damaged_checkpoint_is_named_when_it_is_loaded(inputs: Path, whole: End, tmp_path: Path) -> None:
    source = inputs.parent / "whole"
    newest = (source / "checkpoints" / "latest").read_text().strip()

    def flip(state: Path) -> Path:
        victim = next(state.glob("*.distcp"))
        content = bytearray(victim.read_bytes())
        content[len(content) // 2] ^= 1
        victim.write_bytes(content)
        return victim

    def cut(state: Path) -> Path:
        victim = next(state.glob("*.distcp"))
        victim.write_bytes(victim.read_bytes()[:1000])
        return victim

    def remove(state: Path) -> Path:
        (state / "common.pt").unlink()
        return state / "common.pt"

    for name, damage in {"flipped": flip, "cut": cut, "missing": remove}.items():
        run_dir = tmp_path / name
        shutil.copytree(source, run_dir)
        victim = damage(run_dir / "checkpoints" / newest / "state")
        code, output = run(inputs, run_dir, "--resume")
        assert code == 2, output
        (line,) = [text for text in output.splitlines() if "error:" in text]
        assert str(victim) in line and "latest" in line


def test_a_checkpoint_of_another_model_is_refused(inputs: Path, whole: End, tmp_path: Path) -> None:
    shutil.copytree(inputs.parent / "whole", tmp_path / "run")
    model = tmp_path / "model"
    shutil.copytree(inputs.parent / "model", model)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"intermediate_size": config["intermediate_size"] * 2}))
    recorded = tmp_path / "run" / "config.yaml"
    recorded.write_text(recorded.read_text().replace(str(inputs.parent / "model"), str(model)))
    code, output = run(inputs, tmp_path / "run", "--resume", "--set", f"model.path={model}")
    assert code == 2 and "is of another model" in output


def test_a_run_in_use_is_refused(inputs: Path, tmp_path: Path) -> None:
    process = start(inputs, tmp_path / "run")
    wait_for_step(tmp_path / "run", 1, process)
    code, output = run(inputs, tmp_path / "run", "--resume")
    process.kill()
    process.communicate()
    assert code == 2 and "is in use by another process" in output


def test_weights_that_blow_up_stop_the_run_with_a_checkpoint(inputs: Path, tmp_path: Path) -> None:
    """Though a mean importance ratio that is NaN is not below the limit of an early stop either."""
    settings = ("optimizer.lr=1e30", "optimizer.clip_grad=0", "max_nonfinite_steps=2", "algorithm.early_stop_imp_ratio=5.0")
    code, output = run(inputs, tmp_path / "run", *(part for setting in settings for part in ("--set", setting)))
    assert code == 2, output
    assert "loss or gradient not finite, from prompt" in output
    assert "was not finite in 2 steps in a row" in output
    assert (tmp_path / "run" / "checkpoints" / "latest").exists()
    ends = [row for row in metrics(tmp_path / "run") if row.get("ratio/mean") == "NaN"]
    assert len(ends) >= 2 and all(row["nonfinite_mini_batches"] > 0 for row in ends)


def test_a_run_that_diverged_goes_on_with_gentler_settings_and_the_prompts_that_come_next(inputs: Path, tmp_path: Path) -> None:
    """A KL coefficient beyond reason makes gradients infinite as soon as the policy has left the reference."""
    always = ("--set", "log.samples_per_step=16", "--set", "steps=6")
    fatal = ("--set", "algorithm.kl_beta=1e37", "--set", "max_nonfinite_steps=2")
    code, output = run(inputs, tmp_path / "run", *always, *fatal)
    assert code == 2 and "in 2 steps in a row, up to step 2;" in output, output
    assert "go on with --resume and a lower optimizer.lr" in output
    code, output = run(inputs, tmp_path / "run", *always, "--resume", "--set", "optimizer.lr=1e-4")
    assert code == 0, output
    for line in (
        "from here on optimizer.lr=0.0001; it was 0.001",
        "from here on algorithm.kl_beta=0.01; it was 1e+37",
        "from here on max_nonfinite_steps=3; it was 2",
    ):
        assert line in output and line in (tmp_path / "run" / "messages.jsonl").read_text()
    rows = [row for row in metrics(tmp_path / "run") if "loss/total" in row]
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    assert [row["nonfinite_mini_batches"] for row in rows] == [1, 2, 0, 0, 0, 0]
    assert all(0 < row["lr"] <= 1e-4 for row in rows[2:])
    # Two steps draw all eight prompts, so that a step that were drawn again would leave some out.
    drawn: dict[int, set[str]] = {}
    for text in (tmp_path / "run" / "samples.jsonl").read_text().splitlines():
        row = json.loads(text)
        drawn.setdefault((row["step"] - 1) // 2, set()).add(row["prompt"])
    assert [len(prompts) for prompts in drawn.values()] == [8, 8, 8]


def test_weights_that_do_not_move_though_steps_are_taken_are_an_error(inputs: Path, tmp_path: Path) -> None:
    code, output = run(inputs, tmp_path / "run", "--set", "optimizer.lr=1e-60", "--set", "optimizer.warmup_steps=0")
    assert code == 2 and "nothing trains: is optimizer.lr too small?" in output


def test_a_disk_too_full_for_a_checkpoint_is_named(inputs: Path, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk)], capture_output=True)
    if mounted.returncode:
        pytest.skip("needs the right to mount a small file system (run as root)")
    try:
        code, output = run(inputs, disk / "run")
        assert code == 2, output
        assert "a checkpoint may need" in output and "free the disk and resume" in output
        assert not list((disk / "run" / "checkpoints").glob("step-*"))
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_every_parameter_gets_a_step_count_of_its_own() -> None:
    """Loaded from one shared tensor, torch's Adam would count one update once for each parameter."""
    parameters = [torch.nn.Parameter(torch.ones(2)) for _ in range(3)]
    adam = torch.optim.AdamW(parameters, lr=0.1)
    shared = torch.tensor(4.0)
    for p in parameters:
        adam.state[p] = {"step": shared, "exp_avg": torch.zeros(2), "exp_avg_sq": torch.zeros(2)}
        p.grad = torch.ones(2)

    class Wrapper:
        optimizer = adam

    separate_steps(Wrapper())  # type: ignore[arg-type]
    adam.step()
    assert [float(adam.state[p]["step"]) for p in parameters] == [5.0, 5.0, 5.0]


def _read(path: Path) -> str:
    return path.read_text() if path.exists() else ""
