"""`grpo-mega eval`: a run's checkpoint, or a config's model, answers prompts; nothing is trained, and no run is touched.

Like `train` it is one rank where torchrun has set RANK, and elsewhere starts the ranks of the layout by itself. What the ranks
leave on the way (logs, servers' files) lies in a temporary folder, which is kept only if a rank fails.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from grpo_mega.errors import ConfigError, UserError

if TYPE_CHECKING:
    from grpo_mega.commands.eval_request import Request
    from grpo_mega.config import Config

FOLDER = "GRPO_MEGA_EVAL_FOLDER"  # set for ranks whose launcher has left the request there
_ENDS_WELL = (0, 2, 130)  # done, told in one line, or interrupted


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("target", type=Path, metavar="RUN_DIR_OR_CONFIG", help="a run's folder: its checkpoint, or its hf; a config: its model")
    add("--step", type=int, help="of the run's checkpoint; the latest by default")
    add("--model", type=Path, metavar="FOLDER", help="a checkpoint folder to evaluate in place of the run's")
    add("--data", metavar="PATH", help="a data set in place of the config's held-out prompts")
    add("--train-set", action="store_true", help="evaluate data.train; --out is then a file for data.pass_rates")
    add("--prompts", type=int, metavar="N", help="only the first N of each set")
    add("--samples", type=int, metavar="N", help="sampled responses a prompt; default: eval.samples")
    add("--k", type=int, nargs="+", metavar="K", help="of pass@k and majority@k; default: powers of two up to N")
    add("--temperature", type=float, metavar="T", help="of the sampled responses; default: eval.temperature")
    add("--top-p", type=float, metavar="P", help="of the sampled responses; default: eval.top_p")
    add("--greedy", action=argparse.BooleanOptionalAction, help="one greedy answer a prompt; default: eval.greedy")
    add("--out", type=Path, metavar="FILE", help="JSON lines to write, one a prompt; must not exist")
    add("--set", action="append", default=[], metavar="KEY=VALUE", help="overrides a value of the config")


def run(options: argparse.Namespace, argv: list[str]) -> int:
    """Evaluates as one rank, or starts the ranks with `argv`; returns the exit code."""
    from grpo_mega.commands.eval_request import Options, Request, make_request

    if FOLDER in os.environ:
        return _as_rank(Request.read(Path(os.environ[FOLDER])))
    if options.prompts is not None and options.prompts < 1:
        raise ConfigError(f"--prompts {options.prompts} leaves nothing to evaluate; give at least 1")
    request = make_request(
        Options(
            target=options.target,
            overrides=options.set,
            step=options.step,
            model=options.model,
            data=options.data,
            train_set=options.train_set,
            prompts=options.prompts,
            samples=options.samples,
            ks=options.k,
            temperature=options.temperature,
            top_p=options.top_p,
            greedy=options.greedy,
            out=options.out,
        )
    )
    from grpo_mega.validation import preflight

    if request.note is not None and os.environ.get("RANK", "0") == "0":
        print(f"grpo-mega: note: {request.note}", file=sys.stderr, flush=True)
    if "RANK" in os.environ:
        return _under_torchrun(request)
    preflight.check(request.config)
    return _start(request, argv)


def _start(request: Request, argv: list[str]) -> int:
    from grpo_mega.distributed.launch import launch_local, only_rank
    from grpo_mega.paths import LOGS

    folder = Path(tempfile.mkdtemp(prefix="grpo_mega-eval-"))
    request = _in_folder(request, folder)
    code = 1  # of an exception that nobody foresaw
    try:
        if request.config.layout.world_size == 1:
            with only_rank():
                code = _as_rank(request)
        else:
            request.write(folder)
            os.environ[FOLDER] = str(folder)
            try:
                code = launch_local(argv, request.config.layout.world_size, folder / LOGS)
            finally:
                del os.environ[FOLDER]
        return code
    except (UserError, KeyboardInterrupt):
        code = 0
        raise
    finally:
        if code in _ENDS_WELL:
            shutil.rmtree(folder, ignore_errors=True)
        else:
            print(f"grpo-mega: what the ranks left is in {folder}", file=sys.stderr, flush=True)


def _under_torchrun(request: Request) -> int:
    """Every node has a folder of its own, which its first rank removes."""
    from grpo_mega.validation import preflight, raise_first
    from grpo_mega.validation.layout import world_size_problems

    text = os.environ.get("WORLD_SIZE", "")
    if not text.isdecimal():
        raise ConfigError(f"RANK={os.environ['RANK']} is set but WORLD_SIZE={text!r}; start with torchrun, or unset RANK")
    raise_first(world_size_problems(request.config.layout, int(text)))
    if os.environ["RANK"] == "0":
        preflight.check(request.config)
    job = f"{os.getuid()}-{os.environ.get('MASTER_ADDR', '')}-{os.environ.get('MASTER_PORT', '')}"
    folder = Path(tempfile.gettempdir()) / f"grpo_mega-eval-{job}"
    folder.mkdir(exist_ok=True)
    code = _as_rank(_in_folder(request, folder))
    if os.environ.get("LOCAL_RANK", "0") == "0":
        shutil.rmtree(folder, ignore_errors=True)
    return code


def _in_folder(request: Request, folder: Path) -> Request:
    from dataclasses import replace

    return replace(request, config=request.config.model_copy(update={"run_dir": folder / "run"}))


def _as_rank(request: Request) -> int:
    _prepare(request.config)
    from grpo_mega.commands.eval_rank import evaluate_checkpoint

    evaluate_checkpoint(request)
    return 0


def _prepare(config: Config) -> None:
    from grpo_mega.hardware.fp8 import environment

    for name, value in environment(config).items():
        os.environ.setdefault(name, value)
    from grpo_mega.megatron.found import check_loads  # its package's patches come first

    check_loads()
