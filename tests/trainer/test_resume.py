"""A stopped and resumed run ends like an uninterrupted run, in any layout. Damaged checkpoints are named.

Starting a run is mostly imports, so tests share runs where possible.
"""

from __future__ import annotations

import hashlib
import io
import json
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from grpo_mega.checkpoint_io.dcp_read import find_tensor, read_metadata
from grpo_mega.megatron.optimizer import separate_steps
from tests.helpers import preloaded
from tests.helpers.hostile_text import LINE_ENDS, SURROGATES
from tests.helpers.runs import check_same_weights, losses, metrics, read, run, start, stop_after, wait_for_step
from tools.benchmarks import kills
from tools.benchmarks.kills import End, read_end

pytestmark = [pytest.mark.distributed, pytest.mark.waiting, pytest.mark.usefixtures("preloaded_python")]

# Embeddings are tied, and no size is a multiple of 64 or 128, so every gradient bucket ends with padding.
MODEL = {
    "num_hidden_layers": 5,
    "hidden_size": 44,
    "intermediate_size": 76,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "layer_types": ["full_attention"] * 5,
    "tie_word_embeddings": True,
}


SYNC_STEPS = 3
KEEP = 'cp "$GRPO_MEGA_REPLAY" "$GRPO_MEGA_RUN_DIR/seen-$GRPO_MEGA_ITERATION-$GRPO_MEGA_STEP.jsonl"'


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write inputs with byte order marks. Prompts, answers and verdicts contain line separators, and surrogates if
    allowed.
    """
    folder = tmp_path_factory.mktemp("inputs")
    path = kills.write_inputs(folder, "tp=1", **MODEL)
    for name in ("train", "heldout"):
        rows = [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]
        rows = [{key: value + LINE_ENDS for key, value in row.items()} | {"note": SURROGATES} for row in rows]
        lines = [json.dumps(row, ensure_ascii=False).replace(SURROGATES, "\\ud800") + "\n" for row in rows]
        (folder / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8-sig")
    config = json.loads(path.read_text())
    config["rewards"]["functions"] = [{"name": "tests.helpers.hostile_text.share_of_vowels"}]
    config["algorithm"] |= {"kl_target": 1.0, "kl_horizon": 40.0}  # kl_beta changes by 8% per step
    config["algorithm"] |= {"ref_model_sync_steps": SYNC_STEPS, "ref_model_mixup_alpha": 0.4}
    config["rewards"]["refresh_command"] = KEEP
    config["data"]["replay_fraction"] = 0.2
    path.write_text(json.dumps(config), encoding="utf-8-sig")
    return path


@pytest.fixture(scope="module")
def whole(inputs: Path) -> End:
    """Run without interruption on a single rank."""
    return kills.whole_run(inputs, inputs.parent / "whole")[0]


def seen(run_dir: Path) -> dict[str, str]:
    """Return the replay files that the refresh command read, keyed by iteration and step."""
    return {path.stem.removeprefix("seen-"): path.read_text() for path in run_dir.glob("seen-*.jsonl")}


def test_a_run_stopped_by_the_stop_file_resumes_without_any_difference(
    inputs: Path, whole: End, tmp_path: Path
) -> None:
    output = stop_after(inputs, tmp_path / "run", 5)
    assert "as requested; continue with the same command and --resume" in output
    assert not (tmp_path / "run" / "stop").exists()
    assert not (tmp_path / "run" / "hf").exists()
    code, output = run(inputs, tmp_path / "run", "--resume")
    assert code == 0 and "resumed after step" in output and "algorithm.kl_beta continues at 0.00" in output
    assert read_end(tmp_path / "run") == whole
    assert seen(tmp_path / "run") == seen(inputs.parent / "whole")
    betas = [row["kl/beta"] for row in metrics(tmp_path / "run") if "kl/beta" in row]
    assert betas == pytest.approx([0.01 * 0.92**step for step in range(len(betas))]) and len(betas) > 6


@pytest.mark.parametrize(
    "change",
    [
        pytest.param("{pp: 2} {tp: 2}", marks=pytest.mark.sweep),
        "{tp: 2, pp: 2} {cp: 2}",
        pytest.param("{cp: 2} {dp: 2}", marks=pytest.mark.sweep),
    ],
)
@pytest.mark.full
def test_a_run_resumes_in_another_layout_with_the_same_losses(
    inputs: Path, whole: End, tmp_path: Path, change: str
) -> None:
    first, then = change.replace("} {", "}|{").split("|")
    stop_after(inputs, tmp_path / "run", 4, "--set", f"layout={first}")
    code, output = run(inputs, tmp_path / "run", "--resume", "--set", f"layout={then}")
    assert code == 0, output
    assert losses(tmp_path / "run") == pytest.approx(losses(inputs.parent / "whole"), abs=1e-5)


def test_the_reward_model_is_refreshed_between_iterations(whole: End, inputs: Path) -> None:
    """The replay holds every sample of the last iteration and a share of earlier samples."""
    found = seen(inputs.parent / "whole")
    assert sorted(found) == ["1-3", "2-6", "3-9", "4-12", "5-15"]
    for number, text in enumerate((found[name] for name in sorted(found)), 1):
        rows = [json.loads(line) for line in text.split("\n") if line]
        last = [row for row in rows if row["iteration"] == number]
        assert len(last) == SYNC_STEPS * 16 and {row["step"] for row in last} == {
            3 * number - 2,
            3 * number - 1,
            3 * number,
        }
        assert len(rows) - len(last) == round(0.2 * 48 * (number - 1))
        assert all(row["iteration"] == -(-row["step"] // SYNC_STEPS) <= number for row in rows)
    kept = {(row["step"], row["prompt_id"], row["index"]): row for row in rows}
    logged = [json.loads(line) for line in read(inputs.parent / "whole" / "samples.jsonl").split("\n") if line]
    pairs = [(row, kept[key]) for row in logged if (key := (row["step"], row["prompt_id"], row["index"])) in kept]
    assert len(pairs) >= 12
    for name in ("prompt", "response", "answer", "finish_reason", "reward", "rewards"):
        assert all(row[name] == mine[name] for row, mine in pairs), name


@pytest.mark.full
def test_a_failed_refresh_leaves_a_checkpoint_and_the_run_resumes(inputs: Path, whole: End, tmp_path: Path) -> None:
    settings = ("--set", "checkpoint.interval=0", "--set", "rewards.refresh_command=echo no reward model; exit 3")
    code, output = run(inputs, tmp_path / "run", "--set", "layout={dp: 2}", *settings)
    assert code == 2, output
    (line,) = [text for text in output.splitlines() if "error:" in text]
    log = tmp_path / "run" / "logs" / "refresh-000003.log"
    assert f"rewards.refresh_command ended with code 3; see {log}, correct it and continue with --resume" in line
    assert f"; a checkpoint of step 3 is in {tmp_path / 'run' / 'checkpoints'}" in line
    assert log.read_text() == "no reward model\n"
    code, output = run(inputs, tmp_path / "run", "--resume")
    assert code == 0 and "from here on rewards.refresh_command=" in output, output
    assert losses(tmp_path / "run") == pytest.approx(losses(inputs.parent / "whole"), abs=1e-5)
    assert seen(tmp_path / "run").keys() == seen(inputs.parent / "whole").keys()


@pytest.mark.parametrize("target", ["the launcher", pytest.param("a rank", marks=pytest.mark.full)])
def test_sigterm_leads_to_a_checkpoint_and_exit_code_0(
    inputs: Path, tmp_path: Path, target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", preloaded.REAL)  # with the real Python, ranks are children of the launcher
    process = start(inputs, tmp_path / "run", "--set", "layout={dp: 2}", "--set", "checkpoint.interval=0")
    wait_for_step(tmp_path / "run", 2, process)
    if target == "a rank":
        ranks = subprocess.run(
            ["pgrep", "-P", str(process.pid)], capture_output=True, text=True, check=True
        ).stdout.split()
        subprocess.run(["kill", "-TERM", ranks[-1]], check=True)
    else:
        process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0, output
    assert "continue with the same command and --resume" in output
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
        (state / "metadata.json").unlink()
        return state / "metadata.json"

    for name, damage in {"flipped": flip, "cut": cut, "missing": remove}.items():
        run_dir = tmp_path / name
        shutil.copytree(source, run_dir)
        victim = damage(run_dir / "checkpoints" / newest / "state")
        code, output = run(inputs, run_dir, "--resume")
        assert code == 2, output
        (line,) = [text for text in output.splitlines() if "error:" in text]
        assert str(victim) in line and "latest" in line


def test_a_run_without_its_pointer_resumes_from_its_newest_checkpoint(inputs: Path, whole: End, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    shutil.copytree(inputs.parent / "whole", run_dir)
    shutil.rmtree(run_dir / "checkpoints" / "step-000016")
    shutil.copytree(run_dir / "checkpoints" / "step-000015", run_dir / "checkpoints" / "step-000099-mine")
    (run_dir / "checkpoints" / "latest").unlink()
    heldout = inputs.parent / "heldout.jsonl"
    original = heldout.read_bytes()
    rows = [json.loads(line) | {"source": "x"} for line in original.decode("utf-8-sig").split("\n") if line]
    heldout.write_text("".join(json.dumps(row) + "\n" for row in rows))
    code, output = run(inputs, run_dir, "--resume", "--set", "checkpoint.keep=1")
    heldout.write_bytes(original)
    assert code == 0 and f"resumed after step 15 from {run_dir}/checkpoints/step-000015" in output, output
    assert f"data.heldout={heldout} has changed since the run's checkpoint" in " ".join(output.split())
    assert "data.train=" not in output
    assert read_end(run_dir) == whole
    assert {p.name for p in (run_dir / "checkpoints").iterdir()} == {"latest", "step-000016", "step-000099-mine"}


def test_master_weights_that_do_not_match_the_weights_are_refused(inputs: Path, whole: End, tmp_path: Path) -> None:
    """One byte of a master weight differs but the checksums match, as if the run had written it."""
    run_dir = tmp_path / "run"
    shutil.copytree(inputs.parent / "whole", run_dir)
    checkpoint = run_dir / "checkpoints" / (run_dir / "checkpoints" / "latest").read_text().strip()
    state = checkpoint / "state"
    [chunk, *_] = read_metadata(state)["optimizer.state.param.decoder.final_layernorm.weight"].chunks
    content = bytearray((state / chunk.file).read_bytes())
    found = find_tensor(io.BytesIO(content[chunk.start :][: chunk.length]))
    content[chunk.start + found.data_offset + 2] ^= 0x40
    (state / chunk.file).write_bytes(content)
    manifest = json.loads((checkpoint / "checkpoint.json").read_text())
    manifest["checksums"][chunk.file] = hashlib.sha256(content).hexdigest()
    (checkpoint / "checkpoint.json").write_text(json.dumps(manifest))
    code, output = run(inputs, run_dir, "--resume", "--set", "layout={pp: 2}")
    assert code == 2, output
    lines = [line for line in output.splitlines() if "error:" in line]
    assert lines and all(
        "grpo-mega export RUN_DIR OUT --step N" in line and "final_layernorm" in line for line in lines
    )
    step = str(manifest["step"])
    command = [sys.executable, "-m", "grpo_mega.cli", "export", str(run_dir), str(tmp_path / "out"), "--step", step]
    exported = subprocess.run(command, capture_output=True, text=True, cwd=kills.harness.ROOT)
    assert exported.returncode == 0, exported.stderr
    check_same_weights(tmp_path / "out", run_dir / "hf")


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


def test_a_start_model_that_changed_is_refused(inputs: Path, whole: End, tmp_path: Path) -> None:
    shutil.copytree(inputs.parent / "whole", tmp_path / "run")
    file = inputs.parent / "model" / "config.json"
    content = file.read_text()
    file.write_text(json.dumps(json.loads(content) | {"rms_norm_eps": 1e-3}))  # shapes do not change
    code, output = run(inputs, tmp_path / "run", "--resume")
    file.write_text(content)
    assert (
        code == 2 and "must hold the model that the run started from" in output and "config.json differs" in output
    ), output


def test_a_run_in_use_is_refused(inputs: Path, tmp_path: Path) -> None:
    process = start(inputs, tmp_path / "run")
    wait_for_step(tmp_path / "run", 1, process)
    code, output = run(inputs, tmp_path / "run", "--resume")
    process.kill()
    process.communicate()
    assert code == 2 and "is in use by another process" in output


def test_weights_that_blow_up_stop_the_run_with_a_checkpoint(inputs: Path, tmp_path: Path) -> None:
    """A NaN mean importance ratio does not trigger the early stop instead."""
    settings = (
        "optimizer.lr=1e30",
        "optimizer.clip_grad=0",
        "max_nonfinite_steps=2",
        "algorithm.early_stop_imp_ratio=5.0",
    )
    code, output = run(inputs, tmp_path / "run", *(part for setting in settings for part in ("--set", setting)))
    assert code == 2, output
    assert "loss or gradient not finite, from prompt" in output
    assert "was not finite in 2 steps in a row" in output
    assert (tmp_path / "run" / "checkpoints" / "latest").exists()
    ends = [row for row in metrics(tmp_path / "run") if row.get("ratio/mean") == "NaN"]
    assert len(ends) >= 2 and all(row["nonfinite_mini_batches"] > 0 for row in ends)


@pytest.mark.full
def test_a_diverged_run_resumes_with_other_settings_and_the_next_prompts(inputs: Path, tmp_path: Path) -> None:
    """A huge KL coefficient makes gradients infinite as soon as the policy differs from the reference."""
    always = ("--set", "log.samples_per_step=16", "--set", "steps=6")
    fatal = ("--set", "algorithm.kl_beta=1e37", "--set", "max_nonfinite_steps=2")
    code, output = run(inputs, tmp_path / "run", *always, *fatal)
    assert code == 2 and "in 2 steps in a row, up to step 2;" in output, output
    assert "continue with --resume and a lower optimizer.lr" in output
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
    # Two steps draw all eight prompts. If a step were drawn again, some prompts would be missing.
    drawn: dict[int, set[str]] = {}
    for text in (tmp_path / "run" / "samples.jsonl").read_text().splitlines():
        row = json.loads(text)
        drawn.setdefault((row["step"] - 1) // 2, set()).add(row["prompt"])
    assert [len(prompts) for prompts in drawn.values()] == [8, 8, 8]


def test_weights_that_do_not_change_in_optimizer_steps_are_an_error(inputs: Path, tmp_path: Path) -> None:
    code, output = run(inputs, tmp_path / "run", "--set", "optimizer.lr=1e-60", "--set", "optimizer.warmup_steps=0")
    pattern = r"the weights did not change in \d+ optimizer steps since step \d+; is optimizer.lr too small\?"
    assert code == 2 and re.search(pattern, output)


@pytest.mark.full
def test_a_run_without_a_reward_signal_yet_logs_a_warning_and_continues(inputs: Path, tmp_path: Path) -> None:
    settings = (
        "steps=3",
        "rewards={functions: [{name: accuracy}]}",
        "algorithm={group_size: 4}",
        "optimizer.warmup_steps=0",
    )
    settings += ("data.replay_fraction=0.1",)
    code, output = run(inputs, tmp_path / "run", *(part for setting in settings for part in ("--set", setting)))
    assert code == 0, output
    rows = [json.loads(line) for line in read(tmp_path / "run" / "metrics.jsonl").split("\n") if line]
    assert [row["grad_norm"] for row in rows if "grad_norm" in row] == [0.0] * 3  # no answer is correct
    said = [json.loads(line) for line in read(tmp_path / "run" / "messages.jsonl").split("\n") if line]
    warnings = [row["text"] for row in said if row.get("level") == "warning"]
    assert sum(": past warm-up, no gradient was above 0; do rewards differ" in text for text in warnings) == 2


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


def test_every_parameter_gets_its_own_step_count() -> None:
    """With one shared step tensor, torch's Adam would count an update once per parameter."""
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
