"""Render prompts by chat templates, and find the prefill: the text that a template itself writes into the assistant's turn.

The prefill is found by comparing two renderings of one conversation: the generation prompt, and an assistant's turn
whose content is a marker. The text before the marker is the header that every assistant turn has; the rest of the
generation prompt is the prefill, for example "<think>\\n".
"""

from __future__ import annotations

import re
from typing import Any

from grpo_mega.errors import ConfigError
from grpo_mega.text import find_surrogate

_MARKER = "\N{REPLACEMENT CHARACTER}content\N{REPLACEMENT CHARACTER}"
_OPEN_THOUGHT = re.compile(r"<(think|thinking|thought|reasoning)>\s*\Z")


def check_chat_template(tokenizer: Any) -> None:
    """Raise ConfigError if the tokenizer has no chat template."""
    if not getattr(tokenizer, "chat_template", None):
        raise ConfigError(
            f"the tokenizer of {tokenizer.name_or_path!r} has no chat template; "
            "add chat_template to its tokenizer_config.json, or name an instruct model as model.path"
        )


def render(tokenizer: Any, messages: list[dict[str, Any]], place: str) -> str:
    """Return the prompt's text, up to where the model begins to write. `place` (file:line) is for errors."""
    try:
        text = _apply(tokenizer, messages, add_generation_prompt=True)
    except Exception as error:  # templates raise any exception: jinja2's errors, TypeError, ...
        raise ConfigError(
            f"{place}: the chat template refuses the messages ({' '.join(str(error).split())}); "
            "correct the row, or leave data.system_prompt out if the template takes no system message"
        ) from None
    if surrogate := find_surrogate(text):
        raise ConfigError(
            f"{place}: the rendered prompt has the lone surrogate {surrogate}, which is no character; correct the chat template"
        )
    return text


def find_prefill(tokenizer: Any) -> str:
    """Return the text that the chat template writes into the assistant's turn before the model does; "" for most templates.

    Raises ConfigError for a template that cannot render a question and its answer.
    """
    try:
        return _find_prefill(tokenizer)
    except Exception as error:  # templates raise any exception
        raise ConfigError(
            f"the chat template of {tokenizer.name_or_path!r} cannot render a question and its answer "
            f"({' '.join(str(error).split())}); correct chat_template in its tokenizer_config.json"
        ) from None


def _find_prefill(tokenizer: Any) -> str:
    question = {"role": "user", "content": "question"}
    answer = {"role": "assistant", "content": _MARKER}
    before_turn = _apply(tokenizer, [question], add_generation_prompt=False)
    generation_prompt = _apply(tokenizer, [question], add_generation_prompt=True)
    if not generation_prompt.startswith(before_turn):
        return _open_thought(generation_prompt)
    opening = generation_prompt[len(before_turn) :]
    # A template may write an empty thought into the last turn, which a generation prompt that opens one shares; but it leaves
    # thoughts out of earlier turns. So both renderings are compared, and the shorter common part is the header.
    headers = [
        _header(_apply(tokenizer, [question, answer], add_generation_prompt=False), before_turn),
        _header(_apply(tokenizer, [question, answer, question], add_generation_prompt=False), before_turn),
    ]
    shared = min((_shared_length(opening, header) for header in headers if header is not None), default=len(opening))
    return opening[shared:] or _open_thought(opening)


def find_turn_end(tokenizer: Any) -> str:
    """Return the text that the chat template writes after the content of a last assistant turn, such as "<|im_end|>\\n".

    Return "" without a template, or if the template cannot render a question and its answer.
    """
    conversation = [{"role": "user", "content": "question"}, {"role": "assistant", "content": _MARKER}]
    try:
        check_chat_template(tokenizer)
        return _apply(tokenizer, conversation, add_generation_prompt=False).partition(_MARKER)[2]
    except Exception:  # templates raise any exception; `find_prefill` reports it
        return ""


def _header(conversation: str, before_turn: str) -> str | None:
    """Return the text between the user's turn and the assistant's content; None if the template rearranges the turns."""
    if not conversation.startswith(before_turn) or _MARKER not in conversation:
        return None
    return conversation[len(before_turn) : conversation.index(_MARKER)]


def _shared_length(opening: str, header: str) -> int:
    """Return the length of the common prefix, in whole tags only: "<think>" and "</think>" share nothing."""
    differing = (i for i, (a, b) in enumerate(zip(opening, header, strict=False)) if a != b)
    shared = next(differing, min(len(opening), len(header)))
    if shared == len(opening) or shared == len(header):
        return shared
    open_bracket = opening.rfind("<", 0, shared)
    is_inside_tag = open_bracket > opening.rfind(">", 0, shared)
    return open_bracket if is_inside_tag else shared


def _open_thought(opening: str) -> str:
    """Return the thought tag that the text ends with, for templates that open a thought in every assistant turn."""
    match = _OPEN_THOUGHT.search(opening)
    return match.group() if match else ""


def _apply(tokenizer: Any, messages: list[dict[str, Any]], *, add_generation_prompt: bool) -> str:
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=add_generation_prompt)
    assert isinstance(text, str)
    return text
