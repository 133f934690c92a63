"""The log of a run. The log of rank 0 passes everything to its writers; the log of any other rank has no writers.

Metric names are path-like ("reward/mean", "seconds/update", "eval/score"). `step` is written as the caller passes it.
The last line of a step counts.

The first whole groups of a step are logged in samples.jsonl; prompts come in random order. In a row `token_ends[i]` is
the number of characters of `response` up to the end of token i. `rollout_logprobs` are the engine's log-probs.
`mismatch` is the trainer's old log-prob minus the engine's, omitted if the sample was not trained. `advantages` is
present only if they differ between tokens, and `spans` (version, first token, end) only with several policies.

A conversation of an agent also has `messages`, `turns`: the (first token, end) of each turn that the policy sampled,
`contexts`: the (first token, text) of each rewritten history, and `turn_rewards`: the (last token, reward) of each
turn with a reward. Tokens outside the turns have log-prob, mismatch and advantage 0, and do not count in `advantage`.
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

from grpo_mega import config as configs
from grpo_mega.config import Config
from grpo_mega.paths import METRICS_FILE
from grpo_mega.text import get_console, read_lines, well_formed
from grpo_mega.tracking.curves import by_step, curves
from grpo_mega.tracking.rules import Monitor
from grpo_mega.tracking.writers import ConsoleWriter, JsonLinesWriter, Level, TensorBoardWriter, WandbWriter, Writer
from grpo_mega.types import Group, Sample, StepMetrics

Decode = Callable[[Sequence[int]], str]

SECONDS_BETWEEN_SFT_STEPS = 2.0  # a step of sft may take milliseconds
_LOGPROB_DIGITS = 5  # decimal places
_REPLACEMENT = "\ufffd"  # decoded form of an incomplete character


class RunLog:
    def __init__(
        self, writers: Sequence[Writer] = (), samples_per_step: int = 0, monitor: Monitor | None = None
    ) -> None:
        """`monitor`: warns after a step if a rule of rules.py fires."""
        self.writers, self._samples_per_step, self._monitor = list(writers), samples_per_step, monitor
        self._texts: dict[int, str] = {}  # text of each token in the log so far

    def log_step(self, step: int, metrics: StepMetrics) -> None:
        for writer in self.writers:
            writer.write_step(step, metrics)
        for text in self._monitor.observe(step, metrics) if self._monitor else ():
            self.warn(text)

    def log_eval(self, step: int, metrics: StepMetrics) -> None:
        for writer in self.writers:
            writer.write_eval(step, metrics)

    def message(self, text: str, *, level: Level = "info") -> None:
        for writer in self.writers:
            writer.write_message(well_formed(text), level=level)

    def warn(self, text: str) -> None:
        """Log a message that a person should act on, as one line."""
        self.message(" ".join(text.split()), level="warning")

    def log_samples(self, step: int, groups: Sequence[Group], decode: Decode) -> None:
        """Log the first whole groups of the step, at least log.samples_per_step samples. `decode` turns token ids into
        text.
        """
        num_samples = num_logged(groups, self._samples_per_step) if self.writers else 0
        flat = [(index, sample) for index, group in enumerate(groups) for sample in group.samples]
        rows = [sample_row(step, index, sample, decode, self._texts) for index, sample in flat[:num_samples]]
        for writer in self.writers if rows else ():
            writer.write_samples(rows)

    def log_loads(self, step: int, tokens: Sequence[Sequence[int]]) -> None:
        """Log the tokens per expert, by layer. Log nothing for a dense model."""
        for writer in self.writers if any(tokens) else ():
            writer.write_loads(step, tokens)

    def close(self) -> None:
        for writer in self.writers:
            writer.close()


class Hooks(NamedTuple):
    """Functions that a client adds to a run. The run works without them."""

    open_report: Callable[..., Writer] | None = None  # (folder, steps between pages, the log's `warn`)
    # (config, shape, fields of config.json, number of ranks, ranks per node, GiB of a GPU, whether it uses Transformer
    # Engine) -> free GiB of a GPU by phase, as planned
    plan_free: Callable[..., Mapping[str, float]] | None = None


def open_run_log(config: Config, rank: int, hooks: Hooks) -> RunLog:
    """Open the log of this rank. Rank 0 creates config.run_dir and its files, or continues them."""
    if rank != 0:
        return RunLog()
    settings = config.model_dump(mode="json")
    monitor = Monitor(configs.leaves(settings))
    steps_before = by_step(curves(read_lines(config.run_dir / METRICS_FILE)[0]))
    for step in sorted(steps_before):
        monitor.observe(step, steps_before[step])  # an earlier start has logged these warnings
    console = ConsoleWriter(get_console(), config.steps, SECONDS_BETWEEN_SFT_STEPS if config.algorithm.is_sft else 0.0)
    log = RunLog([console, JsonLinesWriter(config.run_dir)], config.log.samples_per_step, monitor)
    if config.log.wandb:
        log.writers.append(WandbWriter(config.run_dir, config.log.wandb_project, settings, console.write_message))
    if config.log.tensorboard:
        log.writers.append(TensorBoardWriter(config.run_dir, first_step=max(steps_before, default=0) + 1))
    # The report comes last: when it reads the files, the other writers have written and closed them.
    if hooks.open_report:
        log.writers.append(hooks.open_report(config.run_dir, config.log.report_interval, log.warn))
    return log


def num_logged(groups: Sequence[Group], samples_per_step: int) -> int:
    """Return the number of logged samples: whole groups until there are at least `samples_per_step`."""
    ends = accumulate((len(group.samples) for group in groups), initial=0)
    return next((end for end in ends if end >= samples_per_step), sum(len(group.samples) for group in groups))


def sample_row(step: int, group: int, sample: Sample, decode: Decode, token_texts: dict[int, str]) -> dict[str, Any]:
    """Return the row of a sample of the step's group number `group`. `token_texts` caches the text of single tokens."""
    ids, response = sample.response_ids, decode(sample.response_ids)
    for token in ids:
        if token not in token_texts:
            token_texts[token] = decode([token])
    texts = [token_texts[token] for token in ids]
    adds_up = "".join(texts) == response
    advantages = sample.advantages.tolist() if sample.advantages is not None else []
    turns = sample.sampled or [(0, sample.response_len)]
    of_sampled = [value for start, end in turns for value in advantages[start:end]]
    row = {
        "step": step,
        "prompt_id": sample.prompt.id,
        "group": group,
        "index": sample.index,
        "policy_version": sample.policy_version,
        "prompt": sample.prompt.text,
        "response": response,
        "answer": sample.prompt.answer,
        "finish_reason": sample.finish_reason,
        "reward": sample.reward,
        "rewards": sample.scores,
        "verdicts": sample.verdicts,
        "advantage": sum(of_sampled) / len(of_sampled) if of_sampled else None,
        "token_ends": list(accumulate(map(len, texts))) if adds_up else token_ends(ids, response, decode),
        "rollout_logprobs": [round(v, _LOGPROB_DIGITS) for v in sample.rollout_logprobs],
    }
    if len(sample.spans) > 1:
        row["spans"] = [list(span) for span in sample.spans]
    if len(set(of_sampled)) > 1:
        row["advantages"] = [_short(v) for v in advantages]
    if sample.old_logprobs is not None:
        pairs = zip(sample.old_logprobs, sample.rollout_logprobs, strict=True)
        row["mismatch"] = [_short(old - rollout) for old, rollout in pairs]
    if sample.messages is not None:
        row["messages"] = sample.messages
        row["turns"] = [list(turn) for turn in turns]
        row["contexts"] = [[context.start, decode(context.token_ids)] for context in sample.contexts]
        row["turn_rewards"] = list(zip(sample.step_ends, sample.step_rewards, strict=True))
    return row


def token_ends(token_ids: Sequence[int], text: str, decode: Decode) -> list[int] | None:
    """Return the token ends for tokenizers whose token texts depend on their neighbours.

    Each token is decoded together with the few tokens before it. A character of several tokens belongs to the last one.
    Return None if the pieces do not add up to `text`.
    """
    texts = []
    start = told = 0  # tokens from `start` on are decoded; tokens before `told` already have their text
    for i in range(len(token_ids)):
        before, now = decode(token_ids[start:told]), decode(token_ids[start : i + 1])
        is_whole = not now.endswith(_REPLACEMENT) or i + 1 == len(token_ids)
        texts.append(now[len(before) :] if is_whole else "")
        if is_whole:
            start, told = told, i + 1
    return list(accumulate(map(len, texts))) if "".join(texts) == text else None


def _short(value: float) -> float:
    """Round to three digits: enough for a colour, and a quarter of the file size."""
    return float(f"{value:.3g}")
