"""The examples that come with the project: configs that load, and a tiny model that reads any text."""

from __future__ import annotations

import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from grpo_mega.config import load

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
CONFIGS = sorted(EXAMPLES.glob("*.yaml"))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda p: p.stem)
def test_every_example_config_is_valid_and_takes_overrides(path: Path) -> None:
    assert load(path).steps > 0
    assert load(path, ["steps=2", "layout.tp=2"]).layout.tp == 2


@pytest.mark.parametrize("path", CONFIGS, ids=lambda p: p.stem)
def test_every_example_config_begins_with_what_it_needs_and_what_to_expect(path: Path) -> None:
    header = [line for line in path.read_text().splitlines() if line.startswith("#")]
    assert any("Needs:" in line for line in header)
    assert any("Expect:" in line for line in header)


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["tiny_random_model.py", str(folder)])
        runpy.run_path(str(EXAMPLES / "tiny_random_model.py"), run_name="__main__")
    return folder


def test_the_tiny_models_tokenizer_gives_back_any_text_byte_by_byte(tiny_model: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    for text in ("Natalia sold 48/2 = <<48/2=24>>24 clips.\n#### 24", "  two  spaces\t\r\n", "½ é 漢字 🙂", "<think>1</think>"):
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        assert len(ids) == len(text.encode())
        assert tokenizer.decode(ids, clean_up_tokenization_spaces=False) == text


def test_the_tiny_model_has_a_chat_template_and_room_for_its_tokens(tiny_model: Path) -> None:
    tokenizer, config = AutoTokenizer.from_pretrained(tiny_model), AutoConfig.from_pretrained(tiny_model)
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "1+1=?"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert text == "<system>s<end><user>1+1=?<end><assistant>"
    assert len(ids) == len("s1+1=?") + 5  # each tag is one token
    assert max(*ids, len(tokenizer) - 1) < config.vocab_size
    assert config.eos_token_id == [tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids("<end>")]
    assert AutoModelForCausalLM.from_config(config).num_parameters() < 200_000


def test_help_of_the_tiny_models_script_names_its_argument() -> None:
    command = [sys.executable, str(EXAMPLES / "tiny_random_model.py"), "--help"]
    assert "folder to write to" in subprocess.run(command, capture_output=True, text=True, check=True).stdout
