"""Generate and score: prompts in, scored groups out, on every rank.

A phase that wants fewer groups than prompts ends when enough groups are done across ranks, and the rest is aborted.
Done groups are kept in this order: oldest policy first, then lowest engine clock, then position among the prompts.
Every rank makes the same choice. With the embedded engine it depends only on the samples and the number of ranks, so a
resumed run repeats it. With servers the choice depends on their speed.

Groups with a long response are aborted more often, so kept groups are shorter and easier than the average started
group. `flush_stats` reports the known difference. Partial rollouts (backlog.py) continue aborted groups.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple

import torch.distributed as dist

from grpo_mega import errors
from grpo_mega.config import Config
from grpo_mega.distributed.rendezvous import Rendezvous
from grpo_mega.distributed.watchdog import recorder
from grpo_mega.errors import EngineError, SyncError, UserError
from grpo_mega.rewards.scorer import VERDICTS, Scorer, failures_of
from grpo_mega.rollout.backlog import Backlog, gather_samples
from grpo_mega.rollout.engine import Engine, RolloutRequest, Sampling, StopCondition, StopWhenTrainersArrive
from grpo_mega.rollout.routes import cut
from grpo_mega.tracking.progress import Timers, progress
from grpo_mega.types import Group, Sample, StepMetrics

if TYPE_CHECKING:
    from grpo_mega.rollout.sessions.conversations import Conversations

_SAMPLES_PER_COUNTER = 2**24  # exceeds the number of samples of any phase


@dataclass(frozen=True)
class Phase:
    """One rank's generation phase result, before samples are scored and shared."""

    before: Sequence[Group]  # groups before the phase
    mine: dict[int, Group]  # groups that this rank generated, keyed by prompt index
    kept: list[int]  # prompt indices for all kept groups, ascending; the same on every rank
    shared: list[int]  # prompt indices for groups that ranks share, ascending; the same on every rank
    group_size: int
    step: int
    description: str


@dataclass
class Rollouts:
    """Generates using all ranks' engines, and scores the samples. All ranks call every method together."""

    config: Config
    engine: Engine
    recover: Callable[[int], None]  # restarts failed engines, and loads this policy version into all engines again
    rendezvous: Rendezvous
    scorer: Scorer
    sampling: Sampling  # training's sampling parameters
    decode: Callable[[Sequence[int]], str]  # response token ids -> text
    timers: Timers
    warn: Callable[[str], None]
    ranks: dist.ProcessGroup | None  # all ranks
    raise_on_all_ranks: Callable[[], AbstractContextManager[None]]  # for an error that only some ranks raise
    conversations: Conversations | None = None  # runs this rank's agents; None without agents
    # Counts of phases with oversampling since the last flush_stats.
    _stats: Counter[str] = field(default_factory=Counter, init=False)
    # Sums over the engines and the phases of training since the last flush_usage.
    _usage: Counter[str] = field(default_factory=Counter, init=False)

    def generate_from(self, backlog: Backlog, step: int, description: str, wanted: int) -> tuple[list[Group], Backlog]:
        """Return the first `wanted` scored groups that finish, and the backlog without them.

        Raise SyncError if an engine had another policy. Raise RewardError if a reward function is broken.
        """
        rollout = self.config.rollout
        needed = backlog.needed(oldest=step - rollout.max_staleness) if rollout.keeps_unfinished else []
        num_started = max(rollout.num_started(wanted), 1 + max(needed, default=-1))
        before = backlog.groups[:num_started]
        kept, rest = self.score(self.generate(before, step, description, wanted=wanted, needed=needed))
        if rollout.keeps_unfinished:
            return kept, backlog.after_phase(before, kept, rest)
        return kept, replace(backlog, groups=backlog.groups[num_started:])

    def generate(
        self,
        groups: Sequence[Group],
        step: int,
        description: str,
        *,
        wanted: int | None = None,
        needed: Collection[int] = (),
        sampling: Sampling | None = None,
    ) -> Phase:
        """Generate until `wanted` groups (None: all) are complete, including the prompt indices `needed`.

        Groups may come from an earlier phase: unfinished ones are resumed, complete ones are kept. Finished samples go
        to the reward functions. When an engine fails, its unfinished groups are generated again. Raise EngineError on
        all ranks if `recover` raises it.
        """
        is_training, sampling = sampling is None, sampling or self.sampling
        wanted = len(groups) if wanted is None else min(wanted, len(groups))
        todo = _incomplete(groups, sampling)
        # Keep groups with an older policy first, then groups from an earlier attempt (clocks restart at 0), then by
        # clock.
        done = {index: (g.oldest_version or 0, 0, 0) for index, g in enumerate(groups) if index not in todo}
        mine, reports = dict[int, Group](), dict[int, _Report]()
        attempt = 0
        with self._listening(len(groups), step, description, sampling) as on_sample:
            while len(done) < wanted or not done.keys() >= set(needed):
                attempt += 1
                version, missing = self.engine.version, max(0, wanted - len(done))
                stop = StopCondition(self.rendezvous, missing, todo.keys() & needed) if missing < len(todo) else None
                request = RolloutRequest(todo, sampling, step, on_sample, stop, conversations=self.conversations)
                found, new = self._run_engines(request, is_training=is_training)
                ended = {report.prompt_index: report.clock for report in new if report.clock is not None}
                if stop is not None:
                    end = stop.end([(clock, index) for index, clock in ended.items()])
                    if end is not None:
                        ended = {index: clock for index, clock in ended.items() if clock <= end}
                        found = _as_of(end, found, todo, stop.start_clocks)
                    stop.close()
                mine = {index: group for index, group in mine.items() if index not in todo} | found
                reports |= {report.prompt_index: report for report in new}
                done |= {index: (reports[index].oldest_version, attempt, clock) for index, clock in ended.items()}
                todo = {index: group for index, group in todo.items() if index not in ended}
                self.recover(version)
        kept = sorted(sorted(done, key=lambda index: (index not in needed, done[index], index))[:wanted])
        for report in reports.values() if wanted < len(groups) else ():
            name = "kept" if report.prompt_index in kept else "aborted"
            self._stats.update(
                {f"{name}_groups": 1, f"{name}_samples": report.num_samples, f"{name}_tokens": report.num_tokens}
            )
        shared = sorted(reports if self.config.rollout.keeps_unfinished else reports.keys() & kept)
        return Phase(groups, mine, kept, shared, sampling.group_size, step, description)

    def generate_ahead(self, backlog: Backlog, step: int, num_groups: int) -> Backlog:
        """Let engine ranks generate until the trainer ranks have trained `step` and also call this. Return the new
        backlog.

        When an engine fails, the next weight sync restarts it, and its running samples are generated again.
        """
        before, description = backlog.groups[:num_groups], "sampling ahead"
        if not before:
            return backlog
        stop = StopWhenTrainersArrive(self.rendezvous, self.rendezvous.world_size - self.config.layout.engine_ranks)
        with self._listening(len(before), step, description, self.sampling) as on_sample:
            request = RolloutRequest(
                _incomplete(before, self.sampling),
                self.sampling,
                step,
                on_sample,
                stop,
                conversations=self.conversations,
            )
            mine, reports = self._run_engines(request, is_training=True)
            shared = sorted(report.prompt_index for report in reports)
            stop.close()
        phase = Phase(before, mine, [], shared, self.sampling.group_size, step, description)
        return backlog.after_phase(before, *self.score(phase))

    def score(self, phase: Phase) -> tuple[list[Group], list[Group]]:
        """Return the scored groups that the phase kept, and all other groups, for training.

        Raise SyncError if an engine had another policy. Raise RewardError if a reward function is broken. Warn once per
        failure kind, because metrics count each step's failures.
        """
        kept, rest = self.share(phase, self.scorer.check)
        self.warn_of_failures(kept, phase.description, self.scorer.warned_of)
        return kept, rest

    def share(self, phase: Phase, check: Callable[[], None] = lambda: None) -> tuple[list[Group], list[Group]]:
        """Wait for the scores. Return the groups that the phase kept, and all other groups, in their order, on every
        rank.

        `check` may raise a UserError, and every rank then raises it. Samples in unfinished groups are scored in the
        phase that finishes the group. Raise SyncError if an engine had another policy.
        """
        mine = {index: phase.mine[index] for index in phase.shared if index in phase.mine}
        self.scorer.keep(group for group in mine.values() if group.is_complete(phase.group_size))
        with self.timers("reward"), self.raise_on_all_ranks():
            self.scorer.finish(recorder().heartbeat)
            check()
        with self.timers("exchange"):
            prompts = {index: phase.before[index].prompt for index in phase.shared}
            # Any rank may continue other groups' routes. Engine ranks do not take part in the update.
            staying = () if self.config.layout.engine_ranks else phase.kept
            key = self.rendezvous.unique_key("exchange")
            found = gather_samples(mine, prompts, VERDICTS, key, self.ranks, without_routes=staying)
        rest = dict(enumerate(phase.before)) | found
        kept = [rest.pop(index) for index in phase.kept]
        has_earlier = any(group.samples for group in phase.before)
        check_versions(kept, phase.step - self.config.rollout.max_staleness if has_earlier else phase.step, phase.step)
        return kept, list(rest.values())

    def warn_of_failures(self, groups: Sequence[Group], description: str, known: set[str]) -> None:
        """Warn with the first reward function error on any rank, unless `known` has all failure kinds. Add them.

        All ranks call it.
        """
        samples = [sample for group in groups for sample in group.samples]
        failures = [kinds for sample in samples if (kinds := failures_of(sample))]
        kinds = set[str]().union(*failures)
        if kinds <= known:
            return
        known |= kinds
        texts = self.rendezvous.all_gather("scoring", self.scorer.first_error, self.config.rollout.phase_deadline_s)
        self.warn(
            f"{description}: reward functions failed on {len(failures)} of {len(samples)} samples; "
            f"{sum('missing' in one for one in failures)} have no score and are excluded, the others have 0; "
            f"the first: {next(filter(None, texts), 'a worker process ended')}"
        )

    def flush_stats(self) -> StepMetrics:
        """Count kept and aborted groups in phases with oversampling since the last call. Return {} without such phases.

        Lengths are means in tokens. Aborted groups' lengths are a lower bound, because their samples did not finish.
        """
        sums, self._stats = self._stats, Counter()
        if not sums:
            return {}
        metrics = {
            "rollout/begun_groups": float(sums["kept_groups"] + sums["aborted_groups"]),
            "rollout/aborted_groups": float(sums["aborted_groups"]),
        }
        for name in ("kept", "aborted"):
            metrics[f"rollout/{name}_tokens"] = float(sums[f"{name}_tokens"])
            metrics[f"rollout/{name}_length"] = sums[f"{name}_tokens"] / max(1, sums[f"{name}_samples"])
        return metrics

    def flush_usage(self) -> StepMetrics:
        """Return how training used the engines since the last call; {} if no engine generated.

        seconds/idle       generation seconds without a sample, mean across slots; part of seconds/sample. An engine
                           has as many slots as samples ran at once
        engine/retracted   share of ended samples that were interrupted because an SGLang server's KV cache was full
        """
        sums, self._usage = self._usage, Counter()
        if not sums["slot_seconds"]:
            return {}
        metrics = {"seconds/idle": sums["seconds"] * max(0.0, 1 - sums["sample_seconds"] / sums["slot_seconds"])}
        if self.config.rollout.is_served:
            metrics["engine/retracted"] = sums["num_retracted"] / max(1, sums["num_ended"])
        return metrics

    @contextmanager
    def _listening(
        self, num_groups: int, step: int, description: str, sampling: Sampling
    ) -> Iterator[Callable[[Sample, Group], None]]:
        """Yield a function that submits a finished sample to the reward functions and shows the phase's progress."""
        is_main = self.rendezvous.rank == 0
        is_shown = is_main and self.config.log.progress
        with self.timers("sample"), progress(num_groups * sampling.group_size, description, is_shown) as bar:
            num_shown = tokens_shown = 0
            counter = f"{description} of step {step}"

            def on_sample(sample: Sample, group: Group) -> None:
                nonlocal num_shown, tokens_shown
                self.scorer.submit(sample)
                if len(group.samples) == sampling.group_size:
                    self.scorer.submit_group(group.samples)
                if not self.config.log.progress:
                    return
                # One number stores both counts over all ranks, because each request to the store takes time.
                added = _SAMPLES_PER_COUNTER * sample.num_sampled + 1
                before = self.rendezvous.fetch_add(counter, added)
                tokens, num_done = divmod(before + added, _SAMPLES_PER_COUNTER)
                bar.advance(num_done - num_shown, tokens=tokens - tokens_shown)
                num_shown, tokens_shown = num_done, tokens

            yield on_sample
            if is_main:  # no rank uses the counter any more
                self.rendezvous.delete(counter)

    def _run_engines(self, request: RolloutRequest, *, is_training: bool) -> tuple[dict[int, Group], list[_Report]]:
        """Return this rank's groups, and reports on all ranks' groups that have at least one sample.

        `is_training`: count all engines' usage. Raise any rank's first UserError on all ranks.
        """
        started_at, problem, reports = time.monotonic(), None, []
        try:
            mine = self.engine.generate(request)
        except UserError as error:  # the other ranks wait for this one
            mine, problem = {}, [type(error).__name__, *error.args]
        for index, group in mine.items():
            is_complete = group.is_complete(request.sampling.group_size)
            clock = (request.stop.clocks[index] if request.stop else 0) if is_complete else None
            if group.oldest_version is not None:
                reports.append(_Report(index, clock, group.oldest_version, len(group.samples), group.num_tokens))
        value = [reports, asdict(request.usage), problem]
        by_rank = self.rendezvous.all_gather("generation", value, self.config.rollout.phase_deadline_s)
        for name, *texts in (found for *_, found in by_rank if found):
            raise getattr(errors, name, EngineError)(*texts)
        if is_training:
            seconds = time.monotonic() - started_at
            self._usage.update({"seconds": seconds})
            for _, usage, _ in by_rank:
                self._usage.update(usage | {"slot_seconds": usage["most_running"] * seconds})
        return mine, [_Report(*row) for rows, *_ in by_rank for row in rows]


class _Report(NamedTuple):
    """Describes one group to the other ranks."""

    prompt_index: int
    clock: int | None  # None: not finished
    oldest_version: int
    num_samples: int  # with at least one token
    num_tokens: int


def check_versions(groups: Sequence[Group], oldest: int, newest: int) -> None:
    """Raise SyncError with the first sample that has tokens of a policy version outside `oldest` to `newest`."""
    for sample in (s for g in groups for s in g.samples):
        if wrong := [span.version for span in sample.spans if not oldest <= span.version <= newest]:
            wanted = f"{newest}" if oldest == newest else f"{oldest} to {newest}"
            raise SyncError(
                f"sample {sample.index} of prompt {sample.prompt.id} was made by policy version {wrong[0]}, not"
                f" {wanted}; continue from the last checkpoint with --resume"
            )


def _incomplete(groups: Sequence[Group], sampling: Sampling) -> dict[int, Group]:
    return {index: group for index, group in enumerate(groups) if not group.is_complete(sampling.group_size)}


def _as_of(
    end: int, found: Mapping[int, Group], before: Mapping[int, Group], clocks: Mapping[tuple[int, int], int]
) -> dict[int, Group]:
    """Truncate the groups to the tokens generated up to clock `end`. `before` has the groups before the phase.

    A rank decodes a few more tokens before it sees the end, and their number depends on its speed. `clocks` contains
    the clock at which each sample was started or resumed. It is empty if the engine has no clock.
    """
    result = dict(found)
    for index in {index for index, _ in clocks}:
        earlier = {sample.index: sample for sample in before[index].samples}
        kept = []
        for sample in found[index].samples:
            most = max(0, end - clocks.get((index, sample.index), end))
            if (cut_sample := _cut(sample, earlier.get(sample.index), most)) is not None:
                kept.append(cut_sample)
        result[index] = Group(found[index].prompt, kept)
    return result


def _cut(sample: Sample, before: Sample | None, most: int) -> Sample | None:
    """Truncate the sample to `most` more tokens than before the phase; return None if no tokens are left."""
    length = most + (before.response_len if before else 0)
    if sample.response_len <= length:
        return sample
    if most == 0:
        return before
    spans = [*sample.spans[:-1], sample.spans[-1]._replace(end=length)]
    ids, logprobs = sample.response_ids[:length], sample.rollout_logprobs[:length]
    routes = cut(sample.routes, len(sample.prompt.token_ids) + length - 1) if sample.routes else None
    return replace(sample, response_ids=ids, rollout_logprobs=logprobs, finish_reason=None, spans=spans, routes=routes)
