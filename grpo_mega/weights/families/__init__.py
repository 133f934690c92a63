"""The families, one file each, keyed by the `model_type` of config.json. Every file here is found.

A file's `FAMILIES` has a table of rows, and what else differs between families: see `Family`.
"""

from dataclasses import replace
from importlib import import_module
from pkgutil import iter_modules

from grpo_mega.errors import WeightMappingError
from grpo_mega.text import nearest
from grpo_mega.weights.spec import Family, Row
from grpo_mega.weights.tables import EMBEDDING, OUTPUT

_TEXT, _NESTED_TEXT = "model.", "model.language_model."  # prefixes of a language model, alone and in a multimodal one

FAMILIES: dict[str, Family] = {}
for _module in iter_modules(__path__):
    FAMILIES |= import_module(f"{__name__}.{_module.name}").FAMILIES
# Multimodal model types -> the type of their language model, which is all that trains. Its fields are in text_config.
MULTIMODAL = {family.multimodal: name for name, family in FAMILIES.items() if family.multimodal}
_UNKNOWN = Family((), EMBEDDING, OUTPUT)


def find_family(model_type: object) -> Family:
    """Return the family of a language model, alone or in a multimodal one. An unknown one's is empty."""
    name = str(model_type)
    return FAMILIES.get(MULTIMODAL.get(name, name), _UNKNOWN)


def family_of(model_type: str) -> Family:
    """Return the family of a model type. Raise WeightMappingError if the model type has no table."""
    family = find_family(model_type)
    if family is _UNKNOWN:
        hint = nearest(str(model_type), FAMILIES)
        raise WeightMappingError(
            f"model_type {model_type!r} is not known; {hint}known are {', '.join(sorted([*FAMILIES, *MULTIMODAL]))}"
        )
    return _renamed(family) if model_type in MULTIMODAL else family


def _renamed(family: Family) -> Family:
    """Return the table of a multimodal model with this language model."""

    def renamed(row: Row) -> Row:
        return replace(row, hf=tuple(name.replace(_TEXT, _NESTED_TEXT, 1) for name in row.hf))

    output = family.output  # lm_head has no prefix
    return replace(family, rows=tuple(map(renamed, family.rows)), embedding=renamed(family.embedding), output=output)
