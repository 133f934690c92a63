"""Two nodes, as folders in which the ranks start, compare what they read before they join process groups."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from subprocess import PIPE, STDOUT
from typing import Any

import pytest
import torch.distributed as dist
import yaml

from grpo_mega import config as configs
from grpo_mega.distributed.launch import free_port
from grpo_mega.distributed.rendezvous import Rendezvous
from grpo_mega.errors import ConfigError, ResumeError, UserError
from grpo_mega.trainer import inputs as run_inputs
from grpo_mega.trainer.inputs import SameInputs
from tests.helpers.models import make_model, save_checkpoint
from tests.helpers.ranks import ROOT, ranks
from tests.helpers.runs import run
from tools.benchmarks import kills

FILES = {
    "model/config.json": "{}",
    "model/tokenizer.json": "{}",
    "model/chat_template.jinja": "a",
    "model/model-00002-of-00002.safetensors": "weights",
    "teacher/model.safetensors": "weights",
    "adapter/adapter_model.safetensors": "weights",
    "scores/level.txt": "3",
    "code/score.py": "import numpy, odd_helper\n\ndef f():\n    from parts.inner import one\n",
    "code/odd_helper.py": "",
    "code/parts/inner.py": "from . import near\n",
    "code/parts/near.py": "",
    "agents/walk.py": "import json as j\n\nimport elsewhere\n",
    "path/elsewhere.py": "",
    "path/odd_tool-1.dist-info/METADATA": "Metadata-Version: 2.1\nName: odd-tool\nVersion: 1\n",
    "run/checkpoints/latest": "step-5",
}
CONFIG = {
    "run_dir": "run",
    "steps": 3,
    "model": {"path": "model", "lora": {"rank": 2}, "adapter": "adapter"},
    "data": {"train": "rows.jsonl"},
    "teachers": {"one": {"path": "teacher"}},
    "algorithm": {"recipe": "opd"},
    "rewards": {"functions": [{"name": "score.py:f", "options": {"file": "scores/level.txt"}}]},
    "rollout": {"agent": "agents/walk.py:run"},
}
ROWS = "data.train=rows.jsonl"


def setting(key: str, value: object) -> Callable[[], None]:
    def change() -> None:
        config = yaml.safe_load(Path("code/config.yaml").read_text())
        section, _, name = key.rpartition(".")
        (config[section] if section else config)[name] = value
        Path("code/config.yaml").write_text(json.dumps(config))

    return change


def text(path: str) -> Callable[[], object]:
    """Change a character of a file, or create the file."""
    return lambda: Path(path).write_text(f"{FILES[path][:-1]}#\n" if path in FILES else "new")


def variable(name: str, value: str) -> Callable[[], None]:
    return lambda: os.environ.update({name: value})


def move(folder: str, place: str) -> None:
    """Move a folder, also in sys.path."""
    Path(place).parent.mkdir(parents=True, exist_ok=True)
    Path(folder).rename(place)
    sys.path[:] = [str(Path(place).absolute()) if path == str(Path(folder).absolute()) else path for path in sys.path]


def libraries(found: dict[str, str] | ConfigError) -> Callable[[], None]:
    """Let this rank find these libraries, or an error."""

    def read() -> dict[str, str]:
        if isinstance(found, ConfigError):
            raise found
        return found

    return lambda: setattr(run_inputs, "read_libraries", read)


def many(*changes: Callable[[], object]) -> Callable[[], None]:
    def change() -> None:
        for one in changes:
            one()

    return change


# The change on the second node, and the start of the line that both ranks end with; None: the ranks start.
CASES: dict[str, tuple[Callable[[], object], str | None]] = {
    "equal": (lambda: None, None),
    "setting": (setting("steps", 4), "steps: must be the same on all ranks, but is 4 on rank 1 ("),
    "absent setting": (setting("seed", 7), "seed: must be the same on all ranks, but is 7 on rank 1 ("),
    "layout": (setting("layout", {"tp": 2}), "layout.tp: "),
    "model config": (text("model/config.json"), "model/config.json: "),
    "tokenizer": (text("model/tokenizer.json"), "model/tokenizer.json: "),
    "absent tokenizer": (lambda: Path("model/tokenizer.json").unlink(), "model/tokenizer.json: "),
    "one more file": (text("model/added_tokens.json"), "model/added_tokens.json: "),
    "template": (text("model/chat_template.jinja"), "model/chat_template.jinja: "),
    "shard": (text("model/model-00002-of-00002.safetensors"), "model/model-00002-of-00002.safetensors: "),
    "teacher": (text("teacher/model.safetensors"), "teacher/model.safetensors: "),
    "adapter": (text("adapter/adapter_model.safetensors"), "adapter/adapter_model.safetensors: "),
    "file of an option": (text("scores/level.txt"), "scores/level.txt: "),
    "reward": (text("code/score.py"), "score.py: "),
    "imported module": (text("code/odd_helper.py"), "odd_helper.py: "),
    "module imported in a function": (text("code/parts/inner.py"), "parts/inner.py: "),
    "relative import": (text("code/parts/near.py"), "parts/near.py: "),
    "agent": (text("agents/walk.py"), "agents/walk.py: "),
    "module on the path": (text("path/elsewhere.py"), "elsewhere.py: "),
    "package": (
        lambda: Path("path/odd_tool-1.dist-info/METADATA").write_text("Name: odd-tool\nVersion: 1.1\n"),
        "package odd-tool: must be the same on all ranks, but is 1.1 on rank 1 (",
    ),
    "variable": (variable("NVTE_FLASH_ATTN", "0"), "NVTE_FLASH_ATTN: must be the same on all ranks, but is 0 on rank"),
    "level of the CPU": (variable("ATEN_CPU_CAPABILITY", "avx2"), "ATEN_CPU_CAPABILITY: "),
    "workspace": (variable("CUBLAS_WORKSPACE_CONFIG", ":16:8"), "CUBLAS_WORKSPACE_CONFIG: "),
    "workspace of another library": (variable("CUBLASLT_WORKSPACE_SIZE", "0"), "CUBLASLT_WORKSPACE_SIZE: "),
    "kernel of the server": (variable("SGLANG_SUPPORT_CUTLASS_BLOCK_FP8", "1"), "SGLANG_SUPPORT_CUTLASS_BLOCK_FP8: "),
    "another cuDNN": (
        libraries({"cudnn nvidia/cudnn/lib/libcudnn.so.9": "91002"}),
        "cudnn nvidia/cudnn/lib/libcudnn.so.9: must be the same on all ranks, but is 91002 on rank 1 (",
    ),
    "cuDNN of the login shell": (
        libraries({"cudnn /opt/cudnn/libcudnn.so.9": "91400"}),
        "cudnn nvidia/cudnn/lib/libcudnn.so.9: must be the same on all ranks, but is absent on rank 1 (",
    ),
    "two cuDNN": (libraries(ConfigError("cudnn: two versions are loaded")), "rank 1 ("),
    "attention of the server": (variable("SGLANG_ENABLE_X", "1"), "SGLANG_ENABLE_X: "),
    "reductions": (variable("NCCL_ALGO", "Tree"), "NCCL_ALGO: "),
    "variables of a node": (
        many(
            variable("TORCHELASTIC_RUN_ID", "7"),
            variable("SGLANG_PORT", "30001"),
            variable("SGLANG_API_KEY", "secret"),
            variable("TRITON_CACHE_DIR", "/other"),
            variable("CUDNN_HOME", "/opt/cudnn"),
            variable("CUDA_VISIBLE_DEVICES", "3"),
            variable("TORCH_NCCL_DUMP_ON_TIMEOUT", "1"),
            variable("MKL_NUM_THREADS", "3"),
            variable("HOSTNAME", "other"),
        ),
        None,
    ),
    "files that no run reads": (many(text("code/notes.py"), text("model/.cache"), text("path/unused.py")), None),
    "other folders for code": (many(lambda: move("code", "own/place/codes"), lambda: move("path", "lib")), None),
    "other folders and code": (
        many(text("path/elsewhere.py"), lambda: move("code", "own"), lambda: move("path", "own/lib")),
        "elsewhere.py: ",
    ),
    "checkpoint": (text("run/checkpoints/latest"), "the last checkpoint: "),
    "no checkpoint": (lambda: Path("run/checkpoints/latest").unlink(), "the last checkpoint: "),
    "missing code": (lambda: Path("agents/walk.py").unlink(), "rank 1 ("),
}


def compare(name: str, rank: int, folder: Path, data: str = "1", error: UserError | None = None) -> Exception | None:
    """Start this rank in a node of its own, changed on rank 1. Return the error of the comparison."""
    node = folder / name / f"node{rank}"
    for path, content in FILES.items():
        (node / path).parent.mkdir(parents=True, exist_ok=True)
        (node / path).write_text(content)
    (node / "code/config.yaml").write_text(json.dumps(CONFIG))
    before, sys_path, environ = Path.cwd(), [*sys.path], dict(os.environ)
    try:
        os.chdir(node)
        sys.path[:] = [str(node / "path")]  # reading all packages of this machine takes a second
        os.environ.update(RANK=str(rank), WORLD_SIZE="2", LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")
        libraries({"cudnn nvidia/cudnn/lib/libcudnn.so.9": "91400"})()  # this machine has none
        if rank == 1:
            CASES.get(name, (lambda: None, None))[0]()
        inputs = SameInputs(configs.load(next(Path().rglob("config.yaml"))))
        with inputs.reading():
            if error is not None:
                raise error
            inputs.data = {ROWS: data}
        store = dist.PrefixStore(name, dist.distributed_c10d._get_default_store())
        inputs.compare(Rendezvous(store, rank, 2))
    except UserError as raised:
        return raised
    finally:
        os.chdir(before)
        sys.path[:] = sys_path
        os.environ.clear()
        os.environ.update(environ)
    return None


def agree(value: object) -> None:
    values = [None, None]
    dist.all_gather_object(values, value)  # type: ignore[arg-type]
    assert values[0] == values[1], values


@ranks(2)
def test_the_first_difference_between_two_nodes_is_one_line(rank: int, folder: Path) -> None:
    for name, (_, expected) in CASES.items():
        error = compare(name, rank, folder)
        agree(str(error))
        if expected is None:
            assert error is None, (name, error)
        else:
            assert isinstance(error, ConfigError) and len(error.lines) == 1, (name, error)
            assert error.lines[0].startswith(expected), (name, error)
            assert "rank 1 (" in error.lines[0], (name, error)


@ranks(2)
def test_other_prompts_and_an_error_of_one_rank_end_both(rank: int, folder: Path) -> None:
    error = compare("prompts", rank, folder, data=str(rank))
    agree(str(error))
    assert str(error).startswith(f"{ROWS}: must be the same on all ranks, but is 1 on rank 1 ("), error

    error = compare("one", rank, folder, error=ConfigError("a=1: no", "b=2: no") if rank == 1 else None)
    agree(str(error))
    assert isinstance(error, ConfigError) and len(error.lines) == 2 and str(error).startswith("rank 1 ("), error
    assert error.lines[0].endswith("): a=1: no") and error.lines[1] == "b=2: no"

    error = compare("both", rank, folder, error=ResumeError("c=3: no"))
    assert isinstance(error, ResumeError) and str(error) == "c=3: no", error


@ranks(2)
def test_nodes_may_list_packages_and_files_in_other_orders(rank: int, folder: Path) -> None:
    listed, scanned, found = os.listdir, os.scandir, run_inputs.distributions
    backwards = partial(sorted, reverse=bool(rank))

    class Entries(Iterator[os.DirEntry[str]]):  # pathlib of Python 3.12 iterates over the context manager itself
        def __init__(self, path: Any) -> None:
            with scanned(path) as entries:
                self._left = backwards(entries, key=lambda entry: entry.name)

        def __next__(self) -> os.DirEntry[str]:
            if not self._left:
                raise StopIteration
            return self._left.pop(0)

        def __enter__(self) -> Entries:
            return self

        def __exit__(self, *error: object) -> None:
            pass

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "listdir", lambda *path: backwards(listed(*path)))
        patch.setattr(os, "scandir", Entries)
        patch.setattr(run_inputs, "distributions", lambda: backwards(found(), key=lambda one: one.name))
        patch.setitem(
            FILES, "path/even_tool-2.dist-info/METADATA", "Metadata-Version: 2.1\nName: even-tool\nVersion: 2\n"
        )
        error = compare("orders", rank, folder)
    agree(str(error))
    assert error is None, error


def test_any_change_of_a_large_file_s_header_or_of_a_region_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_inputs, "_WHOLE", 1000)
    monkeypatch.setattr(run_inputs, "_PART", 5)
    path = tmp_path / "model.safetensors"
    content = bytes(range(250)) * 5
    path.write_bytes(content)
    digest = run_inputs.file_digest(path)
    for start in (0, 130, 625, 1110):  # a region of 90 bytes has a part, because parts start every 78 bytes
        path.write_bytes(content[:start] + bytes(90) + content[start + 90 :])
        assert run_inputs.file_digest(path) != digest, start
    for other in (content[:-1], content + b"0"):
        path.write_bytes(other)
        assert run_inputs.file_digest(path) != digest
    path.write_bytes(content)
    assert run_inputs.file_digest(path) == digest
    path.write_bytes(content[:1000])
    digest = run_inputs.file_digest(path)
    path.write_bytes(content[:998] + b"ab")
    assert run_inputs.file_digest(path) != digest, "a small file is hashed in full"


def start_nodes(folder: Path, command: list[str]) -> list[tuple[int, str]]:
    """Start one rank in each of two folders by torchrun. Return exit codes and output of the ranks."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GRPO_MEGA_RUN_KEY": "0f" * 32}
    port = str(free_port())
    nodes = []
    for node in (0, 1):
        start = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--nnodes=2",
            f"--node-rank={node}",
            "--master-port",
            port,
        ]
        start += ["--nproc-per-node=1", "--master-addr=127.0.0.1", "-m", "grpo_mega.cli", *command]
        cwd = folder / f"node{node}"
        nodes.append(subprocess.Popen(start, stdout=PIPE, stderr=STDOUT, env=environment, cwd=cwd, text=True))
    try:
        return [(node.wait(), output) for node in nodes for output in [node.communicate(timeout=300)[0]]]
    finally:
        for node in nodes:
            node.kill()
            node.wait()


@pytest.mark.distributed
@pytest.mark.usefixtures("preloaded_python")
@pytest.mark.parametrize(
    "program",
    [
        "train",
        *(pytest.param(name, marks=pytest.mark.full) for name in ("sft", "eval", "engine ranks", "layout", "resume")),
    ],
)
def test_nodes_that_differ_end_before_the_first_step(program: str, tmp_path: Path) -> None:
    model = save_checkpoint(make_model("qwen2"), tmp_path / "model")
    rows: list[dict[str, str]] = [{"prompt": f"{i}+1=?", "answer": str(i + 1)} for i in range(13)]
    raw: dict[str, Any] = {
        "run_dir": "run",
        "steps": 2,
        "model": {"path": "model", "dtype": "float32"},
        "layout": {"dp": 2},
        "data": {"train": "rows.jsonl", "max_prompt_length": 64, "heldout_size": 2},
        "rollout": {"max_response_length": 4},
        "algorithm": {"group_size": 2},
        "rewards": {"functions": [{"name": "format"}], "num_workers": 1},
        "batch": {"prompts_per_step": 4},
        "log": {"progress": False},
    }
    command = [program if program in ("sft", "eval") else "train", "config.yaml"]
    if program == "engine ranks":
        raw["layout"], raw["rollout"]["placement"] = {"engine_ranks": 1}, "separate"
    if program == "sft":
        rows = [{"prompt": row["prompt"], "completion": row["answer"]} for row in rows]
        raw["data"] = {"train": "rows.jsonl", "max_length": 64}
        del raw["rollout"], raw["algorithm"], raw["rewards"]
    if program == "resume":
        raw["checkpoint"] = {"interval": 1}
    for node in (0, 1):
        (tmp_path / f"node{node}").mkdir()
        (tmp_path / f"node{node}" / "model").symlink_to(model)
        if node and program == "layout":
            raw["layout"] = {"tp": 2}
        elif node and program != "resume":
            rows = rows[1:]
        (tmp_path / f"node{node}" / "config.yaml").write_text(yaml.safe_dump(raw))
        (tmp_path / f"node{node}" / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    expected = {"layout": "layout.dp: ", "resume": "the last checkpoint: "}.get(program, f"{ROWS}: ")
    if program == "resume":
        (tmp_path / "node0" / "run").mkdir()
        (tmp_path / "node1" / "run").symlink_to(tmp_path / "node0" / "run")
        assert [code for code, _ in start_nodes(tmp_path, command)] == [0, 0]
        (tmp_path / "node1" / "run").unlink()  # a disk that is not shared after all
        command += ["--resume", "--set", "steps=3"]
    ended = start_nodes(tmp_path, command)
    for number, (code, output) in enumerate(ended):
        errors = [line for line in output.splitlines() if line.startswith("grpo-mega: error: ")]
        assert code == 1 and "exitcode:2" in output.replace(" ", ""), output  # torchrun's code, and its rank's
        assert len(errors) == 1 and expected in errors[0] and " on rank 1 (" in errors[0], output
        assert "step 1" not in output or program == "resume", number


@pytest.mark.distributed
@pytest.mark.usefixtures("preloaded_python")
def test_a_run_names_its_variables_and_refuses_contradictory_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, run_dir = kills.write_inputs(tmp_path, "tp=1"), tmp_path / "run"
    settings = ("--set", "steps=1", "--set", "eval.interval=0", "--set", "checkpoint.interval=0")
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "1")
    code, output = run(path, run_dir, *settings)
    line = "NVIDIA_TF32_OVERRIDE=1: contradicts model.dtype=float32; unset it"
    assert code == 2 and f"grpo-mega: error: {line}" in output.splitlines() and not run_dir.exists(), output
    monkeypatch.delenv("NVIDIA_TF32_OVERRIDE")
    monkeypatch.setenv("NVTE_FLASH_ATN", "0")
    code, output = run(path, run_dir, *settings)
    rows = [json.loads(line) for line in (run_dir / "messages.jsonl").read_text().splitlines()]
    (text,) = [row["text"] for row in rows if row["text"].startswith("libraries and variables that change numbers: ")]
    assert code == 0 and "NVIDIA_TF32_OVERRIDE=0" in text and text in output, output
    assert "NVTE_FLASH_ATN=0 (unknown, check the name)" in text
