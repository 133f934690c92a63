"""Weights through the real server: every family, several trainer layouts, engines at TP1 and TP2; see sync_worker.py."""

import json
from pathlib import Path

import pytest
import torch
from ranks import launch
from sync_cases import CASES, SAMPLING
from transformers import AutoModelForCausalLM

from grpo_mega.launch import free_port

pytestmark = [pytest.mark.distributed, pytest.mark.sglang]

TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def synced(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sync")
    (folder / "port").write_text(str(free_port()))
    results = launch(Path(__file__).with_name("sync_worker.py"), 4, folder, timeout_s=900)
    assert results == {"syncs": []}, results
    return folder


@pytest.mark.parametrize("name", CASES)
def test_the_server_gives_transformers_logprobs_after_a_real_step_in_every_layout(synced: Path, name: str) -> None:
    case, folder = CASES[name], synced / name
    for version, layout in enumerate(case.layouts, start=1):
        worst = {tp: _difference(folder, version, tp, weights_of=version) for tp in case.engine_tps}
        print(f"{name}, {layout}, by the engine's tp: {worst}")
        assert max(worst.values()) < TOLERANCE, (layout, worst)
        assert _difference(folder, version, case.engine_tps[0], weights_of=version - 1) > 100 * TOLERANCE


@torch.no_grad()
def _difference(folder: Path, version: int, tp: int, weights_of: int) -> float:
    """The largest difference of a version's rollout log-probs from transformers' on the weights of that or another version."""
    model = AutoModelForCausalLM.from_pretrained(folder / f"hf{weights_of}", dtype=torch.float32)
    worst = 0.0
    for prompt, response, said in json.loads((folder / f"samples{version}_tp{tp}.json").read_text()):
        logits = model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1] / SAMPLING.temperature
        expected = logits.log_softmax(-1).gather(1, torch.tensor(response)[:, None])[:, 0]
        worst = max(worst, float((expected - torch.tensor(said)).abs().max()))
    return worst
