"""`grpo-mega eval`: answer prompts with a run's checkpoint or a config's model. Trains nothing and changes no run.

Like `train` it is one rank if torchrun has set RANK, and otherwise starts the ranks of the layout itself. The ranks' logs and
the servers' files are in a temporary folder that is kept only if a rank fails.
"""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path

from grpo_mega import preflight
from grpo_mega.commands.eval_request import EvalRequest, make_request
from grpo_mega.commands.options import EvalOptions
from grpo_mega.commands.ranks import check_world_size, heavy_imports, prepare_rank
from grpo_mega.distributed.launch import launch_local, only_rank
from grpo_mega.errors import EXIT_INTERRUPTED, EXIT_USER_ERROR, UserError
from grpo_mega.paths import LOGS
from grpo_mega.temporary import KEEP, private_folder

FOLDER = "GRPO_MEGA_EVAL_FOLDER"  # temporary folder of the ranks, set by the launcher


def run(options: EvalOptions, argv: list[str]) -> int:
    """Evaluate as one rank, or start the ranks with `argv`; return the exit code."""
    request = make_request(options)
    if FOLDER in os.environ:
        return _evaluate(request, Path(os.environ[FOLDER]))
    if request.note is not None and os.environ.get("RANK", "0") == "0":
        print(f"grpo-mega: note: {request.note}", file=sys.stderr, flush=True)
    if "RANK" in os.environ:
        return _under_torchrun(request)
    preflight.check(request.config, preflight.this_machine(request.config.layout))
    return _start(request, argv)


def _start(request: EvalRequest, argv: list[str]) -> int:
    with private_folder() as folder:
        return _start_in(folder, request, argv)


def _start_in(folder: Path, request: EvalRequest, argv: list[str]) -> int:
    code = 1  # exit code after an unexpected exception
    try:
        if request.config.layout.world_size == 1:
            with only_rank():
                code = _evaluate(request, folder)
        else:
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
        if code not in (0, EXIT_USER_ERROR, EXIT_INTERRUPTED):
            (folder / KEEP).touch()
            print(f"grpo-mega: logs of the ranks are in {folder}", file=sys.stderr, flush=True)


def _under_torchrun(request: EvalRequest) -> int:
    """Evaluate with a separate folder for each rank."""
    check_world_size(os.environ, request.config.layout)
    if os.environ["RANK"] == "0":
        preflight.check(request.config, preflight.this_machine(request.config.layout, os.environ))
    with private_folder() as folder:
        return _evaluate(request, folder)


def _evaluate(request: EvalRequest, folder: Path) -> int:
    with heavy_imports():
        prepare_rank(request.config)
        from grpo_mega.commands.eval_rank import evaluate_checkpoint

    evaluate_checkpoint(replace(request, config=request.config.model_copy(update={"run_dir": folder / "run"})))
    return 0
