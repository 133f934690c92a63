"""Generate and score: prompts in, scored groups out, on every rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from grpo_mega.config import Config
from grpo_mega.distributed.recorder import recorder
from grpo_mega.distributed.rendezvous import Rendezvous
from grpo_mega.megatron.runtime import Runtime
from grpo_mega.observe.progress import progress
from grpo_mega.observe.timers import Timers
from grpo_mega.rewards.scorer import VERDICTS, Scorer
from grpo_mega.rollout import exchange
from grpo_mega.rollout.engine import Sampling
from grpo_mega.rollout.phase import Generator
from grpo_mega.types import Group, Prompt, Sample

_MANY = 2**24  # exceeds the number of samples of any phase


@dataclass
class Rollouts:
    """Generates with all engines and scores what they generate. All ranks call `generate` together."""

    config: Config
    generator: Generator
    rendezvous: Rendezvous
    scorer: Scorer
    sampling: Sampling  # of training
    decode: Callable[[Sequence[int]], str]  # token ids of a response to text
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
        wanted: int | None = None,
        is_evaluation: bool = False,
    ) -> list[Group]:
        """Return scored groups for all prompts, or for the first `wanted` that finish; in the order of the prompts, on every
        rank, all from the current policy. Samples are scored as they finish, on the rank that generated them.

        Raises SyncError if an engine held another policy, and, except for an evaluation, RewardError if a reward function is
        broken.
        """
        sampling = sampling or self.sampling
        is_shown = self.runtime.rank == 0 and self.config.log.progress
        with self.timers("sample"), progress(len(prompts) * sampling.group_size, description, is_shown) as bar:
            num_shown = tokens_shown = 0
            counter = f"{description} of step {step}"

            def on_sample(sample: Sample, group: Group) -> None:
                nonlocal num_shown, tokens_shown
                self.scorer.submit(sample)
                if len(group.samples) == sampling.group_size:
                    self.scorer.submit_group(group.samples)
                if not self.config.log.progress:
                    return
                # Counted over all ranks. One number holds both counts, since each request to the store takes time.
                added = _MANY * sample.response_len + 1
                before = self.rendezvous.fetch_add(counter, added)
                tokens, num_done = divmod(before + added, _MANY)
                bar.advance(num_done - num_shown, tokens=tokens - tokens_shown)
                num_shown, tokens_shown = num_done, tokens

            phase = self.generator.generate(prompts, sampling, step=step, on_sample=on_sample, wanted=wanted)
            if self.runtime.rank == 0:  # no rank adds to it any more
                self.rendezvous.delete(counter)
        self.scorer.keep(phase.mine.values())
        with self.timers("reward"), self.runtime.together():
            self.scorer.finish(recorder().beat)
            if not is_evaluation:
                self.scorer.check()
        with self.timers("exchange"):
            groups = exchange.gather(phase.mine, {place: prompts[place] for place in phase.places}, VERDICTS)
        exchange.check_versions(groups, step)
        if is_evaluation or not self.scorer.has_warned:  # training warns once, since each step counts the failures
            has_failures = self._warn_of_failures(groups, description)
            self.scorer.has_warned |= has_failures and not is_evaluation
        return groups

    def _warn_of_failures(self, groups: Sequence[Group], description: str) -> bool:
        """Warn with the first error of a reward function on any rank, if there is one. All ranks call it."""
        samples = [sample for group in groups for sample in group.samples]
        num_failed = sum("error" in sample.verdicts.values() for sample in samples)
        if not num_failed:
            return False
        texts = self.rendezvous.all_gather("scoring", self.scorer.first_error, self.config.rollout.phase_deadline_s)
        self.warn(
            f"{description}: reward functions failed on {num_failed} of {len(samples)} samples, which then have 0 or no score; "
            f"the first: {next(filter(None, texts), 'a worker process ended')}"
        )
        return True
