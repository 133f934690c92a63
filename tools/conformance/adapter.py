"""Compute a conformance case with the oracles (`expected`) or with this trainer (`ours`), and compare two results.

A case of vectors.json is {name, kind, inputs, settings, expected}. check.py lists inputs and results of each kind.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from grpo_mega.algorithm import kl, losses, token_weights
from grpo_mega.algorithm.advantages import assign_advantages
from grpo_mega.algorithm.inputs import LossInputs
from grpo_mega.config import AlgorithmConfig
from grpo_mega.types import Group, Prompt, Sample
from tools.conformance import oracle_advantages, oracle_losses

Json = dict[str, Any]
Implementation = Callable[[str, Json, Json], Json]

PROMPT = Prompt(id=0, text="", token_ids=(), answer="")


def expected(kind: str, inputs: Json, settings: Json) -> Json:
    """Compute the result with the oracles, in float64."""
    functions = {"kl": _expected_kl, "correction": _expected_correction, "loss": _expected_loss}
    functions |= {"advantages": _expected_advantages, "beta": _expected_beta}
    return functions[kind](inputs, settings)


def ours(kind: str, inputs: Json, settings: Json) -> Json:
    """Compute the result with this trainer's functions, in float64."""
    functions = {"kl": _our_kl, "correction": _our_correction, "loss": _our_loss}
    functions |= {"advantages": _our_advantages, "beta": _our_beta}
    return functions[kind](inputs, settings)


def differences(wanted: Json, given: Json, tolerance: float) -> list[str]:
    """Return one line per difference. `tolerance` is relative to the largest number of `wanted`."""
    largest = max((abs(value) for _, value in _numbers(wanted)), default=0.0)
    if _shape(wanted) != _shape(given):
        return [f"has the shape {_shape(given)}, not {_shape(wanted)}"]
    pairs = zip(_numbers(wanted), _numbers(given), strict=True)
    return [
        f"{path} is {actual!r}, not {value!r}: off by {abs(actual - value):.3g}, allowed {tolerance * largest:.3g}"
        for (path, value), (_, actual) in pairs
        if not abs(actual - value) <= tolerance * largest
    ]


# The oracles


def _expected_kl(inputs: Json, settings: Json) -> Json:
    logprobs = _scalars(inputs["logprobs"])
    values = [
        oracle_losses.kl_penalty(logprob, ref, settings["kl_penalty_type"], old=old, kl_clamp=settings["kl_clamp"])
        for logprob, old, ref in zip(logprobs, inputs["old_logprobs"], inputs["ref_logprobs"], strict=True)
    ]
    return {"values": [float(value.detach()) for value in values], "gradients": _gradients(sum(values), [logprobs])[0]}


def _expected_correction(inputs: Json, settings: Json) -> Json:
    own = oracle_settings(settings)
    responses = [
        oracle_losses.Response([], item["old_logprobs"], item["rollout_logprobs"], [], item["mask"])
        for item in inputs["responses"]
    ]
    result: Json = {"importance": [], "kept": []}
    scale = oracle_losses.mean_importance(responses, own) if own.batch_normalize else 1.0
    for response in responses:
        importance, kept = oracle_losses.correct(response, own)
        tokens = range(len(response.mask))
        result["importance"].append([importance.get(t, 0.0) / scale for t in tokens])
        result["kept"].append([float(t in kept) for t in tokens])
    return result


def _expected_loss(inputs: Json, settings: Json) -> Json:
    with_gradient = [{name: _scalars(item[name]) for name in ("logprobs", "entropy")} for item in inputs["responses"]]
    pairs = zip(inputs["responses"], with_gradient, strict=True)
    responses = [oracle_losses.Response(**item | leaves) for item, leaves in pairs]
    loss = oracle_losses.minibatch_loss(responses, oracle_settings(settings))
    return {"loss": float(loss.detach()), "gradients": _gradients(loss, [response.logprobs for response in responses])}


def _expected_advantages(inputs: Json, settings: Json) -> Json:
    groups = [[oracle_advantages.Scored(**sample) for sample in group] for group in inputs["groups"]]
    return {"advantages": oracle_advantages.advantages(groups, oracle_advantages.AdvantageSettings(**settings))}


def _expected_beta(inputs: Json, settings: Json) -> Json:
    """Adapt kl_beta as in Ziegler et al., arXiv 1909.08593, section 2.2, with a horizon in samples."""
    betas, beta = [], settings["kl_beta"]
    for value, num in zip(inputs["kl"], inputs["num_samples"], strict=True):
        error = (value - settings["kl_target"]) / settings["kl_target"]
        beta += beta * min(0.2, max(-0.2, error)) * num / settings["kl_horizon"]
        betas.append(beta)
    return {"betas": betas}


def oracle_settings(settings: Json) -> oracle_losses.Settings:
    flat = {name: value for name, value in settings.items() if name != "correction"}
    return oracle_losses.Settings(**flat, **settings.get("correction", {}))


def _scalars(values: Sequence[float]) -> list[Tensor]:
    return [torch.tensor(value, dtype=torch.float64, requires_grad=True) for value in values]


def _gradients(loss: Any, leaves: Sequence[Sequence[Tensor]]) -> list[list[float]]:
    flat = [leaf for row in leaves for leaf in row]
    gradients: Sequence[Tensor | None] = [None] * len(flat)
    if flat and isinstance(loss, Tensor) and loss.requires_grad:
        gradients = torch.autograd.grad(loss, flat, allow_unused=True)
    values = iter([0.0 if gradient is None else float(gradient) for gradient in gradients])
    return [[next(values) for _ in row] for row in leaves]


# This trainer


def _our_kl(inputs: Json, settings: Json) -> Json:
    logprobs = _vector(inputs["logprobs"]).requires_grad_()
    ref, old = _vector(inputs["ref_logprobs"]), _vector(inputs["old_logprobs"])
    kind, most = settings["kl_penalty_type"], settings["kl_clamp"]
    values = kl.kl_penalty(logprobs, ref, kind, old_logprobs=old, kl_clamp=most)
    return {"values": values.tolist(), "gradients": torch.autograd.grad(values.sum(), logprobs)[0].tolist()}


def _our_correction(inputs: Json, settings: Json) -> Json:
    names = ("logprobs", "ref_logprobs", "entropy", "advantages")
    packed = pack([item | dict.fromkeys(names, item["old_logprobs"]) for item in inputs["responses"]], settings)
    corrected = token_weights.correct(packed.without_masked(), algorithm_config(settings).correction)
    values = {"importance": corrected.importance, "kept": corrected.keep}
    return {
        name: _unpack(torch.where(packed.loss_mask > 0, values_T, 0.0), inputs["responses"])
        for name, values_T in values.items()
    }


def _our_loss(inputs: Json, settings: Json) -> Json:
    packed = pack(inputs["responses"], settings)
    loss = losses.policy_loss(packed, algorithm_config(settings)).loss
    (gradients_T,) = torch.autograd.grad(loss, packed.logprobs)
    return {"loss": float(loss.detach()), "gradients": _unpack(gradients_T, inputs["responses"])}


def _our_advantages(inputs: Json, settings: Json) -> Json:
    groups = [Group(PROMPT, [_sample(i, item) for i, item in enumerate(group)]) for group in inputs["groups"]]
    penalties = None
    if settings.get("kl_in") == "reward":
        kind, most = settings["kl_penalty_type"], settings["kl_clamp"]
        pairs = [[_vector(s[name]) for name in ("logprobs", "ref_logprobs")] for g in inputs["groups"] for s in g]
        penalties = [kl.kl_penalty(own, ref, kind, old_logprobs=own, kl_clamp=most) for own, ref in pairs]
    found = assign_advantages(
        groups,
        algorithm_config(settings),
        max_response_length=settings["max_response_length"],
        kl_penalties=penalties,
        reward_weights=settings.get("reward_weights", {}),
    )
    rows = iter([[] if sample.advantages is None else sample.advantages.tolist() for sample in found])
    return {"advantages": [[next(rows) for _ in group] for group in inputs["groups"]]}


def _our_beta(inputs: Json, settings: Json) -> Json:
    betas, beta = [], settings["kl_beta"]
    for value, num in zip(inputs["kl"], inputs["num_samples"], strict=True):
        beta = kl.adapted_beta(beta, value, num, algorithm_config(settings))
        betas.append(beta)
    return {"betas": betas}


def pack(responses: Sequence[Json], settings: Json) -> LossInputs:
    """Pack the responses as in training. A position outside of the loss follows each; here it holds NaN."""
    names = ["old_logprobs", "ref_logprobs", "rollout_logprobs", "advantages", "entropy", "logprobs"]
    names += ["teacher_logprobs"] if settings.get("distill_beta") else []
    vectors: Json = {name: _vector([x for item in responses for x in [*item[name], torch.nan]]) for name in names}
    num_tokens = [sum(item["mask"]) for item in responses]
    weights = token_weights.token_weights(
        num_tokens,
        settings.get("loss_agg_func", "token-mean"),
        max_response_length=settings.get("max_response_length", 1),
        num_samples=len(responses),
        num_tokens=sum(num_tokens),
    )
    lengths = torch.tensor([len(item["mask"]) + 1 for item in responses])
    vectors["logprobs"].requires_grad_()
    packed = LossInputs(
        **vectors,
        loss_mask=_vector([x for item in responses for x in [*item["mask"], 0]]),
        loss_weights=_vector(weights).repeat_interleave(lengths),
        segments=torch.arange(len(responses)).repeat_interleave(lengths),
        num_segments=len(responses),
    )
    a = algorithm_config(settings)
    if a.positive_nll > 0:
        scored = [_sample(i, {"length": sum(item["mask"]), **item}) for i, item in enumerate(responses)]
        rows = _vector(token_weights.positive_weights(scored, a)).repeat_interleave(lengths)
        packed = replace(packed, nll_weights=rows)
    if a.is_by_covariance:
        mask = losses.choose_by_covariance(packed, a, torch.Generator().manual_seed(0))
        packed = replace(packed, covariance_mask=mask)
    if a.correction.batch_normalize:
        packed = replace(packed, importance_mean=token_weights.mean_importance(packed, a.correction))
    return packed


def _unpack(values_T: Tensor, responses: Sequence[Json]) -> list[list[float]]:
    rows = values_T.detach().split([len(item["mask"]) + 1 for item in responses])
    return [row[:-1].tolist() for row in rows]


def algorithm_config(settings: Json) -> AlgorithmConfig:
    """Return the config's section `algorithm` for the settings of a case."""
    own = {name: value for name, value in settings.items() if name not in ("max_response_length", "reward_weights")}
    return AlgorithmConfig(**own, calculate_entropy=True)


def _sample(index: int, item: Json) -> Sample:
    length = item["length"]
    sample = Sample(PROMPT, index, [0] * length, [0.0] * length, "stop", reward=item.get("reward"))
    sample.step_rewards, sample.step_ends = item.get("step_rewards", []), item.get("step_ends", [])
    sample.scores = item.get("scores", {})
    return sample


def _vector(values: Sequence[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


# Comparing


def _numbers(value: Any, path: str = "") -> list[tuple[str, float]]:
    """Return each number with its path, for example gradients[0][3]."""
    if isinstance(value, dict):
        return [pair for name in sorted(value) for pair in _numbers(value[name], f"{path}.{name}" if path else name)]
    if isinstance(value, list):
        return [pair for i, item in enumerate(value) for pair in _numbers(item, f"{path}[{i}]")]
    return [(path, float(value))]


def _shape(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _shape(value[name]) for name in sorted(value)}
    if isinstance(value, list):
        return [_shape(item) for item in value] if any(isinstance(item, dict | list) for item in value) else len(value)
    return "number"
