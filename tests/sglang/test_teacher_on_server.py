"""A teacher on a separate server, against the same teacher in Megatron."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import torch

from grpo_mega import config as configs
from grpo_mega.cli.commands.check import Case, run_cases
from grpo_mega.rollout.sglang.client import ServerClient
from grpo_mega.rollout.sglang.server import Server
from grpo_mega.types import Group, Prompt, Sample
from tests.helpers.models import make_model
from tests.helpers.servers import MODEL, make_settings, ready

pytestmark = [pytest.mark.sglang, pytest.mark.full, pytest.mark.usefixtures("preloaded_python")]


@pytest.fixture
def own_server(model: Path, temporary: Path, tmp_path: Path) -> Iterator[Server]:
    """Start a server that the other files do not share, because it gets other weights."""
    server = Server(make_settings(model, tmp_path / "engine"))
    server.key = ""  # users start shared servers without a key
    with ready(server, temporary):
        yield server


def make_config(model: Path, **teacher: str) -> configs.Config:
    return configs.validate(
        {
            "run_dir": "unused",
            "steps": 1,
            "model": {"path": str(model), "dtype": "float32"},
            "teachers": {"main": teacher},
            "data": {"train": "unused", "max_prompt_length": 20},
            "rollout": {"max_response_length": 30},
            "algorithm": {"recipe": "opd", "group_size": 3},
            "batch": {"prompts_per_step": 4, "tokens_per_micro_batch": 100},
            "optimizer": {"lr": 1e-3},
        }
    )


def make_groups() -> list[Group]:
    """Return random responses of different lengths. The prompts of two groups share a prefix, so the server's cache has
    part of them."""
    generator = torch.Generator().manual_seed(4)
    prompts = [torch.randint(2, 256, (n,), generator=generator).tolist() for n in (1, 7, 19)]
    groups = []
    for g, tokens in enumerate([*prompts, prompts[2][:11]]):
        prompt = Prompt(g, "", tuple(tokens), "")
        responses = [torch.randint(2, 256, (1 + 5 * i + g,), generator=generator).tolist() for i in range(3)]
        groups.append(Group(prompt, [Sample(prompt, i, r, [-5.5] * len(r), "stop") for i, r in enumerate(responses)]))
    return groups


def test_a_teacher_on_a_server_gives_the_log_probs_of_megatron(own_server: Server, tmp_path: Path) -> None:
    sizes = {k: v for k, v in MODEL.items() if k not in ("architectures", "model_type", "dtype", "tie_word_embeddings")}
    for name, seed in (("student", 1), ("teacher", 2)):
        make_model("qwen2", seed=seed, **sizes).save_pretrained(tmp_path / name)
    body = {"model_path": str(tmp_path / "teacher"), "load_format": "auto"}
    with closing(ServerClient(own_server.url, {})) as session:
        session.run(session.post("/update_weights_from_disk", body))
    torch.save(make_groups(), tmp_path / "groups.pt")
    student, teacher = tmp_path / "student", str(tmp_path / "teacher")
    served, ours = run_cases(
        [
            Case("server", make_config(student, path=teacher, url=own_server.url)),
            Case("Megatron", make_config(student, path=teacher)),
        ],
        tmp_path,
    )
    wanted, found = ours.logprobs["teacher_logprobs"], served.logprobs["teacher_logprobs"]
    assert len(wanted) == len(found) == 12
    for key, values in wanted.items():
        assert values.abs().min() > 0.1
        assert (found[key] - values).abs().max() < 1e-5
    assert served.updates[0]["distill/kl"] == pytest.approx(ours.updates[0]["distill/kl"], abs=1e-5)
    assert served.updates[0]["grad_norm"] == pytest.approx(ours.updates[0]["grad_norm"], rel=1e-5)
