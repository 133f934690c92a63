"""A config.json means the same in every release of transformers that saved it, and for every release that reads it.

`releases/` has each family's config.json as four releases save it, with the release's own reading. `write.py` wrote
them there, with these releases and without this project.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from grpo_mega.checkpoint_io.hf_files import may_have_extra, side_contents, with_old_fields
from grpo_mega.cli.checks.model import model_of
from grpo_mega.weights.families import FAMILIES, MULTIMODAL
from grpo_mega.weights.hf_config import resolve_config
from tests.helpers.resolved import difference

RELEASES = ("4.57.6", "5.12.1", "5.19.0", "5.24.0")
OLD = RELEASES[0]
OLD_FIELDS = ("rope_theta", "rope_scaling", "partial_rotary_factor")


def load(release: str) -> dict[str, dict[str, Any]]:
    """Return the cases of a release. A file has all fields of a family's first case, and the others' differences."""
    cases = json.loads((Path(__file__).parent / "releases" / f"{release}.json").read_text())
    for name, case in cases.items():
        case["config"] = cases[f"{name.partition('-')[0]}-default"]["config"] | case["config"]
    return cases  # type: ignore[no-any-return]


CASES = {release: load(release) for release in RELEASES}
NAMES = sorted(CASES["5.12.1"])
SAVED = [(release, name) for release in RELEASES for name in NAMES if name in CASES[release]]


def family(name: str) -> str:
    return name.partition("-")[0]


def write(folder: Path, fields: dict[str, Any]) -> bytes:
    content = json.dumps(fields).encode()
    (folder / "config.json").write_bytes(content)
    return content


def exported(folder: Path, dtype: str = "bfloat16") -> dict[str, Any]:
    """Return the config.json of an export from this folder."""
    content = side_contents(folder, dtype)["config.json"]
    return json.loads(content if isinstance(content, bytes) else content.read_bytes())  # type: ignore[no-any-return]


def test_the_releases_files_have_all_families_and_each_releases_fields() -> None:
    families = {family(name) for name in NAMES}
    assert families <= {*FAMILIES, *MULTIMODAL} and len(families) >= 14
    unknown = {"glm4_moe_lite", "qwen3_5_text", "qwen3_5_moe_text", *MULTIMODAL}
    assert {family(name) for name in CASES[OLD]} == families - unknown
    glm = [CASES[release]["glm4_moe-theta"]["config"] for release in RELEASES]
    assert ["partial_rotary_factor" in fields for fields in glm] == [True, True, True, False]
    assert ["rope_theta" in fields for fields in glm] == [True, False, False, False]
    assert ["output_router_logits" in fields for fields in glm] == [False, False, True, True]


@pytest.mark.parametrize("name", NAMES)
def test_a_model_is_the_same_in_every_releases_form(name: str, tmp_path: Path) -> None:
    expected = model_of(CASES["5.12.1"][name]["config"])
    for release in RELEASES:
        if name not in CASES[release]:
            continue
        found = model_of(CASES[release][name]["config"])
        assert (found.shape, found.experts_per_token) == (expected.shape, expected.experts_per_token), release
        assert difference(family(name), found.fields, expected.fields) is None, release
        share = CASES[release][name]["reads"]["partial_rotary_factor"]
        assert found.fields.get("partial_rotary_factor") == share, release
        write(tmp_path, CASES[release][name]["config"])
        installed = resolve_config(AutoConfig.from_pretrained(tmp_path).to_dict())
        assert difference(family(name), found.fields, installed) is None, release


@pytest.mark.parametrize(("release", "name"), SAVED)
def test_the_rotary_embedding_equals_the_releases_reading(release: str, name: str) -> None:
    rope = resolve_config(CASES[release][name]["config"])["rope_parameters"]
    reads = CASES[release][name]["reads"]
    assert rope.pop("rope_theta") == reads["rope_theta"]
    assert rope.pop("partial_rotary_factor", None) == reads["partial_rotary_factor"]
    assert rope == reads["scaling"]


@pytest.mark.parametrize(("release", "name"), SAVED)
def test_an_exported_config_has_the_fields_that_transformers_4_reads(release: str, name: str, tmp_path: Path) -> None:
    fields = CASES[release][name]["config"]
    content = write(tmp_path, fields)
    if release == OLD or family(name) in MULTIMODAL:  # no release 4 knows these multimodal models
        assert side_contents(tmp_path, "float32")["config.json"] == tmp_path / "config.json"
        return
    found, reads = exported(tmp_path), CASES[release][name]["reads"]
    assert found["rope_theta"] == reads["rope_theta"]
    assert found.get("partial_rotary_factor") == reads["partial_rotary_factor"]
    scaling = None if reads["scaling"] == {"rope_type": "default"} else reads["scaling"]
    assert found.get("rope_scaling") == scaling
    if name in CASES[OLD]:
        saved = CASES[OLD][name]["config"]
        assert [found.get(key) for key in OLD_FIELDS] == [saved.get(key) for key in OLD_FIELDS]
    assert {key: found[key] for key in fields} == fields
    assert found.keys() - fields.keys() <= {*OLD_FIELDS}
    expected = AutoConfig.from_pretrained(tmp_path).rope_parameters
    assert exported(tmp_path, "float32") == found | {"dtype": "float32"}
    content = write(tmp_path, found)  # has both generations' fields, so it is copied
    assert side_contents(tmp_path, "float32")["config.json"] == tmp_path / "config.json"
    assert content == (tmp_path / "config.json").read_bytes()
    assert AutoConfig.from_pretrained(tmp_path).rope_parameters == expected
    assert difference(family(name), resolve_config(found), resolve_config(fields)) is None


LINEAR = {"rope_type": "linear", "factor": 3.0}
PARTS: list[tuple[dict[str, Any], dict[str, Any]]] = [  # fields of rotary embeddings, and those that an export adds
    ({}, {}),
    ({"rope_theta": 7.0}, {}),
    ({"rope_scaling": LINEAR, "rope_theta": 7.0}, {}),
    ({"rope_parameters": None}, {}),
    ({"rope_parameters": {"rope_type": "default"}}, {"rope_theta": 10000.0}),
    ({"rope_parameters": {"rope_type": "default", "rope_theta": 7.0}, "rope_theta": 7.0}, {}),
    ({"rope_parameters": LINEAR, "rope_theta": 7.0}, {"rope_scaling": LINEAR}),
    ({"rope_parameters": LINEAR | {"rope_theta": 7.0}, "rope_theta": 7.0, "rope_scaling": LINEAR}, {}),
    (
        {"rope_parameters": LINEAR | {"rope_theta": 7.0}, "rope_theta": None, "rope_scaling": None},
        {"rope_theta": 7.0, "rope_scaling": LINEAR},
    ),
    (
        {"rope_parameters": {"type": "linear", "factor": 3.0}},
        {"rope_theta": 10000.0, "rope_scaling": {"type": "linear", "factor": 3.0}},
    ),
    (
        {"rope_parameters": {"rope_type": "yarn", "factor": 3.0, "rope_theta": 7.0}},
        {"rope_theta": 7.0, "rope_scaling": {"rope_type": "yarn", "factor": 3.0}},
    ),
]


@pytest.mark.parametrize(("fields", "added"), PARTS)
def test_an_export_adds_only_the_fields_that_are_missing(fields: dict[str, Any], added: dict[str, Any]) -> None:
    llama = {key: value for key, value in CASES[OLD]["llama-default"]["config"].items() if key not in OLD_FIELDS}
    given = llama | fields
    found = with_old_fields(given | {"torch_dtype": "float16"}, "float32")
    names = dict.fromkeys(("dtype", "torch_dtype"), "float32") if added else {"torch_dtype": "float16"}
    assert found == given | added | names
    assert resolve_config(found)["rope_parameters"] == resolve_config(given)["rope_parameters"]
    del given["dtype"]
    assert with_old_fields(given, "float32") == given | added | ({"dtype": "float32"} if added else {})


def test_a_rotated_share_is_read_where_a_file_has_it() -> None:
    glm = CASES["5.24.0"]["glm4_moe-theta"]["config"]
    bare = {key: value for key, value in glm.items() if key != "rope_parameters"}
    for fields in ({"rope_theta": 5e5}, {"rope_theta": 5e5, "partial_rotary_factor": 0.5}):
        assert resolve_config(bare | fields)["rope_parameters"] == glm["rope_parameters"]
    rope = glm["rope_parameters"] | {"partial_rotary_factor": 1.0}
    assert resolve_config(glm | {"rope_parameters": rope})["partial_rotary_factor"] == 1.0


def test_layers_that_only_predict_more_tokens_are_known_by_each_name() -> None:
    fields = CASES["5.12.1"]["glm4_moe-default"]["config"]
    assert not may_have_extra(fields)
    for name in ("num_nextn_predict_layers", "num_mtp_layers"):
        assert may_have_extra(fields | {name: 3})
        resolved = resolve_config(fields | {name: 3})
        assert (resolved["num_nextn_predict_layers"], resolved["num_mtp_layers"]) == (3, 3)
