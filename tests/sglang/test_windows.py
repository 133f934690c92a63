"""Sliding windows on a real server, in some of the model's layers: log-probs against transformers."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from grpo_mega.rollout.sglang.server import Server
from tests.helpers.servers import MODEL, make_settings, ready
from tests.sglang.test_conversations import PROMPTS
from tests.sglang.test_generation import SAMPLING, connected, generate, update_to

pytestmark = [pytest.mark.sglang, pytest.mark.usefixtures("preloaded_python")]

SLIDING, FULL = "sliding_attention", "full_attention"
WINDOW = {"use_sliding_window": True, "sliding_window": 6, "layer_types": [SLIDING, FULL]}


@pytest.mark.full
def test_a_server_with_windows_returns_transformers_log_probs(temporary: Path, tmp_path: Path) -> None:
    """Prompts of a prefix share their cache, so the server also extends cached tokens."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(MODEL | WINDOW))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        sizes = {key: value for key, value in MODEL.items() if key not in ("architectures", "model_type", "dtype")}
        models = [Qwen2ForCausalLM(Qwen2Config(**sizes, **more, initializer_range=0.15)) for more in (WINDOW, {})]
    model, plain = (one.eval().requires_grad_(False) for one in models)
    plain.load_state_dict(model.state_dict())
    torch.save(model.state_dict(), tmp_path / "x.hf")
    server = Server(make_settings(folder, tmp_path / "engine"))
    with ready(server, temporary), connected(server, folder, tmp_path / "session") as engine:
        update_to(engine, 7, tmp_path / "x.hf")
        groups = generate(engine, PROMPTS)
        assert engine.failure is None, engine.failure
    num_far = 0
    for sample in (sample for group in groups.values() for sample in group.samples):
        ids, start = torch.tensor([[*sample.prompt.token_ids, *sample.response_ids]]), len(sample.prompt.token_ids)
        windowed, full = (
            torch.log_softmax(one(ids).logits[0, start - 1 : -1].double(), -1).gather(1, ids[0, start:, None])[:, 0]
            for one in (model, plain)
        )
        found = torch.tensor(sample.rollout_logprobs, dtype=torch.float64)
        torch.testing.assert_close(found, windowed, rtol=0, atol=1e-5)
        num_far += bool((windowed - full).abs().max() > 0.01)
    assert num_far > len(PROMPTS) * SAMPLING.group_size / 2, "the window has no effect"


@pytest.mark.parametrize("module", ["llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe"])
def test_sglang_still_ignores_the_windows_of_these_families(module: str) -> None:
    """If it fails, with_windows in served_models/families.py is no longer needed for the family."""
    found = find_spec("sglang")  # importing it would import Triton
    assert found is not None and found.origin is not None
    source = Path(found.origin).parent / "srt" / "models" / f"{module}.py"
    assert "sliding_window" not in source.read_text()
