"""`grpo-mega eval` and `grpo-mega sample`: answer prompts with a run's checkpoint, a config's model or a folder.

Both train nothing and change no run. `sample` is `eval` that prints its responses.

Before anything heavy is imported, `make_request` turns the options into a config that trains nothing. Layout, engine,
rewards and seed come from the run; a model without a run has the embedded engine and the reward accuracy. The prompts
to answer are data.train, or the held-out prompts split off from data.train. All ranks then load the policy without
reference and optimizer, sync it to the engine, and generate.

Logs of ranks and files of servers are in a temporary folder that is kept only if a rank fails.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpo_mega import config as configs
from grpo_mega.checkpoint_io.checkpoints import SavedPolicy, check_model, find_policy, read_manifest
from grpo_mega.cli.commands.options import EvalOptions
from grpo_mega.cli.commands.train import check_config, print_notes, rank_imports
from grpo_mega.config import Config
from grpo_mega.distributed.environment import gpu_sign
from grpo_mega.distributed.launch import current_rank, ends_at_first, launch
from grpo_mega.errors import EXIT_INTERRUPTED, EXIT_USER_ERROR, ConfigError, ResumeError, UserError
from grpo_mega.paths import CONFIG_FILE, LOGS, RUN_FILE, STATE, read_json
from grpo_mega.processes import KEEP, own_folder, private_folder
from grpo_mega.text import json_line

if TYPE_CHECKING:
    from grpo_mega.checkpoint_io.model import ModelFiles
    from grpo_mega.megatron.policy import Policy
    from grpo_mega.megatron.runtime import Runtime
    from grpo_mega.trainer.evaluation import Evaluated
    from grpo_mega.trainer.job import Job
    from grpo_mega.types import Group, Prompt, Sample

MAX_PROMPT_LENGTH, MAX_RESPONSE_LENGTH = 4096, 512  # tokens, for a model without a run
PASS_RATE_KEYS = ("pass_rates", "min_pass_rate", "max_pass_rate")  # they select prompts of training


@dataclass
class EvalRequest:
    options: EvalOptions
    config: Config
    checkpoint: Path | None  # a run's checkpoint; None: the model in the config
    # Names of the sets in data.train; None: the held-out prompts split off from data.train.
    set_names: tuple[str, ...] | None
    description: str  # description of the prompts, for the log
    step: int = 0  # step after which the policy was saved
    note: str = ""  # message for the user
    run: Path = Path("unused")  # the folder whose run, if it holds one, decides the date and the split

    def build_policy(self, config: Config, model: ModelFiles, runtime: Runtime) -> Policy:
        """Return a policy that cannot be trained. Raise ResumeError or WeightMappingError on all ranks."""
        import torch.distributed as dist

        from grpo_mega.megatron.policy import Policy
        from grpo_mega.trainer.inputs import check_base
        from grpo_mega.trainer.parts import build_policy, load_saved
        from grpo_mega.trainer.saving import verify_files

        chosen = [self.checkpoint]  # chosen by rank 0, because a run that still trains may save another one meanwhile
        dist.broadcast_object_list(chosen)
        (self.checkpoint,) = chosen
        if self.checkpoint is None and config.model.init == "random":
            return build_policy(config, model, runtime)
        folder = model.folder
        if self.checkpoint is not None:
            manifest = read_manifest(self.checkpoint)
            check_model(self.checkpoint, manifest, model.shape, config.model.recorded_lora)
            verify_files(self.checkpoint, manifest, runtime.rank, runtime.layout.world_size)
            if manifest.adapter is not None:
                check_base(config, manifest, runtime.rank, runtime.layout.world_size)
            self.step, folder = manifest.step, self.checkpoint / STATE
        policy = Policy(config, model.shape, model.family, model.hf_config, runtime)
        try:
            load_saved(config, policy, model, folder)
        except FileNotFoundError as error:
            raise ResumeError(
                f"{error.filename} was removed while it was read; the run keeps its checkpoint.keep newest checkpoints"
                " only: evaluate a newer one"
            ) from None
        return policy


def run(options: EvalOptions) -> int:
    """Evaluate or sample on all ranks, with a temporary run_dir. Return the exit code."""
    if options.prompt is None:
        return _run(make_request(options))
    if options.data is not None:
        raise ConfigError(f"--prompt and --data {options.data} both give prompts; give one of them")
    if not options.prompt.strip():
        raise ConfigError(f"--prompt={options.prompt!r}: must be a text; write one")
    with private_folder() as folder:
        data = folder / "prompt.jsonl"
        row = {"prompt": options.prompt, "answer": options.answer or "none"}
        data.write_text(json_line(row), encoding="utf-8")
        columns = ("data.prompt_column=prompt", "data.answer_column=answer")
        return _run(make_request(replace(options, data=str(data), overrides=[*options.overrides, *columns])))


def _run(request: EvalRequest) -> int:
    if not current_rank():
        print_notes([request.note])
    request.config = check_config(request.config, trains=False)
    with private_folder() as folder:
        run_dir = folder / "run"
        if current_rank() is not None:  # the ranks of a torchrun share a folder, for the key of their messages
            run_dir = Path(tempfile.gettempdir(), f"grpo-mega-eval-{os.getuid()}-{os.getppid()}")
            if current_rank() == 0:
                own_folder(run_dir)
        request.config = request.config.model_copy(update={"run_dir": run_dir})
        if (request.run / RUN_FILE).is_file() and not current_rank():
            run_dir.mkdir(mode=0o700, exist_ok=True)
            shutil.copy(request.run / RUN_FILE, run_dir)
        code = 1  # exit code after an unexpected exception
        try:
            code = launch(evaluate_request, request, request.config.layout.world_size, folder / LOGS)
            return code
        except (UserError, KeyboardInterrupt):
            code = 0
            raise
        finally:
            if current_rank() == 0:
                shutil.rmtree(run_dir, ignore_errors=True)
            if code not in (0, EXIT_USER_ERROR, EXIT_INTERRUPTED):
                (folder / KEEP).touch()
                print(f"grpo-mega: logs of the ranks are in {folder}", file=sys.stderr, flush=True)


def make_request(options: EvalOptions) -> EvalRequest:
    """Return the request. Raise ConfigError or ResumeError in one line if it cannot be evaluated. Writes nothing."""
    if options.prompts is not None and options.prompts < 1:
        raise ConfigError(f"--prompts {options.prompts} leaves nothing to evaluate; give at least 1")
    if options.answer is not None and options.prompt is None:
        raise ConfigError(f"--answer={options.answer}: must go with --prompt; add it, or leave it out")
    if options.shows and options.temperature == 0:
        options = replace(options, greedy=True, samples=0, temperature=None)
    is_run = (options.target / CONFIG_FILE).is_file()
    path = options.target / CONFIG_FILE if is_run else options.target
    if path.is_dir():
        config = _config_of_model(options)
    else:
        config = configs.load(path, ["run_dir=unused", *options.overrides])
    if options.step is not None and options.model is not None:
        raise ConfigError(f"--model {options.model} and --step {options.step} name two policies; give one of them")
    if options.step is not None and not is_run:
        raise ConfigError(
            f"--step {options.step} is an option for a run, but {options.target} is none; name its folder"
        )
    saved = find_policy(options.target, options.step) if is_run and options.model is None else None
    checkpoint = saved.path if saved and saved.note is None else None
    if options.out is not None and options.out.exists():
        raise ConfigError(f"--out {options.out} exists; name a file that does not")
    if options.out is not None and not options.out.parent.is_dir():
        raise ConfigError(f"--out {options.out}: there is no folder {options.out.parent}; make it first")
    raw = config.model_dump(mode="json")
    for name in ("samples", "temperature", "top_p", "greedy", "ks"):
        if (value := getattr(options, name)) is not None:
            raw["eval"][name] = value
    if options.samples is not None and options.ks is None:
        raw["eval"]["ks"] = None  # the config's ks fit its number of samples, not this one
    if options.prompts is not None or options.data is not None or options.train_set:
        raw["eval"]["num_prompts"] = options.prompts
    if options.engine is not None:
        raw["rollout"] |= {"engine": options.engine} | ({"tp": 1, "ep": 1} if options.engine == "embedded" else {})
    if options.max_response_length is not None:
        raw["rollout"]["max_response_length"] = options.max_response_length
        longest = raw["data"]["max_prompt_length"] + options.max_response_length
        raw["batch"]["tokens_per_micro_batch"] = max(raw["batch"]["tokens_per_micro_batch"], longest)
    set_names, description = _choose_data(raw, config, options)
    model = options.model or (saved.path if saved and saved.note else None)
    if model is not None or checkpoint is not None:
        _read_from(raw["model"], model)
    _hold_weights(raw)
    return EvalRequest(
        options=options,
        config=configs.validate(raw),
        checkpoint=checkpoint,
        set_names=set_names,
        description=description,
        step=saved.step if saved else 0,
        note=describe_policy("evaluating", saved, raw["model"]["path"]),
        run=options.target if is_run else (options.model or options.target).parent,
    )


def _config_of_model(options: EvalOptions) -> Config:
    """Return a config for a model without a run. Prompt and response fit into the model's positions."""
    folder, positions = options.target, MAX_PROMPT_LENGTH + MAX_RESPONSE_LENGTH
    if not (folder / "config.json").is_file():
        raise ConfigError(f"{folder} holds no {CONFIG_FILE}; name the run_dir of a run, a config file, or a model")
    if options.data is None:
        raise ConfigError(f"{folder} is a model without a run; name a dataset by --data, or give --prompt")
    with suppress(OSError, ValueError, TypeError, LookupError):  # such a model is refused later
        positions = int(read_json(folder / "config.json")["max_position_embeddings"])
    response = options.max_response_length or min(MAX_RESPONSE_LENGTH, positions // 2)
    prompt = max(1, min(MAX_PROMPT_LENGTH, positions - response))
    raw: dict[str, Any] = {
        "run_dir": "unused",
        "steps": 1,
        "model": {"path": str(folder), "dtype": "bfloat16" if gpu_sign(os.environ) else "float32"},
        "data": {"train": options.data, "max_prompt_length": prompt},
        "rollout": {"max_response_length": response},
        "rewards": {"functions": [{"name": "accuracy"}]},
        "batch": {"tokens_per_micro_batch": prompt + response},
    }
    for text in options.overrides:
        configs.apply_override(raw, text)
    return configs.validate(raw)


def _hold_weights(raw: dict[str, Any]) -> None:
    """Change a config so that the trainer's side only holds weights: it neither computes nor steps."""
    raw["layout"] |= {"overlap_grad_reduce": False, "overlap_param_gather": False, "engine_ranks": 0}
    raw["precision"], raw["sync"]["lora"] = {}, None
    raw["optimizer"] |= {"moments_dtype": "float32", "cpu_offload": False}
    raw["algorithm"] |= {"recipe": "grpo"} if raw["algorithm"]["recipe"] == "sft" else {}  # its data has answers
    raw["batch"] |= {"prompts_per_step": 1, "mini_batches": 1}
    raw["rollout"] |= {"oversample": 1.0, "partial": False, "placement": "colocated"}
    raw["checkpoint"] |= {"interval": 0}
    raw["log"] |= {"wandb": False, "tensorboard": False}


def _read_from(model: dict[str, Any], folder: Path | None) -> None:
    """Change a config's model to the weights in `folder`; None: to a checkpoint of a run."""
    model["adapter"] = None
    if folder is not None:
        model |= {"path": str(folder), "init": "checkpoint", "lora": None}
    elif model["lora"] is None:
        model["init"] = "random"  # model.path need not have weights, because they are not read


def describe_policy(work: str, saved: SavedPolicy | None, model: str) -> str:
    """Return a line for the user that names the policy, its step, and its set of versions if it is not this one."""
    if saved is None:
        return f"{work} {model}"
    from grpo_mega.distributed.versions import installed_set

    line = saved.note or f"{work} {saved.path}, the policy after step {saved.step}"
    return "; ".join([line, *installed_set().change(saved.versions)])


def _choose_data(raw: dict[str, Any], config: Config, options: EvalOptions) -> tuple[tuple[str, ...] | None, str]:
    """Set data.train to the prompts to evaluate, if they are separate sets. Return their names and a description."""
    data = raw["data"]
    data |= dict.fromkeys(PASS_RATE_KEYS)
    if options.train_set:
        if options.data is not None:
            raise ConfigError(f"--data {options.data} and --train-set name two sets; give one of them")
        data |= {"heldout": None, "heldout_sets": {}}
        return ("",) * len(config.data.train), "training prompts"
    sources = {name: source.model_dump() for name, source in config.data.heldout_sources.items()}
    if options.data is not None:
        sources = {"": {"path": options.data}}
    if sources:
        data |= {"train": list(sources.values()), "heldout": None, "heldout_sets": {}}
        data |= {"heldout_size": None, "heldout_fraction": None}
        return tuple(sources), "held-out prompts" if options.data is None else f"prompts of {options.data}"
    if data["heldout_size"] is None and data["heldout_fraction"] is None:
        raise ConfigError(f"{options.target} has no held-out prompts; name a dataset by --data, or give --train-set")
    return None, "held-out prompts"


def evaluate_request(request: EvalRequest) -> None:
    """Evaluate as one rank. Rank 0 writes --out, and prints a table and, as the last line, a summary in JSON."""
    started_at = time.monotonic()
    with ExitStack() as stack:
        stack.enter_context(ends_at_first("ending; nothing is written"))
        with rank_imports(request.config):
            from grpo_mega.tracking.progress import phase
            from grpo_mega.trainer.evaluation import evaluate_set, write_rows
            from grpo_mega.trainer.job import open_job

        job = stack.enter_context(open_job(request.config, request.build_policy))
        with phase("sending the weights to the engines", job.shows_progress):
            job.colocation.sync_weights(version=request.step)
        responses: list[dict[str, Any]] = []

        def show(groups: Sequence[Group]) -> None:
            for group in groups:
                print(group_text(group, job.rollouts.decode), flush=True)
                responses.extend(response_row(sample, job.rollouts.decode) for sample in group.samples)

        options = request.options
        sets = prompts_of(job, request)
        results = {
            name: evaluate_set(job.rollouts, name, prompts, request.step, show if options.shows else None)
            for name, prompts in sets.items()
        }
        if job.is_main:
            if options.out is not None:
                write_rows(options.out, responses or [row for one in results.values() for row in one.rows])
            title = f"{request.checkpoint or request.config.model.path}{f' (step {request.step})' * bool(request.step)}"
            print(f"\n{title}, {request.description}", flush=True)
            print(score_table(results), flush=True)
            print(json.dumps(summary(request, results, responses, time.monotonic() - started_at)), flush=True)


def prompts_of(job: Job, request: EvalRequest) -> dict[str, list[Prompt]]:
    """Return the sets to evaluate, keyed by name."""
    if request.set_names is None:
        return job.heldout
    from grpo_mega.data.load import IDS_PER_SET

    options = request.options
    sets: dict[str, list[Prompt]] = {name: [] for name in request.set_names}
    for prompt in job.data.train:
        if options.prompt is not None:
            prompt = replace(prompt, answer=options.answer or "")
        sets[request.set_names[prompt.id // IDS_PER_SET]].append(prompt)
    return {name: prompts[: job.config.eval.num_prompts] for name, prompts in sets.items()}


def group_text(group: Group, decode: Callable[[Sequence[int]], str]) -> str:
    """Return a prompt and its responses as text, each with reward, scores, log-prob and length.

    A reward function without a score is shown with its verdict.
    """
    lines = [f"\nprompt {group.prompt.id}: {group.prompt.text}"]
    for sample in group.samples:
        reward = "none" if (value := _reward(sample)) is None else f"{value:.3f}"
        parts = [
            f"{name} {sample.verdicts.get(name, '')}" if score is None else f"{name} {score:.3f}"
            for name, score in sample.scores.items()
        ]
        scores = f" ({', '.join(parts)})" * bool(parts)
        total, length = sum(sample.rollout_logprobs), sample.response_len
        ended = "cut off" if sample.finish_reason == "length" else "complete"
        lines += [
            f"\n[{sample.index + 1}/{len(group.samples)}] reward {reward}{scores}, log-prob {total:.3f},"
            f" {total / max(1, length):.3f} per token, {length} tokens, {ended}",
            decode(sample.response_ids),
        ]
    return "\n".join(lines)


def response_row(sample: Sample, decode: Callable[[Sequence[int]], str]) -> dict[str, Any]:
    return {
        "id": sample.prompt.id,
        "prompt": sample.prompt.text,
        "gold": sample.prompt.answer or None,
        "index": sample.index,
        "response": decode(sample.response_ids),
        "token_ids": list(map(int, sample.response_ids)),
        "logprobs": list(map(float, sample.rollout_logprobs)),
        "finish_reason": sample.finish_reason,
        "reward": _reward(sample),
        "scores": sample.scores,
        "verdicts": sample.verdicts,
    }


def _reward(sample: Sample) -> float | None:
    """Return the reward; None if a function could not read the gold answer, or failed."""
    return None if "gold_unparsable" in sample.verdicts.values() else sample.reward


def score_table(results: Mapping[str, Evaluated]) -> str:
    """Return the metrics as text, one column per set."""
    found = results.values()
    rows = {"": [name or "value" for name in results], "prompts": [str(len(one.rows)) for one in found]}
    if any(one.num_unusable for one in found):
        rows["without a gold answer"] = [str(one.num_unusable) for one in found]
    for name in dict.fromkeys(name for one in found for name in one.metrics):
        rows[name] = [f"{one.metrics[name]:.4f}" if name in one.metrics else "" for one in found]
    label, widths = max(map(len, rows)), [max(8, len(head)) for head in rows[""]]
    return "\n".join(
        "  ".join([f"{name:{label}}", *(f"{text:>{width}}" for text, width in zip(texts, widths, strict=True))])
        for name, texts in rows.items()
    )


def summary(
    request: EvalRequest, results: Mapping[str, Evaluated], responses: Sequence[Mapping[str, Any]], seconds: float
) -> dict[str, object]:
    """Return the summary. `responses` are the rows of `sample`, whose mean reward and log-prob are in it."""
    settings = request.config.eval
    rewards = [row["reward"] for row in responses if row["reward"] is not None]
    logprobs = [logprob for row in responses for logprob in row["logprobs"]]
    sampled = {
        "responses": len(responses),
        "reward": sum(rewards) / len(rewards) if rewards else None,
        "logprob_per_token": sum(logprobs) / max(1, len(logprobs)),
    }
    return (sampled if responses else {}) | {
        "model": str(request.checkpoint or request.config.model.path),
        "step": request.step if request.checkpoint or request.step else None,
        "prompts": request.description,
        "samples": settings.samples,
        "temperature": settings.temperature,
        "top_p": settings.top_p,
        "sets": {
            name or "all": {"num_prompts": len(one.rows), "num_unusable": one.num_unusable} | one.metrics
            for name, one in results.items()
        },
        "out": str(request.options.out) if request.options.out else None,
        "seconds": round(seconds, 1),
    }
