"""Every layout gives the same numbers: logits against transformers, and whole updates against a single rank.

All cases of one world size share a launch of ranks with real Megatron-core over gloo. Only cases of the selected tests
run. layout_matrix.py chooses the cases that run by default, and those that need --all.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from grpo_mega.batching.pack import PackingSpec, pack_mini_batches
from grpo_mega.cli.commands.check import Case, Difference, compare_outcomes
from tests.distributed.forced_routes import force_routes, routes_of
from tests.distributed.layout_cases import (
    METHODS,
    MIXTURES,
    MODELS,
    LogitsCase,
    as_samples,
    label,
    make_config,
    make_sequences,
    probe,
    random_groups,
    routed,
)
from tests.distributed.layout_matrix import (
    ALL_GRADIENTS,
    ALL_LOGITS,
    ALL_METHODS,
    ALL_UPDATES,
    ALONE,
    COMPARED,
    GRADIENTS,
    LOGITS,
    ROUTERS,
)
from tests.helpers.models import make_model, save_checkpoint
from tests.helpers.ranks import CaseValues, Results, launch

pytestmark = pytest.mark.distributed

WORKER = Path(__file__).with_name("layouts_worker.py")


@dataclass
class Matrix:
    logits: CaseValues  # "model:layout" -> largest relative differences of logits and gradients by name
    updates: CaseValues  # "model:layout" -> Outcome
    norms: CaseValues  # "model:layout" -> [optimizer steps, the guard's groups]


@pytest.fixture(scope="module")
def matrix(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Matrix:
    folder = tmp_path_factory.mktemp("layouts")
    items = [item for item in request.session.items if item.path == request.path]
    chosen = {case for item in items for case in _cases_of(item)}
    cases: list[Case | LogitsCase] = []
    for name in MODELS | MIXTURES:
        model, sequences = _make(name, folder / name), make_sequences(name)
        routes = routes_of(model, map(len, sequences)) if "-routed" in name else []
        if routes:
            force_routes(model, routes)
        with torch.no_grad():
            expected = [model(torch.tensor([tokens])).logits[0] for tokens in sequences]
        probed = _probed(name, model, sequences, folder) if name in GRADIENTS else {}
        for text in LOGITS.get(name, ()):
            if ("logits", f"{name}:{text}") in chosen:
                config = make_config(folder / name, *text.split(" "), *ROUTERS.get(name, ()))
                of_gradients = probed if text in GRADIENTS.get(name, ()) else {}
                cases.append(LogitsCase(f"{name}:{text}", config, sequences, expected, routes=routes, **of_gradients))
    for name, texts in ALL_UPDATES.items():
        groups = random_groups(seed=7)
        if "-routed" in name:
            samples = [sample for group in groups for sample in group.samples]
            for sample, routes in zip(
                samples, routes_of(_make_model(name), (s.total_len for s in samples)), strict=True
            ):
                sample.routes = routes
        torch.save(groups, folder / f"groups-{name}.pt")
        texts = (*texts, *ALONE.get(name, ()))
        cases += [_update_case(name, text, folder) for text in texts if ("update", f"{name}:{text}") in chosen]
    problems: Results = {}
    for world_size in sorted({case.world_size for case in cases}):
        torch.save({i: case for i, case in enumerate(cases) if case.world_size == world_size}, folder / "cases.pt")
        problems |= launch(WORKER, world_size, folder)
    logits, updates, norms = (CaseValues(kind, problems) for kind in ("logits", "update", "update"))
    for i, case in enumerate(cases):
        if problems[label(case)]:
            continue
        if isinstance(case, LogitsCase):
            logits[case.name] = torch.load(folder / f"{i}.pt")
        else:
            updates[case.name] = torch.load(folder / str(i) / "outcome.pt", weights_only=False)
            norms[case.name] = torch.tensor(torch.load(folder / str(i) / "norms.pt"))
    return Matrix(logits, updates, norms)


def _cases_of(item: Any) -> list[tuple[str, str]]:
    """Return the cases that a test needs, as ("logits" or "update", "MODEL:LAYOUT")."""
    parameters = item.callspec.params if hasattr(item, "callspec") else {}
    if "logits" in parameters:
        return [("logits", parameters["logits"])]
    if "method" in parameters:
        return [("update", f"short+{parameters['method']}:tp=1")]
    name = parameters.get("name", "qwen2:tp=1")
    return [("update", name), ("update", f"{name.split(':')[0]}:tp=1")]


@pytest.mark.parametrize("logits", ALL_LOGITS)
def test_logits_equal_those_of_transformers(matrix: Matrix, logits: str) -> None:
    assert matrix.logits[logits]["logits"] < (1e-6 if logits.startswith("qwen3_5") else 2e-6)


@pytest.mark.parametrize("logits", ALL_GRADIENTS)
def test_the_gradient_of_every_tensor_equals_that_of_transformers(matrix: Matrix, logits: str) -> None:
    """Logits do not show a lost gradient. The expected gradients are fp64, and transformers in fp32 differs from them
    by up to 6e-6.
    """
    bound = 4e-6 if logits.startswith("qwen3_5") else 1e-5
    gradients = [value for name, value in matrix.logits[logits].items() if "chunk" in name]
    assert len(gradients) > 40 and max(gradients) < bound, matrix.logits[logits]


@pytest.mark.parametrize("logits", [case for case in ALL_GRADIENTS if not str(case.values[0]).startswith("qwen3_5:")])
def test_expert_loads_and_router_losses_equal_transformers(matrix: Matrix, logits: str) -> None:
    """Padding is not counted, and no token is counted twice."""
    found = matrix.logits[logits]
    assert found["loads"] == 0 and all(value < 1e-5 for name, value in found.items() if name.startswith("moe/")), found


@pytest.mark.parametrize("name", COMPARED)
def test_three_updates_are_the_same_in_every_layout(matrix: Matrix, name: str) -> None:
    baseline = matrix.updates[f"{name.split(':')[0]}:tp=1"]
    difference = compare_outcomes(name, matrix.updates[name], baseline)
    assert _is_rounding(difference), difference


@pytest.mark.parametrize("name", COMPARED)
def test_the_gradient_norm_of_every_layer_is_the_same_in_every_layout(matrix: Matrix, name: str) -> None:
    found, baseline = matrix.norms[name], matrix.norms[f"{name.split(':')[0]}:tp=1"]
    assert found.shape == baseline.shape == (3, baseline.shape[1]) and (baseline > 0).all()
    assert ((found - baseline).abs() / baseline).max() < 1e-5


@pytest.mark.parametrize("name", ["mixtral:tp=2,ep=2,sequence_parallel=true"])
def test_frozen_routers_stay_bit_for_bit_while_all_else_trains(matrix: Matrix, name: str) -> None:
    before = _make_model("mixtral").state_dict()
    after = AutoModelForCausalLM.from_pretrained(matrix.updates[name].checkpoint).state_dict()
    kept = {n for n in before if torch.equal(before[n], after[n])}
    assert kept == {n for n in before if n.endswith("mlp.gate.weight")} and len(kept) == 4


@pytest.mark.parametrize("name", [f"deepseek_v3-plain:{text}" for text in ALONE["deepseek_v3-plain"]])
def test_biases_follow_the_loads_of_optimizer_steps_that_are_taken(matrix: Matrix, name: str) -> None:
    """transformers computes the loads, with the biases of each step."""
    model = _make_model("deepseek_v3-plain")
    dropped, taken = (
        _biases(load_file(matrix.updates[n].checkpoint / "model.safetensors")) for n in (name, "deepseek_v3-plain:tp=1")
    )
    assert len(dropped) == 4 and all(torch.equal(bias, model.state_dict()[n]) for n, bias in dropped.items())
    for _ in range(3):
        with routed(model) as found, torch.no_grad():
            for sample in (s for group in random_groups(seed=7) for s in group.samples):
                model.model(torch.tensor([[*sample.prompt.token_ids, *sample.response_ids]]))
        for bias, load in zip(_biases(model.state_dict()).values(), map(torch.tensor, found.loads()), strict=True):
            bias += 0.02 * torch.sign(load.float().mean() - load)
    assert all((bias - taken[n]).abs().max() < 1e-6 for n, bias in _biases(model.state_dict()).items())


@pytest.mark.parametrize("name", [f"qwen3_moe:{text}" for text in ALONE["qwen3_moe"]])
def test_experts_above_their_capacity_drop_tokens(matrix: Matrix, name: str) -> None:
    """With even loads a factor of 0.5 would drop half of the tokens."""
    dropped = [metrics["moe/dropped_tokens"] for metrics in matrix.updates[name].updates]
    assert all(0.45 < share < 0.8 for share in dropped), dropped
    assert "moe/dropped_tokens" not in matrix.updates["qwen3_moe:tp=1"].updates[0]


def test_the_updates_compared_are_real_ones(matrix: Matrix) -> None:
    """Ratios leave 1, tokens are clipped, and the KL grows. Otherwise equality would show little."""
    outcome = matrix.updates["qwen2:tp=1"]
    first, *_, last = outcome.updates
    assert first["ratio/mean"] == pytest.approx(1.0, abs=1e-6) and first["clip/fraction"] == 0
    assert last["ratio/max"] > 1.2 and last["clip/fraction"] > 0.02 and last["kl/mean"] > 1e-4
    assert last["grad_norm"] > 0


@pytest.mark.parametrize("method", ALL_METHODS)
def test_the_compared_methods_have_an_effect(matrix: Matrix, method: str) -> None:
    metrics = matrix.updates[f"short+{method}:tp=1"].updates[-1]
    assert metrics["grad_norm"] > 0 and metrics["loss/policy"] != 0
    names = [f"correction/{name}" for name in ("masked", "vetoed", "rejected", "off_policy")] + ["clip/chosen"]
    dropped = [metrics[name] for name in names if name in metrics]
    assert all(0 < share < 1 for share in dropped), dropped
    words = ("mask", "veto", "reject", "off_policy", "cov_share")
    assert len(dropped) == sum(word in str(METHODS[method]) for word in words), metrics


@pytest.mark.parametrize("name", ["short+opd:tp=1", *(f"short+opd:{text}" for text in ALL_UPDATES["short+opd"][1:])])
def test_a_teachers_log_probs_equal_transformers_in_every_layout(matrix: Matrix, name: str) -> None:
    """The teacher's family, size and tied weights differ from the policy's."""
    model = _make_model("uneven").double()
    found = matrix.updates[name].logprobs["teacher_logprobs"]
    for group in random_groups(seed=7):
        for sample in group.samples:
            tokens, length = torch.tensor([*group.prompt.token_ids, *sample.response_ids]), sample.response_len
            table = torch.log_softmax(model(tokens[None]).logits[0, -length - 1 : -1] / 0.8, -1)
            expected = table.gather(1, tokens[-length:, None])[:, 0]
            assert ((found[group.prompt.id, sample.index] - expected) / expected).abs().max() < 2e-6


@pytest.mark.parametrize("name", ["qwen3_moe-routed:tp=1", "qwen3_moe-routed:tp=2,ep=2,sequence_parallel=true"])
def test_the_policy_replays_experts_and_its_reference_chooses_for_itself(matrix: Matrix, name: str) -> None:
    """Policy and reference have the same weights before the first step."""
    samples = [sample for group in random_groups(seed=7) for sample in group.samples]
    forced = _make_model("qwen3_moe-routed")
    force_routes(forced, routes_of(forced, (s.total_len for s in samples)))
    models, num_compared = {"old_logprobs": forced, "ref_logprobs": _make_model("qwen3_moe-routed")}, 0
    for sample in samples:
        tokens, length = torch.tensor([*sample.prompt.token_ids, *sample.response_ids]), sample.response_len
        expected = {}
        for kind, model in models.items():
            table = torch.log_softmax(model(tokens[None]).logits[0, -length - 1 : -1] / 0.8, -1)
            expected[kind] = table.gather(1, tokens[-length:, None])[:, 0]
        if sample.reward is not None:  # a sample without a reward is not in the loss and has no log-probs
            for kind, values in expected.items():
                found = matrix.updates[name].logprobs[kind][sample.prompt.id, sample.index]
                assert ((found - values) / values).abs().max() < 1e-5, kind
            num_compared += bool((expected["old_logprobs"] - expected["ref_logprobs"]).abs().max() > 0.1)
    assert num_compared > 10, "the test has become too easy"


def _is_rounding(d: Difference) -> bool:
    """Weights get a larger tolerance, because Adam turns a gradient of pure rounding into a full step."""
    terms, derived = (d.loss, d.logprobs, d.ref_logprobs), (d.grad_norm, d.metrics, d.weights)
    return all(t < 2e-6 for t in terms) and all(x < 1e-5 for x in derived) and d.clipped_tokens < 1.5


def _biases(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in tensors.items() if name.endswith("e_score_correction_bias")}


def _probed(name: str, model: Any, sequences: list[list[int]], folder: Path) -> dict[str, Any]:
    config = make_config(folder / name, GRADIENTS[name][0].partition(" ")[0], *ROUTERS.get(name, ()))
    spec = PackingSpec(
        dp_size=1, dp_rank=0, token_budget=max(64, *map(len, sequences)), length_multiple=config.layout.tp
    )
    batches = pack_mini_batches([as_samples(sequences)], [[1.0] * len(sequences)], spec)[0]
    return probe(
        model, sequences, folder / f"{name}-gradients", config.model.router, [b.sample_indices for b in batches]
    )


def _make(name: str, folder: Path) -> torch.nn.Module:
    model = _make_model(name)
    save_checkpoint(model, folder)
    return model


def _make_model(name: str) -> torch.nn.Module:
    family, changes = (MODELS | MIXTURES)[name]
    model = make_model(family, **{"seed": 3, "num_hidden_layers": 8, **changes})
    # transformers omits a factor of attention's scale for deepseek_v2, but not for deepseek_v3.
    if name == "deepseek_v2":
        scale = make_model("deepseek_v3", **changes).model.layers[0].self_attn.scaling
        for layer in model.model.layers:
            layer.self_attn.scaling = scale
    return model


def _update_case(name: str, text: str, folder: Path) -> Case:
    model, _, method = name.partition("+")
    layout, *rest = text.split(" ")
    overrides = [r for r in rest if r != "reversed"]
    overrides = [
        *ROUTERS.get(model, ()),
        *(m.replace("FOLDER", str(folder)) for m in METHODS.get(method, ())),
        *overrides,
    ]
    config = make_config(folder / model, layout, *overrides)
    return Case(f"{name}:{text}", config)
