"""Sliding windows in every kind of layout: logits and gradients against transformers, for lengths around the window."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed.layout_cases import LogitsCase, label, make_config, probe
from tests.helpers.models import VOCAB_SIZE, make_model, save_checkpoint
from tests.helpers.ranks import CaseValues, Results, launch

pytestmark = pytest.mark.distributed

WORKER = Path(__file__).with_name("layouts_worker.py")
LENGTHS = (300, 5, 129, 128, 127, 2, 260)
BUDGET = 560  # a micro-batch holds segments below, at and above the window
FULL, SLIDING = "full_attention", "sliding_attention"
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "mistral": ("mistral", {"sliding_window": 128, "num_hidden_layers": 3}),
    "mixed": (
        "qwen2",
        {
            "use_sliding_window": True,
            "sliding_window": 127,
            "num_hidden_layers": 5,
            "layer_types": [SLIDING, FULL, SLIDING, SLIDING, FULL],
        },
    ),
    "last layers": (
        "qwen3",
        {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 1, "num_hidden_layers": 3, "tied": True},
    ),
    "tiny": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 2, "max_window_layers": 1, "num_hidden_layers": 3, "tied": True},
    ),
    "experts": ("qwen3_moe", {"use_sliding_window": True, "sliding_window": 129, "num_hidden_layers": 3}),
}
CASES = {
    "mistral": ("tp=1", "tp=2,sequence_parallel=true", "pp=2,layers_per_chunk=[1;2]"),
    "mixed": (
        "tp=1",
        "tp=1 model.recompute=full",
        "pp=2,layers_per_chunk=[2;3]",
        "pp=2,vpp=2,layers_per_chunk=[1;1;2;1]",
    ),
    "last layers": ("tp=1", "tp=2", "tp=1 model.recompute=selective"),
    "tiny": ("tp=2",),
    "experts": ("tp=1", "tp=2,ep=2,sequence_parallel=true"),
}
# Limits of logits and of gradients. With norms of queries and keys, transformers' fp32 gradients differ by 3.2e-6
# from fp64, and logits by as much as in the tests of all layouts.
LIMITS = {"last layers": (2e-6, 6e-6), "tiny": (2e-6, 2e-6)}  # without vector kernels tiny logits differ by 1.2e-6
NAMES = [f"{model}:{layout}" for model, layouts in CASES.items() for layout in layouts]


@pytest.fixture(scope="module")
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> CaseValues:
    """Return the largest relative differences of logits and of gradients, by case of a selected test and name."""
    folder, cases = tmp_path_factory.mktemp("windows"), list[LogitsCase]()
    items: list[Any] = [item for item in request.session.items if item.path == request.path]
    chosen = {item.callspec.params["name"] for item in items}
    generator = torch.Generator().manual_seed(5)
    sequences = [torch.randint(2, VOCAB_SIZE, (n,), generator=generator).tolist() for n in LENGTHS]
    for name, (family, changes) in MODELS.items():
        model = make_model(family, seed=3, max_position_embeddings=512, **changes)
        save_checkpoint(model, folder / name)
        with torch.no_grad():
            expected = [model(torch.tensor([tokens])).logits[0] for tokens in sequences]
        config = make_config(folder / name, "tp=1")
        probed = probe(model, sequences, folder / f"{name}-gradients", config.model.router, [])
        for text in (text for text in CASES[name] if f"{name}:{text}" in chosen):
            config = make_config(folder / name, *text.split(" "))
            cases.append(LogitsCase(f"{name}:{text}", config, sequences, expected, token_budget=BUDGET, **probed))
    problems: Results = {}
    for world_size in sorted({case.world_size for case in cases}):
        torch.save({i: case for i, case in enumerate(cases) if case.world_size == world_size}, folder / "cases.pt")
        problems |= launch(WORKER, world_size, folder)
    values = CaseValues("logits", problems)
    for i, case in enumerate(cases):
        if not problems[label(case)]:
            values[case.name] = torch.load(folder / f"{i}.pt")
    return values


@pytest.mark.parametrize("name", NAMES)
def test_logits_and_gradients_with_windows_equal_transformers(found: CaseValues, name: str) -> None:
    gradients = {key: value for key, value in found[name].items() if "chunk" in key}
    most, most_of_gradients = LIMITS.get(name.partition(":")[0], (1e-6, 2e-6))
    assert found[name]["logits"] < most and len(gradients) > 20
    worst = max(gradients.items(), key=lambda item: item[1])
    assert worst[1] < most_of_gradients, worst
