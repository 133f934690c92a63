"""Interrupted conversions leave nothing that looks finished, and they resume. Memory does not depend on tensor
sizes.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import convert_hf_to_mcore
import pytest
import torch

from grpo_mega.checkpoint_io.convert import convert_hf_to_mcore as convert
from grpo_mega.checkpoint_io.convert import convert_mcore_to_hf
from grpo_mega.checkpoint_io.output import JOURNAL
from grpo_mega.weights.families import family_of
from grpo_mega.weights.spec import ModelShape
from tests.checkpoint_io.families import CASES, save, tensors_of

ROOT = Path(__file__).resolve().parents[2]
TOOL = ROOT / "tools/convert_hf_to_mcore.py"
LARGE = {
    "model_type": "llama",
    "num_hidden_layers": 12,
    "hidden_size": 1024,
    "intermediate_size": 8192,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 24576,
    "tie_word_embeddings": True,
}


def make_large(folder: Path) -> tuple[int, int]:
    """Write about 0.7 GB of bfloat16. Return the bytes of all tensors and of the largest tensor."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LARGE))
    shapes = family_of("llama").hf_tensors(ModelShape.from_hf_config(LARGE))
    header, offset = {}, 0
    for name, shape in shapes.items():
        size = 2 * torch.Size(shape).numel()
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    block = torch.randn(1 << 20).bfloat16().view(torch.uint8).numpy().tobytes()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for start in range(0, offset, len(block)):
            file.write(block[: min(len(block), offset - start)])
    return offset, max(2 * torch.Size(s).numel() for s in shapes.values())


def _take_interrupts() -> None:
    """Handle SIGINT again, because background processes of a shell and their children ignore it."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.mark.parametrize("kind", [pytest.param(signal.SIGKILL, marks=pytest.mark.full), signal.SIGINT])
def test_an_interrupted_conversion_leaves_no_output_and_resumes(kind: signal.Signals, tmp_path: Path) -> None:
    """Stop the tool as soon as its journal names a tensor, before most tensors are written."""
    make_large(tmp_path / "hf")
    out, journal = tmp_path / "out", tmp_path / "out.partial" / JOURNAL
    command = [sys.executable, str(TOOL), str(tmp_path / "hf"), str(out), "--workers", "1"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    for _ in range(5):  # on a busy machine the tool may end before the signal
        shutil.rmtree(out, ignore_errors=True)
        running = subprocess.Popen(
            command, env=environment, stderr=subprocess.PIPE, text=True, preexec_fn=_take_interrupts
        )
        while running.poll() is None and not (journal.exists() and journal.read_text().count("\n") > 1):
            time.sleep(0.005)
        running.send_signal(kind)
        error = running.communicate()[1]
        if running.returncode != 0:
            break
    if kind == signal.SIGINT:
        assert running.returncode == 130 and error.endswith("interrupted; run the same command again to continue\n")
    assert not out.exists()
    written = set(journal.read_text().split()[1:])
    assert written
    assert not (tmp_path / "out.partial/.metadata").exists() and not (tmp_path / "out.partial/metadata.json").exists()

    report = convert(tmp_path / "hf", out, show_progress=False)
    assert 0 < report.resumed_bytes <= report.num_bytes
    assert sorted(p.name for p in tmp_path.iterdir()) == ["hf", "out"] and not (out / JOURNAL).exists()
    convert_mcore_to_hf(out, tmp_path / "back", show_progress=False)
    ours, theirs = tensors_of(tmp_path / "back"), tensors_of(tmp_path / "hf")
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[n], theirs[n]) for n in theirs)


def test_remains_of_another_conversion_are_not_resumed(tmp_path: Path) -> None:
    source = save(CASES["qwen2"], tmp_path / "hf")
    partial = tmp_path / "out.partial"
    partial.mkdir()
    (partial / JOURNAL).write_text("00000000\n0\n1\n2\n")
    (partial / "__0_0.distcp").write_bytes(b"other")
    assert convert(source, tmp_path / "out", show_progress=False).resumed_bytes == 0
    assert not partial.exists()


def test_bytes_that_changed_on_disk_are_detected_when_read_back(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """After a power cut, the journal may list a tensor as written although the file holds other bytes."""
    source = save(CASES["qwen2"], tmp_path / "hf")
    convert(source, tmp_path / "whole", show_progress=False)
    noted = fingerprint_of(source, tmp_path)
    partial = tmp_path / "out.partial"
    partial.mkdir()
    (partial / "__0_0.distcp").write_bytes(bytes((tmp_path / "whole/__0_0.distcp").stat().st_size))
    (partial / JOURNAL).write_text(f"{noted}\n0\n")
    assert convert_hf_to_mcore.main([str(source), str(tmp_path / "out")]) == 2
    expected = "__0_0.distcp: model.embed_tokens.weight differs from its source when read back; check the disk\n"
    assert capsys.readouterr().err.endswith(expected)
    assert not partial.exists() and not (tmp_path / "out").exists()


def fingerprint_of(source: Path, folder: Path) -> str:
    from grpo_mega.checkpoint_io.convert import megatron_plan
    from grpo_mega.checkpoint_io.detect import find_checkpoint

    checkpoint = find_checkpoint(source)
    return megatron_plan(checkpoint, checkpoint.open(), None).fingerprint()  # type: ignore[arg-type]


def test_only_one_process_writes_to_an_output(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import fcntl

    source = save(CASES["qwen2"], tmp_path / "hf")
    (tmp_path / "out.partial").mkdir()
    with (tmp_path / "out.partial" / JOURNAL).open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert convert_hf_to_mcore.main([str(source), str(tmp_path / "out")]) == 2
    assert "out.partial is being written" in capsys.readouterr().err


MEASURED = """
import re, sys
from pathlib import Path
from grpo_mega.checkpoint_io.convert import convert_hf_to_mcore, convert_mcore_to_hf

def resident(field):
    return int(re.search(field + r":\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) << 10

hf, out, back = map(Path, sys.argv[1:])
for convert, source, target in ((convert_hf_to_mcore, hf, out), (convert_mcore_to_hf, out, back)):
    Path("/proc/self/clear_refs").write_text("5")
    before = resident("VmRSS")
    convert(source, target, workers=2, show_progress=False)
    print(resident("VmHWM") - before)
"""


@pytest.mark.full
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs /proc")
def test_memory_stays_within_a_tensor_per_worker_plus_64_mib(tmp_path: Path) -> None:
    """Actual use is a few blocks. The model has 700 MiB, its largest tensor 48 MiB."""
    _, largest = make_large(tmp_path / "hf")
    command = [sys.executable, "-c", MEASURED, *(str(tmp_path / name) for name in ("hf", "out", "back"))]
    done = subprocess.run(
        command, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=True
    )
    there, back = map(int, done.stdout.split())
    assert largest >= 32 << 20
    assert max(there, back) < 64 << 20, (there, back)


def test_progress_shows_bytes_speed_and_the_time_left(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from grpo_mega.tracking.progress import Bar

    monkeypatch.setattr("grpo_mega.tracking.progress.SECONDS_BETWEEN_LINES", 0.0)
    lines = Bar(4_000_000_000, "writing", "bytes")
    lines.advance(1_000_000_000)
    assert re.fullmatch(r"writing: 25%, 1\.0 of 4\.0 GB, \d+ MB/s, \d+ s left\n", capsys.readouterr().out)
