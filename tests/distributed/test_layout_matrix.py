"""The cases of the layout tests that run by default, and those that --all adds, cover the pairs that they promise."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path
from typing import Any

from tests.distributed import layout_matrix
from tests.distributed.layout_cases import METHODS, MIXTURES, MODELS, make_config
from tests.distributed.layout_matrix import ALL_GRADIENTS, ALL_LOGITS, ALL_UPDATES, AXES, COMPARED, LOGITS, NEEDED
from tests.helpers.cover import cover


def cases_of(*levels: str) -> list[tuple[str, str]]:
    """Return kind and "MODEL:LAYOUT" of the cases with these marks; "" is the level of cases without a mark."""
    kinds = {"logits": ALL_LOGITS, "gradients": ALL_GRADIENTS, "update": COMPARED}
    found: list[tuple[str, Any]] = [(kind, one) for kind, cases in kinds.items() for one in cases]
    return [(kind, one.values[0]) for kind, one in found if "".join(mark.name for mark in one.marks) in levels]


def axes_of(name: str) -> dict[str, str]:
    given = dict(part.split("=", 1) for part in name.partition(":")[2].partition(" ")[0].split(","))
    return {axis: given.get(axis, "false" if axis == "sequence_parallel" else "1") for axis in AXES}


def family_of(name: str) -> str:
    family: str = (MODELS | MIXTURES)[name.partition(":")[0].partition("+")[0]][0]
    return family


def test_default_cases_have_each_pair_of_axes_and_each_family_in_tp_and_pp() -> None:
    def things(cases: list[tuple[str, str]]) -> set[Any]:
        found = set[Any]()
        for kind, name in cases:
            used = sorted(axis for axis, value in axes_of(name).items() if value not in ("1", "false"))
            found |= {*combinations(used, 2), *((kind, axis) for axis in used), (kind, family_of(name))}
            found |= {(family_of(name), axis) for axis in used if axis in ("tp", "pp", "ep")}
        return found

    everything, usual = things(cases_of("", "full", "sweep")), things(cases_of(""))
    assert usual >= everything, sorted(everything - usual)
    assert {("cp", "tp"), ("ep", "etp"), ("pp", "vpp"), ("update", "cp"), ("mixtral", "pp")} <= usual


def test_all_cases_have_each_pair_of_sizes_and_each_size_in_each_family() -> None:
    def things(cases: list[tuple[str, str]]) -> set[Any]:
        return {
            pair
            for _, name in cases
            if "+" not in name
            for pair in combinations([("family", family_of(name)), *axes_of(name).items()], 2)
        }

    everything, found = things(cases_of("", "full", "sweep")), things(cases_of("", "full"))
    assert found >= everything, sorted(everything - found)


def test_every_model_and_each_method_that_is_no_token_loss_runs() -> None:
    usual = cases_of("")
    models = {name.partition(":")[0].partition("+")[0] for _, name in usual}
    assert models == {*MODELS, *MIXTURES} - {"large"}  # a teacher
    methods = {name.partition(":")[0].partition("+")[2] for kind, name in usual if kind == "update"}
    assert methods - {""} == {*METHODS} - {*layout_matrix.IN_ONE_TOKEN}


def test_cases_that_are_named_elsewhere_run_by_default() -> None:
    usual = {" ".join(case) for case in cases_of("")}
    assert usual >= set(NEEDED)


def test_the_number_of_ranks_of_a_layout_is_that_of_its_config() -> None:
    for text in {text for texts in (ALL_UPDATES | LOGITS).values() for text in texts}:
        layout, *rest = text.split(" ")
        config = make_config(Path("unused"), layout, *(setting for setting in rest if setting != "reversed"))
        assert layout_matrix.num_ranks(text) == config.layout.world_size, text


def test_a_cover_has_everything_and_nothing_that_others_have() -> None:
    found_in = {"ab": "ab", "bc": "bc", "c": "c", "abc": "abc", "d": "d"}
    assert cover(found_in, {"ab": 1, "bc": 1, "c": 1, "abc": 4, "d": 1}) in ({"ab", "bc", "d"}, {"ab", "c", "d"})
    assert cover(found_in, dict.fromkeys(found_in, 1)) == {"abc", "d"}
    assert cover(found_in, dict.fromkeys(found_in, 1), ["c"]) >= {"c", "d"}
