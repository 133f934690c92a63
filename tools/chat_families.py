"""Chat templates of model families with small tokenizers, for check_sessions.py and tests.

A tokenizer has the special tokens of its family and about 320 byte-level tokens. Templates are read from the package
trl, apart from these:

- mistral, in chat_templates/: tokenizer_config.json of mistralai/Mistral-7B-Instruct-v0.3 (Apache-2.0), with shorter
  error texts;
- smollm2: tokenizer_config.json of HuggingFaceTB/SmolLM2-135M-Instruct (Apache-2.0).
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

SMOLLM2 = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system\nYou"
    " are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n' }}{% endif %}{{'<|im_start|>' +"
    " message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}{% if add_generation_prompt %}"
    "{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@dataclass(frozen=True)
class Family:
    """A chat template with its tokens. The first stop token ends most turns."""

    template: str  # the template, or the name of a file in chat_templates/ or of one of trl's
    special: tuple[str, ...]  # control tokens
    plain: tuple[str, ...] = ()  # tokens that are text, such as <tool_call>
    stops: tuple[str, ...] = ("<|im_end|>", "<|endoftext|>")
    bos: str | None = None
    before: str = ""  # a statement before the template

    @property
    def text(self) -> str:
        """Return the template."""
        if "{" in self.template:
            return self.template
        path = Path(__file__).with_name("chat_templates") / f"{self.template}.jinja"
        if not path.exists():
            spec = importlib.util.find_spec("trl")
            assert spec is not None and spec.origin is not None, "the templates of most families are read from trl"
            path = Path(spec.origin).parent / "chat_templates" / path.name
        return self.before + path.read_text(encoding="utf-8")


_CHATML = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
_CALLS, _THOUGHTS = ("<tool_call>", "</tool_call>"), ("<think>", "</think>")
_NO_THINKING = "{%- set enable_thinking = false %}"
_GLM = ("[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>", "<|endoftext|>")
_GLM_STOPS = ("<|user|>", "<|observation|>", "<|endoftext|>")
_LLAMA = ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|python_tag|>", "<|eom_id|>")
_LLAMA_STOPS = ("<|eot_id|>", "<|eom_id|>")
_MISTRAL = ("[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]")

FAMILIES = {
    "llama3": Family("llama3_1", _LLAMA, stops=_LLAMA_STOPS, bos="<|begin_of_text|>"),
    "mistral": Family("mistral", ("<s>", "</s>", *_MISTRAL), ("[TOOL_CALLS]",), ("</s>",), "<s>"),
    "qwen2.5": Family("qwen2_5", _CHATML, _CALLS),
    "qwen3": Family("qwen3", _CHATML, (*_CALLS, *_THOUGHTS)),
    "qwen3-no-thinking": Family("qwen3", _CHATML, (*_CALLS, *_THOUGHTS), before=_NO_THINKING),
    "qwen3-2507": Family("qwen3_instruct_2507", _CHATML, _CALLS),
    "qwen3.5": Family("qwen3_5_think", _CHATML, (*_CALLS, *_THOUGHTS)),
    "qwen3.5-no-thinking": Family("qwen3_5_nothink", _CHATML, (*_CALLS, *_THOUGHTS)),
    "glm4.5": Family("glm4moe", _GLM, (*_CALLS, *_THOUGHTS), _GLM_STOPS),
    "glm4.5-no-thinking": Family("glm4moe", _GLM, (*_CALLS, *_THOUGHTS), _GLM_STOPS, before=_NO_THINKING),
    "smollm2": Family(SMOLLM2, _CHATML),
}


@cache
def tokenizer_of(name: str) -> Any:
    """Return the tokenizer of a family, with its chat template."""
    family = FAMILIES[name]
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    texts = ["system user assistant name arguments parameters function tool_response thousand hello the and of\n\n"] * 3
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=500, initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator(texts, trainer)
    backend.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in family.special])
    backend.add_tokens([AddedToken(text, special=False, normalized=False) for text in family.plain])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=family.bos,
        eos_token=family.stops[0],
        chat_template=family.text,
        name_or_path=name,
    )


def stop_ids(name: str) -> tuple[int, ...]:
    """Return the stop tokens of a family, in its order."""
    return tuple(tokenizer_of(name).convert_tokens_to_ids(text) for text in FAMILIES[name].stops)
