"""Rules for `teachers`: models that can be read, fit the policy's layout, and agree with the policy on every token id."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress

from grpo_mega.config import Config, LayoutConfig, ModelConfig
from grpo_mega.data.rows import read_conversations
from grpo_mega.data.sources import MissingColumn, find_value
from grpo_mega.errors import UserError
from grpo_mega.preflight.layout import layout_problems
from grpo_mega.preflight.model import check_model, position_problems
from grpo_mega.preflight.tokenizer import check_tokenizer_files, vocabulary_difference
from grpo_mega.weights.hf_config import resolve
from grpo_mega.weights.spec import ModelShape, read_config


def teacher_problems(config: Config, shape: ModelShape) -> Iterator[str]:
    """Yield the problems of each teacher for a policy of this shape."""
    for name, settings in config.teachers.items():
        key = f"teachers.{name}.path"
        try:
            theirs = check_model(ModelConfig(path=settings.path, init="random" if settings.url else "checkpoint"))
            check_tokenizer_files(settings.path, theirs.vocab)
        except UserError as error:
            yield from (line.replace("model.path", key) for line in error.lines)
            continue
        if difference := vocabulary_difference(settings.path, config.model.path):
            yield (
                f"{key}={settings.path}: must have the tokenizer of model.path={config.model.path}, but {difference}; "
                "name a teacher of the policy's tokenizer"
            )
        elif theirs.vocab < shape.vocab:
            yield (
                f"{key}={settings.path}: must have the vocabulary of model.path={config.model.path}, but vocab_size is "
                f"{theirs.vocab} there and {shape.vocab} here, so it lacks some tokens; name a larger one"
            )
        problems = list(position_problems(config, resolve(read_config(settings.path))))
        if settings.url is None:
            problems += layout_problems(_layout(config, theirs), theirs)
        yield from (f"{key}={settings.path}: {problem}" for problem in problems)


def row_problems(config: Config) -> Iterator[str]:
    """Yield the first row of each training set that names no teacher, if rows choose their teacher."""
    column = config.data.teacher_column
    if column is None:
        return
    for source in config.data.train:
        for row in read_conversations(source, config.data):
            value = None
            with suppress(MissingColumn):
                value = find_value(row.extras, column)
            if str(value) not in config.teachers:
                yield f"{row.place}: {column}={value!r} names no teacher; use one of {', '.join(config.teachers)}"
                break


def _layout(config: Config, theirs: ModelShape) -> LayoutConfig:
    """Return the policy's layout for a teacher. The layers per chunk follow from the teacher's size."""
    changes: dict[str, object] = {"layers_per_chunk": None, "dp": config.layout.dp or config.layout.least_dp}
    return config.layout.model_copy(update=changes | ({} if theirs.num_experts else {"ep": 1}))
