"""Score a rollout: send samples to the pool as they finish, and write the scores into them.

Call `submit` for every sample that finishes, and `submit_group` once all samples of a group have finished. `finish`
waits for the rest and sets scores, verdicts, rewards and step rewards. Training then calls `check`; evaluation only
warns about `first_error`. `drop_unusable` removes the groups whose gold answer does not parse, because they would train
on format alone.

A conversation (rollout.agent or rollout.tools) has the scores that its agent function returned. Their sum is its
reward, and rewards.functions do not score it. Without such scores rewards.functions score the text of the last turn,
and get the messages of the whole conversation. If there are no functions and a limit ended the conversation, it scores
0. Rewards of turns that the agent set add to the step rewards of functions.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from grpo_mega.errors import RewardError
from grpo_mega.rewards.api import RewardResult, Score, result_of
from grpo_mega.rewards.pool import RewardPool
from grpo_mega.rewards.registry import AGENT, FINISH_REASON, MESSAGES, OF_PROGRAMS
from grpo_mega.text import num_common
from grpo_mega.types import Group, Sample

# A reward function counts as broken after it has raised on this many samples and prompts.
MIN_SAMPLES, MIN_PROMPTS = 8, 4

PIECE_SIZE = 16  # tokens that are decoded together, plus up to MAX_CUT if the piece would end within a character
MAX_CUT = 4
_REPLACEMENT = "\ufffd"  # decoded form of an incomplete character
Decode = Callable[[Sequence[int]], str]

VERDICTS = """
    correct wrong unparsable gold_unparsable well_formed malformed oracle_right oracle_wrong steps_right
    steps_wrong no_steps scored not_applicable timeout error memory output refused length turns deadline
    """.split()  # noqa: SIM905  # a list of texts is three times as long


class Scorer:
    """Scores the samples of one rank in a pool of worker processes."""

    def __init__(self, pool: RewardPool, decode: Decode) -> None:
        self._pool = pool
        self._decode = decode
        # Submitted samples by their id(), each with its key in the pool; None: rewards.functions do not score it.
        self._samples: dict[int, tuple[int | None, Sample]] = {}
        self._scored: list[tuple[Sample, RewardResult]] = []  # results of the last rollout
        self._failures = Failures()
        self.warned_of: set[str] = set()  # kinds of failures that the log already names; see rollout/rollouts.py
        self._keys = itertools.count()

    def submit(self, sample: Sample) -> None:
        """Send a sample to the workers without waiting. The scored text is what `decode` returns for the response.

        Rewards for lengths count the text of sampled tokens only.
        """
        if sample.messages is not None and (sample.scores or not self._pool.has_functions):
            self._samples[id(sample)] = None, sample
            return
        key = next(self._keys)
        self._samples[id(sample)] = key, sample
        prompt = sample.prompt
        extras = {**prompt.extras, "prefill": prompt.prefill, FINISH_REASON: sample.finish_reason}
        extras |= {} if sample.messages is None else {MESSAGES: sample.messages}
        text, length = self._decode(sample.response_ids[sample.last_turn :]), None
        if sample.sampled:
            length = sum(len(self._decode(sample.response_ids[start:end])) for start, end in sample.sampled)
        self._pool.submit(key, prompt.text, text, prompt.answer, extras, length)

    def submit_group(self, samples: Iterable[Sample]) -> None:
        """Send a group to the functions that are called once per group.

        Samples that finished in an earlier phase, and so were not submitted yet, first go to the other functions.
        """
        ordered = sorted(samples, key=lambda sample: sample.index)
        for sample in ordered:
            if id(sample) not in self._samples:
                self.submit(sample)
        scored = {key: sample for key, sample in (self._samples[id(one)] for one in ordered) if key is not None}
        if scored:
            token_ids = [list(sample.response_ids) for sample in scored.values()]
            conversations = [sample.messages for sample in scored.values() if sample.messages is not None]
            self._pool.submit_group(list(scored), ordered[0].prompt.raw_columns, token_ids, conversations)

    def keep(self, groups: Iterable[Group]) -> None:
        """Keep the samples of these groups, and stop scoring all other submitted samples."""
        others = self._samples.keys() - {id(sample) for group in groups for sample in group.samples}
        dropped = [self._samples.pop(identity)[0] for identity in others]
        self._pool.discard([key for key in dropped if key is not None])

    def finish(self, on_progress: Callable[[], None] = lambda: None) -> None:
        """Wait until everything submitted is scored. Call `on_progress()` whenever checks finish."""
        results = self._pool.collect(on_progress)
        self._scored = [(sample, results[key]) for key, sample in self._samples.values() if key is not None]
        own = [sample for key, sample in self._samples.values() if key is None]
        names = sorted({name for sample in own for name in sample.scores if AGENT not in sample.verdicts})
        self._scored += [(sample, own_result(sample, names or [AGENT])) for sample in own]
        self._samples = {}
        for sample, result in self._scored:
            sample.scores, sample.verdicts, sample.reward = dict(result.scores), dict(result.verdicts), result.total
            # By token, because steps that end at the same token become one step.
            is_chat = sample.messages is not None
            rewards = defaultdict(float, zip(sample.step_ends, sample.step_rewards, strict=True) if is_chat else ())
            start = sample.last_turn
            tokens = tokens_at(sample.response_ids[start:], self._decode, [step.end for step in result.steps])
            for token, step in zip(tokens, result.steps, strict=True):
                rewards[start + token] += step.value
            sample.step_ends = sorted(rewards)
            sample.step_rewards = [rewards[token] for token in sample.step_ends]

    def check(self) -> None:
        """Raise RewardError if this rollout and earlier ones show that a reward function is broken."""
        self._failures.add(self._scored)

    @property
    def first_error(self) -> str | None:
        """The first exception on the samples of this rollout, with the function's name; None if there is none."""
        return next((f"{name}: {text}" for _, result in self._scored for name, text in result.errors.items()), None)


def own_result(sample: Sample, names: Collection[str]) -> RewardResult:
    """Return the result of a conversation that rewards.functions do not score.

    If the agent function raised, or a limit ended it before, every name has the score 0 and the verdict says why.
    `names` are the scores of other conversations.
    """
    scores: Mapping[str, float | None] = sample.scores if AGENT not in sample.verdicts else {}
    verdict, errors = "scored", dict[str, str]()
    if not scores:
        verdict = sample.verdicts.get(AGENT) or sample.finish_reason or "stop"
        if verdict == "stop":
            errors = {AGENT: "rollout.agent returned None, and rewards.functions is empty"}
            return RewardResult(None, {AGENT: None}, {AGENT: "error"}, (), errors)
        scores = dict.fromkeys(names, 0.0)
        errors = dict.fromkeys(names, "the agent function; the log has the error") if verdict == "error" else {}
    outcomes = {name: Score(value, verdict) for name, value in scores.items()}
    return result_of(dict.fromkeys(scores, 1.0), outcomes, errors)


def drop_unusable(groups: Sequence[Group]) -> tuple[list[Group], list[Group]]:
    """Return (groups whose gold answer parses, the other groups)."""
    usable, dropped = list[Group](), list[Group]()
    for group in groups:
        (dropped if any("gold_unparsable" in s.verdicts.values() for s in group.samples) else usable).append(group)
    return usable, dropped


def failures_of(sample: Sample) -> set[str]:
    """Return the effect of failed checks on the sample: "zero" for a score of 0, "missing" for a missing score."""
    effects = set[str]()
    for name, verdict in sample.verdicts.items():
        if verdict in ("error", "timeout") and sample.scores.get(name) is None:
            effects.add("missing")
        elif verdict == "error" and name not in OF_PROGRAMS:
            effects.add("zero")
    return effects


class Failures:
    """Decides when a reward function is broken, so that the run must end.

    An exception may be the fault of one data row: the function then raises on every sample of the group, and a rank may
    have few prompts in a rollout. So a function counts as broken once it has raised on every sample of this rank since
    its last score, if these are at least MIN_SAMPLES different samples from MIN_PROMPTS prompts. Waiting that long
    costs little, because equal scores produce no gradient.
    """

    def __init__(self) -> None:
        # Failed samples by function, as (prompt id, response).
        self._failed: dict[str, set[tuple[int, tuple[int, ...]]]] = {}

    def add(self, scored: Sequence[tuple[Sample, RewardResult]]) -> None:
        """Add the results of one rollout. Raises RewardError if a function is broken."""
        for name in {name for _, result in scored for name in result.verdicts}:
            errors = [(sample, result.errors[name]) for sample, result in scored if name in result.errors]
            if len(errors) < len(scored):
                self._failed.pop(name, None)
                continue
            failed = self._failed.setdefault(name, set())
            failed |= {(sample.prompt.id, tuple(sample.response_ids)) for sample, _ in errors}
            if len(failed) >= MIN_SAMPLES and len({prompt for prompt, _ in failed}) >= MIN_PROMPTS:
                raise RewardError(
                    f"reward function {name!r} raised an exception for every one of the last {len(failed)} samples, now"
                    f" {errors[0][1]}; correct the function or take it out of rewards.functions"
                )


def tokens_at(token_ids: Sequence[int], decode: Decode, ends: Sequence[int]) -> list[int]:
    """Return for each character end the index of the token that completes it.

    This is the smallest t such that the decoded token_ids[: t + 1] start with that many characters of the whole text.
    """
    if not ends:
        return []  # without decoding
    ids = list(token_ids)
    # Some tokenizers drop the space before the first word of a text, so decode later pieces after a token.
    for context in ([], ids[:1]):
        by_token = _ends_by_pieces(ids, decode, context)
        if by_token is not None:
            return [bisect_left(by_token, end) for end in ends]
    whole = decode(ids)
    return [
        bisect_left(range(len(ids) - 1), True, key=lambda t: decode(ids[: t + 1]).startswith(whole[:end]))
        for end in ends
    ]


def _ends_by_pieces(ids: list[int], decode: Decode, context: list[int]) -> list[int] | None:
    """Return for each token how many characters of the whole decoded text are complete after it; None if unknown.

    A character that spans several tokens is complete with the last one. A token without text, such as a special token
    that `decode` omits, adds no characters. The text is decoded in pieces, because decoding every prefix of a long text
    takes seconds. With some tokenizers the pieces do not add up to the whole text; then the result is None.
    """
    whole = decode(ids)
    ends: list[int] = []
    start = 0  # characters of all pieces so far
    while len(ends) < len(ids):
        before = context if ends else []
        skipped = len(decode(before))
        for size in range(PIECE_SIZE, PIECE_SIZE + MAX_CUT + 1):
            piece = ids[len(ends) : len(ends) + size]
            text = decode([*before, *piece])[skipped:]
            if not text.endswith(_REPLACEMENT):
                break
        if not whole.startswith(text, start):
            return None
        reached = 0  # must not shrink: a character can vanish while bytes of the next one are decoded with it
        for size in range(1, len(piece) + 1):
            reached = max(reached, num_common(decode([*before, *piece[:size]])[skipped:], text))
            ends.append(start + reached)
        start += len(text)
    return ends if start == len(whole) else None
