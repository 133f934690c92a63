"""`grpo-mega sample MODEL_OR_RUN_DIR`: print responses with log-probs and rewards, or chat in the terminal.

It takes the path of `grpo-mega eval`: a config that trains nothing, the policy synced to an engine, and the run's
rewards. A model without a run is sampled by the embedded engine, in float32 on a CPU, and scored by accuracy.

With --prompt or --data, responses are printed prompt by prompt, and --out gets a JSON line per response. A chat has one
rank, which reads the terminal. It keeps the conversation, and prints a reply while the engine samples it. Ctrl-C ends a
reply; Ctrl-D or /quit ends the chat.
"""

from __future__ import annotations

import json
import math
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpo_mega import config as configs
from grpo_mega.cli.commands.eval import (
    PASS_RATE_KEYS,
    EvalRequest,
    check_out,
    describe_policy,
    hold_weights,
    prompts_of,
    read_from,
    run_request,
)
from grpo_mega.cli.commands.options import SampleOptions
from grpo_mega.cli.commands.train import rank_imports
from grpo_mega.config import Config
from grpo_mega.distributed.environment import gpu_sign
from grpo_mega.distributed.launch import current_rank, ends_at_first, signals_handled
from grpo_mega.errors import ConfigError
from grpo_mega.formats.checkpoints import find_policy
from grpo_mega.paths import CONFIG_FILE, read_json, write_atomically
from grpo_mega.processes import private_folder
from grpo_mega.text import json_line, well_formed
from grpo_mega.types import Group, Prompt

if TYPE_CHECKING:
    from grpo_mega.rollout.engine import Sampling
    from grpo_mega.run.job import Job
    from grpo_mega.types import Sample

PROMPTS_AT_ONCE = 64
MAX_PROMPT_LENGTH, MAX_RESPONSE_LENGTH = 4096, 512  # tokens, for a model without a run
QUIT = "/quit"


@dataclass(kw_only=True)
class SampleRequest(EvalRequest):
    options: SampleOptions


def run(options: SampleOptions) -> int:
    """Sample or chat on all ranks. Return the exit code. Raise ConfigError or ResumeError."""
    with private_folder() as folder:
        request = make_request(options, folder)
        return run_request(request, chat_request if options.is_chat else sample_request)


def make_request(options: SampleOptions, folder: Path) -> SampleRequest:
    """Return the request. Write the prompt of the command line to `folder`, as a data set. Raise ConfigError."""
    _check(options)
    is_run = (options.target / CONFIG_FILE).is_file()
    saved = find_policy(options.target, options.step) if is_run else None
    data = options.data
    if data is None:
        data = str(folder / "prompt.jsonl")
        row = {"prompt": options.prompt or "Hello", "answer": options.answer or "none"}
        Path(data).write_text(json_line(row), encoding="utf-8")
    path = options.target / CONFIG_FILE if is_run else options.target
    is_config = path.is_file()
    config = (
        configs.load(path, ["run_dir=unused", *options.overrides]) if is_config else _config_of_model(options, data)
    )
    raw = config.model_dump(mode="json")
    hold_weights(raw)
    raw["data"] |= {"train": [{"path": data}], "heldout_sets": {}}
    raw["data"] |= dict.fromkeys(("heldout", "heldout_size", "heldout_fraction", *PASS_RATE_KEYS))
    if options.data is None:
        raw["data"] |= {"prompt_column": "prompt", "answer_column": "answer"}
    raw["eval"] = {"num_prompts": options.prompts}
    if saved is not None:
        read_from(raw["model"], None if saved.note is None else saved.path)
    if options.is_chat:
        if current_rank() is not None:
            raise ConfigError(
                "a chat has one rank, which reads the terminal; start it without torchrun, or give --prompt"
            )
        raw |= {"layout": {}, "teachers": {}, "algorithm": {}}
        raw["rewards"] = {"functions": [{"name": "format"}], "num_workers": 1}  # no reward that is slow to start
        raw["data"]["teacher_column"] = None
        raw["rollout"]["server_args"] |= {"stream_interval": 1}  # print token by token
    _set_engine(raw, options)
    longest = raw["data"]["max_prompt_length"] + raw["rollout"]["max_response_length"]
    raw["batch"]["tokens_per_micro_batch"] = max(raw["batch"]["tokens_per_micro_batch"], longest)
    return SampleRequest(
        config=configs.validate(raw),
        checkpoint=saved.path if saved and saved.note is None else None,
        set_names=("",),
        description="the prompt" if options.data is None else f"prompts of {options.data}",
        out=options.out,
        step=saved.step if saved else 0,
        note=describe_policy("sampling from", saved, raw["model"]["path"]),
        run=options.target if is_run else options.target.parent,
        options=options,
    )


def _check(options: SampleOptions) -> None:
    if options.prompt is not None and options.data is not None:
        raise ConfigError(f"--prompt and --data {options.data} both give prompts; give one of them")
    if options.prompt is not None and not options.prompt.strip():
        raise ConfigError(f"--prompt={options.prompt!r}: must be a text; leave it out to chat")
    companions = {
        "answer": ("--prompt", options.prompt is not None),
        "out": ("--prompt or --data", not options.is_chat),
        "prompts": ("--data", options.data is not None),
    }
    for name, (companion, is_given) in companions.items():
        if getattr(options, name) is not None and not is_given:
            raise ConfigError(f"--{name}={getattr(options, name)}: must go with {companion}; add it, or leave it out")
    for name, value in (("n", options.n), ("prompts", options.prompts)):
        if value is not None and value < 1:
            raise ConfigError(f"--{name}={value}: must be at least 1; leave it out for the default")
    if options.temperature is not None and not 0 <= options.temperature < math.inf:
        raise ConfigError(f"--temperature={options.temperature}: must be 0 or above; use 0 for greedy responses")
    if options.step is not None and not (options.target / CONFIG_FILE).is_file():
        raise ConfigError(f"--step={options.step}: must go with a run's folder, and {options.target} is none")
    check_out(options.out)


def _config_of_model(options: SampleOptions, data: str) -> Config:
    """Return a config for a model without a run. Prompt and response fit into the model's positions."""
    positions = MAX_PROMPT_LENGTH + MAX_RESPONSE_LENGTH
    with suppress(OSError, ValueError, TypeError, LookupError):  # such a model is refused later
        positions = int(read_json(options.target / "config.json")["max_position_embeddings"])
    response = options.max_response_length or min(MAX_RESPONSE_LENGTH, positions // 2)
    prompt = max(1, min(MAX_PROMPT_LENGTH, positions - response))
    raw: dict[str, Any] = {
        "run_dir": "unused",
        "steps": 1,
        "model": {"path": str(options.target), "dtype": "bfloat16" if gpu_sign(os.environ) else "float32"},
        "data": {"train": data, "max_prompt_length": prompt},
        "rollout": {"max_response_length": response},
        "rewards": {"functions": [{"name": "accuracy"}]},
        "batch": {"tokens_per_micro_batch": prompt + response},
    }
    for text in options.overrides:
        configs.apply_override(raw, text)
    return configs.validate(raw)


def _set_engine(raw: dict[str, Any], options: SampleOptions) -> None:
    rollout = raw["rollout"]
    if options.engine is not None:
        rollout["engine"] = options.engine
    if rollout["engine"] == "embedded" or options.is_chat:
        rollout |= {"tp": 1, "ep": 1}
    given = {"top_p": options.top_p, "max_response_length": options.max_response_length}
    rollout |= {name: value for name, value in given.items() if value is not None}
    rollout |= {"longest_first": False, "routing_replay": False}


def sample_request(request: SampleRequest) -> None:
    """Sample as one rank. Rank 0 prints the responses, and writes request.out."""
    with ExitStack() as stack:
        stack.enter_context(ends_at_first("ending; nothing is written"))
        job = stack.enter_context(_ready_job(request))
        from grpo_mega.run.evaluation import answer

        sampling = _sampling(job, request)
        prompts = prompts_of(job, request)[""]
        if request.options.prompt is not None:
            prompts = [replace(prompts[0], answer=request.options.answer or "")]
        rows: list[dict[str, Any]] = []
        most_samples = PROMPTS_AT_ONCE * request.options.n
        for groups in answer(job.rollouts, prompts, sampling, request.step, request.description, most_samples):
            if job.is_main:
                for group in groups:
                    print(group_text(group, job.rollouts.decode), flush=True)
                    rows += [
                        {
                            "id": sample.prompt.id,
                            "prompt": sample.prompt.text,
                            "gold": sample.prompt.answer or None,
                            "index": sample.index,
                            "response": job.rollouts.decode(sample.response_ids),
                            "token_ids": list(map(int, sample.response_ids)),
                            "logprobs": list(map(float, sample.rollout_logprobs)),
                            "finish_reason": sample.finish_reason,
                            "reward": _reward(sample),
                            "scores": sample.scores,
                            "verdicts": sample.verdicts,
                        }
                        for sample in group.samples
                    ]
        if job.is_main:
            if request.out is not None:
                write_atomically(request.out, "".join(map(json_line, rows)).encode())
            print(json.dumps(summary(request, rows)), flush=True)


@contextmanager
def _ready_job(request: SampleRequest) -> Iterator[Job]:
    """Open the job of a rank, and give the engine its weights."""
    with rank_imports(request.config):
        from grpo_mega.run.job import open_job
    with open_job(request.config, request.build_policy) as job:
        job.colocation.sync_weights(version=request.step)
        yield job


def _sampling(job: Job, request: SampleRequest) -> Sampling:
    given, sampling = request.options.temperature, job.rollouts.sampling
    temperature = sampling.temperature if given is None else given
    return replace(sampling, group_size=request.options.n, temperature=temperature)


def group_text(group: Group, decode: Any) -> str:
    """Return a prompt and its responses as text, each with reward, scores, log-prob and length.

    A reward function without a score is shown with its verdict.
    """
    lines = [f"\nprompt {group.prompt.id}: {group.prompt.text}"]
    for sample in group.samples:
        reward = "none" if (value := _reward(sample)) is None else f"{value:.3f}"
        parts = []
        for name, score in sample.scores.items():
            verdict = sample.verdicts.get(name, "")
            if verdict == "gold_unparsable":
                parts.append(f"{name}: no gold answer")
            else:
                parts.append(f"{name} {verdict}" if score is None else f"{name} {score:.3f}")
        scores = f" ({', '.join(parts)})" * bool(parts)
        lines.append(f"\n[{sample.index + 1}/{len(group.samples)}] reward {reward}{scores}, {_logprob(sample)}")
        lines.append(decode(sample.response_ids))
    return "\n".join(lines)


def _reward(sample: Sample) -> float | None:
    """Return the reward; None if a function could not read the gold answer, or failed."""
    return None if "gold_unparsable" in sample.verdicts.values() else sample.reward


def _logprob(sample: Sample) -> str:
    total, length = sum(sample.rollout_logprobs), sample.response_len
    ended = {"stop": "complete", "length": "cut off"}.get(sample.finish_reason or "", "ended by you")
    return f"log-prob {total:.3f}, {total / max(1, length):.3f} per token, {length} tokens, {ended}"


def summary(request: SampleRequest, rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    rewards = [row["reward"] for row in rows if row["reward"] is not None]
    return {
        "model": str(request.checkpoint or request.config.model.path),
        "step": request.step or None,
        "responses": len(rows),
        "reward": sum(rewards) / len(rewards) if rewards else None,
        "logprob_per_token": sum(sum(row["logprobs"]) for row in rows)
        / max(1, sum(len(row["logprobs"]) for row in rows)),
        "out": str(request.out) if request.out else None,
    }


def chat_request(request: SampleRequest) -> None:
    """Chat in the terminal, as the only rank."""
    with ExitStack() as stack:
        with ends_at_first("ending before the chat"):
            job = stack.enter_context(_ready_job(request))
            chat = Chat(job, request)
        print(f"{QUIT} or Ctrl-D ends the chat, Ctrl-C ends a reply", flush=True)
        signal.signal(signal.SIGINT, signal.default_int_handler)  # the shell may have started this in the background
        while (text := _read_message()) is not None:
            chat.reply(text)


def _read_message() -> str | None:
    """Return the next message of the user; None if the user ends the chat."""
    while True:
        try:
            text = well_formed(input("\nyou: ")).strip()
        except EOFError:
            print(flush=True)
            return None
        except KeyboardInterrupt:
            print(f"\n{QUIT} or Ctrl-D ends the chat", flush=True)
            continue
        if text == QUIT:
            return None
        if text:
            return text


class Chat:
    """A conversation with the policy. Each reply sees all messages before it."""

    def __init__(self, job: Job, request: SampleRequest) -> None:
        from grpo_mega.data.chat import Renderer, set_date
        from grpo_mega.formats.model import read_tokenizer
        from grpo_mega.run.folder import first_start

        self._job, self._step = job, request.step
        self._tokenizer = read_tokenizer(job.model.folder, job.model.shape.vocab)
        set_date(self._tokenizer, first_start(job.config.run_dir).time)
        self._renderer = Renderer(self._tokenizer)
        self._sampling = replace(_sampling(job, request), group_size=1)
        prompt = request.config.data.system_prompt
        self._system = [] if prompt is None else [{"role": "system", "content": prompt}]
        self._messages = list(self._system)
        self._num_replies = 0

    def reply(self, text: str) -> None:
        """Print the model's reply to a message of the user. Ctrl-C ends the reply, and its text so far is kept."""
        from grpo_mega.rollout.engine import RolloutRequest, StopWhenAsked

        with (
            closing(StopWhenAsked(self._job.rollouts.rendezvous)) as stop,
            signals_handled(lambda number: stop.ask(), (signal.SIGINT,)),
        ):
            limit = self._job.config.data.max_prompt_length
            self._messages.append({"role": "user", "content": text})
            rendered, token_ids = self._render()
            if len(token_ids) > limit and len(self._messages) > len(self._system) + 1:
                print(
                    f"the conversation has {len(token_ids)} tokens, above data.max_prompt_length={limit}; it starts"
                    " again with this message"
                )
                self._messages = [*self._system, self._messages[-1]]
                rendered, token_ids = self._render()
            if len(token_ids) > limit:
                print(f"the message has {len(token_ids)} tokens, above data.max_prompt_length={limit}; shorten it")
                self._messages.pop()
                return
            print("\nmodel: ", end="", flush=True)
            before = Group(Prompt(self._num_replies, rendered, token_ids, ""), [])
            self._num_replies += 1
            shown = ReplyStream(self._job.rollouts.decode)
            request = RolloutRequest({0: before}, self._sampling, self._step, stop=stop, on_tokens=shown.show)
            group = self._job.colocation.engine.generate(request).get(0, before)
            reply = [token for sample in group.samples for token in sample.response_ids]
            shown.finish(reply)
            content = self._job.rollouts.decode(reply)
            figures = [_logprob(sample) for sample in group.samples] or ["ended by you, before the first token"]
            print(f"\n[{figures[0]}]", flush=True)
            self._messages.append({"role": "assistant", "content": content})

    def _render(self) -> tuple[str, tuple[int, ...]]:
        """Return the conversation as text and as tokens."""
        rendered = self._renderer.render(self._messages, "the chat")
        return rendered, tuple(self._tokenizer([rendered], add_special_tokens=False)["input_ids"][0])


class ReplyStream:
    """Prints a reply while it is sampled. A token that ends within a character waits for the next ones."""

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._token_ids: list[int] = []
        self._first = self._num_shown = 0  # the tokens between them are decoded again, as context of the next one

    def show(self, token_ids: Sequence[int]) -> None:
        """Print the new ones of a reply's tokens so far."""
        self._token_ids = list(token_ids)
        if not (text := self._rest()).endswith("\ufffd"):
            print(text, end="", flush=True)
            self._first, self._num_shown = self._num_shown, len(self._token_ids)

    def finish(self, token_ids: Sequence[int]) -> None:
        """Print the rest of the reply."""
        self._token_ids = list(token_ids)
        print(self._rest(), end="", flush=True)

    def _rest(self) -> str:
        before = self._decode(self._token_ids[self._first : self._num_shown])
        return self._decode(self._token_ids[self._first :])[len(before) :]
