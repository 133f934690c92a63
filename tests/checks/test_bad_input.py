"""Bad input: whatever a person got wrong is one line with the value and the remedy, exit code 2, and nothing is half
written.

Each case breaks one thing in a run that would work, and runs the command. A fault that only a rank can detect is tested
by running the code of a rank in this process. If the fault comes before the first step, nothing of a run may remain.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from grpo_mega import cli
from grpo_mega.distributed.launch import rank_environments
from tests.helpers.models import make_model, save_checkpoint
from tests.helpers.runs import write_small
from tests.helpers.spoil import (
    NORM,
    OTHER_NORM,
    SHARD,
    Spoil,
    change,
    cut,
    end_of,
    grow,
    header,
    index_names,
    model,
    overlap,
    remove,
    rows,
    shift,
    tensors,
    write,
)
from tests.helpers.teacher_cases import TEACHER_CASES

pytestmark = pytest.mark.pool

BIG_TOKENIZER = {"model": {"vocab": {"a": 0, "b": 400}}}


@dataclass(frozen=True)
class Case:
    """A config that is spoilt, by --set or in the files of a folder, and the words that the line must hold, the remedy
    last.
    """

    name: str
    says: tuple[str, ...]
    sets: tuple[str, ...] = ()
    spoil: Spoil | None = None
    in_rank: bool = False  # reported after torch is imported
    after_start: bool = False  # reported after the run has started


RANDOM = ("model.init=random",)
GOOD = {"prompt": "1+1=?", "answer": "2"}
LOST_INDEX = json.dumps({"weight_map": {"lm_head.weight": "model-9.safetensors"}})
LFS_POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"

CASES = [
    # the config
    Case(
        "config missing",
        ("none.yaml: there is no such file or folder", "train takes a YAML file"),
        spoil=lambda f: (f / "config.yaml").rename(f / "none"),
    ),
    Case("config not YAML", ("config.yaml: not YAML", "correct the file"), spoil=write("config.yaml", "a: [1\nb")),
    Case("config a list", ("holds list", "see examples"), spoil=write("config.yaml", "- a")),
    Case("config empty", ("holds nothing", "see examples"), spoil=write("config.yaml", "")),
    Case("unknown key", ("'optimizer.learning_rat'", "known keys here: lr"), ("optimizer.learning_rat=1",)),
    Case("misspelt key", ("'algorithm.group_sise'", "did you mean 'group_size'"), ("algorithm.group_sise=8",)),
    Case("missing key", ("model.path is missing", "no default"), ("model={}",)),
    Case("wrong type", ("steps='many'", "whole number; write"), ("steps=many",)),
    Case("out of range", ("rollout.top_p=1.5", "must be at most 1"), ("rollout.top_p=1.5",)),
    Case(
        "mini-batches", ("batch.mini_batches=3", "use 1, 2 or 4"), ("batch.mini_batches=3", "batch.prompts_per_step=4")
    ),
    Case("budget", ("tokens_per_micro_batch=8", "at least 68"), ("batch.tokens_per_micro_batch=8",)),
    Case("--set without a value", ("--set 'steps'", "form key.subkey=value"), ("steps",)),
    Case("--set of a value's part", ("--set 'steps.x=1'", "'steps' is a value, not a section"), ("steps.x=1",)),
    Case("--set not YAML", ("--set 'steps=['", "not a YAML value"), ("steps=[",)),
    # the layout
    Case("layout unknown order", ("layout.order='dp-tp-pp'", "must be 'tp-dp-pp'"), ("layout.order=dp-tp-pp",)),
    Case("layout heads", ("layout.tp=3", "4 attention heads; use 1, 2, 4"), ("layout.tp=3",)),
    Case(
        "layout MLP", ("layout.tp=4", "50 rows of the MLP; use"), ("layout.tp=4", *RANDOM), model(intermediate_size=50)
    ),
    Case(
        "layout key-value heads",
        ("layout.tp=2", "3 key-value heads; use 1, 3"),
        ("layout.tp=2", *RANDOM),
        model(num_attention_heads=6, num_key_value_heads=3, hidden_size=48),
    ),
    Case(
        "layout fused rows",
        ("layout.tp=6", "80 fused rows", "use 1, 2"),
        ("layout.tp=6", *RANDOM),
        model(num_attention_heads=6, hidden_size=48),
    ),
    Case("layout stages", ("layout.pp=5", "has 4 layers; use fewer"), ("layout.pp=5",)),
    Case("layout chunks", ("layout.pp=2 with vpp=3", "6 model chunks", "use fewer"), ("layout.pp=2", "layout.vpp=3")),
    Case("layout vpp", ("layout.vpp=2", "leave vpp out"), ("layout.vpp=2",)),
    Case("layout sp", ("sequence_parallel=true needs layout.tp > 1", "leave"), ("layout.sequence_parallel=true",)),
    Case("layout sizes", ("[1, 1]", "4 layers; change"), ("layout={pp: 2, layers_per_chunk: [1, 1]}",)),
    Case("layout entries", ("[1, 3]", "give pp * vpp = 1"), ("layout.layers_per_chunk=[1, 3]",)),
    Case(
        "layout overlap",
        ("overlap_param_gather=true", "overlap_grad_reduce=true"),
        ("layout.overlap_param_gather=true",),
    ),
    *(Case(*case) for case in TEACHER_CASES),
    # the model's config
    Case("model folder missing", ("model.path=/none", "name the folder"), ("model.path=/none",)),
    Case("no config.json", ("holds no config.json", "name the folder"), spoil=remove("model/config.json")),
    Case("config.json not JSON", ("config.json is not JSON", "restore"), spoil=cut("model/config.json")),
    Case("config.json a list", ("holds a JSON list", "restore"), spoil=write("model/config.json", "[]")),
    Case("config.json without a field", ("'hidden_size'", "causal language"), spoil=model(hidden_size=None)),
    Case(
        "config.json with a text", ("num_hidden_layers='four'", "whole number"), spoil=model(num_hidden_layers="four")
    ),
    Case("config.json with odd heads", ("num_key_value_heads=3", "must divide"), spoil=model(num_key_value_heads=3)),
    Case(
        "model type not known", ("'gpt2'", "known are deepseek_v2, deepseek_v3, glm4"), spoil=model(model_type="gpt2")
    ),
    Case(
        "attention bias", ("attention_bias=True", "name another"), spoil=model(model_type="llama", attention_bias=True)
    ),
    Case("activation", ("hidden_act='gelu'", "only 'silu'"), spoil=model(hidden_act="gelu")),
    Case("sliding window", ("sliding_window=1", "from 2 to"), spoil=model(model_type="mistral", sliding_window=1)),
    Case(
        "window in use", ("layer_types; with sliding_window=None",), spoil=model(layer_types=["sliding_attention"] * 4)
    ),
    Case(
        "layer types",
        ("layer_types=['full_attention']", "num_hidden_layers=4", "correct the file"),
        spoil=model(layer_types=["full_attention"]),
    ),
    Case(
        "rope yarn",
        ("'yarn'", "supported are default, "),
        spoil=model(rope_scaling={"type": "yarn"}, rope_parameters=None),
    ),
    Case("rope parameters", ("'dynamic'", "supported are"), spoil=model(rope_parameters={"rope_type": "dynamic"})),
    Case("head_dim odd", ("head_dim=7", "must be even", "name another"), spoil=model(head_dim=7)),
    Case(
        "mixture top 1",
        ("num_experts_per_tok=1 for mixtral", "no gradient reaches the router", "name another"),
        spoil=model(model_type="mixtral", num_local_experts=4, num_experts_per_tok=1),
    ),
    Case(
        "mixture top 1 normalised",
        ("num_experts_per_tok=1 for qwen3_moe", "name another"),
        spoil=model(
            model_type="qwen3_moe", num_experts=4, moe_intermediate_size=8, num_experts_per_tok=1, norm_topk_prob=True
        ),
    ),
    Case(
        "mixture without so many experts",
        ("num_experts_per_tok=5", "from 1 to 4"),
        spoil=model(model_type="mixtral", num_local_experts=4, num_experts_per_tok=5),
    ),
    Case(
        "positions",
        ("max_response_length=68", "max_position_embeddings=67", "lower one"),
        spoil=model(max_position_embeddings=67),
    ),
    Case(
        "FP8 blocks",
        ("quant_method='fp8'", "grpo-mega convert", "model.path=OUT"),
        spoil=model(quantization_config={"quant_method": "fp8", "weight_block_size": [128, 128]}),
    ),
    Case(
        "quantised otherwise",
        ("quant_method='gptq'", "name the model that it was made from"),
        spoil=model(quantization_config={"quant_method": "gptq", "bits": 4}),
    ),
    # its weights
    Case("shard's tensors overlap", (SHARD, OTHER_NORM, "overlap", "fetch"), spoil=header(overlap)),
    Case("shard with a hole", (SHARD, "hole of 4 bytes", "fetch"), spoil=header(lambda h: shift(h, 4))),
    Case("shard out of range", (SHARD, "cut short", "fetch"), spoil=header(lambda h: grow(h, 128))),
    Case("shard names twice", (SHARD, "occurs twice", "fetch"), spoil=header(lambda h: h.append(h[-1]))),
    Case(
        "shard with more",
        (SHARD, "its header describes", "fetch"),
        spoil=header(lambda h: h.remove(max(h, key=end_of))),
    ),
    Case(
        "tensor in two shards",
        ("model-00003-of-00006.safetensors", "and so does", SHARD, "fetch"),
        spoil=lambda f: shutil.copy(f / "model" / SHARD, f / "model/model-00003-of-00006.safetensors"),
    ),
    Case("index leads out", ("'../else.safetensors', outside", "fetch"), spoil=index_names("../else.safetensors")),
    Case("index leads away", ("else.safetensors', outside", "fetch"), spoil=index_names("DIR/else.safetensors")),
    Case("index names a folder", ("model is named by", "fetch the missing"), spoil=index_names(".")),
    Case("index names a number", ("not an index of shards", "fetch"), spoil=index_names(3)),
    Case(
        "FP8 scales",
        (f"{NORM}_scale_inv", "grpo-mega convert", "model.path=OUT"),
        spoil=tensors(
            lambda t: t.update({NORM: t[NORM].to(torch.float8_e4m3fn), f"{NORM}_scale_inv": torch.ones(1, 1)})
        ),
    ),
    Case("no weights", ("neither model.safetensors nor", "give"), spoil=remove("model/model.safetensors.index.json")),
    Case("shard cut short", (SHARD, "cut short", "fetch the file again"), spoil=cut(f"model/{SHARD}")),
    Case("shard empty", (SHARD, "0 bytes", "fetch the file again"), spoil=write(f"model/{SHARD}", b"")),
    Case(
        "shard a pointer", (SHARD, "cannot be read", "fetch the file again"), spoil=write(f"model/{SHARD}", LFS_POINTER)
    ),
    Case(
        "shard's header damaged", (SHARD, "header", "fetch"), spoil=write(f"model/{SHARD}", b"\4" + bytes(7) + b"{]x}")
    ),
    Case("shard missing", (SHARD, "does not exist", "fetch the missing shard"), spoil=remove(f"model/{SHARD}")),
    Case(
        "index names no file",
        ("model-9.safetensors", "fetch the missing shard"),
        spoil=write("model/model.safetensors.index.json", LOST_INDEX),
    ),
    Case("index not JSON", ("not an index of shards", "fetch"), spoil=write("model/model.safetensors.index.json", "{")),
    Case("tensor missing", (NORM, "fetch the checkpoint again"), spoil=tensors(lambda t: t.pop(NORM))),
    Case("tensor unknown", ("'extra'", "check model_type"), spoil=tensors(lambda t: t.update(extra=torch.ones(2)))),
    Case("tensor's shape", ("shape [102, 32]", "[999, 32]", "give the config.json"), spoil=model(vocab_size=999)),
    Case("head of a tied model", ("lm_head.weight is not", "set it to false"), spoil=model(tie_word_embeddings=True)),
    Case("quantized", ("dtype I8", "not quantized"), spoil=tensors(lambda t: t.update({NORM: t[NORM].to(torch.int8)}))),
    Case("NaN", (SHARD, NORM, "NaN", "fetch"), spoil=tensors(lambda t: t[NORM][3].fill_(torch.nan)), in_rank=True),
    Case(
        "infinity",
        (SHARD, NORM, "infinity", "fetch"),
        spoil=tensors(lambda t: t[NORM][3].fill_(-torch.inf)),
        in_rank=True,
    ),
    # its tokenizer
    Case("tokenizer missing", ("holds no tokenizer", "copy"), spoil=remove("model/tokenizer.json")),
    Case(
        "tokenizer damaged", ("tokenizer.json is not JSON", "fetch the file again"), spoil=cut("model/tokenizer.json")
    ),
    Case("tokenizer odd", ("tokenizer.json is no tokenizer", "fetch"), spoil=write("model/tokenizer.json", "{}")),
    Case(
        "no chat template", ("no chat template", "add"), spoil=change("model/tokenizer_config.json", chat_template=None)
    ),
    Case(
        "vocabulary", ("vocab_size=102", "400", "give"), spoil=write("model/tokenizer.json", json.dumps(BIG_TOKENIZER))
    ),
    Case(
        "tokenizer cannot be loaded",
        ("cannot be loaded", "fetch its files again"),
        spoil=write("model/tokenizer.json", '{"model": {"vocab": {}}}'),
        in_rank=True,
    ),
    Case(
        "chat template refuses",
        ("chat template", "no user", "correct chat_template"),
        spoil=change("model/tokenizer_config.json", chat_template="{{ raise_exception('no user') }}"),
        in_rank=True,
    ),
    Case(
        "chat template refuses a system message",
        ("train.jsonl:1", "undefined", "leave data.system_prompt out"),
        ("data.system_prompt=s",),
        change(
            "model/tokenizer_config.json", chat_template="{% if messages[0].role == 'system' %}{{ a.b }}{% endif %}a"
        ),
        in_rank=True,
    ),
    # the data
    Case("data missing", ("none.jsonl", "name a file"), ("data.train=none.jsonl",)),
    Case("data of another format", ("'.csv'", "formats are"), ("data.train=DIR/t.csv",), write("t.csv", "a,b")),
    Case("data empty", ("train.jsonl is empty", "one row per prompt"), spoil=rows()),
    Case(
        "row without an answer",
        ("train.jsonl:2", "answer=None", "write a text"),
        spoil=rows(GOOD, GOOD | {"answer": None}),
    ),
    Case("row not JSON", ("train.jsonl:2 is not JSON", "write one JSON object"), spoil=rows(GOOD, '{"prompt": ')),
    Case("row a list", ("train.jsonl:1 holds a JSON list", "write one"), spoil=rows([1])),
    Case(
        "row without a prompt",
        ("train.jsonl:2", "'prompt'", "columns are: question"),
        spoil=rows(GOOD, {"question": "1"}),
    ),
    Case("column not there", ("prompt_column='q'", "columns are: prompt"), ("data.prompt_column=q",)),
    Case(
        "no answer column",
        ("none of answer, solution", "set data.answer_column"),
        spoil=rows({"prompt": "a", "gold": "1"}),
    ),
    Case(
        "prompt with half a character",
        ("train.jsonl:2: prompt has the lone surrogate U+D800 at character 1", "U+FFFD"),
        spoil=rows(GOOD, '{"prompt": "a\\ud800", "answer": "2"}'),
    ),
    Case(
        "message with half a character",
        ("train.jsonl:1: prompt has the lone surrogate U+DC80 at character 0",),
        spoil=rows(GOOD | {"prompt": [{"role": "user", "content": "\udc80"}]}),
    ),
    Case(
        "answer with half a character",
        ("train.jsonl:1: answer has the lone",),
        spoil=rows(GOOD | {"answer": "1\udfff"}),
    ),
    Case("system prompt", ("data.system_prompt has the lone surrogate U+D83D",), ("data.system_prompt=\ud83d",)),
    Case("prompt a number", ("prompt=3", "correct or remove"), spoil=rows(GOOD | {"prompt": 3})),
    Case("not UTF-8", ("train.jsonl is not UTF-8", "write it as UTF-8"), spoil=write("train.jsonl", b'{"\xe9": 1}')),
    Case("Parquet damaged", ("t.parquet", "write it again"), ("data.train=DIR/t.parquet",), write("t.parquet", "PAR1")),
    Case("hub name", ("'hub:a b'", "the form hub:owner/name"), ("data.train=hub:a b",)),
    Case("too few prompts", ("prompts_per_step=9", "4 prompts", "use at most 4"), ("batch.prompts_per_step=9",)),
    Case(
        "too few to oversample",
        ("rollout.oversample=5.0", "10 prompts", "4 prompts", "lower it"),
        ("rollout.oversample=5",),
    ),
    Case(
        "one set too small",
        ("data.train.1 has 1", "up to 2", "lower"),
        ("data.train=[DIR/train.jsonl, DIR/few.jsonl]", "batch.prompts_per_step=4"),
    ),
    Case("set given twice", ("train.jsonl' twice", "give it once"), ("data.train=[DIR/train.jsonl, DIR/train.jsonl]",)),
    Case(
        "held out is train",
        ("data.heldout=", "is also in data.train", "heldout_size"),
        ("data.heldout=DIR/./train.jsonl",),
    ),
    Case(
        "held out twice",
        ("data.heldout.path=h", "heldout_size=1", "give one"),
        ("data.heldout=h", "data.heldout_size=1"),
    ),
    Case(
        "held-out row", ("few.jsonl:1", "'q'", "columns are"), ("data.heldout={path: DIR/few.jsonl, prompt_column: q}",)
    ),
    Case("all held out", ("4 held-out prompts", "lower data.heldout_size"), ("data.heldout_size=4",), in_rank=True),
    Case(
        "too few that are not too long",
        ("prompts_per_step=6", "4 prompts", "8 more are longer than data.max_prompt_length=64"),
        ("batch.prompts_per_step=6",),
        rows(*[GOOD | {"prompt": f"{i}+1=?" + "x" * 90 * (i > 3)} for i in range(12)]),
        in_rank=True,
    ),
    Case(
        "too few that are not held out",
        ("prompts_per_step=4", "3 prompts", "1 more are held out"),
        ("batch.prompts_per_step=4", "data.heldout_size=1"),
        in_rank=True,
    ),
    Case("all too long", ("max_prompt_length=3", "all 4", "raise it"), ("data.max_prompt_length=3",), in_rank=True),
    # rewards
    Case("no reward", ("rewards.functions is empty", "name at least one"), ("rewards.functions=[]",)),
    Case("reward unknown", ("'acuracy'", "did you mean accuracy"), ("rewards.functions=[{name: acuracy}]",)),
    Case("reward's module", ("'no_such.f'", "set PYTHONPATH"), ("rewards.functions=[{name: no_such.f}]",)),
    Case("reward's file", ("'pack.no_such.f'", "set PYTHONPATH"), ("rewards.functions=[{name: pack.no_such.f}]",)),
    Case("reward import", ("ValueError: broken", "importable"), ("rewards.functions=[{name: pack.broken.f}]",)),
    Case(
        "reward missing",
        ("'pack.raises.missing': pack.raises has no function missing; check the name",),
        ("rewards.functions=[{name: pack.raises.missing}]",),
    ),
    Case(
        "reward misspelt",
        ("pack.raises has no function ff; did you mean f? check the name",),
        ("rewards.functions=[{name: pack.raises.ff}]",),
    ),
    Case(
        "reward ends the process",
        ("'leaves.py:f': the import ended the process with code 3 (goodbye); correct it",),
        ("rewards.functions=[{name: 'leaves.py:f'}]",),
        write("leaves.py", "import os, sys\nprint('goodbye', file=sys.stderr, flush=True)\nos._exit(3)\n"),
    ),
    Case(
        "reward raises every time",
        ("'pack.raises.f'", "every one of the last", "ZeroDivisionError", "correct the function"),
        ("rewards.functions=[{name: pack.raises.f}]", "batch.prompts_per_step=4", "algorithm.group_size=4"),
        after_start=True,
    ),
    # the machine
    Case(
        "fp8",
        ("precision.fp8='hybrid'", "install it or leave precision.fp8 out"),
        ("precision.fp8=hybrid", "model.dtype=bfloat16"),
    ),
    Case("no GPU", ("device=cuda", "use device=auto or device=cpu"), ("device=cuda",)),
]
NEEDS = {"fp8": importlib.util.find_spec("transformer_engine") is None, "no GPU": not torch.cuda.is_available()}


@pytest.fixture(scope="module")
def good_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that works: config.yaml, model, data, and a package of reward functions."""
    folder = tmp_path_factory.mktemp("good")
    save_checkpoint(make_model("qwen2"), folder / "model", max_shard_size="30KB")
    write_small(folder)
    write("few.jsonl", json.dumps(GOOD) + "\n")(folder)
    (folder / "pack").mkdir()
    write("pack/__init__.py", "")(folder)
    write("pack/broken.py", "raise ValueError('broken\\nmodule')")(folder)
    write("pack/raises.py", "def f(prompt, response, answer, extras):\n    return 1 / 0\n")(folder)
    return folder


@pytest.fixture
def folder(good_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A copy of it, which is the working folder of a process that is no rank yet."""
    shutil.copytree(good_run, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    for name in rank_environments({}, world_size=1)[0]:
        monkeypatch.setenv(name, "")  # so that what the run sets is undone
        monkeypatch.delenv(name)
    monkeypatch.setattr("grpo_mega.distributed.launch.run_ranks", None)  # several ranks are never started
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield tmp_path
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name.replace(" ", "-"))
def test_bad_input_is_one_line_with_value_and_remedy_and_leaves_nothing(
    case: Case, folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    if not NEEDS.get(case.name, True):
        pytest.skip("this machine has what the case wants to be absent")
    if case.spoil is not None:
        case.spoil(folder)
        capfd.readouterr()
    name = "config.yaml" if (folder / "config.yaml").exists() else "none.yaml"
    arguments = [argument.replace("DIR", str(folder)) for item in case.sets for argument in ("--set", item)]
    before = files_of(folder)
    code = cli.main(["train", str(folder / name), *arguments])
    output = capfd.readouterr()
    errors = [line for line in output.err.splitlines() if line.startswith("grpo-mega: error: ")]
    assert (code, len(errors)) == (2, 1), output.err
    positions = [errors[0].find(word) for word in case.says]
    assert -1 not in positions, f"{errors[0]!r} lacks {case.says[positions.index(-1)]!r}"
    assert "Traceback" not in output.err
    if not case.in_rank and not case.after_start:
        assert output.out == ""
        assert output.err.splitlines() == errors
    if not case.after_start:
        assert files_of(folder) == before
    else:
        assert not (folder / "run/hf").exists()


@pytest.mark.parametrize(("command", "count"), [("train", 3), ("eval", 3), ("check --layouts pp=5;pp=5,tp=3", 4)])
def test_all_broken_rules_are_printed(
    command: str, count: int, folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    sets = ("layout.pp=5", "rewards.functions=[{name: acuracy}]", "data.heldout=none.jsonl")
    before, words = files_of(folder), [word.replace(";", " ") for word in command.split()]
    assert cli.main([*words, "config.yaml", *(word for item in sets for word in ("--set", item))]) == 2
    output = capfd.readouterr()
    lines = [line for line in output.err.splitlines() if line.startswith("grpo-mega: error: ")]
    other = [line for line in output.err.splitlines() if line not in lines]
    assert len(lines) == count and files_of(folder) == before
    assert all(line.startswith("grpo-mega: note: ") for line in other), other
    for says in ("'acuracy'", "layout.pp=5 with vpp=1", "none.jsonl"):
        assert sum(says in line for line in lines) == 1, output.err


def test_the_run_that_the_cases_spoil_works(folder: Path) -> None:
    assert cli.main(["train", "config.yaml"]) == 0
    assert (folder / "run/hf/config.json").exists()


def test_the_checks_before_the_ranks_start_import_no_torch(folder: Path) -> None:
    program = (
        "import sys\nfrom pathlib import Path\nfrom grpo_mega import config\nfrom grpo_mega.cli import checks\n"
        "c = config.load(Path('config.yaml'))\nchecks.check_config(c, checks.this_machine(c.layout))\n"
        "sys.exit(', '.join({'torch', 'transformers', 'datasets'} & sys.modules.keys()) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=folder)
    assert (done.returncode, done.stderr) == (0, "")


def files_of(folder: Path) -> set[str]:
    return {os.path.relpath(path, folder) for path in folder.rglob("*") if "__pycache__" not in path.parts}
