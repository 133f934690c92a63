"""The cases of vectors.json without their expected numbers: small ragged batches and edge cases.

Numbers have four decimals so that people can read them. Every clipping limit has ratios on both sides.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from typing import Any

Json = dict[str, Any]

LOSS_TYPES = ("actor", "dual_clip", "gspo", "gspo_token", "cispo", "sapo", "gmpo", "reinforce", "clip_cov", "kl_cov")
AGGREGATIONS = ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm")
PENALTIES = ("kl", "abs", "mse", "low_var_kl", "low_var_kl_weighted", "low_var_kl+")
ADVANTAGES: tuple[str, ...] = ("grpo", "grpo_process", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline")
ADVANTAGES += ("grpo_turn", "grpo_leave_one_out", "opo", "pass_at_k", "gdpo")
CORRECTIONS: dict[str, Json] = {
    "token importance": {"importance": "token", "max_importance": 1.2},
    "sequence importance": {"importance": "sequence", "max_importance": 1.5},
    "token mask": {"mask": "token", "mask_low": 0.7, "mask_high": 1.4},
    "sequence mask": {"mask": "sequence", "mask_low": 0.5, "mask_high": 2.0},
    "geometric mask": {"mask": "geometric", "mask_low": 0.9, "mask_high": 1.15},
    "veto": {"veto_below": 0.6},
    "importance, mask and veto": {"importance": "token", "max_importance": 1.2, "mask": "token", "mask_low": 0.65}
    | {"mask_high": 1.5, "veto_below": 0.55},
    "IcePop": {"importance": "icepop", "mask_low": 0.7, "mask_high": 1.4},
    "importance with a lower bound": {"importance": "token", "min_importance": 0.8, "max_importance": 1.3},
    "sequence importance, normalised": {"importance": "sequence", "max_importance": 1.5, "batch_normalize": True},
    "decoupled PPO, normalised": {"importance": "icepop", "mask_low": 0.0, "mask_high": 1.5, "batch_normalize": True},
    "off-policy mask": {"off_policy_threshold": 0.05},
    "token k2": {"reject": "token_k2", "reject_above": 0.05},
    "token k3": {"reject": "token_k3", "reject_above": 0.05},
    "sum of k2": {"reject": "seq_sum_k2", "reject_above": 0.4},
    "sum of k3": {"reject": "seq_sum_k3", "reject_above": 0.4},
    "mean of k2": {"reject": "seq_mean_k2", "reject_above": 0.08},
    "mean of k3": {"reject": "seq_mean_k3", "reject_above": 0.08},
    "maximum of k2": {"reject": "seq_max_k2", "reject_above": 0.17},
    "maximum of k3, and mask": {"reject": "seq_max_k3", "reject_above": 0.17, "mask": "token", "mask_high": 1.4},
}
LOSS_SETTINGS: Json = {
    "loss_type": "actor",
    "loss_agg_func": "seq-mean-token-mean",
    "max_response_length": 8,
    "ratio_clip_eps_low": 0.2,
    "ratio_clip_eps_high": 0.28,
    "ratio_clip_c": 1.5,
    "sapo_tau_positive": 1.0,
    "sapo_tau_negative": 1.05,
    "kl_beta": 0.0,
    "kl_penalty_type": "low_var_kl",
    "kl_clamp": 10.0,
    "entropy_bonus": 0.0,
}
# With these settings every clip applies to some tokens but not to all, and clip_cov selects without randomness.
OWN_SETTINGS: dict[str, Json] = {
    "cispo": {"ratio_clip_eps_low": 1.0, "ratio_clip_eps_high": 0.5},
    "clip_cov": {"cov_share": 1.0, "cov_low": 0.1, "cov_high": 0.6},
    "kl_cov": {"cov_share": 0.3, "cov_kl": 0.7},
}
COVARIANCE_SETTINGS = {name: OWN_SETTINGS[name] for name in ("clip_cov", "kl_cov")}
REWARD_WEIGHTS: Json = {"accuracy": 1.0, "format": 0.3}  # for gdpo
ADVANTAGE_SETTINGS: Json = {
    "adv_type": "grpo",
    "normalize_by_std": True,
    "std_ddof": 1,
    "std_eps": 1e-6,
    "normalize_advantages": False,
    "kl_beta": 0.0,
    "kl_in": "loss",
    "kl_penalty_type": "kl",
    "kl_clamp": 10.0,
    "overlong_buffer": 0.0,
    "overlong_penalty": 1.0,
    "max_response_length": 8,
}


def all_cases() -> list[Json]:
    """Return all cases as {name, kind, inputs, settings}; names are unique."""
    losses = [*kl_cases(), *correction_cases(), *loss_cases(), *loss_edges()]
    return [*losses, *advantage_cases(), *advantage_edges(), *beta_cases()]


def case(name: str, kind: str, inputs: Json, settings: Json) -> Json:
    return {"name": f"{kind}: {name}", "kind": kind, "inputs": inputs, "settings": settings}


def loss(name: str, items: list[Json], **changes: Any) -> Json:
    return case(name, "loss", {"responses": items}, LOSS_SETTINGS | changes)


def advantages(name: str, groups: list[list[Json]], **changes: Any) -> Json:
    return case(name, "advantages", {"groups": groups}, ADVANTAGE_SETTINGS | changes)


def kl_cases() -> Iterator[Json]:
    gaps = [0.0, 1e-4, -0.001, 0.3, -0.7, 2.0, -2.5, 5.0, -12.0, 12.0, 30.0, -30.0]
    moves = [round(-0.2 * math.sin(i), 4) for i in range(len(gaps))]
    # The weighted penalty is a product. These pairs have a factor beyond its limit but not the product, and the
    # reverse.
    gaps += [-3.0, -5.0, -2.0, 1.5, 15.0, -24.0, -24.0, 24.0]
    moves += [-0.9, -6.0, 2.5, 4.0, -3.0, -18.0, -27.0, 22.0]
    logprobs = [round(-0.1 - 0.3 * i, 4) for i in range(len(gaps))]
    inputs = {
        "logprobs": logprobs,
        "old_logprobs": [round(value - move, 4) for value, move in zip(logprobs, moves, strict=True)],
        "ref_logprobs": [round(value - gap, 4) for value, gap in zip(logprobs, gaps, strict=True)],
    }
    for kind in PENALTIES:
        yield case(kind, "kl", inputs, {"kl_penalty_type": kind, "kl_clamp": 10.0})
    for kind in PENALTIES[3:]:
        yield case(f"{kind} without a clamp on its value", "kl", inputs, {"kl_penalty_type": kind, "kl_clamp": None})


def correction_cases() -> Iterator[Json]:
    names = ("old_logprobs", "rollout_logprobs", "mask")
    items = [{name: item[name] for name in names} for item in responses(40, [4, 1, 0, 6, 3], has_gaps=True)]
    for name, correction in CORRECTIONS.items():
        if name != "off-policy mask":  # this mask needs log-probs from after an update
            yield case(name, "correction", {"responses": items}, {"correction": correction})


def loss_cases() -> Iterator[Json]:
    for number, loss_type in enumerate(LOSS_TYPES):
        own = OWN_SETTINGS.get(loss_type, {}) | {"loss_type": loss_type}
        for aggregation in AGGREGATIONS:
            items = responses(number, [3, 6, 1, 4])
            yield loss(f"{loss_type}, {aggregation}", items, **own, loss_agg_func=aggregation)
        kind = PENALTIES[number % len(PENALTIES)]
        regularized = {"loss_type": loss_type, "kl_beta": 0.3, "kl_penalty_type": kind, "entropy_bonus": 0.1}
        regularized |= COVARIANCE_SETTINGS.get(loss_type, {})
        with_gaps = responses(10 + number, [5, 2, 4], has_gaps=True)
        yield loss(f"{loss_type}, {kind} and entropy, tokens masked", with_gaps, **regularized)
        items, correction = responses(20 + number, [5, 3, 6]), CORRECTIONS["importance, mask and veto"]
        yield loss(f"{loss_type}, {kind} and entropy, tokens dropped", items, **regularized, correction=correction)
    for number, (name, correction) in enumerate(CORRECTIONS.items()):
        changes: Json = {"loss_agg_func": "token-mean", "correction": correction}
        for loss_type in ("actor", "gspo") if number < 8 or name == "off-policy mask" else ("actor",):
            yield loss(f"{loss_type}, {name}", responses(30 + number, [4, 3, 5]), loss_type=loss_type, **changes)
    yield from teacher_cases()
    pairs = zip(responses(70, [3, 6, 1, 4]), (1.0, 0.4, 0.7, 0.5), strict=True)
    right = [item | {"reward": reward} for item, reward in pairs]
    for loss_type, more in (("actor", {}), ("gspo", {"correction": CORRECTIONS["token mask"]})):
        changes = {"loss_type": loss_type, "positive_nll": 0.1, "positive_above": 0.5} | more
        yield loss(f"{loss_type}, likelihood of right answers", right, **changes)


def teacher_cases() -> Iterator[Json]:
    for number, loss_type in enumerate(("actor", "cispo", "reinforce")):
        items = responses(80 + number, [3, 6, 1], has_gaps=True)
        for item in items:
            item["teacher_logprobs"] = [
                round(value + 0.5 * (-1) ** t, 4) for t, value in enumerate(item["old_logprobs"])
            ]
        items[1]["teacher_logprobs"][2] = -40.0
        alone = [item | {"advantages": [0.0] * len(item["mask"])} for item in items]
        changes = OWN_SETTINGS.get(loss_type, {}) | {"loss_type": loss_type, "distill_beta": 0.7}
        yield loss(f"{loss_type}, a teacher beside rewards", items, **changes)
        yield loss(f"{loss_type}, a teacher alone", alone, **changes)


def loss_edges() -> Iterator[Json]:
    """Yield worked examples, empty responses and masks, and ratios that overflow without a clamp."""
    worked = [one_token(math.log(ratio), advantage) for advantage in (1.0, -1.0) for ratio in (0.4, 1.1, 1.4, 1.8)]
    changes: Json = {"ratio_clip_eps_high": 0.2, "loss_agg_func": "seq-mean-token-sum"}
    yield loss("actor, ratios 0.4 to 1.8 with either sign", worked, **changes)
    beyond = [one_token(gap, advantage) for gap in (1e4, -1e4) for advantage in (1.0, 0.0, -1.0)]
    some = responses(50, [3, 4])
    all_masked = [item | {"mask": [0] * len(item["mask"])} for item in some]
    for loss_type in LOSS_TYPES:
        own: Json = {"loss_type": loss_type} | COVARIANCE_SETTINGS.get(loss_type, {})
        yield loss(f"{loss_type}, ratios e^+-10000", beyond, **own)
        own |= {"kl_beta": 0.1, "entropy_bonus": 0.1}
        yield loss(f"{loss_type}, responses without tokens", responses(60, [0, 2, 0]), **own)
        yield loss(f"{loss_type}, a response all masked", [all_masked[0], some[1]], **own)
        yield loss(f"{loss_type}, all masked", all_masked, **own)
    dropped = {"mask": "token", "mask_low": 100.0, "mask_high": 101.0}
    yield loss("actor, every token dropped", some, kl_beta=0.1, correction=dropped)


def advantage_cases() -> Iterator[Json]:
    for number, adv_type in enumerate(ADVANTAGES):
        seed = 100 + number if number < 5 else 125 + number  # seed 120 is used below
        groups = [samples(seed, [3, 5, 1, 4]), samples(seed + 10, [2, 8, 6])]
        own: Json = {"adv_type": adv_type}
        if adv_type == "gdpo":
            groups, own = with_scores(groups), own | {"reward_weights": REWARD_WEIGHTS}
        yield advantages(adv_type, groups, **own)
        yield advantages(f"{adv_type}, whitened", groups, **own, normalize_advantages=True)
        if adv_type != "gdpo":
            overlong = {"overlong_buffer": 0.5, "overlong_penalty": 0.4}
            yield advantages(f"{adv_type}, overlong responses punished", groups, **own, **overlong)
        if adv_type not in ("grpo_process", "grpo_turn", "gdpo"):
            yield advantages(f"{adv_type}, KL in the reward", groups, **own, kl_in="reward", kl_beta=0.2)
    one = [samples(120, [3, 5, 1, 4])]
    yield advantages("none, for a teacher alone", one, adv_type="none")
    yield advantages("grpo, over the group's size", one, std_ddof=0)
    yield advantages("grpo, with an epsilon of 0.1", one, std_eps=0.1)
    yield advantages("grpo, not divided by the deviation", one, normalize_by_std=False)
    two = [samples(121, [3, 5, 1, 4]), samples(122, [2, 8, 6])]
    yield advantages("grpo, divided by the batch's deviation", two, std_over="batch")
    name = "grpo_leave_one_out, not divided by the deviation"
    yield advantages(name, two, adv_type="grpo_leave_one_out", normalize_by_std=False)
    yield advantages("pass_at_k, k = 2", two, adv_type="pass_at_k", pass_k=2)
    name = "pass_at_k, k = 3, not divided by the deviation"
    yield advantages(name, two, adv_type="pass_at_k", pass_k=3, normalize_by_std=False)


def advantage_edges() -> Iterator[Json]:
    """Yield worked examples, and groups with equal, single or missing rewards."""
    half_right = [outcomes([1, 0, 0, 1]), outcomes([0, 0, 1, 1]), outcomes([1, 0, 0, 1, 1, 0, 0, 1])]
    yield advantages("grpo, half of the answers right", half_right)
    steps = [[stepped(10, [0.2, 0.8, 1.0], [3, 7, 9]), stepped(6, [0.0, 0.4], [2, 5])]]
    own: Json = {"adv_type": "grpo_process", "std_eps": 0.0, "max_response_length": 16}
    yield advantages("grpo_process, five steps", steps, **own)
    after = [[stepped(6, [1.0, 0.0], [1, 3]), stepped(0, [], []), stepped(3, [0.5], [0])]]
    yield advantages("grpo_process, tokens after the last step", after, **own)
    own |= {"overlong_buffer": 0.5, "overlong_penalty": 0.4, "max_response_length": 10}
    yield advantages("grpo_process, overlong responses punished, no outcomes", steps, **own)
    lengths = [outcomes([0.0] * 9, lengths=[0, 7, 8, 9, 10, 11, 13, 15, 16])]
    own = {"normalize_by_std": False, "overlong_buffer": 0.5, "overlong_penalty": 0.5, "max_response_length": 16}
    yield advantages("grpo, DAPO's punishment by length", lengths, **own)
    others = [outcomes([0.3, 0.3, 0.3, 0.9]), outcomes([0.9, 0.9, 0.3])]
    for adv_type in ("grpo_leave_one_out", "pass_at_k"):
        yield advantages(f"{adv_type}, one sample unlike the others", others, adv_type=adv_type)
    edges = {
        "equal rewards": [outcomes([0.1] * 3), outcomes([0.1] * 4)],
        "a single sample with a reward": [outcomes([None, 0.7])],
        "samples without a reward or a token": [
            outcomes([None, None]),
            outcomes([1.0, None, 0.0, 0.5], lengths=[2, 2, 0, 3]),
        ],
    }
    for adv_type in ADVANTAGES:
        for name, groups in edges.items():
            yield advantages(f"{adv_type}, {name}", groups, adv_type=adv_type)


def beta_cases() -> Iterator[Json]:
    inputs = {"kl": [0.02, 0.5, 0.09, 0.1, 0.11, 0.0], "num_samples": [512, 512, 511, 512, 7, 512]}
    settings = {"kl_beta": 0.05, "kl_target": 0.1, "kl_horizon": 10000.0}
    yield case("towards 0.1 nats per token", "beta", inputs, settings)


def responses(seed: int, lengths: list[int], *, has_gaps: bool = False) -> list[Json]:
    """Make ratios of 0.4 to 2.5, and advantages of alternating signs. `has_gaps` puts NaN at masks."""
    rng = random.Random(seed)

    def some(length: int, low: float, high: float) -> list[float]:
        return [round(rng.uniform(low, high), 4) for _ in range(length)]

    def near(values: list[float], by: float) -> list[float]:
        return [round(value + rng.uniform(-by, by), 4) for value in values]

    result = []
    for i, length in enumerate(lengths):
        old = some(length, -3.0, -1.0)
        item: Json = {
            "logprobs": near(old, 0.9),
            "old_logprobs": old,
            "ref_logprobs": near(old, 0.6),
            "rollout_logprobs": near(old, 0.7),
            "entropy": some(length, 0.1, 3.0),
            "advantages": [round(rng.uniform(0.3, 2.0) * (-1) ** i, 4)] * length,
            "mask": [int(not has_gaps or rng.random() > 0.3) for _ in range(length)],
        }
        for name in item.keys() - {"mask"}:
            item[name] = [value if kept else math.nan for value, kept in zip(item[name], item["mask"], strict=True)]
        result.append(item)
    return result


def one_token(log_ratio: float, advantage: float) -> Json:
    values = {"logprobs": [-1.0], "old_logprobs": [round(-1.0 - log_ratio, 12)], "advantages": [advantage], "mask": [1]}
    return values | {name: [-1.0] for name in ("ref_logprobs", "rollout_logprobs", "entropy")}


def samples(seed: int, lengths: list[int]) -> list[Json]:
    rng = random.Random(seed)
    result = []
    for length in lengths:
        old = [round(rng.uniform(-3.0, -0.5), 4) for _ in range(length)]
        ends = sorted(rng.sample(range(length), min(length, 2)))
        item = {
            "length": length,
            "reward": round(rng.uniform(-1, 1), 4),
            "step_rewards": [round(rng.uniform(0, 1), 4) for _ in ends],
            "step_ends": ends,
            "logprobs": old,
            "ref_logprobs": [round(value + rng.uniform(-0.5, 0.5), 4) for value in old],
        }
        result.append(item)
    return result


def with_scores(groups: list[list[Json]]) -> list[list[Json]]:
    """Add scores by reward function. One function does not apply to one of the samples."""
    rng = random.Random(9)
    return [
        [
            sample | {"scores": {"accuracy": float(i % 2), "format": None if i == 2 else round(rng.uniform(0, 1), 4)}}
            for i, sample in enumerate(group)
        ]
        for group in groups
    ]


def outcomes(rewards: list[Any], *, lengths: list[int] | None = None) -> list[Json]:
    return [
        stepped(length, [], []) | {"reward": reward}
        for reward, length in zip(rewards, lengths or [2] * len(rewards), strict=True)
    ]


def stepped(length: int, rewards: list[float], ends: list[int]) -> Json:
    empty: Json = {"reward": None, "logprobs": [-1.0] * length, "ref_logprobs": [-1.0] * length}
    return {"length": length, "step_rewards": rewards, "step_ends": ends} | empty
