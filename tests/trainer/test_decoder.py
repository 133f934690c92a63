"""The text of a response contains every token except end and padding, even tokens that the tokenizer calls special."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, LlamaConfig, PreTrainedTokenizerFast

import grpo_mega.megatron  # noqa: F401  # its patches come first
from grpo_mega.checkpoint_io.model import ModelFiles, decoder
from grpo_mega.config import RewardsConfig
from grpo_mega.rewards.pool import RewardPool
from grpo_mega.rewards.scorer import Scorer
from grpo_mega.types import Prompt, Sample
from tests.helpers import runs
from tools.benchmarks import kills

CONTROL = ["<pad>", "<bos>", "<eos>", "<turn_end>"]
TAGS = ["<think>", "</think>", "<answer>", "</answer>", "<tool_call>", "<|vision|>"]
TEMPLATE = (
    "{% for m in messages %}<role>{{ m.role }}</role>{{ m.content }}<turn_end>\n{% endfor %}"
    "{% if add_generation_prompt %}<role>assistant</role>{% endif %}"
)
RIGHT = "<think>2 + 2, as é 漢\u2028 , is 4 .\n</think> <answer> 4 </answer>"


def byte_level(tags: list[str], *, is_special: bool = True, template: str | None = TEMPLATE) -> PreTrainedTokenizerFast:
    """Return a tokenizer with a token per byte, as Qwen and Llama have, and one per control token and tag."""
    names = [*CONTROL, "<unk>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    backend = Tokenizer(models.BPE({name: i for i, name in enumerate(names)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in [*CONTROL, "<unk>"]])
    backend.add_tokens([AddedToken(name, special=is_special, normalized=False) for name in tags])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        unk_token="<unk>",
        chat_template=template,
        clean_up_tokenization_spaces=True,
    )


def ids_of(tokenizer: Any, text: str) -> list[int]:
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids


@pytest.mark.parametrize("is_special", [True, False])
@pytest.mark.parametrize("ending", ["", "<eos>", "<turn_end>", "<turn_end><eos><pad><pad>"])
def test_tags_are_text_but_end_and_padding_tokens_are_not(is_special: bool, ending: str) -> None:
    tokenizer = byte_level(TAGS, is_special=is_special)
    for text in (RIGHT, "".join(TAGS), "a<|vision|> <tool_call>{}", "<unk> ,  ."):
        ids = ids_of(tokenizer, f"<bos>{text}{ending}")
        assert (len(ids) < len(text.encode()) + 6) == ("<" in text)  # tags are single tokens
        assert decoder(tokenizer)(ids) == text


@pytest.mark.full
def test_special_tags_get_the_same_reward_as_tags_in_plain_text() -> None:
    config = RewardsConfig.model_validate({"functions": [{"name": "accuracy"}, {"name": "format"}], "num_workers": 1})
    prompt = Prompt(0, "2 + 2", (5,), "4")
    scores = []
    for tags in (TAGS, []):
        tokenizer = byte_level(tags)
        samples = [
            Sample(prompt, i, ids, [-1.0] * len(ids), "stop")
            for i, text in enumerate((RIGHT, RIGHT.replace(" 4 ", " 5 "), RIGHT.replace("</think>", "")))
            for ids in [ids_of(tokenizer, f"{text}<turn_end>")]
        ]
        with RewardPool(config) as pool:
            pool.wait_until_ready()
            scorer = Scorer(pool, decoder(tokenizer))
            for sample in samples:
                scorer.submit(sample)
            scorer.finish()
        scores.append([sample.scores for sample in samples])
    assert scores[0] == scores[1]
    assert scores[0][0] == {"accuracy": 1.0, "format": 1.0}
    assert [one["accuracy"] for one in scores[0]][1] == 0.0 and [one["format"] for one in scores[0]][2] == 0.0


def model_of(folder: Path, generation: dict[str, Any] | None, **config: Any) -> Any:
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return ModelFiles(folder, LlamaConfig(**config), *[Mock()] * 3)


def test_special_ids_of_the_model_or_its_generation_config_are_no_text(tmp_path: Path) -> None:
    tokenizer = byte_level([*TAGS, "<call>", "<return>", "<fill>", "<start>"])
    call, back, fill, start = (
        tokenizer.convert_tokens_to_ids(f"<{name}>") for name in ("call", "return", "fill", "start")
    )
    ids = ids_of(tokenizer, "<start>x<call>y<return><fill>")
    plain = model_of(tmp_path, None, eos_token_id=None, bos_token_id=None, pad_token_id=None)
    assert decoder(tokenizer, plain)(ids) == "<start>x<call>y<return><fill>"
    named = model_of(tmp_path, {"eos_token_id": [call, 2], "pad_token_id": fill}, eos_token_id=back, bos_token_id=start)
    assert decoder(tokenizer, named)(ids) == "xy"


def test_a_default_id_of_the_models_class_hides_no_ordinary_character(tmp_path: Path) -> None:
    tokenizer = byte_level(TAGS)
    a = tokenizer.convert_tokens_to_ids("a")
    model = model_of(tmp_path, None, bos_token_id=a, pad_token_id=a, eos_token_id=2)
    assert decoder(tokenizer, model)(ids_of(tokenizer, "banana")) == "banana"


def test_the_end_of_turn_token_is_the_one_after_an_assistant_message() -> None:
    opens_next = "{% for m in messages %}<think>{{ m.role }}</think>{{ m.content }}{% endfor %}<answer>"
    closing = "{% for m in messages %}{{ m.content }}{{ '</answer>' if m.role == 'user' else '\\n' }}{% endfor %}"
    for template in (closing, "{{ raise_exception('none') }}", "{{ undefined.content }}", None):
        tokenizer = byte_level(TAGS, template=template)
        assert decoder(tokenizer)(ids_of(tokenizer, RIGHT + "<eos>")) == RIGHT
    tokenizer = byte_level(TAGS, template=opens_next)
    assert decoder(tokenizer)(ids_of(tokenizer, "<think>a<answer>")) == "<think>a"


def test_pieces_of_sentencepiece_keep_their_spaces_around_tags() -> None:
    names = ["<unk>", "<s>", "</s>", *"▁abc4", "▁a"]
    backend = Tokenizer(models.BPE({name: i for i, name in enumerate(names)}, [("▁", "a")], unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    backend.decoder = decoders.Metaspace(prepend_scheme="never")
    backend.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in ("<s>", "</s>", *TAGS)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>", pad_token="</s>")
    text = "<think>a b a</think><answer>4</answer> c"
    assert decoder(tokenizer)(ids_of(tokenizer, f"<s>{text}</s>")) == text


@pytest.mark.full
def test_a_stop_token_of_the_config_is_text_but_the_models_is_not(tmp_path: Path) -> None:
    """Only the generation config names `ends`. Only rollout.stop_token_ids names `seen`."""
    ends, seen = [*range(20, 300, 8)], [*range(23, 300, 8)]
    path = kills.write_inputs(tmp_path, "tp=1", {"stop_token_ids": seen, "max_response_length": 40})
    (tmp_path / "model" / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    config = json.loads(path.read_text()) | {"steps": 1, "eval": {"interval": 1, "samples": 9, "temperature": 1.3}}
    path.write_text(json.dumps(config))
    code, output = runs.run(path, tmp_path / "run")
    assert code == 0, output
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    rows = [
        json.loads(line)
        for file in (tmp_path / "run").glob("heldout-*.jsonl")
        for line in file.read_text().splitlines()
    ]
    last: dict[str, int] = {"ends": 0, "seen": 0}
    for row in rows:
        ids = row["token_ids"]
        end = "ends" if ids[-1] in ends else "seen" if ids[-1] in seen else ""
        if end:
            last[end] += 1
            whole = tokenizer.decode(ids[: -1 if end == "ends" else None])
            assert row["response"] == whole, row
    assert min(last.values()) >= 1, last
