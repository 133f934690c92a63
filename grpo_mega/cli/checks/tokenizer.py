"""Rules for a tokenizer's files, checked without transformers: they exist, have a chat template, and fit the
vocabulary.

A chat template is a program from the model's folder. A template that never ends, or builds gigabytes, would stop every
rank. So a child process renders a question and its answer within limits (render_template.py). If the template refuses
the messages, the ranks report it, because their errors name the row. Without a tokenizer.json the vocabulary is checked
after the tokenizer is loaded (`check_vocabulary`).
"""

import hashlib
import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from grpo_mega.checkpoint_io.hf_files import check_vocabulary, generation_token_ids, read_object
from grpo_mega.cli.checks import render_template
from grpo_mega.errors import ConfigError
from grpo_mega.paths import read_file

MAX_TEMPLATE_BYTES = 4 << 20
WALL_SECONDS = 120.0  # long enough for a busy machine; a template that does not wait reaches the CPU limit first
_VOCABULARIES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "tekken.json")


def check_tokenizer_files(folder: Path, vocab_size: int, *, has_tools: bool = False) -> None:
    """Raise ConfigError if a tokenizer is missing, damaged, without chat template, or larger than the vocabulary.

    With `has_tools` the template must take tools.
    """
    if not any((folder / name).is_file() for name in _VOCABULARIES):
        raise ConfigError(
            f"model.path={folder} holds no tokenizer (none of {', '.join(_VOCABULARIES)}); copy the model's there"
        )
    for field in ("eos_token_id", "pad_token_id", "bos_token_id"):
        generation_token_ids(folder, field)
    settings = read_object(folder / "tokenizer_config.json")
    check_template(folder, settings)
    if has_tools and not takes_tools(find_template(folder, settings) or ""):
        raise ConfigError(
            f"rollout.tools: the chat template of model.path={folder} does not write tools, so the model would not see"
            " them; use a template or a model that takes tools, or write an agent function that describes them"
        )
    ids = _token_ids(folder, settings)
    if ids:
        check_vocabulary(folder, max(ids), vocab_size)


def vocabulary_difference(folder: Path, other: Path) -> str | None:
    """Return an example of a token with different ids in two folders' tokenizers; None if they agree on every id."""
    theirs, ours = _vocabulary(folder), _vocabulary(other)
    for token in sorted(theirs.keys() | ours.keys()):
        if theirs.get(token) != ours.get(token):
            return f"{token!r} is {theirs.get(token, 'missing')} there and {ours.get(token, 'missing')} here"
    return None


def check_template(folder: Path, settings: dict[str, Any]) -> None:
    """Raise ConfigError if a tokenizer has no default chat template, or if the template takes too much time or memory.

    `settings`: the contents of tokenizer_config.json.
    """
    template = find_template(folder, settings)
    if template is None:
        raise ConfigError(
            f"the tokenizer of model.path={folder} has no chat template; add chat_template to its"
            " tokenizer_config.json, or name an instruct model as model.path"
        )
    problem = bound_problem(template)
    if problem is not None:
        raise ConfigError(f"the chat template of model.path={folder} {problem}; correct the template")


def find_template(folder: Path, settings: dict[str, Any]) -> str | None:
    """Return the template of prompts. Files come before tokenizer_config.json; of several templates, "default" is used.

    Raise ConfigError if there are several and none is the default. chat_template.json belongs to a processor and is not
    read.
    """
    found: dict[str, Any] = {}
    files = {"default": folder / "chat_template.jinja"}
    files |= {path.stem: path for path in sorted(folder.glob("additional_chat_templates/*.jinja"))}
    for name, path in files.items():
        if not path.exists():
            continue
        try:
            found[name] = read_file(path, MAX_TEMPLATE_BYTES).decode("utf-8")
        except OSError as error:
            raise ConfigError(f"chat template {path} cannot be read ({error.strerror}); fetch the file again") from None
        except UnicodeDecodeError as error:
            raise ConfigError(f"chat template {path} is not UTF-8 ({error.reason}); fetch the file again") from None
    given = settings.get("chat_template")
    if not found and isinstance(given, str):
        found["default"] = given
    elif not found and isinstance(given, list):
        try:
            found = {one["name"]: one["template"] for one in given}
        except (KeyError, TypeError):
            raise _wrong(folder, "a list whose items are not all a name and a template") from None
    elif not found and given is not None:
        raise _wrong(folder, f"a JSON {type(given).__name__}")
    template = found.get("default")
    if template is None and found:
        names = ", ".join(map(repr, found))
        raise ConfigError(
            f"the tokenizer of model.path={folder} has the chat templates {names}, and none is called 'default';"
            " rename one"
        )
    if template is not None and not isinstance(template, str):
        raise _wrong(folder, f"a JSON {type(template).__name__} as default")
    return template or None


def bound_problem(template: str) -> str | None:
    """Return the limit that a template exceeds when it renders a question and its answer; None if it exceeds none."""
    code = _render(template)
    if code is None:
        return f"does not end within {WALL_SECONDS:g} s"
    if code in (-signal.SIGXCPU, -signal.SIGKILL):
        return f"does not end within {render_template.CPU_SECONDS} s of computing"
    if code == render_template.OUT_OF_MEMORY or code < 0:
        return f"needs more than {render_template.MEMORY_BYTES >> 20} MiB of memory, or recurs too deeply"
    return None if code == 0 else f"could not be rendered to check it (exit code {code})"


def takes_tools(template: str) -> bool:
    """Return True if a template writes the tools of a request."""
    return _render(template, "tools") != render_template.WITHOUT_TOOLS


def _render(template: str, *arguments: str) -> int | None:
    """Return the exit code of render_template.py; None if it does not end."""
    try:
        done = subprocess.run(
            [sys.executable, "-I", render_template.__file__, *arguments],
            input=json.dumps(template).encode(),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=WALL_SECONDS,
        )
    except subprocess.TimeoutExpired:
        return None
    return done.returncode


def _vocabulary(folder: Path) -> dict[str, int | str]:
    """Return the id of each token in a tokenizer.json. Without one, return a digest of each file with a vocabulary."""
    if _token_ids(folder, {}):
        tokenizer = read_object(folder / "tokenizer.json")
        vocabulary = tokenizer["model"]["vocab"]
        ids = vocabulary if isinstance(vocabulary, dict) else {str(pair[0]): i for i, pair in enumerate(vocabulary)}
        return ids | {token["content"]: token["id"] for token in tokenizer.get("added_tokens") or []}
    files = [folder / name for name in _VOCABULARIES if (folder / name).is_file()]
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest()[:12] for path in files}


def _token_ids(folder: Path, settings: dict[str, Any]) -> list[int]:
    """Return all ids of a tokenizer.json and of the tokens that its settings add; empty without a tokenizer.json."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        return []
    tokenizer = read_object(path)
    try:
        vocabulary = tokenizer["model"]["vocab"]
        ids = list(vocabulary.values()) if isinstance(vocabulary, dict) else list(range(len(vocabulary)))
        ids += [token["id"] for token in tokenizer.get("added_tokens") or []]
        return [int(i) for i in [*ids, *(settings.get("added_tokens_decoder") or {})]]
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError(f"{path} is no tokenizer ({error!r}); fetch the file again") from None


def _wrong(folder: Path, found: str) -> ConfigError:
    return ConfigError(
        f"{folder / 'tokenizer_config.json'} has {found} as chat_template; give a text, or a list of names and"
        " templates"
    )
