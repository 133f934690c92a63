"""Every layout gives the same numbers: logits against transformers, and whole updates against a single rank.

All cases of one world size share a launch of ranks; everything runs on real Megatron-core over gloo. Only cases of tests that
were selected run. Those in FULL repeat an axis that others cover, and wait for --all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from layout_cases import LogitsCase, probe
from models import VOCAB_SIZE, make_model, save_checkpoint
from ranks import run_forked

from grpo_mega import config as configs
from grpo_mega.commands.check import Case, Difference, Outcome, compare
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

YARN_ROPE = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 16.0, "original_max_position_embeddings": 16}
YARN_ROPE |= {"mscale": 0.707, "mscale_all_dim": 0.5}

# Eight layers for pp=4 with vpp=2; two key-value heads, fewer than tp=4; the vocabulary of 102 does not divide by 4.
MODELS = {
    "llama": ("llama", {}),
    "llama3": ("llama", {"rope_parameters": LLAMA3_ROPE, "tied": True}),
    "mistral": ("mistral", {"sliding_window": None}),
    "qwen2": ("qwen2", {}),
    "short": ("qwen2", {"num_hidden_layers": 2}),
    "qwen2-tied": ("qwen2", {"tied": True}),
    "qwen3": ("qwen3", {}),
    "uneven": ("llama", {"num_hidden_layers": 6, "tied": True}),
    "large": ("qwen3", {"num_hidden_layers": 4, "vocab_size": 111, "hidden_size": 40}),
}
MIXTURES = {
    "mixtral": ("mixtral", {"num_hidden_layers": 4}),
    "qwen3_moe": ("qwen3_moe", {"num_hidden_layers": 4, "norm_topk_prob": True}),
    "qwen3_moe-unnormalised": ("qwen3_moe", {"num_hidden_layers": 4, "norm_topk_prob": False, "tied": True}),
    "deepseek_v2": ("deepseek_v2", {"num_hidden_layers": 5, "rope_parameters": YARN_ROPE | {"factor": 4.0}}),
    "deepseek_v3": ("deepseek_v3", {"num_hidden_layers": 5, "q_lora_rank": 10, "rope_parameters": YARN_ROPE}),
    "glm4_moe": ("glm4_moe", {"num_hidden_layers": 4}),
    "glm4_moe-normed": ("glm4_moe", {"num_hidden_layers": 5, "use_qk_norm": True, "n_group": 1, "topk_group": 1}),
    "deepseek_v3-plain": ("deepseek_v3", {"num_hidden_layers": 4, "first_k_dense_replace": 0, "n_group": 1, "topk_group": 1}),
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
    "deepseek_v3": (
        "tp=1",
        "tp=1 model.recompute=full",
        "tp=1 batch.tokens_per_micro_batch=40",
        "tp=2,ep=2,sequence_parallel=true",
        "pp=2,vpp=2,ep=2",
    ),
    "uneven": ("tp=1", "pp=4", "pp=4,layers_per_chunk=[1;2;2;1]", "tp=2,pp=2,sequence_parallel=true", "pp=2,vpp=2,dp=2"),
}

# Methods, on a short qwen2, by their changes to the config: between them every loss, advantage and kind of correction.
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
    "clip_cov": (
        "algorithm={recipe: clip_cov, adv_type: grpo_turn, group_size: 4, cov_share: 1.0, cov_low: 0.02, cov_high: 0.5}",
        "algorithm.correction={importance: token, batch_normalize: true, reject: seq_max_k3, reject_above: 2.0}",
    ),
    "kl_cov": (
        "algorithm={recipe: kl_cov, adv_type: opo, group_size: 4, cov_share: 0.2, positive_nll: 0.1, positive_above: 0.5}",
        "algorithm.correction={importance: sequence, batch_normalize: true, off_policy_threshold: 0.01}",
    ),
    "opd": ("algorithm.recipe=opd", "teachers={main: {path: FOLDER/uneven}}"),
    "opd_kl": (
        "algorithm={recipe: opd, group_size: 4, adv_type: grpo, distill_kl: reverse}",
        "teachers={main: {path: FOLDER/large}}",
    ),
}
METHODS_LAYOUTS = ("tp=1", "tp=2,dp=2 batch.tokens_per_micro_batch=40 reversed")
ALL_UPDATES = UPDATES | {f"short+{method}": METHODS_LAYOUTS for method in METHODS}
for _method in ("reinforce_plus_plus", "clip_cov", "opd", "opd_kl"):  # they need log-probs of the last stage before the update
    ALL_UPDATES[f"short+{_method}"] += ("tp=2,pp=2",)
LOGITS = {
    name: MIXTURES_LAYOUTS if name in MIXTURES else LOGITS_LAYOUTS
    for name in MODELS | MIXTURES
    if name not in ("short", "large")
}
GRADIENTS = {
    "deepseek_v3": (
        *MIXTURES_LAYOUTS,
        "tp=1 model.recompute=full",
        "tp=2,ep=2,sequence_parallel=true model.recompute=selective",
    ),
    "deepseek_v2": ("tp=1", "tp=2,sequence_parallel=true"),
    "deepseek_v3-plain": ("ep=2",),
    "glm4_moe": ("tp=1", "pp=2,ep=2"),
    "glm4_moe-normed": ("tp=2,ep=2,sequence_parallel=true",),
    "qwen3_moe": ("tp=2,ep=2,sequence_parallel=true",),
}
LOGITS |= {name: (*dict.fromkeys((*LOGITS[name], *texts)),) for name, texts in GRADIENTS.items()}
LOGITS["uneven"] = tuple(layout for layout in LOGITS_LAYOUTS if "vpp" not in layout)
# Those that every model keeps without --all; qwen2 and qwen3_moe keep all.
KEPT_LOGITS = ("tp=1", "tp=2,pp=2", "tp=2,ep=2,sequence_parallel=true")
FULL_UPDATES = {
    "qwen2": (
        "pp=2,dp=2",
        "pp=4,vpp=2",
        "tp=4",
        "dp=4,overlap_grad_reduce=true,overlap_param_gather=true",
        "tp=2,pp=2,dp=2",
    ),
    "qwen3": ("tp=2,pp=2", "dp=4"),
    "qwen3_moe": ("ep=2", "ep=4", "tp=4,sequence_parallel=true", "pp=2,ep=2"),
    "deepseek_v3": ("tp=1 model.recompute=full", "tp=1 batch.tokens_per_micro_batch=40"),
    "uneven": ("pp=4", "tp=2,pp=2,sequence_parallel=true"),
    # What they have of their own is in one token's loss, which an oracle and a replay of whole steps hold.
    **{f"short+{m}": METHODS_LAYOUTS for m in ("gspo_token", "cispo", "sapo", "reinforce_plus_plus_baseline", "kl_cov")},
}


def parameters(names: Iterable[str], is_full: Callable[[str, str], bool]) -> list[Any]:
    """Return "MODEL:LAYOUT" as parameters of a test."""
    return [pytest.param(name, marks=[pytest.mark.full] if is_full(*name.split(":")) else []) for name in names]


ALL_LOGITS = parameters(
    (f"{model}:{layout}" for model, layouts in LOGITS.items() for layout in layouts),
    lambda model, layout: model not in ("qwen2", "qwen3_moe") and layout not in KEPT_LOGITS,
)
ALL_GRADIENTS = parameters(
    (f"{model}:{text}" for model, texts in GRADIENTS.items() for text in texts),
    lambda model, text: model == "deepseek_v3" and text not in (*KEPT_LOGITS, "pp=2,vpp=2,ep=2"),
)
COMPARED = parameters(
    (f"{model}:{text}" for model, texts in ALL_UPDATES.items() for text in texts[1:]),
    lambda model, text: text in FULL_UPDATES.get(model, ()),
)


@dataclass
class Matrix:
    logits: dict[str, dict[str, float]]  # "model:layout" -> largest relative differences of logits and gradients
    updates: dict[str, Outcome]
    norms: dict[str, torch.Tensor]  # [optimizer steps, the guard's groups]


@pytest.fixture(scope="module")
def matrix(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Matrix:
    folder = tmp_path_factory.mktemp("layouts")
    items = [item for item in request.session.items if item.path == request.path]
    chosen = {case for item in items for case in _cases_of(item)}
    sequences = _sequences()
    cases: list[Case | LogitsCase] = []
    for name in MODELS | MIXTURES:
        model = _make(name, folder / name)
        with torch.no_grad():
            expected = [model(torch.tensor([tokens])).logits[0] for tokens in sequences]
        probed = probe(model, sequences, folder / f"{name}-gradients") if name in GRADIENTS else ()
        for text in LOGITS.get(name, ()):
            if ("logits", f"{name}:{text}") in chosen:
                config = _config(folder / name, *text.split(" "))
                cases.append(
                    LogitsCase(
                        f"{name}:{text}", config, sequences, expected, *(probed if text in GRADIENTS.get(name, ()) else ())
                    )
                )
    for name, texts in ALL_UPDATES.items():
        torch.save(_random_groups(seed=7), folder / f"groups-{name}.pt")
        cases += [_update_case(name, text, folder) for text in texts if ("update", f"{name}:{text}") in chosen]
    for world_size in sorted({case.world_size for case in cases}):
        torch.save({i: case for i, case in enumerate(cases) if case.world_size == world_size}, folder / "cases.pt")
        run_forked(str(WORKER), world_size, str(folder))
    logits, updates, norms = {}, {}, {}
    for i, case in enumerate(cases):
        if isinstance(case, LogitsCase):
            logits[case.name] = torch.load(folder / f"{i}.pt")
        else:
            updates[case.name] = torch.load(folder / str(i) / "outcome.pt", weights_only=False)
            norms[case.name] = torch.tensor(torch.load(folder / str(i) / "norms.pt"))
    return Matrix(logits, updates, norms)


def _cases_of(item: Any) -> list[tuple[str, str]]:
    """Return what a test needs, as ("logits" or "update", "MODEL:LAYOUT")."""
    parameters = item.callspec.params if hasattr(item, "callspec") else {}
    if "logits" in parameters:
        return [("logits", parameters["logits"])]
    if "method" in parameters:
        return [("update", f"short+{parameters['method']}:tp=1")]
    name = parameters.get("name", "qwen2:tp=1")
    return [("update", name), ("update", f"{name.split(':')[0]}:tp=1")]


@pytest.mark.parametrize("logits", ALL_LOGITS)
def test_logits_equal_those_of_transformers(matrix: Matrix, logits: str) -> None:
    assert matrix.logits[logits]["logits"] < 2e-6


@pytest.mark.parametrize("logits", ALL_GRADIENTS)
def test_the_gradient_of_every_tensor_equals_that_of_transformers(matrix: Matrix, logits: str) -> None:
    """Logits do not show a gradient that a rank loses. transformers in fp32 is itself up to 6e-6 off these, which are fp64."""
    _, *gradients = (matrix.logits[logits][name] for name in sorted(matrix.logits[logits], key="logits".__ne__))
    assert len(gradients) > 40 and max(gradients) < 1e-5, matrix.logits[logits]


@pytest.mark.parametrize("name", COMPARED)
def test_three_updates_are_the_same_in_every_layout(matrix: Matrix, name: str) -> None:
    baseline = matrix.updates[f"{name.split(':')[0]}:tp=1"]
    difference = compare(name, matrix.updates[name], baseline)
    assert _is_rounding(difference), difference


@pytest.mark.parametrize("name", COMPARED)
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
    metrics = matrix.updates[f"short+{method}:tp=1"].updates[-1]
    assert metrics["grad_norm"] > 0 and metrics["loss/policy"] != 0
    names = [f"correction/{name}" for name in ("masked", "vetoed", "rejected", "off_policy")] + ["clip/chosen"]
    dropped = [metrics[name] for name in names if name in metrics]
    assert all(0 < share < 1 for share in dropped), dropped
    words = ("mask", "veto", "reject", "off_policy", "cov_share")
    assert len(dropped) == sum(word in str(METHODS[method]) for word in words), metrics


@pytest.mark.parametrize("name", ["short+opd:tp=1", *(f"short+opd:{text}" for text in ALL_UPDATES["short+opd"][1:])])
def test_a_teachers_log_probs_are_those_of_transformers_in_every_layout(matrix: Matrix, name: str) -> None:
    """Its family, size and tied weights are not the policy's."""
    model = _make_model("uneven").double()
    found = matrix.updates[name].logprobs["teacher_logprobs"]
    for group in _random_groups(seed=7):
        for sample in group.samples:
            tokens, length = torch.tensor([*group.prompt.token_ids, *sample.response_ids]), sample.response_len
            table = torch.log_softmax(model(tokens[None]).logits[0, -length - 1 : -1] / 0.8, -1)
            expected = table.gather(1, tokens[-length:, None])[:, 0]
            assert ((found[group.prompt.id, sample.index] - expected) / expected).abs().max() < 2e-6


def _is_rounding(d: Difference) -> bool:
    """Weights get more room: where a gradient is nothing but rounding, Adam makes a whole step of it."""
    terms, derived = (d.loss, d.logprobs, d.ref_logprobs), (d.grad_norm, d.metrics, d.weights)
    return all(t < 2e-6 for t in terms) and all(x < 1e-5 for x in derived) and d.clipped_tokens < 1.5


def _make(name: str, folder: Path) -> torch.nn.Module:
    model = _make_model(name)
    save_checkpoint(model, folder)
    return model


def _make_model(name: str) -> torch.nn.Module:
    family, changes = (MODELS | MIXTURES)[name]
    model = make_model(family, seed=3, **{"num_hidden_layers": 8, **changes})
    if name == "deepseek_v2":  # for which transformers forgets a factor of attention's scale, as it does not for its successor
        scale = make_model("deepseek_v3", **changes).model.layers[0].self_attn.scaling
        for layer in model.model.layers:
            layer.self_attn.scaling = scale
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
    config = _config(folder / model, layout, *(m.replace("FOLDER", str(folder)) for m in METHODS.get(method, ())), *overrides)
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
