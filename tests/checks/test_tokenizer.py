"""The launcher finds the chat template that transformers finds, and refuses one that would stop the ranks."""

from __future__ import annotations

import json
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer, GenerationConfig

from grpo_mega.checkpoint_io.hf_files import generation_token_ids
from grpo_mega.checkpoint_io.model import read_tokenizer
from grpo_mega.cli.checks.tokenizer import bound_problem, check_template, check_tokenizer_files, find_template
from grpo_mega.errors import ConfigError
from tests.helpers.models import VOCAB_SIZE, make_model, save_checkpoint

NAMED = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
SETTINGS: list[Any] = [None, "S", "", NAMED, NAMED[:1], [], {"default": "D"}]
FILES: list[dict[str, str]] = [
    {},
    {"chat_template.jinja": "J\u2028"},
    {"chat_template.json": json.dumps({"chat_template": "P"})},
    {"additional_chat_templates/tool.jinja": "A"},
    {"additional_chat_templates/default.jinja": "B"},
    {"chat_template.jinja": "J", "additional_chat_templates/tool.jinja": "A"},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer")
    save_checkpoint(make_model("qwen2"), path)
    return path


@pytest.mark.parametrize("files", FILES, ids=lambda files: "+".join(files) or "none")
@pytest.mark.parametrize("given", SETTINGS, ids=repr)
def test_the_template_is_the_one_that_transformers_takes(
    folder: Path, tmp_path: Path, given: Any, files: dict[str, str]
) -> None:
    for path in folder.glob("tokenizer*"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    settings.pop("chat_template", None)
    settings |= {} if given is None else {"chat_template": given}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    try:
        expected = AutoTokenizer.from_pretrained(tmp_path).get_chat_template() or None
    except Exception:
        expected = None
    try:
        found = find_template(tmp_path, settings)
    except ConfigError as error:
        assert "\n" not in str(error)
        found = None
    if isinstance(given, dict) and not any(
        name.endswith(".jinja") for name in files
    ):  # transformers takes a mapping, which no library writes
        assert found is None
    else:
        assert found == expected


@pytest.mark.parametrize(
    ("template", "says"),
    [
        ("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", "does not end within"),
        ("{{ 'a' * 3 * 10 ** 9 }}", "of memory"),
        ("{% set n = namespace(s='ab') %}{% for i in range(60) %}{% set n.s = n.s + n.s %}{% endfor %}", "of memory"),
        ("{% macro f(n) %}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}", "recurs too deeply"),
    ],
)
def test_a_template_without_bounds_is_refused(tmp_path: Path, template: str, says: str) -> None:
    with pytest.raises(ConfigError, match=rf"^the chat template of model\.path=\S+ .*{says}.*; correct the template$"):
        check_template(tmp_path, {"chat_template": template})


@pytest.mark.parametrize(
    "template",
    [
        (
            "{% for m in messages %}{{ m.role }}: {{ m.content | tojson }}\u2028{% break %}{% endfor %}{{"
            " strftime_now('%d') }}"
        ),
        "{{ raise_exception('no user') }}",  # the ranks report it
        "{{ range(10 ** 10) }}",  # so too: the sandbox has no such range
    ],
)
def test_a_template_that_ends_is_left_to_the_ranks(template: str) -> None:
    assert bound_problem(template) is None


def test_a_template_file_that_is_a_pipe_or_a_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").mkdir()
    with pytest.raises(ConfigError, match=r"chat_template\.jinja cannot be read \(Is a directory\); fetch"):
        find_template(tmp_path, {})


@pytest.mark.parametrize(
    "content",
    [
        *(None, b"", b"{", b"[]", b"null", b'"x"', b"\0\0", b'{"x": "\xff"}', b"\xef\xbb\xbf{}"),
        b'{"x":' + b"[" * 10**5,
        *(b'{"eos_token_id": "x"}', b'{"eos_token_id": [[1]]}', b'{"eos_token_id": 1.5}', b'{"eos_token_id": -1}'),
        *(b'{"eos_token_id": true}', b'{"eos_token_id": NaN}', b'{"eos_token_id": {}}', b'{"eos_token_id": [null]}'),
        *(b'{"eos_token_id": %s}' % (b"9" * 5000), b'{"eos_token_id": "%s"}' % (b"9" * 5000)),
        *(b'{"pad_token_id": "x"}', b'{"bos_token_id": [1.0]}'),
    ],
    ids=lambda content: repr(content)[:30],
)  # fmt: skip
def test_a_damaged_generation_config_is_one_line_before_any_rank(
    folder: Path, tmp_path: Path, content: bytes | None
) -> None:
    """transformers accepts some of these files, and raises errors of any type for others."""
    for path in folder.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    path = tmp_path / "generation_config.json"
    path.unlink()
    path.mkdir() if content is None else path.write_bytes(content)
    with pytest.raises(ConfigError, match=rf"^{path}.*; fetch the file again$") as caught:
        check_tokenizer_files(tmp_path, VOCAB_SIZE)
    assert len(caught.value.lines) == 1 and len(caught.value.lines[0]) < 400


@pytest.mark.parametrize("ids", [7, [7, 9], [], None])
def test_the_ids_of_a_generation_config_are_those_that_transformers_reads(tmp_path: Path, ids: Any) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": ids, "pad_token_id": -1}))
    read = GenerationConfig.from_pretrained(tmp_path)
    for field in ("eos_token_id", "pad_token_id", "bos_token_id"):
        theirs = getattr(read, field)
        expected = set(theirs) if isinstance(theirs, list) else {theirs} - {None}
        assert generation_token_ids(tmp_path, field) == expected
    assert generation_token_ids(tmp_path / "none", "eos_token_id") == set()


def test_a_tokenizer_that_is_not_sentencepieces_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers drops the space in front, which this vocabulary needs, unless the class is given. For mistral it
    ignores the class.
    """
    sentencepiece = pytest.importorskip("sentencepiece")
    (tmp_path / "text").write_text("what is seventeen plus five, and think about it first 0123456789?\n" * 20)
    sentencepiece.SentencePieceTrainer.train(
        input=str(tmp_path / "text"), model_prefix=str(tmp_path / "tokenizer"), vocab_size=310, model_type="bpe",
        byte_fallback=True, normalization_rule_name="identity", remove_extra_whitespaces=False, minloglevel=2,
    )  # fmt: skip
    refusal = r"^model\.path=\S+: \w+ may split text into other tokens .* tokenizer\.model does; copy the model's tok"
    given = {"tokenizer_class": "LlamaTokenizer"}
    for model_type, settings, is_right in [
        ("llama", None, False),
        ("llama", {}, False),
        ("llama", {"chat_template": "T"}, False),
        ("llama", given, True),
        ("mistral", given, False),
    ]:
        (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
        (tmp_path / "tokenizer_config.json").unlink(missing_ok=True)
        if settings is not None:
            (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
        with nullcontext() if is_right else pytest.raises(ConfigError, match=refusal):
            read_tokenizer(tmp_path, 400)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    monkeypatch.setitem(sys.modules, "sentencepiece", None)  # without it transformers may also refuse the file
    with pytest.raises(ConfigError, match=r"model\.path=\S+"):
        read_tokenizer(tmp_path, 400)
