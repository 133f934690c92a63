"""Every layout gives the same numbers: logits against transformers, and whole updates against a single rank.

All cases of one world size share a launch of ranks; everything runs on real Megatron-core over gloo.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from layout_cases import LogitsCase
from models import VOCAB_SIZE, make_model, save_checkpoint

from grpo_mega import config as configs
from grpo_mega.commands.check import Case, Difference, Outcome, compare
from grpo_mega.distributed.launch import run_ranks
from grpo_mega.types import Group, Prompt, Sample

pytestmark = pytest.mark.distributed

WORKER = Path(__file__).with_name("layouts_worker.py")
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}

# Eight layers for pp=4 with vpp=2; two key-value heads, fewer than tp=4; the vocabulary of 102 does not divide by 4.
MODELS = {
    "llama": ("llama", {}),
    "llama3": ("llama", {"rope_parameters": LLAMA3_ROPE, "tied": True}),
    "mistral": ("mistral", {"sliding_window": None}),
    "qwen2": ("qwen2", {}),
    "qwen2-tied": ("qwen2", {"tied": True}),
    "qwen3": ("qwen3", {}),
    "uneven": ("llama", {"num_hidden_layers": 6, "tied": True}),
}
MIXTURES = {
    "mixtral": ("mixtral", {"num_hidden_layers": 4}),
    "qwen3_moe": ("qwen3_moe", {"num_hidden_layers": 4, "norm_topk_prob": True}),
    "qwen3_moe-unnormalised": ("qwen3_moe", {"num_hidden_layers": 4, "norm_topk_prob": False, "tied": True}),
}
LOGITS_LAYOUTS = (
    "tp=1",
    "tp=2,dp=2,sequence_parallel=true",
    "pp=2,dp=2",
    "tp=2,pp=2",
    "pp=4,vpp=2",
    "tp=4",
)
MIXTURES_LAYOUTS = (
    "tp=1",
    "ep=2",
    "ep=4",
    "dp=4,ep=2",
    "tp=2,ep=2,sequence_parallel=true",
    "tp=4,sequence_parallel=true",
    "pp=2,ep=2",
    "pp=2,vpp=2,ep=2",
)
# Model, layout, and what else is changed.
UPDATES = {
    "qwen2": (
        "tp=1",
        "tp=1 batch.tokens_per_micro_batch=40",
        "tp=1 model.recompute=full",
        "tp=1 model.recompute=selective",
        "tp=1 reversed",
        "tp=2,dp=2,sequence_parallel=true",
        "pp=2,dp=2",
        "pp=2,vpp=2,dp=2",
        "pp=4,vpp=2",
        "tp=2,pp=2 batch.tokens_per_micro_batch=40",
        "tp=2,pp=2,sequence_parallel=true model.recompute=full",
        "tp=4",
        "dp=4 batch.tokens_per_micro_batch=40",
        "dp=4,overlap_grad_reduce=true,overlap_param_gather=true",
        "pp=2,vpp=2,dp=2,overlap_grad_reduce=true,overlap_param_gather=true",
        "pp=2,dp=2,order=tp-pp-dp reversed",
        "tp=2,pp=2,dp=2",
    ),
    "qwen3": ("tp=1", "tp=2,pp=2", "tp=4,sequence_parallel=true", "dp=4"),
    "qwen3_moe": ("tp=1", *MIXTURES_LAYOUTS[1:], "dp=4,ep=2 model.recompute=selective"),
    "mixtral": ("tp=1", "tp=2,ep=2,sequence_parallel=true"),
    "uneven": ("tp=1", "pp=4", "pp=4,layers_per_chunk=[1;2;2;1]", "tp=2,pp=2,sequence_parallel=true", "pp=2,vpp=2,dp=2"),
}

# Methods, on qwen2, by their changes to the config: between them every loss, advantage and kind of correction.
METHODS = {
    "dual_clip": (
        "algorithm.loss_type=dual_clip",
        "algorithm.use_valid_token_scale=true",
        "algorithm.loss_agg_func=token-mean",
    ),
    "gspo": ("algorithm.recipe=gspo", "algorithm.correction={importance: sequence, veto_below: 0.1}"),
    "gspo_token": ("algorithm.recipe=gspo_token", "algorithm.adv_type=grpo_process"),
    "cispo": ("algorithm.recipe=cispo", "algorithm.correction={importance: token, mask: token, mask_low: 0.3, mask_high: 3.0}"),
    "sapo": ("algorithm.recipe=sapo", "algorithm.correction={mask: geometric, mask_low: 0.7, mask_high: 1.4}"),
    "gmpo": ("algorithm.recipe=gmpo", "algorithm.correction={mask: sequence, mask_low: 0.05, mask_high: 20.0}"),
    "rloo": (
        "algorithm.recipe=rloo",
        "algorithm.loss_type=reinforce",
        "algorithm.correction={importance: icepop, mask_low: 0.8, mask_high: 1.25}",
    ),
    "reinforce_plus_plus": ("algorithm.recipe=reinforce_plus_plus", "algorithm.kl_beta=0.1"),
    "reinforce_plus_plus_baseline": ("algorithm.recipe=reinforce_plus_plus_baseline", "algorithm.overlong_buffer=0.3"),
    "process_supervision": ("algorithm.recipe=process_supervision", "algorithm.overlong_filter=true"),
}
METHODS_LAYOUTS = ("tp=1", "tp=2,dp=2 batch.tokens_per_micro_batch=40 reversed")
ALL_UPDATES = UPDATES | {f"qwen2+{method}": METHODS_LAYOUTS for method in METHODS}
ALL_UPDATES["qwen2+reinforce_plus_plus"] += ("tp=2,pp=2",)  # whose advantages need log-probs of the last stage


@dataclass
class Matrix:
    logits: dict[str, float]  # "model:layout" -> largest relative difference
    updates: dict[str, Outcome]
    norms: dict[str, torch.Tensor]  # [optimizer steps, the guard's groups]


@pytest.fixture(scope="module")
def matrix(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Matrix]:
    folder = tmp_path_factory.mktemp("layouts")
    models = {name: _make(name, folder / name) for name in MODELS | MIXTURES}
    for name in ALL_UPDATES:
        torch.save(_random_groups(seed=7), folder / f"groups-{name}.pt")
    sequences = _sequences()
    cases: list[Case | LogitsCase] = []
    for name, model in models.items():
        with torch.no_grad():
            expected = [model(torch.tensor([tokens])).logits[0] for tokens in sequences]
        for layout in MIXTURES_LAYOUTS if name in MIXTURES else LOGITS_LAYOUTS:
            if name != "uneven" or "vpp" not in layout:
                cases.append(LogitsCase(f"{name}:{layout}", _config(folder / name, layout), sequences, expected))
    cases += [_update_case(name, text, folder) for name, texts in ALL_UPDATES.items() for text in texts]
    for world_size in sorted({case.world_size for case in cases}):
        torch.save({i: case for i, case in enumerate(cases) if case.world_size == world_size}, folder / "cases.pt")
        code = run_ranks([sys.executable, str(WORKER), str(folder)], world_size, folder / f"logs-{world_size}")
        assert code == 0, f"the ranks of world size {world_size} failed; see the output above"
    logits, updates, norms = {}, {}, {}
    for i, case in enumerate(cases):
        if isinstance(case, LogitsCase):
            logits[case.name] = torch.load(folder / f"{i}.pt")
        else:
            updates[case.name] = torch.load(folder / str(i) / "outcome.pt", weights_only=False)
            norms[case.name] = torch.tensor(torch.load(folder / str(i) / "norms.pt"))
    yield Matrix(logits, updates, norms)


@pytest.mark.parametrize("layout", LOGITS_LAYOUTS)
@pytest.mark.parametrize("model", [m for m in MODELS if m != "uneven"])
def test_logits_equal_those_of_transformers(matrix: Matrix, model: str, layout: str) -> None:
    assert matrix.logits[f"{model}:{layout}"] < 2e-6


@pytest.mark.parametrize("layout", [x for x in LOGITS_LAYOUTS if "vpp" not in x])
def test_logits_equal_those_of_transformers_with_uneven_stages(matrix: Matrix, layout: str) -> None:
    assert matrix.logits[f"uneven:{layout}"] < 2e-6


@pytest.mark.parametrize("layout", MIXTURES_LAYOUTS)
@pytest.mark.parametrize("model", MIXTURES)
def test_logits_of_mixtures_equal_those_of_transformers(matrix: Matrix, model: str, layout: str) -> None:
    assert matrix.logits[f"{model}:{layout}"] < 2e-6


@pytest.mark.parametrize("name", [f"{m}:{t}" for m, texts in ALL_UPDATES.items() for t in texts[1:]])
def test_three_updates_are_the_same_in_every_layout(matrix: Matrix, name: str) -> None:
    baseline = matrix.updates[f"{name.split(':')[0]}:tp=1"]
    difference = compare(name, matrix.updates[name], baseline)
    assert _is_rounding(difference), difference


@pytest.mark.parametrize("name", [f"{m}:{t}" for m, texts in ALL_UPDATES.items() for t in texts[1:]])
def test_the_gradient_norm_of_every_layer_is_the_same_in_every_layout(matrix: Matrix, name: str) -> None:
    found, baseline = matrix.norms[name], matrix.norms[f"{name.split(':')[0]}:tp=1"]
    assert found.shape == baseline.shape == (3, baseline.shape[1]) and (baseline > 0).all()
    assert ((found - baseline).abs() / baseline).max() < 1e-5


def test_the_updates_compared_are_real_ones(matrix: Matrix) -> None:
    """Ratios leave 1, tokens are clipped, and the KL grows: equality would else prove little."""
    outcome = matrix.updates["qwen2:tp=1"]
    first, *_, last = outcome.updates
    assert first["ratio/mean"] == pytest.approx(1.0, abs=1e-6) and first["clip/fraction"] == 0
    assert last["ratio/max"] > 1.2 and last["clip/fraction"] > 0.02 and last["kl/mean"] > 1e-4
    assert last["grad_norm"] > 0


@pytest.mark.parametrize("method", METHODS)
def test_the_methods_compared_do_what_they_are_for(matrix: Matrix, method: str) -> None:
    metrics = matrix.updates[f"qwen2+{method}:tp=1"].updates[-1]
    assert metrics["grad_norm"] > 0 and metrics["loss/policy"] != 0
    dropped = [metrics[name] for name in ("correction/masked", "correction/vetoed") if name in metrics]
    assert all(0 < share < 1 for share in dropped), dropped
    assert len(dropped) == ("mask" in str(METHODS[method]) or "veto" in str(METHODS[method]))


def _is_rounding(d: Difference) -> bool:
    """Weights get more room: where a gradient is nothing but rounding, Adam makes a whole step of it."""
    terms, derived = (d.loss, d.logprobs, d.ref_logprobs), (d.grad_norm, d.metrics, d.weights)
    return all(t < 2e-6 for t in terms) and all(x < 1e-5 for x in derived) and d.clipped_tokens < 1.5


def _make(name: str, folder: Path) -> torch.nn.Module:
    family, changes = (MODELS | MIXTURES)[name]
    model = make_model(family, seed=3, **{"num_hidden_layers": 8, **changes})
    save_checkpoint(model, folder)
    return model


def _config(model: Path, layout: str, *overrides: str) -> configs.Config:
    raw = {
        "run_dir": "unused",
        "steps": 1,
        "model": {"path": str(model), "dtype": "float32"},
        "data": {"train": "unused", "max_prompt_length": 12},
        "rollout": {"max_response_length": 24, "temperature": 0.8},
        "algorithm": {"group_size": 4, "kl_beta": 0.02, "calculate_entropy": True, "entropy_bonus": 0.01},
        "batch": {"prompts_per_step": 6, "epochs": 3, "tokens_per_micro_batch": 128},
        # eps is above the rounding of gradients: Adam would make a whole step of one that is nothing but rounding.
        "optimizer": {"lr": 1e-3, "weight_decay": 0.01, "eps": 1e-6},
    }
    for part in layout.split(","):
        configs.apply_override(raw, f"layout.{part.replace(';', ',')}")
    for override in overrides:
        configs.apply_override(raw, override)
    return configs.validate(raw)


def _update_case(name: str, text: str, folder: Path) -> Case:
    model, _, method = name.partition("+")
    layout, *rest = text.split(" ")
    overrides = [r for r in rest if r != "reversed"]
    config = _config(folder / model, layout, *METHODS.get(method, ()), *overrides)
    return Case(f"{name}:{text}", config, reverse_groups="reversed" in rest)


def _sequences() -> list[list[int]]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(2, VOCAB_SIZE, (n,), generator=generator).tolist() for n in (5, 17, 2, 30, 11, 24, 9)]


def _random_groups(seed: int) -> list[Group]:
    """Six groups of four ragged samples; one without spread, one sample without a reward."""
    generator = torch.Generator().manual_seed(seed)

    def ints(n: int) -> list[int]:
        return torch.randint(2, VOCAB_SIZE, (n,), generator=generator).tolist()

    groups = []
    for g in range(6):
        prompt = Prompt(g, "", tuple(ints(3 + g)), "")
        samples = []
        for i in range(4):
            length = int(torch.randint(1, 24, (1,), generator=generator))
            logprobs = (-5.3 + 0.3 * torch.randn(length, generator=generator)).tolist()  # near those of a random model
            reward = 1.0 if g == 2 else float(torch.rand(1, generator=generator))
            sample = Sample(prompt, i, ints(length), logprobs, "stop" if length < 20 else "length", 0)
            if not g == i == 1:
                sample.reward = reward
                sample.step_ends = sorted({length // 3, length - 1})
                sample.step_rewards = torch.rand(len(sample.step_ends), generator=generator).tolist()
            samples.append(sample)
        groups.append(Group(prompt, samples))
    return groups
