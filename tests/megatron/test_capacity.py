"""With a capacity factor experts drop tokens. Padding takes no place in an expert and does not change the capacity."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.helpers.ranks import Results, launch

pytestmark = [pytest.mark.distributed, pytest.mark.full]

WORKER = Path(__file__).with_name("capacity_worker.py")
MULTIPLES = (2, 48, 130)  # row lengths are multiples of these
LAYOUTS = {  # by number of ranks
    1: ("tp=1", "tp=1 model.recompute=full", "tp=1 model.recompute=selective"),
    2: ("dp=2,ep=2", "dp=2,ep=2 model.recompute=full", "tp=2,sequence_parallel=true", "cp=2", "pp=2"),
}
CASES = [text for texts in LAYOUTS.values() for text in texts]
NAMES = ("loss/total", "loss/policy", "grad_norm", "kl/mean", "mismatch/k3", "moe/dropped_tokens", "moe/load_max")


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> tuple[Results, dict[str, dict[str, list[dict[str, float]]]]]:
    problems: Results = {}
    found = {}
    for num_ranks, texts in LAYOUTS.items():
        folder = tmp_path_factory.mktemp(f"ranks{num_ranks}")
        (folder / "cases.json").write_text(json.dumps({"layouts": texts, "multiples": MULTIPLES}))
        problems |= launch(WORKER, num_ranks, folder)
        found |= {t: json.loads((folder / f"{t}.json").read_text()) for t in texts if (folder / f"{t}.json").exists()}
    return problems, found


@pytest.mark.parametrize("text", CASES)
def test_row_length_does_not_change_the_tokens_that_experts_drop(results: tuple[Results, dict], text: str) -> None:
    problems, found = results
    assert problems[text] == []
    short, *longer = (found[text][str(multiple)] for multiple in MULTIPLES)
    assert all(0.3 < metrics["moe/dropped_tokens"] < 0.7 for metrics in short)
    for metrics in longer:
        for mine, expected in zip(metrics, short, strict=True):
            assert mine["moe/dropped_tokens"] == expected["moe/dropped_tokens"]
            assert {n: mine[n] for n in NAMES} == pytest.approx({n: expected[n] for n in NAMES}, rel=1e-4, abs=1e-8)


@pytest.mark.parametrize("text", CASES)
def test_passes_for_log_probs_drop_the_same_tokens_as_the_update(results: tuple[Results, dict], text: str) -> None:
    for metrics in results[1][text].values():
        assert metrics[0]["ratio/mean"] == pytest.approx(1, abs=1e-6) and metrics[0]["ratio/max"] == pytest.approx(
            1, abs=1e-5
        )


def test_an_expert_keeps_its_best_tokens_up_to_its_capacity(results: tuple[Results, dict]) -> None:
    assert results[0]["choices"] == []
    layouts = [results[1][text]["48"] for text in ("tp=1", "tp=2,sequence_parallel=true", "cp=2", "pp=2")]
    for metrics in layouts[1:]:  # ranks that share a row share one capacity
        assert [m["moe/dropped_tokens"] for m in metrics] == [m["moe/dropped_tokens"] for m in layouts[0]]
