"""A config.json is resolved as transformers resolves it: each family, with fields missing, null or of another type."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoConfig, PreTrainedConfig

from grpo_mega.errors import ConfigError, WeightMappingError
from grpo_mega.weights.architecture import shape_of
from grpo_mega.weights.families import FAMILIES
from grpo_mega.weights.hf_config import resolve_config
from grpo_mega.weights.spec import ModelShape, read_config
from tests.helpers.resolved import difference

TYPES = {
    "int": "int",
    "int | None": "int?",
    "float": "float",
    "bool": "bool",
    "bool | None": "bool?",
    "str": "str",
    "str | None": "str?",
    "int | list[int] | None": "ids?",
    "float | int": "number",
    "float | int | None": "number?",
    "int | float | None": "number?",
    "float | None": "float?",
    "list[str] | None": "texts?",
    "list[int] | None": "ints?",
}
SMALL = {
    "vocab_size": 102,
    "hidden_size": 36,
    "intermediate_size": 52,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "max_position_embeddings": 77,
}
EXPERTS = {"moe_intermediate_size": 10, "num_experts_per_tok": 2}
NAMES = {"mixtral": "num_local_experts", "qwen3_moe": "num_experts"}
LATENT = {"num_key_value_heads": 6, "kv_lora_rank": 9, "q_lora_rank": 7, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4}
MODELS: dict[str, dict[str, Any]] = {model_type: SMALL | {"model_type": model_type} for model_type in FAMILIES}
for _type in ("mixtral", "qwen3_moe", "deepseek_v2", "deepseek_v3", "glm4_moe", "glm4_moe_lite"):
    MODELS[_type] |= EXPERTS | {NAMES.get(_type, "n_routed_experts"): 5}
    MODELS[_type] |= {"n_group": 1, "topk_group": 1} if _type.startswith(("deepseek", "glm")) else {}
    MODELS[_type] |= LATENT | {"v_head_dim": 5} if _type.startswith("deepseek") or _type == "glm4_moe_lite" else {}
MODELS["qwen3_5_text"] |= {"full_attention_interval": 2}
MODELS["qwen3_5_moe_text"] |= EXPERTS | {"full_attention_interval": 2, "num_experts": 5}
MODELS["qwen3_5_moe_text"] |= {"shared_expert_intermediate_size": 7}
# Fields that every model's config.json needs. transformers uses defaults if they are missing.
NEEDED = {"vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"}
NEEDED |= {"num_experts", "num_local_experts", "n_routed_experts", "moe_intermediate_size"}
NEEDED |= {"shared_expert_intermediate_size"}
ROPES: list[dict[str, Any]] = [
    {},
    {"rope_theta": 5e5},
    {"rope_parameters": {"rope_type": "default", "rope_theta": 7.0}},
    {"rope_parameters": {"rope_type": "default"}, "rope_theta": 7.0},
    {"rope_parameters": {"type": "linear", "factor": 2.0}},
    {"rope_parameters": {}, "rope_scaling": None},
    {"rope_scaling": {"type": "linear", "factor": 2}, "rope_theta": 7.0},
    {"rope_scaling": {"rope_type": "yarn", "factor": 2.0}},
    {"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}},
    {"rope_parameters": {"rope_type": "linear", "factor": 3.0}, "rope_scaling": {}},
    {"partial_rotary_factor": 0.5},
    {"partial_rotary_factor": None},
    {"use_sliding_window": True, "sliding_window": 9},
    {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1},
    {"use_sliding_window": True, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    {"sliding_window": 9},
    {"mlp_only_layers": None},
    {"layer_types": ["full_attention"] * 3},
    {"layer_types": None},
    {"head_dim": 14},
    {"num_local_experts": 7},
    {"num_experts": 7},
    {"torch_dtype": "bfloat16"},
]


NEWER = ("output_router_logits", "num_mtp_layers")  # for some model types only since transformers 5.19
NEWER_ALIASES = {
    frozenset(("num_mtp_layers", "num_nextn_predict_layers")),
    frozenset(("num_experts", "n_routed_experts")),  # deepseek_v2's; no release writes it
}
OF_EVERY_TYPE = ("rope_theta", "rope_parameters", "rope_scaling", "partial_rotary_factor", "head_dim", "torch_dtype")


def theirs(fields: dict[str, Any], folder: Path) -> dict[str, Any] | None:
    """Return transformers' reading of a file with these fields; None if transformers refuses it."""
    (folder / "config.json").write_text(json.dumps(fields))
    try:
        return AutoConfig.from_pretrained(folder).to_dict()  # type: ignore[no-any-return]
    except Exception:
        return None


def shape_in(fields: dict[str, Any]) -> ModelShape | str:
    try:
        return ModelShape.from_hf_config(fields)
    except WeightMappingError as error:
        return str(error)


def ours(fields: dict[str, Any]) -> dict[str, Any] | None:
    try:
        return resolve_config(fields)
    except WeightMappingError as error:
        assert "\n" not in str(error) and len(str(error)) < 500
        return None


@pytest.mark.parametrize("model_type", FAMILIES)
def test_the_table_has_the_fields_types_and_defaults_of_transformers(model_type: str) -> None:
    declared = CONFIG_MAPPING[model_type]
    shared = {field.name for field in dataclasses.fields(PreTrainedConfig)}
    fields = [field for field in dataclasses.fields(declared) if field.name not in shared | {"rope_parameters"}]
    kinds = {
        field.name: TYPES[field.type.__name__ if isinstance(field.type, type) else str(field.type)] for field in fields
    }
    defaults = {
        field.name: field.default_factory() if field.default is dataclasses.MISSING else field.default  # type: ignore[misc]
        for field in fields
    }
    table = {name: field for name, field in FAMILIES[model_type].declared.items() if name in kinds or name not in NEWER}
    assert {name: field.kind for name, field in table.items()} == kinds
    # Every file has the needed fields, so their defaults, which releases change, do not matter.
    assert {name: table[name].default for name in table.keys() - NEEDED} == {
        name: defaults[name] for name in defaults.keys() - NEEDED
    }
    assert FAMILIES[model_type].rope_theta == declared.default_theta
    aliases, expected = (
        set(map(frozenset, one.items())) for one in (FAMILIES[model_type].aliases, declared.attribute_map)
    )
    assert aliases ^ expected <= NEWER_ALIASES


@pytest.mark.parametrize("model_type", FAMILIES)
def test_a_config_of_a_family_is_resolved_as_transformers_resolves_it(model_type: str, tmp_path: Path) -> None:
    known = {*FAMILIES[model_type].declared, *FAMILIES[model_type].aliases, *OF_EVERY_TYPE}
    for more in (more for more in ROPES if more.keys() <= known):
        fields = MODELS[model_type] | more
        if FAMILIES[model_type].rotary_share and more == {
            "partial_rotary_factor": None
        }:  # means another share by release
            with pytest.raises(ConfigError, match="partial_rotary_factor=None; only 0"):
                shape_of(fields)
            continue
        if (expected := theirs(fields, tmp_path)) is None:
            assert ours(fields) is None, more
            continue
        assert same_as(expected, resolve_config(fields), model_type) is None, more
        assert resolve_config(expected) == resolve_config(resolve_config(expected))


@pytest.mark.parametrize("model_type", FAMILIES)
def test_missing_and_null_fields_mean_the_same_as_in_transformers(model_type: str, tmp_path: Path) -> None:
    num_compared = 0
    for name in {*FAMILIES[model_type].declared, "head_dim", "rope_parameters", "rope_scaling", "rope_theta"} - NEEDED:
        left_out = {key: value for key, value in MODELS[model_type].items() if key != name}
        for fields in (left_out, MODELS[model_type] | {name: None}):
            expected, found = theirs(fields, tmp_path), ours(fields)
            if expected is None or found is None:  # only we refuse these if they are null: transformers fails later
                assert found is None and (
                    expected is None
                    or None in (fields.get(one, 1) for one in ("rope_theta", "head_dim", "v_head_dim"))
                    or name in NEWER
                ), (
                    name,
                    fields.get(name, "left out"),
                )
                continue
            num_compared += 1
            assert same_as(expected, found, model_type) is None, name
            assert shape_in(fields) == shape_in(expected), name
    assert num_compared > 20


@pytest.mark.parametrize("model_type", FAMILIES)
@pytest.mark.parametrize("value", [[1], "1", {"a": 1}, True, 1.5], ids=repr)
def test_values_of_a_type_that_transformers_refuses_are_refused(model_type: str, value: Any, tmp_path: Path) -> None:
    for name in FAMILIES[model_type].declared:
        fields = MODELS[model_type] | {name: value}
        if theirs(fields, tmp_path) is None:
            assert ours(fields) is None, name


def test_the_heads_of_qwen3_are_128_wide_unless_its_config_sets_the_width() -> None:
    fields = {key: value for key, value in MODELS["qwen3"].items() if key != "head_dim"}
    assert ModelShape.from_hf_config(fields).head_dim == 128
    assert ModelShape.from_hf_config(fields | {"head_dim": 6}).head_dim == 6


IMPOSSIBLE = [0, -1, 10**9 * 10**9, 10**400, math.nan, math.inf, "4", True, [4], {}, 2.5]


@pytest.mark.parametrize("model_type", FAMILIES)
@pytest.mark.parametrize("value", IMPOSSIBLE, ids=lambda value: repr(value)[:12])
def test_impossible_sizes_are_refused_in_one_line(model_type: str, value: Any) -> None:
    sizes = [name for name, field in FAMILIES[model_type].declared.items() if field.kind in ("int", "int?")]
    skipped = {
        "pretraining_tp",
        "num_mtp_layers",
        "max_window_layers",
        "first_k_dense_replace",
        "sliding_window",
        *(n for n in sizes if "token" in n),
    }
    for name in {*sizes} - skipped - {"num_experts_per_tok"} | {"num_hidden_layers"}:
        with pytest.raises(
            WeightMappingError, match=rf"^config.json has {name}=[^\n]*; correct the file$|no field '{name}'"
        ):
            resolve_config(MODELS[model_type] | {name: value})


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        *(
            ({"rope_theta": value}, "rope_theta=")
            for value in (0, -1e4, math.nan, math.inf, "10000", None, True, [1.0], 10**400)
        ),
        ({"rope_parameters": {"rope_theta": 0.0}}, "rope_theta=0.0: must be a positive number"),
        (
            {"rope_parameters": {"rope_theta": 1e6}, "rope_theta": 1e4},
            "rope_theta=10000.0, which contradicts 1000000.0 in",
        ),
        (
            {"rope_scaling": {"rope_type": "linear", "factor": 2.0}, "rope_parameters": {"rope_type": "default"}},
            "contradicts",
        ),
        ({"rope_scaling": {"type": "linear", "rope_type": "default", "factor": 2.0}}, "and type='linear'"),
        ({"rope_scaling": {"type": "linear"}}, "without factor; add it"),
        ({"rope_scaling": {"type": "linear", "factor": 0.5}}, "factor=0.5: must be at least 1"),
        ({"rope_scaling": {"type": "linear", "factor": "2"}}, "factor='2': must be a positive number"),
        (
            {"rope_scaling": {"type": "llama3", "factor": 8.0, "low_freq_factor": 4, "high_freq_factor": 1}},
            "high_freq_factor=1",
        ),
        ({"rope_scaling": "linear"}, "rope_scaling='linear': must be an object"),
        ({"rope_parameters": [1]}, "rope_parameters=[1]: must be an object"),
        (
            {"rope_parameters": {"full_attention": {"rope_type": "linear"}}},
            "rope_parameters.full_attention, of one kind",
        ),
        ({"partial_rotary_factor": 0.0}, "partial_rotary_factor=0.0: must be above 0"),
        ({"partial_rotary_factor": "x"}, "partial_rotary_factor='x'"),
        *(({"rms_norm_eps": value}, "rms_norm_eps=") for value in (0.0, -1e-6, 2.0, math.nan, math.inf, "1e-6", 1)),
        *(({"initializer_range": value}, "initializer_range=") for value in (-0.1, 1.5, math.nan, math.inf, None)),
        ({"eos_token_id": 102}, "eos_token_id=102: must be below vocab_size=102"),
        ({"eos_token_id": [1, -2]}, "eos_token_id=[1, -2]: must be below"),
        ({"pad_token_id": [1]}, "pad_token_id=[1]: must be a whole number or null"),
        ({"bos_token_id": 5.0}, "bos_token_id=5.0: must be a whole number"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings=1: must be true or false"),
        ({"torch_dtype": "bfloat17"}, "torch_dtype='bfloat17': must be one of float32"),
        ({"dtype": ["float32"]}, "dtype=['float32']: must be one of"),
        ({"architectures": "LlamaForCausalLM"}, "architectures='LlamaForCausalLM': must be a list of texts"),
        ({"hidden_size": 37}, "hidden_size=37: must be a multiple of num_attention_heads=6"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers=1000000000: must be a positive whole number up to 10,000"),
        ({"hidden_act": ["silu"] * 999}, "...: must be a text"),
    ],
)
def test_impossible_values_are_named_with_their_requirement(fields: dict[str, Any], says: str) -> None:
    with pytest.raises(WeightMappingError) as caught:
        shape_of(MODELS["llama"] | fields)
    assert says in str(caught.value)
    assert len(str(caught.value)) < 400


def test_a_negative_padding_id_and_layers_of_full_attention_are_accepted() -> None:
    shape_of(MODELS["llama"] | {"pad_token_id": -1})
    shape_of(MODELS["qwen2"] | {"layer_types": ["full_attention"] * 3})


@pytest.mark.parametrize("model_type", FAMILIES)
def test_a_window_is_of_the_layers_that_have_it_in_transformers(model_type: str) -> None:
    window = {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}
    if "sliding_window" not in FAMILIES[model_type].declared:
        window |= {"first_k_dense_replace": 1}
        with pytest.raises(ConfigError, match="sliding_window=9; only None"):
            shape_of(MODELS[model_type] | window)
        return
    expected = (0, 9, 9) if "max_window_layers" in FAMILIES[model_type].declared else (9, 9, 9)
    assert shape_of(MODELS[model_type] | window).windows == expected
    assert shape_of(MODELS[model_type] | window | {"sliding_window": None}).windows == ()
    mixed = MODELS[model_type] | window | {"layer_types": ["sliding_attention", "full_attention", "full_attention"]}
    if "layer_types" in FAMILIES[model_type].declared:
        assert shape_of(mixed).windows == (9, 0, 0)
    else:
        with pytest.raises(WeightMappingError, match=r"'full_attention' .*sliding_window=9 "):
            shape_of(mixed)


@pytest.mark.parametrize(
    "text",
    ["[" * 100_000, '{"a": ' * 100_000, '{"model_type": "llama", "vocab_size": ' + "9" * 5000 + "}", '{"a": "\udc80'],
    ids=["lists", "objects", "digits", "surrogate"],
)
def test_hostile_json_is_one_line(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(WeightMappingError, match=r"^[^\n]{1,300} \([^\n]{1,300}\); restore the file$"):
        read_config(tmp_path)


def same_as(expected: dict[str, Any], found: dict[str, Any], model_type: str) -> str | None:
    """Return the first of transformers' values that differs in a resolved config."""
    for name, value in expected.items():
        if name in found and found[name] != value and name not in ("layer_types", "transformers_version"):
            if (name, value) == ("head_dim", None) and found[name] == found["hidden_size"] // found[
                "num_attention_heads"
            ]:
                continue  # transformers' modules then use this width
            return f"{name}: {value!r} is {found[name]!r} here"
    return difference(model_type, found, resolve_config(expected))


def test_torch_knows_the_dtypes_of_a_config() -> None:
    from grpo_mega.weights import hf_config

    assert all(isinstance(getattr(torch, name), torch.dtype) for name in hf_config._DTYPES)


def test_transformers_and_sglang_must_agree_on_the_layers_without_experts() -> None:
    """transformers reads one field and SGLang another."""
    fields = MODELS["glm4_moe_lite"]
    assert resolve_config(fields)["mlp_layer_types"] == ["dense", "sparse", "sparse"]
    types = ["dense", "dense", "sparse"]
    assert resolve_config(fields | {"mlp_layer_types": types, "first_k_dense_replace": 2})["mlp_layer_types"] == types
    for changes in ({"mlp_layer_types": types}, {"first_k_dense_replace": 2}, {"mlp_layer_types": ["sparse"] * 3}):
        with pytest.raises(WeightMappingError, match="first layers"):
            resolve_config(fields | changes)


def test_a_multimodal_config_is_that_of_its_language_model(tmp_path: Path) -> None:
    types = ["linear_attention", "full_attention", "linear_attention"]
    text = SMALL | {"model_type": "qwen3_5_text", "tie_word_embeddings": True, "head_dim": 12, "layer_types": types}
    whole = {"model_type": "qwen3_5", "text_config": text, "vision_config": {}, "tie_word_embeddings": True}
    expected, found = theirs(whole, tmp_path), resolve_config(whole)
    assert expected is not None
    assert same_as(expected["text_config"], found | {"model_type": "qwen3_5_text"}, "qwen3_5_text") is None
    assert resolve_config(found) == found
    assert ModelShape.from_hf_config(expected) == ModelShape.from_hf_config(whole)
    alone = ModelShape.from_hf_config(text)
    assert ModelShape.from_hf_config(whole) == dataclasses.replace(alone, model_type="qwen3_5")
    assert alone.linear_layers == (0, 2) and alone.tied
    with pytest.raises(WeightMappingError, match=r"text_config; .*equal$"):
        resolve_config(whole | {"tie_word_embeddings": False})
