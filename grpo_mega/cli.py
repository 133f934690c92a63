"""The command line: `grpo-mega train CONFIG`, `plan CONFIG`, `check CONFIG --layouts "..."`, `eval RUN_DIR_OR_CONFIG`,
`export RUN_DIR OUT`, `report RUN_DIR`.

Imports nothing heavy until a command runs. What a person can mend (UserError) is printed in one line on stderr and ends the
process with code 2. `train` is one rank where torchrun has set RANK; elsewhere it starts the ranks of the layout by itself.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from grpo_mega.errors import ConfigError, UserError

if TYPE_CHECKING:
    from grpo_mega.config import Config, LayoutConfig

EXIT_USER_ERROR = 2
CLAIMED = "GRPO_MEGA_CLAIMED"  # set for ranks whose launcher has checked the config and holds the run's folder
EXIT_INTERRUPTED = 130


def main(argv: list[str] | None = None) -> int:
    """Runs one command; returns the process's exit code."""
    arguments = sys.argv[1:] if argv is None else argv
    options = _parser().parse_args(arguments if arguments[:1] != ["grpo"] else ["grpo"])  # which reads its own flags
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # as stderr has it: what cannot be printed must not end a run
    try:
        code = _run(options, arguments)
        sys.stdout.flush()
        return code
    except UserError as error:
        rank = os.environ.get("RANK", "0")
        print(f"grpo-mega: error: {'' if rank == '0' else f'rank {rank}: '}{_one_line(error)}", file=sys.stderr, flush=True)
        return EXIT_USER_ERROR
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:  # of whom reads the first lines only; at the end Python would write once more
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_INTERRUPTED


def _run(options: argparse.Namespace, argv: list[str]) -> int:
    if options.command == "train":
        from grpo_mega import config as config_module
        from grpo_mega.commands.trl_flags.rewards import overrides_of

        overrides = [*overrides_of(options), *_profile_override(options.profile)]
        return train(config_module.load(options.config, overrides), options.resume, argv)
    if options.command == "grpo":
        return grpo(argv)
    if options.command == "plan":
        return plan(options)
    if options.command == "check":
        return check(options.config, options.set, options.layouts.split())
    if options.command == "eval":
        from grpo_mega.commands import eval as cli_eval

        return cli_eval.run(options, argv)
    if options.command == "export":
        return export(options.run_dir, options.out, options.step)
    return report(options.run_dir)


def train(config: Config, resume: bool, argv: list[str]) -> int:
    """Trains as one rank, or starts the ranks; `argv` is what they are started with."""
    from grpo_mega.paths import LOGS
    from grpo_mega.run import folder as run_folder
    from grpo_mega.validation import preflight  # numpy: only for a config that is sound

    is_rank = "RANK" in os.environ
    if is_rank:
        check_world_size(os.environ, config.layout)
    if CLAIMED in os.environ or os.environ.get("RANK", "0") != "0":
        return _train_as_rank(config)
    preflight.check(config)
    with run_folder.claim(config, resume=resume, argv=argv):
        if not is_rank and config.layout.world_size > 1:
            from grpo_mega.distributed.launch import launch_local

            os.environ[CLAIMED] = str(os.getpid())  # the ranks are part of this claim
            try:
                code = launch_local(argv, config.layout.world_size, config.run_dir / LOGS)
            finally:
                del os.environ[CLAIMED]
            if code == EXIT_USER_ERROR:
                run_folder.discard_unstarted(config.run_dir)
            return code
        if not is_rank:
            _become_only_rank()
        return _train_as_rank(config)


def grpo(argv: list[str]) -> int:
    """Trains as the flags of TRL and open-r1 say; `argv` is "grpo" and the flags."""
    if {"-h", "--help"} & set(argv):
        from grpo_mega.commands.trl_flags.parse import help_text

        print(help_text())
        return 0
    from grpo_mega.commands.trl_flags import command

    request = command.read(argv[1:], os.environ, is_cached=CLAIMED in os.environ)
    if CLAIMED not in os.environ and os.environ.get("RANK", "0") == "0":
        for note in request.notes:
            print(f"grpo-mega: note: {note}", file=sys.stderr)
    return train(request.config, request.resume, argv)


def plan(options: argparse.Namespace) -> int:
    """Tells whether a job will run, and how fast: 0 if it fits, 1 if it does not, 2 if its config breaks a rule."""
    from grpo_mega.commands.plan import Request, run

    return run(
        Request(
            config=options.config,
            overrides=options.set,
            gpu=options.gpu,
            world_size=options.world_size,
            gpus_per_node=options.gpus_per_node,
            model_config=options.model_config,
            model=options.model,
            mean_prompt=options.mean_prompt,
            mean_response=options.mean_response,
            is_json=options.json,
            suggests=options.suggest,
            explains=options.explain,
            rehearses=options.rehearse,
            ranks=options.ranks,
        )
    )


def check(config_path: Path, overrides: list[str], layouts: list[str]) -> int:
    """Prints how far each layout's numbers are from a single rank's; 1 if one is farther than rounding explains."""
    from grpo_mega import config as config_module
    from grpo_mega.commands import check as checks

    config = config_module.load(config_path, overrides)
    differences = checks.check(config, layouts)
    tolerance = checks.TOLERANCE[config.model.dtype]
    print(checks.table(differences, tolerance))
    return 0 if all(d.is_within(tolerance) for d in differences) else 1


def export(run_dir: Path, out: Path, step: int | None) -> int:
    """Write the weights of a run's checkpoint as a Hugging Face folder, whatever layout it was saved from.

    A finished run without checkpoints has such a folder, which is copied.
    """
    from grpo_mega import config as config_module
    from grpo_mega.formats.checkpoint_files import find_finished, without_checkpoints
    from grpo_mega.paths import CHECKPOINTS, CONFIG_FILE

    if out.exists():
        raise ConfigError(f"{out} exists; name a folder that does not")
    config = config_module.load(run_dir / CONFIG_FILE)
    finished = find_finished(run_dir, step)
    if finished is not None:
        print(f"grpo-mega: note: {without_checkpoints(finished)}", file=sys.stderr, flush=True)
        _copy_folder(finished, out)
        print(f"policy of {finished} written to {out}")
        return 0
    from grpo_mega.commands.export import export_checkpoint

    print(export_checkpoint(config, run_dir / CHECKPOINTS, step, out))
    return 0


def _copy_folder(source: Path, out: Path) -> None:
    """`out` appears only when it is whole."""
    partial = out.with_name(out.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    shutil.copytree(source, partial)
    os.rename(partial, out)


def report(run_dir: Path) -> int:
    """Writes the run's page, and its curves as a picture once there are any, into its folder."""
    from grpo_mega.observe.plot import draw_curves
    from grpo_mega.observe.report import write_report
    from grpo_mega.paths import METRICS_FILE

    print(write_report(run_dir))
    picture = run_dir / "curves.png"
    with contextlib.suppress(ConfigError):  # nothing to draw: the page says why
        draw_curves(run_dir / METRICS_FILE, picture)
        print(picture)
    return 0


def check_world_size(environ: Mapping[str, str], layout: LayoutConfig) -> None:
    """Raises ConfigError if torchrun's WORLD_SIZE does not fit the layout."""
    text = environ.get("WORLD_SIZE", "")
    if not text.isdecimal():
        raise ConfigError(f"RANK={environ.get('RANK')} is set but WORLD_SIZE={text!r}; start with torchrun, or unset RANK")
    from grpo_mega.validation import raise_first
    from grpo_mega.validation.layout import world_size_problems

    raise_first(world_size_problems(layout, int(text)))


def _profile_override(steps: str | None) -> list[str]:
    return [] if steps is None else [f"log.profile={json.dumps(steps)}"]


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())


def _train_as_rank(config: Config) -> int:
    from grpo_mega.hardware.fp8 import environment

    for name, value in environment(config).items():
        os.environ.setdefault(name, value)
    from grpo_mega.megatron.found import check_loads  # its package's patches come first

    check_loads()
    from grpo_mega import train as train_module

    train_module.run(config)
    return 0


def _become_only_rank() -> None:
    """A world of one process needs no launcher."""
    from grpo_mega.distributed.launch import rank_environments

    os.environ.update(rank_environments(os.environ, world_size=1)[0])


def _parser() -> argparse.ArgumentParser:
    from grpo_mega.commands.eval import add_options as add_eval_options
    from grpo_mega.commands.trl_flags.rewards import add_reward_flags

    parser = argparse.ArgumentParser(prog="grpo-mega", description="Trains language models with GRPO on Megatron-core.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    train_parser = commands.add_parser("train", help="train as a YAML file says")
    _add_config(train_parser)
    train_parser.add_argument("--resume", action="store_true", help="go on with the run in run_dir from its last checkpoint")
    train_parser.add_argument("--profile", metavar="STEPS", help="steps to trace into RUN_DIR/trace, like 3 or 3-4")
    add_reward_flags(train_parser)
    commands.add_parser("grpo", help="train by the flags of TRL and open-r1, without a file; grpo --help lists them")
    _add_plan(commands.add_parser("plan", help="tell without a GPU whether a job will fit, and how fast it will be"))
    check_parser = commands.add_parser("check", help="prove that layouts give the same numbers as a single rank")
    _add_config(check_parser)
    check_parser.add_argument(
        "--layouts",
        required=True,
        metavar='"LAYOUT ..."',
        help='layouts to compare, for example "tp=2 pp=2 tp=2,pp=2,sequence_parallel=true"',
    )
    add_eval_options(commands.add_parser("eval", help="answer held-out or other prompts, greedily and by sampling"))
    export_parser = commands.add_parser("export", help="write a checkpoint of a run as a Hugging Face folder")
    export_parser.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="the run_dir of its config")
    export_parser.add_argument("out", type=Path, metavar="OUT", help="folder to write, which must not exist")
    export_parser.add_argument("--step", type=int, help="of the checkpoint; the latest by default")
    report_parser = commands.add_parser("report", help="write a run's report.html and curves.png into its folder")
    report_parser.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="the run_dir of its config")
    return parser


def _add_plan(parser: argparse.ArgumentParser) -> None:
    _add_config(parser)
    parser.add_argument("--gpu", default="h100", choices=("a100", "h100", "h200", "b200"), help="default: h100")
    parser.add_argument("--world-size", type=int, metavar="N", help="number of GPUs; the layout's tp * pp * dp by default")
    parser.add_argument("--gpus-per-node", type=int, default=8, metavar="N", help="default: 8")
    parser.add_argument("--model", metavar="NAME", help="a well-known model to plan with: llama-3-70b, qwen3-30b-a3b, ...")
    parser.add_argument("--model-config", type=Path, metavar="FILE", help="a config.json to plan with in place of model.path's")
    parser.add_argument("--mean-prompt", type=float, metavar="TOKENS", help="mean length of prompts; for times")
    parser.add_argument("--mean-response", type=float, metavar="TOKENS", help="mean length of responses; for times")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--suggest", action="store_true", help="search other layouts, and name the fastest that fit")
    parser.add_argument("--rehearse", action="store_true", help="compare with real Megatron on a few ranks, without a GPU")
    parser.add_argument("--ranks", type=int, nargs="+", default=(), metavar="N", help="those to rehearse")
    parser.add_argument("--explain", action="store_true", help="print every figure's formula and inputs, and all assumptions")


def _add_config(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", type=Path, metavar="CONFIG", help="YAML file; see examples/*.yaml")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="overrides a value of the file, for example --set optimizer.lr=1e-6; may be repeated",
    )


if __name__ == "__main__":
    sys.exit(main())
