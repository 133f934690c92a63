"""Linear attention (Qwen3.5) on a real server on a CPU: log-probs against transformers' model on the same weights.

The server reads the config of a multimodal model. Its value heads are twice its key heads; in test_sync.py they are
three times as many, so SGLang takes another path.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from grpo_mega.rollout.engine import RolloutRequest, Sampling
from grpo_mega.rollout.sglang.engine import SGLangEngine
from grpo_mega.rollout.sglang.server import Server
from grpo_mega.types import Group, Prompt, Sample
from tests.helpers.models import VOCAB_SIZE, make_model
from tests.helpers.servers import make_settings, post, ready
from tests.sglang.test_generation import connected, enough, update_to

pytestmark = [pytest.mark.sglang, pytest.mark.full, pytest.mark.usefixtures("preloaded_python")]

TOLERANCE = 1e-5
EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
LINEAR, FULL = "linear_attention", "full_attention"
ROPE = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
SIZES: dict[str, Any] = {
    "num_hidden_layers": 5,
    "layer_types": [LINEAR, FULL, LINEAR, LINEAR, FULL],
    "linear_num_value_heads": 4,
    "max_position_embeddings": 512,
    "eos_token_id": None,
    "rope_parameters": ROPE,
}
LENGTHS = (1, 63, 64, 65, 129)
SAMPLING = Sampling(4, temperature=1.0, max_response_length=20, stop_token_ids=frozenset())
MODELS = [make_model("qwen3_5_text", seed=seed, **SIZES) for seed in (7, 8)]  # two policies


def prompt_of(length: int) -> Prompt:
    ids = torch.randint(3, VOCAB_SIZE, (length,), generator=torch.Generator().manual_seed(length))
    return Prompt(length, "", tuple(ids.tolist()), "")


@pytest.fixture(scope="module")
def hybrid(temporary: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[SGLangEngine, Server, Path]]:
    """Yield an engine, its server with room for 1200 tokens, and the folder of the policies' weights."""
    folder = tmp_path_factory.mktemp("hybrid")
    text = MODELS[0].config.to_dict()
    del text["partial_rotary_factor"]  # SGLang's default is another one
    text["rope_parameters"] |= {"mrope_section": [2, 1, 1], "mrope_interleaved": True}
    config = {"model_type": "qwen3_5", "architectures": ["Qwen3_5ForConditionalGeneration"], "text_config": text}
    (folder / "config.json").write_text(json.dumps(config | {"vision_config": {}, "tie_word_embeddings": False}))
    for index, model in enumerate(MODELS):
        torch.save(model.state_dict(), folder / f"{index}.hf")
    small = {"cache_tokens": 1200, "max_concurrent": 32}
    server = Server(replace(make_settings(folder, folder / "engine", **small), is_hybrid=True))
    with ready(server, temporary), connected(server, folder, folder / "session", **small) as engine:
        yield engine, server, folder


def sampled(engine: SGLangEngine, groups: dict[int, Group], sampling: Sampling, **others: Any) -> RolloutRequest:
    """Fill the groups with samples. Return the request."""
    request = RolloutRequest(dict(groups), sampling, 0, **others)
    groups |= engine.generate(request)
    assert engine.failure is None, engine.failure
    return request


@torch.no_grad()
def difference(samples: list[Sample], policy: int = 0) -> float:
    """Return the largest difference of the samples' log-probs from transformers."""
    worst = 0.0
    for sample in samples:
        ids, start = torch.tensor([[*sample.prompt.token_ids, *sample.response_ids]]), len(sample.prompt.token_ids)
        logits = MODELS[policy](ids).logits[0, start - 1 : -1].double()
        expected = torch.log_softmax(logits, -1).gather(1, ids[0, start:, None])[:, 0]
        worst = max(worst, float((expected - torch.tensor(sample.rollout_logprobs)).abs().max()))
    return worst


def samples_of(groups: dict[int, Group]) -> list[Sample]:
    return [sample for group in groups.values() for sample in group.samples]


def continued(server: Server, sample: Sample) -> tuple[Sample, int]:
    """Return a sample for a later turn after this sample, and the number of prompt tokens from the prefix cache."""
    ids = [*sample.prompt.token_ids, *sample.response_ids, 5, 6, 7]
    params = {"max_new_tokens": 20, "temperature": 1.0, "ignore_eos": True}
    answer = post(server, "/generate", {"input_ids": ids, "sampling_params": params, "return_logprob": True})
    said = answer["meta_info"]
    later = replace(
        sample,
        prompt=replace(sample.prompt, token_ids=tuple(ids)),
        response_ids=answer["output_ids"],
        rollout_logprobs=[one[0] for one in said["output_token_logprobs"]],
    )
    return later, said["cached_tokens"]


def test_prompts_around_a_chunk_in_one_batch_have_transformers_logprobs(
    hybrid: tuple[SGLangEngine, Server, Path],
) -> None:
    engine, server, folder = hybrid
    update_to(engine, 1, folder / "0.hf")
    groups = {length: Group(prompt_of(length), []) for length in LENGTHS}
    sampled(engine, groups, SAMPLING)
    samples = samples_of(groups)
    assert len(samples) == len(LENGTHS) * SAMPLING.group_size and difference(samples) < TOLERANCE
    later = [continued(server, group.samples[-1]) for group in groups.values()]
    assert all(num_cached > 0 for _, num_cached in later), "no turn used the cached states"
    assert difference([sample for sample, _ in later]) < TOLERANCE


def test_states_of_the_old_policy_survive_an_update_only_without_flush(
    hybrid: tuple[SGLangEngine, Server, Path],
) -> None:
    engine, server, folder = hybrid
    found = {}
    for flush in (True, False):
        update_to(engine, 1, folder / "0.hf")
        groups = {65: Group(prompt_of(65), [])}
        sampled(engine, groups, SAMPLING)
        update_to(engine, 2, folder / "1.hf", flush_cache=flush)
        later, num_cached = continued(server, groups[65].samples[0])
        found[flush] = difference([later], policy=1)
        assert (num_cached == 0) == flush
    assert found[True] < TOLERANCE and found[False] > 100 * TOLERANCE, found


def test_samples_that_a_full_cache_interrupts_are_right(hybrid: tuple[SGLangEngine, Server, Path]) -> None:
    engine, _, folder = hybrid
    update_to(engine, 1, folder / "0.hf")
    groups = {length: Group(prompt_of(length), []) for length in (1, 3, 5, 63)}
    usage = sampled(engine, groups, replace(SAMPLING, group_size=8, max_response_length=300)).usage
    assert usage.num_retracted > 0, usage
    assert difference(samples_of(groups)) < TOLERANCE


def test_aborted_samples_continue_with_right_states(hybrid: tuple[SGLangEngine, Server, Path]) -> None:
    engine, _, folder = hybrid
    update_to(engine, 1, folder / "0.hf")
    groups = {length: Group(prompt_of(length), []) for length in (1, 5, 64)}
    sampling = replace(SAMPLING, max_response_length=90, stop_token_ids=frozenset(range(3, VOCAB_SIZE, 30)))
    sampled(engine, groups, sampling, stop=enough(1))
    aborted = [sample for sample in samples_of(groups) if not sample.is_finished]
    assert aborted and difference([sample for sample in aborted if sample.response_ids]) < TOLERANCE
    sampled(engine, groups, sampling)
    assert all(group.is_complete(sampling.group_size) for group in groups.values())
    assert difference(samples_of(groups)) < TOLERANCE


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("dtype", "bound"), [("float32", TOLERANCE), pytest.param("bfloat16", 0.3, marks=pytest.mark.sweep)]
)
def test_a_training_run_with_a_server_has_the_trainers_logprobs(tmp_path: Path, dtype: str, bound: float) -> None:
    """The quickstart's recipe, with fewer prompts, on a model with random weights. In bf16 the sync verifies that some
    weights are float32."""
    small = {"steps": 3, "layout": "{tp: 2}", "rollout.engine": "sglang", "rollout.tp": 2, "batch.prompts_per_step": 4}
    paths = {"model.path": "model", "data.train": "train.jsonl", "data.heldout": "heldout.jsonl", "run_dir": "run"}
    settings = (
        small | {"eval.num_prompts": 4, "model.dtype": dtype} | {key: tmp_path / name for key, name in paths.items()}
    )
    overrides = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    for command in (
        [EXAMPLES / "arithmetic.py", tmp_path, "--seed", "0", "--hybrid"],
        ["-m", "grpo_mega.cli", "train", EXAMPLES / "quickstart.yaml", *overrides],
    ):
        done = subprocess.run([sys.executable, *map(str, command)], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    found = [row["mismatch/abs_max"] for row in rows if "mismatch/abs_max" in row]
    assert len(found) == 3 and 0 < max(found) < bound, found
