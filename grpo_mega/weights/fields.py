"""The fields of a config.json as transformers declares them, in a table: name:type=default.

In types "?" allows null, "ids" is a token id or a list of them, "number" is an int or a float. A test compares the
families' tables with the installed transformers.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from grpo_mega.errors import WeightMappingError

# Fields of every family here.
OF_FAMILIES = """
    hidden_act:str="silu" initializer_range:float=0.02 pad_token_id:int?=null tie_word_embeddings:bool=false
    use_cache:bool=true
"""


@dataclass(frozen=True)
class Field:
    kind: str
    default: Any

    def refuses(self, value: Any) -> str | None:
        """Return the required type of a value if the value has another type; None if it is right."""
        is_right, wording = _KINDS[self.kind.removesuffix("?")]
        may_be_null = self.kind.endswith("?")
        if is_right(value) or (may_be_null and value is None):
            return None
        return f"{wording} or null" if may_be_null else wording


def is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_list_of(is_right: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list) and all(map(is_right, value))


_KINDS: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "int": (is_int, "a whole number"),
    "float": (lambda value: isinstance(value, float), "a number with a decimal point or exponent"),
    "number": (lambda value: isinstance(value, float) or is_int(value), "a number"),
    "bool": (lambda value: isinstance(value, bool), "true or false"),
    "str": (lambda value: isinstance(value, str), "a text"),
    "ids": (lambda value: is_int(value) or _is_list_of(is_int)(value), "a token id, a list of them"),
    "ints": (_is_list_of(is_int), "a list of whole numbers"),
    "texts": (_is_list_of(lambda value: isinstance(value, str)), "a list of texts"),
}


@cache
def parse_fields(text: str) -> Mapping[str, Field]:
    """Return the fields of a table."""
    fields = {}
    for item in text.split():
        declared, _, default = item.partition("=")
        name, _, kind = declared.partition(":")
        fields[name] = Field(kind, json.loads(default))
    return fields


# Fields of every model type.
SHARED_FIELDS = parse_fields(
    "transformers_version:str?=null architectures:texts?=null chunk_size_feed_forward:int=0"
    " is_encoder_decoder:bool=false output_hidden_states:bool?=false return_dict:bool?=true"
)


def is_number(value: Any) -> bool:
    return is_int(value) or (isinstance(value, float) and math.isfinite(value))


def shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:100]}..."


def wrong(name: str, value: Any, must_be: str) -> WeightMappingError:
    return WeightMappingError(f"config.json has {name}={shown(value)}: must be {must_be}; correct the file")
