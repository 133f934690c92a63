"""The examples of the project: configs that load, and a tiny model that reads any text."""

from __future__ import annotations

import itertools
import json
import runpy
import sys
from pathlib import Path

import pytest
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from grpo_mega.cli.checks.layout import layout_problems
from grpo_mega.config import load
from grpo_mega.config.data import DataConfig
from grpo_mega.data import load_data
from grpo_mega.rewards.api import Score
from grpo_mega.rewards.math.accuracy import accuracy
from grpo_mega.weights.spec import ModelShape

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
CONFIGS = sorted(EXAMPLES.glob("*.yaml"))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda p: p.stem)
def test_every_example_config_is_valid_and_takes_overrides(path: Path) -> None:
    assert load(path).steps > 0
    assert load(path, ["steps=2", "layout.tp=2"]).layout.tp == 2


@pytest.mark.parametrize("path", CONFIGS, ids=lambda p: p.stem)
def test_every_example_config_starts_with_its_requirements(path: Path) -> None:
    header = "".join(itertools.takewhile(lambda line: line.startswith("#"), path.open()))
    assert "needs" in header.lower()


@pytest.mark.parametrize("path", [*CONFIGS, *sorted((EXAMPLES.parent / "slurm").glob("*.yaml"))], ids=lambda p: p.stem)
def test_an_example_names_nothing_outside_the_repository(path: Path) -> None:
    config = load(path)
    sources = [source.path for source in (*config.data.train, *config.data.heldout_sources.values())]
    for name in (str(config.model.path), str(config.run_dir), *sources):
        assert not Path(name).is_absolute() and ".." not in Path(name).parts, name
    if "gsm8k" in path.stem:
        assert all(name.startswith("hub:openai/gsm8k") for name in sources)


SHAPES = {  # models named in the recipes
    "qwen2.5-1.5b": ModelShape(
        "qwen2", 28, 1536, 8960, num_heads=12, num_kv_heads=2, head_dim=128, vocab=151936, tied=True
    ),
    "qwen3-8b": ModelShape(
        "qwen3", 36, 4096, 12288, num_heads=32, num_kv_heads=8, head_dim=128, vocab=151936, tied=False
    ),
}
SHAPES["qwen3-8b-32k"] = SHAPES["qwen3-8b-lora"] = SHAPES["qwen3-8b"]


@pytest.mark.parametrize("name", SHAPES)
def test_the_layout_of_a_recipe_fits_its_model(name: str) -> None:
    assert not list(layout_problems(load(EXAMPLES / f"{name}.yaml").layout, SHAPES[name]))


@pytest.mark.parametrize("name", SHAPES)
def test_the_columns_of_a_recipe_read_rows_like_gsm8k_and_math(name: str, tmp_path: Path, tiny_model: Path) -> None:
    rows = {
        "question": {"question": "A clip costs 9. What do two cost?", "answer": "9 * 2 = <<9*2=18>>18\n#### 18"},
        "problem": {
            "problem": "What is $9 \\cdot 2$?",
            "solution": "It is $\\boxed{18}$.",
            "level": "Level 1",
            "type": "Algebra",
        },
    }
    data = load(EXAMPLES / f"{name}.yaml").data.model_dump()
    sources = [*data["train"], data["heldout"]]
    for number, source in enumerate(sources):
        path = tmp_path / f"{number}.jsonl"
        path.write_text(json.dumps(rows[source["prompt_column"] or data["prompt_column"]]) + "\n")
        source["path"] = str(path)
    found = load_data(DataConfig.model_validate(data), AutoTokenizer.from_pretrained(tiny_model))
    assert len(found.train) == len(data["train"])
    for prompt in [*found.train, *found.heldout_sets[""]]:
        assert accuracy(prompt.text, "<answer>18</answer>", prompt.answer, prompt.extras) == Score(1.0, "correct")


def test_every_recipe_sets_the_dtype_that_its_figures_are_for() -> None:
    recipes = [*EXAMPLES.glob("*.yaml"), *EXAMPLES.parent.glob("slurm/*.yaml")]
    assert len(recipes) > 10
    assert [path.name for path in recipes if load(path).model.dtype is None] == []


def test_the_index_names_every_example() -> None:
    index = (EXAMPLES / "README.md").read_text()
    files = {path.name for path in EXAMPLES.iterdir() if path.suffix in {".py", ".sh", ".yaml"}}
    assert {name for name in files if f"[`{name}`]({name})" not in index} == set()
    recipes = {path.name for path in (EXAMPLES / "recipes").iterdir()}
    assert len(recipes) > 10 and {name for name in recipes if f"[`{name}`](recipes/{name})" not in index} == set()


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["tiny_random_model.py", str(folder)])
        runpy.run_path(str(EXAMPLES / "tiny_random_model.py"), run_name="__main__")
    return folder


def test_the_tokenizer_of_the_tiny_model_keeps_every_byte_of_any_text(tiny_model: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    for text in (
        "Natalia sold 48/2 = <<48/2=24>>24 clips.\n#### 24",
        "  two  spaces\t\r\n",
        "½ é 漢字 🙂",
        "<think>1</think>",
    ):
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        assert len(ids) == len(text.encode())
        assert tokenizer.decode(ids, clean_up_tokenization_spaces=False) == text


def test_the_tiny_model_has_the_rotary_fields_of_both_generations(tiny_model: Path) -> None:
    fields = json.loads((tiny_model / "config.json").read_text())
    assert fields["rope_parameters"] == {"rope_theta": 10000.0, "rope_type": "default"}
    assert (fields["rope_theta"], fields["dtype"]) == (10000.0, "float32")


def test_the_tiny_model_has_a_chat_template_and_rows_for_its_tokens(tiny_model: Path) -> None:
    tokenizer, config = AutoTokenizer.from_pretrained(tiny_model), AutoConfig.from_pretrained(tiny_model)
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "1+1=?"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert text == "<system>s<end><user>1+1=?<end><assistant>"
    assert len(ids) == len("s1+1=?") + 5  # each of the 5 tags is one token
    assert max(*ids, len(tokenizer) - 1) < config.vocab_size
    assert config.eos_token_id == [tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids("<end>")]
    assert AutoModelForCausalLM.from_config(config).num_parameters() < 200_000
