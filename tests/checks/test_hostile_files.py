"""No file that a config names makes the launcher wait, or end otherwise than in one line; nor does a chat template."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.helpers.hostile_files import HANG_S, KINDS, deep, digits
from tests.helpers.models import make_model, save_checkpoint

pytestmark = pytest.mark.pool

ROOT = Path(__file__).parents[2]
DEEP_ROW = '{"prompt": "1", "answer": ' + "[" * 100_000
DIGIT_ROW = '{"prompt": "1", "answer": ' + "9" * 5000 + "}"


def deep_row(path: Path) -> None:
    path.write_text(DEEP_ROW + "\n")


def digit_row(path: Path) -> None:
    path.write_text(DIGIT_ROW + "\n")


MODEL_FILES = ("config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors.index.json")
SHARD = "model/model-00002-of-00006.safetensors"
CASES = [
    *((kind, f"model/{name}") for kind in (*KINDS, deep, digits) for name in MODEL_FILES),
    *((kind, name) for kind in KINDS for name in (SHARD, "model/chat_template.jinja", "config.yaml")),
    *((kind, name) for kind in KINDS for name in ("train.jsonl", "t.json", "t.parquet", "rates.jsonl")),
    *((kind, "train.jsonl") for kind in (deep_row, digit_row)),
    (deep, "t.json"),
    (deep, "config.yaml"),
]
# Templates, and words of which the error has at least one. The sandbox of the ranks refuses the first.
TEMPLATES = {
    "{% for i in range(10**10) %}{% endfor %}": ("Range too big",),
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}": ("does not end within",),
    "{{ 'a' * 3 * 10**9 }}": ("of memory",),
    "{% for i in range(99999) %}{{ 'a' * 99999 }}{% endfor %}": ("does not end within", "of memory"),
}
# Each line of stdin: a folder and values to set. On stdout: the folder's name and the exit code.
PROGRAM = """
import sys
from grpo_mega import cli
for line in sys.stdin:
    folder, *values = line.split()
    print("#", folder, file=sys.stderr, flush=True)
    words = [word for value in values for word in ("--set", value)]
    print(folder, cli.main(["train", f"{folder}/config.yaml", *words]), flush=True)
"""


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sound")
    save_checkpoint(make_model("qwen2"), folder / "model", max_shard_size="30KB")
    rows = [{"prompt": f"{i}+1=?", "answer": str(i + 1)} for i in range(5)]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    raw = {
        "run_dir": "run",
        "steps": 1,
        "model": {"path": "model", "dtype": "float32"},
        "data": {"train": "train.jsonl", "max_prompt_length": 61},
        "rollout": {"max_response_length": 5},
        "algorithm": {"group_size": 2},
        "rewards": {"functions": [{"name": "format"}], "num_workers": 1},
        "batch": {"prompts_per_step": 2, "tokens_per_micro_batch": 257},
        "log": {"progress": False},
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(raw))
    return folder


def copy(sound: Path, folder: Path) -> Path:
    """Copy the run, with paths that do not depend on the working folder."""
    shutil.copytree(sound, folder)
    raw = yaml.safe_load((folder / "config.yaml").read_text())
    raw |= {"run_dir": str(folder / "run"), "model": {"path": str(folder / "model"), "dtype": "float32"}}
    raw["data"]["train"] = str(folder / "train.jsonl")
    (folder / "config.yaml").write_text(yaml.safe_dump(raw))
    return folder


def train(lines: list[str]) -> list[tuple[str, int, str]]:
    """Return of each line the name of its folder, the exit code and the errors."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        input="\n".join(lines),
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=HANG_S,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    errors = [part.partition("\n")[2] for part in done.stderr.split("# /")[1:]]
    codes = [line.split() for line in done.stdout.splitlines()]
    return [(Path(folder).name, int(code), text) for (folder, code), text in zip(codes, errors, strict=True)]


def test_no_file_of_a_run_makes_the_launcher_wait(sound: Path, tmp_path: Path) -> None:
    lines = []
    for i, (kind, name) in enumerate(CASES):
        folder = copy(sound, tmp_path / str(i))
        kind(folder / name)
        value = {"t": "data.train", "r": "data.pass_rates"}.get(name[0])
        lines.append(f"{folder} {value}={folder / name}" if value else str(folder))
    for (kind, name), (_, code, error) in zip(CASES, train(lines), strict=True):
        case = (kind.__name__, name, code, error[:1000])
        assert code == 2, case
        assert error.count("\n") == 1 and len(error) < 900, case
        assert Path(name).name in error or "model.path" in error, case
    assert not list(tmp_path.glob("*/run"))


@pytest.mark.full
def test_a_template_without_bounds_ends_a_run_in_one_line(sound: Path, tmp_path: Path) -> None:
    lines = []
    for i, template in enumerate(TEMPLATES):
        folder = copy(sound, tmp_path / str(i))
        path = folder / "model/tokenizer_config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": template}))
        lines.append(str(folder))
    for (template, says), (_, code, error) in zip(TEMPLATES.items(), train(lines), strict=True):
        found = [line for line in error.splitlines() if "error: " in line]
        assert code == 2 and len(found) == 1, (template, code, error)
        assert "chat template" in found[0] and any(word in found[0] for word in says), (template, found)
        assert "Traceback" not in error
    assert not list(tmp_path.glob("*/run/checkpoints"))
