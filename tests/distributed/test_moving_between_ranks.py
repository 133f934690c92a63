"""Weights and samples between four gloo ranks. All cases run in one launch; moving_worker.py has the assertions."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.helpers.models import make_model, save_checkpoint
from tests.helpers.ranks import Results, launch

pytestmark = pytest.mark.distributed

Launched = tuple[Results, Path]


@pytest.fixture(scope="module")
def launched(tmp_path_factory: pytest.TempPathFactory) -> Launched:
    folder = tmp_path_factory.mktemp("ranks")
    save_checkpoint(make_model("qwen2", tied=True), folder / "source")
    return launch(Path(__file__).with_name("moving_worker.py"), 4, folder), folder


def check(launched: Launched, case: str) -> None:
    assert not launched[0][case], "\n".join(launched[0][case])


def test_execute_moves_weights_to_another_layout_in_rounds_of_any_size(launched: Launched) -> None:
    check(launched, "reshards")


def test_execute_fills_engines_on_all_ranks_on_some_and_on_none(launched: Launched) -> None:
    check(launched, "fills_engines")


def test_servers_are_filled_through_two_buffers_with_valid_checksums(launched: Launched) -> None:
    check(launched, "fills_servers")


def test_whole_replicas_are_filled_through_two_buffers_in_turn(launched: Launched) -> None:
    check(launched, "fills_whole_replicas")


def test_all_experts_of_a_layer_may_be_in_one_parameter(launched: Launched) -> None:
    check(launched, "fills_experts_in_one_parameter")


def test_execute_works_in_a_group_of_some_of_the_ranks(launched: Launched) -> None:
    check(launched, "works_in_a_group")


def test_publish_sends_each_version_and_names_wrong_tensors_on_all_ranks(launched: Launched) -> None:
    check(launched, "publishes")


@pytest.mark.parametrize("name", ["single", "sharded"])
def test_an_untrained_model_is_exported_as_it_was_loaded(launched: Launched, name: str) -> None:
    check(launched, "exports")
    source, folder = launched[1] / "source", launched[1] / name
    assert (len(list(folder.glob("*.safetensors"))) > 3) == (name == "sharded")
    for path in source.iterdir():
        if path.suffix != ".safetensors":
            assert (folder / path.name).read_bytes() == path.read_bytes()
    before, after = (AutoModelForCausalLM.from_pretrained(f).state_dict() for f in (source, folder))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)


def test_gather_gives_every_rank_all_groups_in_order_with_missing_scores(launched: Launched) -> None:
    check(launched, "gathers")
