"""One rank of `grpo-mega eval`: load the policy without reference and optimizer, sync it to the engine, and generate."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Mapping
from pathlib import Path

import torch.distributed as dist

from grpo_mega.commands.eval_request import EvalRequest
from grpo_mega.config import Config
from grpo_mega.data.load import IDS_PER_SET
from grpo_mega.errors import ResumeError
from grpo_mega.formats.detect import read_manifest
from grpo_mega.megatron.policy import Policy
from grpo_mega.megatron.runtime import Runtime
from grpo_mega.paths import STATE
from grpo_mega.run.checkpoints import check_model
from grpo_mega.run.evaluation import Evaluated, evaluate_set, write_rows
from grpo_mega.run.job import Job, open_job
from grpo_mega.run.model_files import ModelFiles, build_policy
from grpo_mega.run.saving import verify
from grpo_mega.types import Prompt


def evaluate_checkpoint(request: EvalRequest) -> None:
    """Evaluate; all ranks call this. Rank 0 writes request.out, and prints a table and, as the last line, a summary in JSON."""
    started_at = time.monotonic()
    source = _Source(request.checkpoint, request.step)
    with open_job(request.config, source.build) as job:
        for number in (signal.SIGTERM, signal.SIGINT):  # the trainer's handler would wait for the end of a step
            signal.signal(number, signal.default_int_handler)
        job.colocation.sync_weights(version=source.step)
        sets = prompts_of(job, request)
        results = {name: evaluate_set(job.rollouts, name, prompts, source.step) for name, prompts in sets.items()}
        if job.is_main:
            if request.out is not None:
                write_rows(request.out, [row for one in results.values() for row in one.rows])
            title = f"{source.checkpoint} (step {source.step})" if source.checkpoint else request.config.model.path
            print(f"\n{title}, {request.description}", flush=True)
            print(table(results), flush=True)
            print(json.dumps(summary(request, source, results, time.monotonic() - started_at)), flush=True)


class _Source:
    """The source of the policy's weights: a run's checkpoint, or the model's folder."""

    def __init__(self, checkpoint: Path | None, step: int) -> None:
        self.checkpoint = checkpoint
        self.step = step  # step after which the policy was saved

    def build(self, config: Config, model: ModelFiles, runtime: Runtime) -> Policy:
        """Return a policy that cannot be trained. Raise ResumeError or WeightMappingError on all ranks."""
        chosen = [self.checkpoint]  # chosen by rank 0, because a run that still trains may save another one meanwhile
        dist.broadcast_object_list(chosen)
        (self.checkpoint,) = chosen
        if self.checkpoint is None and config.model.init == "random":
            return build_policy(config, model, runtime)
        folder = model.folder
        if self.checkpoint is not None:
            manifest = read_manifest(self.checkpoint)
            check_model(self.checkpoint, manifest.model, model.shape)
            verify(self.checkpoint, manifest, runtime.rank, runtime.layout.world_size)
            self.step, folder = manifest.step, self.checkpoint / STATE
        policy = Policy(config, model.shape, model.family, model.hf_config, runtime)
        try:
            model.read_weights(policy.load_weights, folder)
        except FileNotFoundError as error:
            raise ResumeError(
                f"{error.filename} was removed while it was read; the run keeps its checkpoint.keep newest checkpoints only: "
                "evaluate a newer one"
            ) from None
        return policy


def prompts_of(job: Job, request: EvalRequest) -> dict[str, list[Prompt]]:
    """Return the sets to evaluate, keyed by name."""
    if request.set_names is None:
        return job.heldout
    sets: dict[str, list[Prompt]] = {name: [] for name in request.set_names}
    for prompt in job.data.train:
        sets[request.set_names[prompt.id // IDS_PER_SET]].append(prompt)
    return {name: prompts[: job.config.eval.num_prompts] for name, prompts in sets.items()}


def table(results: Mapping[str, Evaluated]) -> str:
    """Return the metrics as text, one column per set."""
    names = list(dict.fromkeys(name for one in results.values() for name in one.metrics))
    heads = [name or "value" for name in results]
    label = max(len(name) for name in ["prompts", *names])
    widths = [max(8, len(head)) for head in heads]

    def line(first: str, values: list[str]) -> str:
        return f"{first:{label}}  " + "  ".join(f"{v:>{w}}" for v, w in zip(values, widths, strict=True))

    lines = [line("", heads), line("prompts", [str(len(one.rows)) for one in results.values()])]
    if any(one.num_unusable for one in results.values()):
        lines.append(line("without a gold answer", [str(one.num_unusable) for one in results.values()]))
    for name in names:
        lines.append(line(name, [f"{one.metrics[name]:.4f}" if name in one.metrics else "" for one in results.values()]))
    return "\n".join(lines)


def summary(request: EvalRequest, source: _Source, results: Mapping[str, Evaluated], seconds: float) -> dict[str, object]:
    settings = request.config.eval
    return {
        "model": str(source.checkpoint or request.config.model.path),
        "step": source.step if source.checkpoint or source.step else None,
        "prompts": request.description,
        "samples": settings.samples,
        "temperature": settings.temperature,
        "top_p": settings.top_p,
        "sets": {
            name or "all": {"num_prompts": len(one.rows), "num_unusable": one.num_unusable} | one.metrics
            for name, one in results.items()
        },
        "out": str(request.out) if request.out else None,
        "seconds": round(seconds, 1),
    }
