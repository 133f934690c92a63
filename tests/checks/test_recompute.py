"""Settings of recomputation that the model, its precision or the installed packages cannot follow."""

from __future__ import annotations

from typing import Any

import pytest

from grpo_mega import config as configs
from grpo_mega.cli.checks.machine import Machine
from grpo_mega.cli.checks.precision import installed_problems
from grpo_mega.cli.checks.violations import cut_problems
from grpo_mega.errors import ConfigError
from grpo_mega.weights.architecture import shape_of
from tests.helpers.models import make_config

RAW: dict[str, Any] = {"run_dir": "unused", "steps": 1, "data": {"train": "unused"}}
DENSE, EXPERTS = (make_config(name).to_dict() for name in ("qwen3", "qwen3_moe"))


def test_parts_and_numbers_of_recomputed_layers_must_fit_the_model() -> None:
    def problems(model: dict[str, Any], fields: dict[str, Any] = EXPERTS, **sections: Any) -> list[str]:
        raw = {**RAW, **sections, "model": {"path": "unused", "dtype": "bfloat16"} | model}
        config, machine = configs.validate(raw), Machine(1, 1, transformer_engine=None)
        found = [*cut_problems(config, shape_of(fields)), *installed_problems(config, machine)]
        return [problem for problem in found if "recompute" in problem]

    selective: dict[str, Any] = {"recompute": "selective"}
    layers = EXPERTS["num_hidden_layers"]
    assert not problems(selective) and not problems({"recompute": "full", "recompute_num_layers": layers})
    [line] = problems({"recompute": "full", "recompute_num_layers": layers + 1})
    assert f"recompute_num_layers={layers + 1}: must be at most the {layers} layers of a model chunk; lower it" in line
    [line] = problems(selective | {"recompute_modules": ["layernorm"]})
    assert line.endswith("layernorm needs Transformer Engine; install it or leave layernorm out")
    [line] = problems(selective | {"recompute_modules": ["moe"]}, DENSE)
    assert "moe must be left out for" in line
    delayed = {"fp8": "hybrid", "fp8_recipe": "delayed", "fp8_reference": True}
    assert any(
        "with precision.fp8_recipe=delayed" in line
        for line in problems(selective | {"recompute_modules": ["layernorm"]}, DENSE, precision=delayed)
    )


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ({"recompute_modules": ["mlp"]}, r"\['mlp'\] needs model.recompute=selective; set it"),
        ({"recompute": "selective", "recompute_modules": []}, r"must name at least one part, each once"),
        ({"recompute": "selective", "recompute_modules": ["mlp", "mlp"]}, r"must name at least one part, each once"),
        ({"recompute": "selective", "recompute_modules": ["moe_act"]}, r"moe_act needs model.grouped_experts=true"),
        ({"recompute_num_layers": 2}, r"recompute_num_layers=2 needs model.recompute=full; set it"),
    ],
)
def test_recomputation_settings_that_contradict_each_other_are_one_line(model: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        configs.validate({**RAW, "model": {"path": "unused"} | model})
