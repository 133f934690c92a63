"""A token dispatcher that the layout, the card, the dtype or the packages rule out is refused in one line."""

from __future__ import annotations

from typing import Any

import pytest

from grpo_mega import config as configs
from grpo_mega.cli.checks import precision
from grpo_mega.cli.checks.machine import Machine
from grpo_mega.config import Config, LayoutConfig, PrecisionConfig
from grpo_mega.distributed.kernels import dispatcher_problems, length_multiple
from grpo_mega.errors import ConfigError

KINDS = ("deepep", "hybridep")


def config_of(kind: str, dtype: str = "bfloat16", **layout: Any) -> Config:
    return configs.validate(
        {
            "run_dir": "r",
            "steps": 1,
            "model": {"path": "m", "dtype": dtype},
            "data": {"train": "t"},
            "layout": {"ep": 2, "dp": 2, "token_dispatcher": kind} | layout,
        }
    )


@pytest.mark.parametrize("kind", KINDS)
def test_a_dispatcher_needs_ranks_that_share_experts(kind: str) -> None:
    with pytest.raises(
        ConfigError,
        match=rf"^layout\.token_dispatcher={kind} needs layout\.ep > 1 or .*, or leave token_dispatcher out$",
    ):
        config_of(kind, ep=1)
    config_of(kind, ep=1, tp=2, etp=2, sequence_parallel=True)


@pytest.mark.parametrize(
    ("kind", "capability", "dtype", "says"),
    [
        ("deepep", None, "bfloat16", "needs a GPU of compute capability 8.0, found a card; leave it out"),
        ("hybridep", (8, 0), "bfloat16", "needs a GPU of compute capability 9.0, found a card; leave it out"),
        ("hybridep", (9, 0), "float32", "needs model.dtype=bfloat16; set it, or leave token_dispatcher out"),
        ("deepep", (8, 0), "bfloat16", None),
        ("hybridep", (10, 0), "bfloat16", None),
        ("alltoall", None, "float32", None),
    ],
)
def test_a_dispatcher_needs_its_card_and_bfloat16(
    kind: str, capability: tuple[int, int] | None, dtype: str, says: str | None
) -> None:
    found = [*dispatcher_problems(config_of(kind).layout, dtype, capability, "a card")]
    assert found == ([f"layout.token_dispatcher={kind}: {says}"] if says else [])


@pytest.mark.parametrize(("kind", "module"), [("deepep", "deep_ep"), ("hybridep", "hybrid_ep_cpp")])
def test_a_dispatcher_that_is_not_installed_is_named(kind: str, module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def found(names: set[str]) -> list[str]:
        monkeypatch.setattr(precision, "find_spec", lambda name: object() if name in names else None)
        problems = precision.installed_problems(config_of(kind), Machine(2, 2, transformer_engine=None))
        return [problem for problem in problems if "token_dispatcher" in problem]

    [problem] = found({"deep_ep", "hybrid_ep_cpp"} - {module})
    assert problem.startswith(f"layout.token_dispatcher={kind}: needs the module {module}; build it from https://")
    assert not found({module})


def test_hybridep_gets_whole_chunks_of_tokens_on_every_rank() -> None:
    def of(kind: str, **precision: str) -> int:
        layout = LayoutConfig(tp=4, ep=2, token_dispatcher=kind)  # type: ignore[arg-type]
        return length_multiple(PrecisionConfig.model_validate(precision), layout)

    assert [of(kind) for kind in ("alltoall", *KINDS)] == [64, 64, 512]
    assert of("hybridep", fp8="e4m3", fp8_recipe="mxfp8") == 512
