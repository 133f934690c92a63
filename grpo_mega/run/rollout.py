"""Generate and score: prompts in, scored groups out, on every rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from grpo_mega.config import Config
from grpo_mega.distributed.recorder import recorder
from grpo_mega.distributed.rendezvous import Rendezvous
from grpo_mega.megatron.runtime import Runtime
from grpo_mega.observe.progress import progress
from grpo_mega.observe.timers import Timers
from grpo_mega.rewards.scorer import VERDICTS, Scorer, failures_of
from grpo_mega.rollout import exchange
from grpo_mega.rollout.backlog import Backlog
from grpo_mega.rollout.engine import Sampling
from grpo_mega.rollout.phase import Generator, Phase
from grpo_mega.types import Group, Prompt, Sample

_SAMPLES_PER_COUNTER = 2**24  # exceeds the number of samples of any phase


@dataclass
class Rollouts:
    """Generates samples with all engines and scores them. All ranks call every method together."""

    config: Config
    generator: Generator
    rendezvous: Rendezvous
    scorer: Scorer
    sampling: Sampling  # sampling parameters of training
    decode: Callable[[Sequence[int]], str]  # token ids of a response -> text
    runtime: Runtime
    timers: Timers
    warn: Callable[[str], None]

    def generate(
        self,
        prompts: Sequence[Prompt],
        step: int,
        description: str,
        *,
        sampling: Sampling | None = None,
        is_evaluation: bool = False,
    ) -> list[Group]:
        """Return scored groups of the current policy for all prompts, in their order, on every rank.

        Raise SyncError if an engine had another policy. Raise RewardError if a reward function is broken, except in an
        evaluation.
        """
        fresh = [Group(prompt, []) for prompt in prompts]
        chosen = sampling or self.sampling
        return self._phase(fresh, step, description, chosen, len(fresh), is_evaluation=is_evaluation)[0]

    def generate_from(self, backlog: Backlog, step: int, description: str, wanted: int) -> tuple[list[Group], Backlog]:
        """Return the first `wanted` scored groups of the backlog that finish, and the backlog without them."""
        rollout = self.config.rollout
        if not rollout.keeps_unfinished:
            num_started = rollout.num_started(wanted)
            kept, _ = self._phase(backlog.groups[:num_started], step, description, self.sampling, wanted)
            return kept, replace(backlog, groups=backlog.groups[num_started:])
        needed = backlog.needed(oldest=step - rollout.max_staleness)
        num_started = max(rollout.num_started(wanted), 1 + max(needed, default=-1))
        before = backlog.groups[:num_started]
        kept, rest = self._phase(before, step, description, self.sampling, wanted, needed)
        return kept, backlog.after_phase(before, kept, rest)

    def generate_ahead(self, backlog: Backlog, step: int) -> Backlog:
        """Let engine ranks generate until the trainer ranks have trained `step` and also call this. Return the new backlog."""
        before = backlog.groups[: self.config.rollout.num_ahead(self.config.batch.prompts_per_step)]
        if not before:
            return backlog
        return backlog.after_phase(before, *self._phase(before, step, "sampling ahead", self.sampling, None))

    def _phase(
        self,
        groups: Sequence[Group],
        step: int,
        description: str,
        sampling: Sampling,
        wanted: int | None,
        needed: Sequence[int] = (),
        *,
        is_evaluation: bool = False,
    ) -> tuple[list[Group], list[Group]]:
        """Generate until `wanted` groups are complete, including the groups at the positions `needed`.

        Return these groups, scored, and all other groups, in their order, on every rank. If `wanted` is None, generate until
        the trainer ranks arrive, and return all groups in the second list.

        Samples are scored when they finish, on the rank that generated them. Samples of unfinished groups are scored later.
        Without partial rollouts the other groups are returned unchanged.
        """
        keeps_rest = self.config.rollout.keeps_unfinished and not is_evaluation
        oldest = step - self.config.rollout.max_staleness if keeps_rest else step
        is_whole = [group.is_complete(sampling.group_size) for group in groups]
        phase = self._generate(groups, step, description, sampling, wanted, needed)
        mine = phase.mine | (phase.rest if keeps_rest else {})
        self.scorer.keep(group for group in mine.values() if group.is_complete(sampling.group_size))
        with self.timers("reward"), self.runtime.raise_on_all_ranks(self.runtime.everyone):
            self.scorer.finish(recorder().beat)
            if not is_evaluation:
                self.scorer.check()
        places = sorted([p for p in phase.places if not is_whole[p]] + (phase.rest_places if keeps_rest else []))
        with self.timers("exchange"):
            prompts = {place: groups[place].prompt for place in places}
            name = self.rendezvous.unique_key("exchange")
            found = exchange.gather(mine, prompts, VERDICTS, name, self.runtime.everyone)
        after = dict(enumerate(groups)) | dict(zip(places, found, strict=True))
        kept = [after.pop(place) for place in phase.places]
        exchange.check_versions(kept, oldest, step)
        self._warn_of_failures(kept, description, is_evaluation)
        return kept, list(after.values())

    def _generate(
        self,
        groups: Sequence[Group],
        step: int,
        description: str,
        sampling: Sampling,
        wanted: int | None,
        needed: Sequence[int],
    ) -> Phase:
        """Generate on all engines and submit samples to the reward functions when they end."""
        is_shown = self.runtime.rank == 0 and self.config.log.progress
        with self.timers("sample"), progress(len(groups) * sampling.group_size, description, is_shown) as bar:
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
                added = _SAMPLES_PER_COUNTER * sample.response_len + 1
                before = self.rendezvous.fetch_add(counter, added)
                tokens, num_done = divmod(before + added, _SAMPLES_PER_COUNTER)
                bar.advance(num_done - num_shown, tokens=tokens - tokens_shown)
                num_shown, tokens_shown = num_done, tokens

            prompts = [group.prompt for group in groups]
            earlier = {place: group for place, group in enumerate(groups) if group.samples}
            if wanted is None:
                num_trainers = self.runtime.layout.world_size
                phase = self.generator.generate_meanwhile(
                    prompts, sampling, step=step, on_sample=on_sample, earlier=earlier, num_trainers=num_trainers
                )
            else:
                phase = self.generator.generate(
                    prompts, sampling, step=step, on_sample=on_sample, wanted=wanted, earlier=earlier, needed=needed
                )
            if self.runtime.rank == 0:  # no rank uses the counter any more
                self.rendezvous.delete(counter)
        return phase

    def _warn_of_failures(self, groups: Sequence[Group], description: str, is_evaluation: bool) -> None:
        """Warn with the first error of a reward function on any rank, if there is one. All ranks call it.

        Training warns of each kind of failure once, because metrics count the failures of each step.
        """
        samples = [sample for group in groups for sample in group.samples]
        failures = [kinds for sample in samples if (kinds := failures_of(sample))]
        kinds = set[str]().union(*failures)
        if not kinds or (not is_evaluation and kinds <= self.scorer.warned_of):
            return
        if not is_evaluation:
            self.scorer.warned_of |= kinds
        texts = self.rendezvous.all_gather("scoring", self.scorer.first_error, self.config.rollout.phase_deadline_s)
        self.warn(
            f"{description}: reward functions failed on {len(failures)} of {len(samples)} samples; "
            f"{sum('missing' in one for one in failures)} have no score and are excluded, the others have 0; "
            f"the first: {next(filter(None, texts), 'a worker process ended')}"
        )
