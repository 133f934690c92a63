"""The loss and the gradients of `grpo-mega sft` equal transformers', in every layout and packing.

The expected values share no code with the package: the texts of the chats are written here in full, with the parts that
are trained. All layouts share one launch of two ranks.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from grpo_mega import config as configs
from grpo_mega.config.data import as_sft
from tests.helpers.models import make_model, make_tokenizer, save_checkpoint
from tests.helpers.ranks import Results, launch

pytestmark = pytest.mark.distributed

LAYOUTS = ("tp=2,sequence_parallel=true", "pp=2,layers_per_chunk=[3, 2]", "dp=2", "cp=2", "tp=2")
BUDGETS = (48, 400)  # tokens: many micro-batches, and one
SIZES: dict[str, Any] = {
    "num_hidden_layers": 5,
    "hidden_size": 44,
    "intermediate_size": 76,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "layer_types": ["full_attention"] * 5,
}
# The parts of each row's text; every second one is trained.
TEXTS = [
    ["<user>Say one.<assistant>", "one<eos>"],
    ["<user>ab<assistant>", "c<eos>", "<user>d<assistant>", "efghij<eos>"],
    [
        "<system>Be kind.<user>x<assistant>",
        "y<eos>",
        "<user>z<assistant>",
        "<eos>!<eos>",
        "<user>?<assistant>",
        "!<eos>",
    ],
    ["<user>1+1<assistant>", "1+1=2, and that is all.<eos>"],
    ["<user>A longer question, sir?<assistant>", "No<eos>"],
]


def rows() -> list[dict[str, Any]]:
    """Return the rows of TEXTS, as chats, or as prompts with completions."""

    def user(text: str) -> dict[str, str]:
        return {"role": "user", "content": text}

    def assistant(text: str) -> dict[str, str]:
        return {"role": "assistant", "content": text}

    chats = [
        [user("Say one."), assistant("one")],
        [user("ab"), assistant("c"), user("d"), assistant("efghij")],
        [
            {"role": "system", "content": "Be kind."},
            *(user("x"), assistant("y"), user("z"), assistant("<eos>!"), user("?"), assistant("!"), user("unused")),
        ],
        [user("1+1"), assistant("1+1=2, and that is all.")],
        [user("A longer question, sir?"), assistant("No")],
    ]
    return [{"messages": messages, "other": 1} for messages in chats]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Results, float]:
    """Return the folder of the results, the errors of the cases, and the expected loss."""
    folder = tmp_path_factory.mktemp("sft")
    model = make_model("qwen2", tied=True, **SIZES)
    save_checkpoint(model, folder / "model")
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows()))
    loss, gradients = expected(model)
    cases = {f"{layout} {budget}": config_of(folder, layout, budget) for layout in LAYOUTS for budget in BUDGETS}
    torch.save((cases, gradients), folder / "cases.pt")
    return folder, launch(Path(__file__).with_name("sft_worker.py"), 2, folder), loss


def expected(model: Any) -> tuple[float, dict[str, torch.Tensor]]:
    """Return the mean loss of the trained tokens and its fp64 gradients by name, one row at a time."""
    model, tokenizer = model.double().requires_grad_(True), make_tokenizer()
    total, num_trained = torch.zeros((), dtype=torch.float64), 0
    for parts in TEXTS:
        ids = [tokenizer(part, add_special_tokens=False)["input_ids"] for part in parts]
        is_trained = torch.tensor([bool(i % 2) for i, part in enumerate(ids) for _ in part])
        tokens = torch.tensor([token for part in ids for token in part])
        logprobs = model(tokens[None]).logits[0, :-1].log_softmax(-1).gather(1, tokens[1:, None])[:, 0]
        total = total - logprobs[is_trained[1:]].sum()
        num_trained += int(is_trained.sum())
    loss = total / num_trained
    loss.backward()
    return loss.item(), {name: p.grad for name, p in model.named_parameters()}


def config_of(folder: Path, layout: str, budget: int) -> configs.Config:
    raw: dict[str, Any] = {
        "run_dir": str(folder / "run"),
        "steps": 1,
        "device": "cpu",
        "model": {"path": str(folder / "model"), "dtype": "float32"},
        "data": {"train": str(folder / "train.jsonl"), "max_length": 48},
        "batch": {"prompts_per_step": 5, "tokens_per_micro_batch": budget},
        "rollout": {"temperature": 0.5},
        "log": {"progress": False},
    }
    for part in layout.split(",", 1) if "[" in layout else layout.split(","):
        configs.apply_override(raw, f"layout.{part}")
    return configs.validate(as_sft(raw))


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_loss_and_gradients_equal_transformers(found: tuple[Path, Results, float], layout: str, budget: int) -> None:
    folder, problems, loss = found
    name = f"{layout} {budget}"
    assert not problems[name], "\n".join(problems[name])
    metrics, differences = torch.load(folder / f"{name}.pt", weights_only=False)
    for key in ("loss/nll", "loss/total", "eval"):
        assert metrics[key] == pytest.approx(loss, rel=2e-6), key
    trained = "".join(part for parts in TEXTS for part in parts[1::2])
    assert metrics["num_tokens"] == len(trained.replace("<eos>", "!"))
    assert (metrics["micro_batches"] > 1) == (budget == BUDGETS[0])
    assert len(differences) > 36 and max(differences.values()) < 2e-6, differences
