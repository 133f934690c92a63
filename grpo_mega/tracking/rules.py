"""Rules on the metrics of a run's last steps: does it learn nothing, learn the wrong thing, or waste its engines?

RULES is the one table. `Monitor` checks it after every step of a run and returns warnings. `findings` checks it for all
steps of metrics.jsonl, for the report. Rules read only metrics that metrics.jsonl stores. Each text has the figures and
the keys to change.

`Health` judges updates: when a step earns a warning, and when the run must end.
"""

import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from grpo_mega.config.algorithm import STEPWISE
from grpo_mega.errors import MismatchError, NonFiniteError
from grpo_mega.rewards.registry import OF_PROGRAMS
from grpo_mega.tracking.metrics import K3_STALE, engine_mismatch
from grpo_mega.types import Sample, StepMetrics

REPEAT_AFTER = 20  # a rule warns at most once in this many steps

Metrics = Mapping[str, float]
Steps = Sequence[Metrics]  # the metrics of the last steps
Keys = Mapping[str, Any]  # the values of the config by dotted key; older runs may lack keys
Check = Callable[[Steps, Keys], Iterator[str]]  # yields warnings; the first one counts

_MANY_CUT = 0.2
_RISE = 0.25  # a reward rises if it gains this share of the standard deviation of rewards
_MANY_WITHOUT_VARIANCE = 0.8
_MANY_CLIPPED = 0.3
_STALE_K3 = 0.1  # nats per token
_DRIFT, _DRIFT_ENDS = 2.0, 5  # ratio of two mean lengths, each over this many steps
_MANY_RETRACTED = 0.05
_MOSTLY_IDLE, _LONG_PHASE = 0.6, 0.3  # idle share of engines, and share of generation in the time of steps
_PAID_BUT_WRONG = 0.01
_RISEN_LOSS = 1.25


class Rule(NamedTuple):
    name: str
    num_steps: int  # the check gets the metrics of this many last steps
    check: Check
    is_logged_elsewhere: bool = False  # the run logs this with more details, so only the report uses the rule


class MetricWarning(NamedTuple):
    """A rule that fired, with its text at the last of `steps`."""

    rule: str
    text: str
    steps: list[int]

    @property
    def when(self) -> str:
        """Return the steps as text: "step 3", or "steps 3 to 12 (5 times)"."""
        first, last, count = self.steps[0], self.steps[-1], len(self.steps)
        if count == 1:
            return f"step {first}"
        return f"steps {first} to {last}" + (f" ({count} times)" if count <= last - first else "")


class Monitor:
    """Checks the rules after every step, and limits how often a rule warns."""

    def __init__(self, keys: Keys) -> None:
        self._keys = keys
        self._recent: deque[Metrics] = deque(maxlen=max(rule.num_steps for rule in RULES))
        self._warned: dict[str, int] = {}  # the step of the last warning, by rule

    def observe(self, step: int, metrics: Metrics) -> list[str]:
        """Return the warnings after `step`. Steps must come in order."""
        self._recent.append(metrics)
        texts = []
        for rule in RULES:
            is_due = step >= self._warned.get(rule.name, -REPEAT_AFTER) + REPEAT_AFTER
            if is_due and not rule.is_logged_elsewhere and (text := _text(rule, self._recent, self._keys)):
                self._warned[rule.name] = step
                texts.append(f"step {step}: {text}")
        return texts


def find_warnings(steps: Mapping[int, Metrics], keys: Keys) -> list[MetricWarning]:
    """Return the rules that fired at any step, in the order of the table. `steps` are the metrics by step."""
    recent: deque[Metrics] = deque(maxlen=max(rule.num_steps for rule in RULES))
    found: dict[str, MetricWarning] = {}
    for step in sorted(steps):
        recent.append(steps[step])
        for rule in RULES:
            if text := _text(rule, recent, keys):
                earlier = found[rule.name].steps if rule.name in found else []
                found[rule.name] = MetricWarning(rule.name, text, [*earlier, step])
    return [found[rule.name] for rule in RULES if rule.name in found]


def _text(rule: Rule, recent: deque[Metrics], keys: Keys) -> str | None:
    if len(recent) < rule.num_steps:
        return None
    return next(rule.check([recent[i] for i in range(-rule.num_steps, 0)], keys), None)


def _key(keys: Keys, name: str) -> str:
    return name if keys.get(name) is None else f"{name}={keys[name]}"


def _mean(steps: Steps, name: str) -> float:
    """Return the mean over the steps; NaN, which fulfils no condition, if a step has no value."""
    return sum(step.get(name, math.nan) for step in steps) / len(steps)


def _cut(steps: Steps, keys: Keys) -> Iterator[str]:
    share = _mean(steps, "response_length/cut")
    if share > _MANY_CUT:
        yield (
            f"{share:.0%} of the responses were cut at {_key(keys, 'rollout.max_response_length')} in the last"
            f" {len(steps)} steps; raise it, or make responses shorter with algorithm.overlong_buffer"
        )


def _hacked(steps: Steps, keys: Keys) -> Iterator[str]:
    old, new = steps[: len(steps) // 2], steps[len(steps) // 2 :]
    before, after = _mean(old, "reward/mean"), _mean(new, "reward/mean")
    cut_before, cut = _mean(old, "response_length/cut"), _mean(new, "response_length/cut")
    is_rising = after - before > max(_RISE * _mean(steps, "reward/std"), 0.01)
    if is_rising and cut_before > _MANY_CUT and cut > max(_MANY_CUT, 0.7 * cut_before):
        yield (
            f"the reward rose from {before:.3g} to {after:.3g} in the last {len(steps)} steps while {cut:.0%} of the"
            f" responses were cut at {_key(keys, 'rollout.max_response_length')}; a reward that needs no answer may be"
            " hacked: read the samples, and change rewards.functions"
        )


def _equal_rewards(steps: Steps, keys: Keys) -> Iterator[str]:
    if all(s.get("reward/std") == 0 and s.get("groups/zero_variance", 0) > 0.99 for s in steps):
        yield (
            f"all rewards of a step were equal in the last {len(steps)} steps (mean {_mean(steps, 'reward/mean'):.3g}),"
            " so nothing was learned; check rewards.functions with grpo-mega eval, or use other prompts in data.train"
        )


def _zero_variance(steps: Steps, keys: Keys) -> Iterator[str]:
    share = _mean(steps, "groups/zero_variance")
    if share > _MANY_WITHOUT_VARIANCE and any(s.get("reward/std", 0) > 0 for s in steps):
        yield (
            f"{share:.0%} of the groups had no variance in the last {len(steps)} steps and taught nothing (mean reward"
            f" {_mean(steps, 'reward/mean'):.3g}); choose prompts with data.min_pass_rate and max_pass_rate, raise"
            f" {_key(keys, 'algorithm.group_size')}, or raise {_key(keys, 'algorithm.dynamic_sampling_tries')}"
        )


def _mismatch(steps: Steps, keys: Keys) -> Iterator[str]:
    k3, limit = engine_mismatch(dict(steps[-1])), keys.get("rollout.mismatch_warn")
    if limit is not None and k3 > limit:
        yield (
            f"engine and trainer differ by a KL (k3) of {k3:.3g} nats per token, above rollout.mismatch_warn={limit:g};"
            f" set {_key(keys, 'rollout.dtype')} to the trainer's dtype, or correct for it with"
            " algorithm.correction.importance"
        )


def _staleness(steps: Steps, keys: Keys) -> Iterator[str]:
    def grown(unit: str) -> float:
        name = f"ledger/dropped_{unit}/stale"  # a counter since the start of the run, absent while it is 0
        return steps[-1].get(name, 0.0) - steps[0].get(name, 0.0)

    limit = _key(keys, "rollout.max_staleness")
    if grown("groups") > 0:
        yield (
            f"{grown('groups'):.0f} groups with {grown('tokens'):,.0f} tokens became older than {limit} and restarted"
            f" in the last {len(steps)} steps; raise it, or start fewer groups with {_key(keys, 'rollout.oversample')}"
        )
    oldest = max((int(name.removeprefix(K3_STALE)) for name in steps[-1] if name.startswith(K3_STALE)), default=0)
    k3 = _mean(steps, f"{K3_STALE}{oldest}")
    if oldest > 0 and k3 > _STALE_K3:
        yield (
            f"tokens that are {oldest} versions old differ by a KL (k3) of {k3:.3g} nats per token from the policy that"
            f" trains on them, in the last {len(steps)} steps; lower {limit}, or lower {_key(keys, 'optimizer.lr')}"
        )


def _clip(steps: Steps, keys: Keys) -> Iterator[str]:
    share = _mean(steps, "clip/fraction")
    if share > _MANY_CLIPPED:
        yield (
            f"{share:.0%} of the tokens were clipped in the last {len(steps)} steps; lower"
            f" {_key(keys, 'optimizer.lr')}, {_key(keys, 'batch.mini_batches')} or {_key(keys, 'batch.epochs')}"
        )


def _drift(steps: Steps, keys: Keys) -> Iterator[str]:
    before, after = (_mean(part, "response_length/mean") for part in (steps[:_DRIFT_ENDS], steps[-_DRIFT_ENDS:]))
    change = (
        f"the mean response length went from {before:.0f} to {after:.0f} tokens in the last {len(steps)} steps"
        f" ({_key(keys, 'rollout.max_response_length')})"
    )
    if after > _DRIFT * before:
        yield f"{change}; limit it with algorithm.overlong_buffer"
    elif after < before / _DRIFT:
        raised = _key(keys, "algorithm.kl_beta")
        yield f"{change}; read the samples, and change rewards.functions or raise {raised}"


def _cache(steps: Steps, keys: Keys) -> Iterator[str]:
    share = _mean(steps, "engine/retracted")
    if share > _MANY_RETRACTED:
        yield (
            f"the engines' KV cache was full, so {share:.0%} of the responses were interrupted and computed again in"
            f" the last {len(steps)} steps; raise {_key(keys, 'rollout.cache_tokens')} or"
            f" {_key(keys, 'rollout.memory_fraction')}, or lower {_key(keys, 'rollout.max_concurrent')}"
        )


def _idle(steps: Steps, keys: Keys) -> Iterator[str]:
    sampling = _mean(steps, "seconds/sample")
    idle, part = (
        _mean(steps, "seconds/idle") / max(sampling, 1e-9),
        sampling / max(_mean(steps, "seconds/step"), 1e-9),
    )
    wasted = f"the engines' slots were idle for {idle:.0%} of the time of generation in the last {len(steps)} steps"
    if idle > _MOSTLY_IDLE and keys.get("rollout.placement") == "separate":
        yield f"{wasted}; lower {_key(keys, 'layout.engine_ranks')}, or raise {_key(keys, 'rollout.max_staleness')}"
    elif idle > _MOSTLY_IDLE and part > _LONG_PHASE:
        lengths = "/".join(f"{_mean(steps, f'response_length/{name}'):.0f}" for name in ("mean", "max"))
        yield (
            f"{wasted}, which is {part:.0%} of a step, because a few responses are long (mean/longest: {lengths}"
            " tokens); set rollout.oversample=1.25 and rollout.partial=true, or rollout.placement=separate"
        )


def _rising(steps: Steps, keys: Keys) -> Iterator[str]:
    before, after = (_mean(part, "loss/nll") for part in (steps[:_DRIFT_ENDS], steps[-_DRIFT_ENDS:]))
    if "epoch" in steps[-1] and after > _RISEN_LOSS * before:  # only sft logs epochs
        yield (
            f"the loss rose from {before:.3g} to {after:.3g} in the last {len(steps)} steps; lower"
            f" {_key(keys, 'optimizer.lr')}, or raise {_key(keys, 'optimizer.warmup_steps')}"
        )


def _not_finite(steps: Steps, keys: Keys) -> Iterator[str]:
    if names := sorted(name for name, value in steps[-1].items() if not math.isfinite(value)):
        yield f"not finite: {', '.join(names)}; lower {_key(keys, 'optimizer.lr')}"


def _unread(steps: Steps, keys: Keys) -> Iterator[str]:
    if "reward/steps" in steps[-1] and keys.get("algorithm.adv_type", STEPWISE[0]) not in STEPWISE:
        yield (
            f"rewards of turns and steps (chat.reward, Score.steps) do nothing with {_key(keys, 'algorithm.adv_type')};"
            " set algorithm.recipe=mt_grpo or process_supervision, or reward whole responses"
        )


def _wrong(steps: Steps, keys: Keys) -> Iterator[str]:
    share = steps[-1].get("reward/paid_but_wrong", 0.0)
    if share > _PAID_BUT_WRONG:
        yield f"{share:.1%} of the paid responses were wrong; change rewards.functions"


def _dropped(steps: Steps, keys: Keys) -> Iterator[str]:
    if num_nonfinite := steps[-1].get("nonfinite_mini_batches", 0):
        yield f"{num_nonfinite:.0f} mini-batches were dropped because loss or gradient was not finite"
    if number := steps[-1].get("dropped_mini_batches", 0):
        yield f"{number:.0f} mini-batches were dropped by algorithm.early_stop_imp_ratio"


def _checks(steps: Steps, keys: Keys) -> Iterator[str]:
    endings = ("/timeout", "/crashed", "/error")
    shares = {
        name: v
        for name, v in steps[-1].items()
        if name.startswith("verdict/") and name.endswith(endings) and v > 0 and name.split("/")[1] not in OF_PROGRAMS
    }
    if shares:
        listed = ", ".join(f"{name.removeprefix('verdict/')} {shares[name]:.1%}" for name in sorted(shares))
        yield f"reward functions failed, share of samples: {listed}; see rewards.deadline_s"


def _excluded(steps: Steps, keys: Keys) -> Iterator[str]:
    if (number := steps[-1].get("reward/excluded", 0)) > 0:
        yield f"{number:.0f} samples had no reward and were excluded"


RULES = (
    Rule("equal rewards", 3, _equal_rewards),
    Rule("zero variance", 5, _zero_variance),
    Rule("cut", 5, _cut),
    Rule("hacked", 20, _hacked),
    Rule("drift", 50, _drift),
    Rule("clip", 5, _clip),
    Rule("mismatch", 1, _mismatch),
    Rule("staleness", 5, _staleness),
    Rule("cache", 5, _cache),
    Rule("idle", 5, _idle),
    Rule("unread", 1, _unread),
    Rule("wrong", 1, _wrong),
    Rule("rising", 20, _rising),
    Rule("not finite", 1, _not_finite),
    Rule("dropped", 1, _dropped, is_logged_elsewhere=True),
    Rule("checks", 1, _checks, is_logged_elsewhere=True),
    Rule("excluded", 1, _excluded, is_logged_elsewhere=True),
)


_MOST_NAMED = 8  # maximum number of samples in a warning


@dataclass
class Health:
    """Counts consecutive steps with updates that were dropped because of infinities or NaN."""

    max_nonfinite_steps: int
    mismatch_stop: float | None
    nonfinite_steps: int = 0

    def observe(self, step: int, metrics: StepMetrics, blamed: Sequence[Sample]) -> list[str]:
        """Count the update of `step`. If part of it was dropped, return a warning with the samples that caused it."""
        if not metrics.get("nonfinite_mini_batches"):
            self.nonfinite_steps = 0
            return []
        self.nonfinite_steps += 1
        names = [f"prompt {sample.prompt.id} sample {sample.index}" for sample in blamed[:_MOST_NAMED]]
        blame = f"from {', '.join(names)}" if names else "from the gradient alone"
        return [f"step {step}: loss or gradient not finite, {blame}; the mini-batch was dropped"]

    def check(self, step: int, metrics: StepMetrics) -> None:
        """Raise an error if the run must end. The step has been logged.

        Raise NonFiniteError after too many steps with dropped updates. Raise MismatchError if the token probabilities
        of engine and trainer differ too much.
        """
        if self.nonfinite_steps >= self.max_nonfinite_steps:
            raise NonFiniteError(
                f"loss or gradient was not finite in {self.nonfinite_steps} steps in a row, up to step {step};"
                " continue with --resume and a lower optimizer.lr, or a higher max_nonfinite_steps"
            )
        k3, limit = engine_mismatch(metrics), self.mismatch_stop
        # NaN from the trainer is a nonfinite step, not a mismatch.
        is_counted = math.isnan(k3) and self.nonfinite_steps > 0
        if limit is not None and not is_counted and not k3 <= limit:
            raise MismatchError(
                f"step {step}: the KL (k3) between engine and trainer is {k3:.3g} nats per token, above "
                f"rollout.mismatch_stop={limit}; continue from an earlier checkpoint, or raise the limit"
            )
