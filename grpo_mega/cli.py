"""The command line of grpo-mega.

The commands are `grpo-mega train CONFIG`, `plan CONFIG`, `check CONFIG --layouts "..."`, `eval RUN_DIR_OR_CONFIG`, `export
RUN_DIR OUT`, `report RUN_DIR`, `config [KEY]`, and `grpo` with the flags of TRL.

Nothing heavy is imported until a command runs. An error that the user can correct (UserError) is one line per broken rule on
stderr and exit code 2. `train` is one rank if torchrun has set RANK; otherwise it starts the ranks of the layout itself.
"""

from __future__ import annotations

import argparse
import os
import sys
from contextlib import suppress
from typing import TYPE_CHECKING

from grpo_mega import console
from grpo_mega.errors import DISK_ERRORS, EXIT_INTERRUPTED, EXIT_USER_ERROR, UserError
from grpo_mega.paths import user_path

if TYPE_CHECKING:
    from grpo_mega.config import Config

CLAIMED = "GRPO_MEGA_CLAIMED"  # set for ranks whose launcher has checked the config and claimed the run's folder


def main(argv: list[str] | None = None) -> int:
    """Run one command and return the process's exit code."""
    console.install()
    arguments = sys.argv[1:] if argv is None else argv
    options = _parser().parse_args(arguments if arguments[:1] != ["grpo"] else ["grpo"])  # grpo reads its own flags
    try:
        code = _run(options, arguments)
        sys.stdout.flush()
        return code
    except UserError as error:
        return _refuse(error.lines)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:  # the reader, such as `head`, has exited; Python writes to stdout once more at the end
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_INTERRUPTED
    except OSError as error:
        if error.errno not in DISK_ERRORS:
            raise
        return _refuse([f"{error.filename or 'a file'} cannot be written ({error.strerror}); free its disk"])


def _refuse(lines: list[str]) -> int:
    """Print errors that the user can correct, and return the exit code."""
    rank = os.environ.get("RANK", "0")
    with suppress(OSError):  # stderr may be a file on a full disk
        prefix = "" if rank == "0" else f"rank {rank}: "
        print(*(f"grpo-mega: error: {prefix}{line}" for line in lines), sep="\n", file=sys.stderr, flush=True)
    return EXIT_USER_ERROR


def _run(options: argparse.Namespace, argv: list[str]) -> int:
    if options.command == "train":
        from grpo_mega import config as configs
        from grpo_mega.commands.trl_flags.rewards import overrides_of

        profile = [] if options.profile is None else [f"log.profile={options.profile}"]
        return train(configs.load(options.config, [*overrides_of(options), *profile]), options.resume, argv)
    if options.command == "grpo":
        return grpo(argv)
    if options.command == "plan":
        from grpo_mega.commands import plan
        from grpo_mega.commands.options import PlanOptions, read_options

        return plan.run(read_options(PlanOptions, options))
    if options.command == "check":
        from grpo_mega.commands import check

        return check.run(options.config, options.overrides, options.layouts.split())
    if options.command == "eval":
        from grpo_mega.commands import eval as eval_command
        from grpo_mega.commands.options import EvalOptions, read_options

        return eval_command.run(read_options(EvalOptions, options), argv)
    if options.command == "export":
        from grpo_mega.commands.export import export

        export(options.run_dir, options.out, options.step)
        return 0
    if options.command == "config":
        from grpo_mega.commands import config as config_command

        return config_command.run(options.key, options.markdown)
    from grpo_mega.commands.report import report

    report(options.run_dir)
    return 0


def train(config: Config, resume: bool, argv: list[str]) -> int:
    """Train as one rank, or start the ranks with `argv`. Return the exit code."""
    from grpo_mega import preflight
    from grpo_mega.commands.ranks import check_world_size
    from grpo_mega.distributed.launch import launch_local, rank_environments
    from grpo_mega.paths import LOGS
    from grpo_mega.run import folder as run_folder

    is_rank = "RANK" in os.environ
    if is_rank:
        check_world_size(os.environ, config.layout)
    if CLAIMED in os.environ or os.environ.get("RANK", "0") != "0":
        return _train_as_rank(config)
    preflight.check(config, preflight.this_machine(config.layout, os.environ if is_rank else None))
    with run_folder.claim(config, resume=resume, argv=argv) as claim:
        if not is_rank and config.layout.world_size > 1:
            os.environ[CLAIMED] = str(os.getpid())  # the ranks share this claim
            try:
                code = launch_local(argv, config.layout.world_size, config.run_dir / LOGS)
            finally:
                del os.environ[CLAIMED]
            if code == EXIT_USER_ERROR:
                claim.discard_unstarted()
            return code
        if not is_rank:
            os.environ.update(rank_environments(os.environ, world_size=1)[0])
        return _train_as_rank(config)


def grpo(argv: list[str]) -> int:
    """Train with the flags of TRL and open-r1; `argv` is "grpo" and the flags."""
    from grpo_mega.commands.trl_flags import command
    from grpo_mega.commands.trl_flags.flags import help_text

    if {"-h", "--help"} & set(argv):
        print(help_text())
        return 0
    request = command.read(argv[1:], os.environ, is_cached=CLAIMED in os.environ)
    if CLAIMED not in os.environ and os.environ.get("RANK", "0") == "0":
        for note in request.notes:
            print(f"grpo-mega: note: {note}", file=sys.stderr)
    return train(request.config, request.resume, argv)


def _train_as_rank(config: Config) -> int:
    from grpo_mega.commands.ranks import heavy_imports, prepare_rank

    with heavy_imports():
        prepare_rank(config)
        from grpo_mega import train as train_module  # imported after the environment is set

    train_module.run(config)
    return 0


def _parser() -> argparse.ArgumentParser:
    from grpo_mega.commands.options import ConfigOptions, EvalOptions, PlanOptions, add_options
    from grpo_mega.commands.trl_flags.rewards import add_reward_flags

    parser = argparse.ArgumentParser(prog="grpo-mega", description="Train language models with GRPO on Megatron-core.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    train_parser = commands.add_parser("train", help="train with a YAML config")
    add_options(train_parser, ConfigOptions)
    train_parser.add_argument("--resume", action="store_true", help="continue the run in run_dir from its last checkpoint")
    train_parser.add_argument("--profile", metavar="STEPS", help="steps to trace into RUN_DIR/trace, like 3 or 3-4")
    add_reward_flags(train_parser)
    commands.add_parser("grpo", help="train with the flags of TRL and open-r1, without a file; grpo --help lists them")
    plan_parser = commands.add_parser("plan", help="estimate without a GPU whether a job fits in memory, and how fast it is")
    add_options(plan_parser, PlanOptions)
    check_parser = commands.add_parser("check", help="verify that layouts give the same numbers as a single rank")
    add_options(check_parser, ConfigOptions)
    check_parser.add_argument(
        "--layouts",
        required=True,
        metavar='"LAYOUT ..."',
        help='layouts to compare, for example "tp=2 pp=2 tp=2,pp=2,sequence_parallel=true"',
    )
    eval_parser = commands.add_parser("eval", help="generate and score responses to held-out or other prompts")
    add_options(eval_parser, EvalOptions)
    export_parser = commands.add_parser("export", help="write a checkpoint of a run as a Hugging Face folder")
    export_parser.add_argument("run_dir", type=user_path, metavar="RUN_DIR", help="the run_dir of its config")
    export_parser.add_argument("out", type=user_path, metavar="OUT", help="folder to write, which must not exist")
    export_parser.add_argument("--step", type=int, help="the checkpoint after this step; default: the latest")
    report_parser = commands.add_parser("report", help="write a run's report.html and curves.png into its folder")
    report_parser.add_argument("run_dir", type=user_path, metavar="RUN_DIR", help="the run_dir of its config")
    config_parser = commands.add_parser("config", help="print the keys of the config: type, default and description")
    config_parser.add_argument(
        "key", nargs="?", metavar="KEY", help="a key or a section, like rollout.top_p; default: all keys"
    )
    config_parser.add_argument("--markdown", action="store_true", help="print them as a table in Markdown")
    return parser


if __name__ == "__main__":
    sys.exit(main())
