"""A converter never waits for a pipe or device and never trusts a hostile file: one line, exit code 2, nothing
written.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from grpo_mega.checkpoint_io.checkpoints import find, latest, read_manifest
from grpo_mega.checkpoint_io.convert import convert_hf_to_mcore
from grpo_mega.errors import ResumeError
from tests.checkpoint_io.families import CASES, save, write_manifest
from tests.helpers.hostile_files import HANG_S, KINDS, deep, digits

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a Hugging Face model, its conversion, and a run with one checkpoint."""
    path = tmp_path_factory.mktemp("sound")
    save(CASES["llama2"], path / "hf", max_shard_size="100KB")
    convert_hf_to_mcore(path / "hf", path / "mcore", show_progress=False)
    step = path / "run/checkpoints/step-000007"
    shutil.copytree(path / "mcore", step / "state")
    (step / "state/config.json").unlink()
    write_manifest(step, 7)
    (path / "run/checkpoints/latest").write_text("step-000007\n")
    (path / "run/config.yaml").write_text(f"model: {{path: {path / 'hf'}}}\n")
    return path


SHARD = "model-00002-of-00003.safetensors"
SPOILT = [
    *((kind, f"hf/{name}") for kind in KINDS for name in ("config.json", SHARD, "model.safetensors.index.json")),
    *((kind, f"mcore/{name}") for kind in KINDS for name in (".metadata", "__0_0.distcp", "config.json")),
    *((kind, "run/checkpoints/step-000007/checkpoint.json") for kind in (*KINDS, deep, digits)),
    *((kind, "run/checkpoints/latest") for kind in (*KINDS, deep)),
    *((kind, "run/config.yaml") for kind in (*KINDS, deep)),
    *((kind, f"hf/{name}") for kind in (deep, digits) for name in ("config.json", "model.safetensors.index.json")),
]


def test_no_file_makes_a_converter_wait_or_end_with_a_traceback(sound: Path, tmp_path: Path) -> None:
    """Run all cases in one process, with a timeout that no machine needs."""
    for i, (kind, name) in enumerate(SPOILT):
        case = tmp_path / str(i)
        shutil.copytree(sound, case)
        kind(case / name)
    program = (
        "import sys\nsys.path.insert(0, 'tools')\nimport convert_hf_to_mcore, convert_mcore_to_hf, inspect_checkpoint\n"
        "from pathlib import Path\n"
        "for line in sys.stdin:\n"
        "    case, name = line.split()\n"
        "    top = name.partition('/')[0]\n"
        "    tool = convert_hf_to_mcore if top == 'hf' else convert_mcore_to_hf\n"
        "    print('#', case, flush=True, file=sys.stderr)\n"
        "    codes = tool.main([f'{case}/{top}', f'{case}/out']), inspect_checkpoint.main([f'{case}/{top}'])\n"
        "    print(case, *codes, flush=True)\n"
    )
    cases = "".join(f"{tmp_path / str(i)} {name}\n" for i, (_, name) in enumerate(SPOILT))
    done = subprocess.run(
        [sys.executable, "-c", program], input=cases, capture_output=True, text=True, cwd=ROOT, timeout=HANG_S
    )
    assert done.returncode == 0, done.stderr[-2000:]
    errors = {Path(part.partition("\n")[0]).name: part.partition("\n")[2] for part in done.stderr.split("# ")[1:]}
    for i, ((kind, name), line) in enumerate(zip(SPOILT, done.stdout.splitlines(), strict=True)):
        assert line.split()[1] == "2", (kind.__name__, name, errors[str(i)])
        assert errors[str(i)].count("\n") == line.split()[1:].count("2"), (kind.__name__, name, errors[str(i)])
        assert Path(name).name in errors[str(i)] or "not a checkpoint" in errors[str(i)], (name, errors[str(i)])
        assert all(len(error) < 700 for error in errors[str(i)].splitlines())
        assert not (tmp_path / str(i) / "out").exists()
        assert not (tmp_path / str(i) / "out.partial").exists()


@pytest.mark.parametrize("kind", [*KINDS, deep, digits], ids=lambda kind: kind.__name__)
def test_a_hostile_manifest_or_pointer_of_a_run_is_one_line(
    kind: Callable[[Path], None], sound: Path, tmp_path: Path
) -> None:
    shutil.copytree(sound / "run", tmp_path / "run")
    checkpoints = tmp_path / "run/checkpoints"
    kind(checkpoints / "step-000007/checkpoint.json")
    with pytest.raises(ResumeError, match=r"^\S+/checkpoint\.json .*\([^\n]{1,200}\); resume"):
        read_manifest(checkpoints / "step-000007")
    kind(checkpoints / "latest")
    with pytest.raises(ResumeError, match=r"^\S+/latest [^\n]{1,4500}$"):
        latest(checkpoints)
    with pytest.raises(ResumeError, match=r"^\S+/latest [^\n]{1,4500}$"):
        find(checkpoints, None)
