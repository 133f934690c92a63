"""The families, one file each, keyed by the `model_type` of config.json. Every file here is found.

A file's `FAMILIES` has a table of rows, and what else differs between families: see `Family`.
"""

from dataclasses import replace
from importlib import import_module
from pkgutil import iter_modules
from typing import Any

from grpo_mega.errors import WeightMappingError
from grpo_mega.text import nearest
from grpo_mega.weights.spec import Family, Row


def _nested(row: Row) -> Row:
    """Return a language model's row in a multimodal model."""
    return replace(row, hf=tuple(name.replace("model.", "model.language_model.", 1) for name in row.hf))


FAMILIES: dict[str, Family] = {}
for _module in iter_modules(__path__):
    FAMILIES |= import_module(f"{__name__}.{_module.name}").FAMILIES
# Only the language model of a multimodal model trains. Its fields are in text_config. The output layer has no prefix.
MULTIMODAL = {
    family.multimodal: replace(family, rows=tuple(map(_nested, family.rows)), embedding=_nested(family.embedding))
    for family in FAMILIES.values()
    if family.multimodal
}


def family_of(model_type: Any) -> Family:
    """Return the family of a model type. Raise WeightMappingError if it has none."""
    name, known = str(model_type), FAMILIES | MULTIMODAL
    if name not in known:
        raise WeightMappingError(
            f"model_type {model_type!r} is not known; {nearest(name, FAMILIES)}known are {', '.join(sorted(known))}"
        )
    return known[name]
