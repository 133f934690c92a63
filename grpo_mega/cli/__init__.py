"""The command line of grpo-mega: one table of commands, which the scripts of tools/ share (`run_script`).

Nothing heavy is imported until a command runs. An error that the user can correct (UserError) is one line per broken
rule on stderr and exit code 2. distributed/launch.py describes how a process becomes a rank of train, grpo, eval or
check.
"""

import argparse
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from errno import ENAMETOOLONG
from importlib import import_module
from typing import Any, NoReturn

import grpo_mega
from grpo_mega.cli.commands import options as of
from grpo_mega.cli.commands.options import Options
from grpo_mega.errors import DISK_ERRORS, EXIT_INTERRUPTED, EXIT_USER_ERROR, ConfigError, UserError, shorten
from grpo_mega.text import filter_output


def main(argv: list[str] | None = None) -> int:
    """Run one command and return the process's exit code."""
    arguments = sys.argv[1:] if argv is None else argv
    return _exit_code_of(lambda: _run(arguments))


def run_script(
    doc: str | None, options: type[Options], act: Callable[[Options], int], arguments: list[str] | None
) -> int:
    """Parse the arguments of a script (None: sys.argv), call `act`, and return the process's exit code."""
    parser = _Parser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    of.add_options(parser, options)
    return _exit_code_of(lambda: act(of.read_options(options, parser.parse_args(arguments))))


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        super().error(shorten(message))


def _exit_code_of(act: Callable[[], int]) -> int:
    """Call `act` with filtered output. Errors that the user can correct are printed, one line each."""
    filter_output()
    bypass_proxies()
    try:
        code = act()
        sys.stdout.flush()
        return code
    except UserError as error:
        return _refuse(error.lines)
    except KeyboardInterrupt:
        print("\ngrpo-mega: interrupted", file=sys.stderr, flush=True)
        return EXIT_INTERRUPTED
    except BrokenPipeError:  # the reader, such as `head`, has exited; Python writes to stdout once more at the end
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_INTERRUPTED
    except OSError as error:
        if error.errno == ENAMETOOLONG:
            return _refuse([shorten(f"{error.filename}: must be a shorter path; name another")])
        if error.errno not in DISK_ERRORS:
            raise
        return _refuse([f"{error.filename or 'a file'} cannot be written ({error.strerror}); free its disk"])


def bypass_proxies() -> None:
    """Make the clients of this process, and of all that it starts, reach this machine without the user's HTTP proxy."""
    for name, other in (("no_proxy", "NO_PROXY"), ("NO_PROXY", "no_proxy")):
        hosts = os.environ.get(name, os.environ.get(other, "")).split(",")
        if hosts != ["*"]:  # clients know * only if it is alone
            os.environ[name] = ",".join(dict.fromkeys([*filter(None, hosts), "127.0.0.1", "localhost", "::1"]))


def _run(arguments: list[str]) -> int:
    parser = _Parser(prog="grpo-mega", description="Train language models with GRPO on Megatron-core.")
    parser.add_argument("--version", action="version", version=f"grpo-mega {grpo_mega.__version__}")
    parser.set_defaults(argv=arguments)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    parsers: dict[str, argparse.ArgumentParser] = {}
    for name, (_, options, text) in COMMANDS.items():
        listed: dict[str, Any] = {} if text is None else {"help": text}
        parsers[name] = commands.add_parser(name, **listed)
        of.add_options(parsers[name], options)
    if arguments and not arguments[0].startswith("-") and arguments[0] not in COMMANDS:
        of.refuse_command(arguments[0], [name for name, (_, _, text) in COMMANDS.items() if text is not None])
    # grpo reads its own flags
    parsed, unknown = parser.parse_known_args(arguments[:1] if arguments[:1] == ["grpo"] else arguments)
    if unknown:
        parsers[parsed.command].error(of.unknown_argument(unknown[0], parsed, parsers[parsed.command]))
    run, kind, _ = COMMANDS[parsed.command]
    options = of.read_options(kind, parsed)
    of.check_paths(parsed.command, options)
    return run(options)


def _refuse(lines: list[str]) -> int:
    """Print errors that the user can correct, and return the exit code."""
    rank = os.environ.get("RANK", "0")
    with suppress(OSError):  # stderr may be a file on a full disk
        prefix = "" if rank == "0" else f"rank {rank}: "
        print(*(f"grpo-mega: error: {prefix}{line}" for line in lines), sep="\n", file=sys.stderr, flush=True)
    return EXIT_USER_ERROR


def _report(options: of.ReportOptions) -> int:
    """Write a run's page and print its path, or serve the page with --watch. Return the exit code."""
    if options.watch:
        from grpo_mega.cli.report.live import watch

        watch(options.run_dir, options.port or 0)
        return 0
    if options.port is not None:
        raise ConfigError(f"--port={options.port}: must be with --watch; add it, or leave --port out")
    from grpo_mega.cli.report.report import write_report

    print(write_report(options.run_dir))
    return 0


def _rank(options: of.NoOptions) -> int:
    from grpo_mega.distributed.launch import current_rank, run_request

    if current_rank() is None:
        raise ConfigError("rank: must be started by a launcher; use train, eval, sample or check")
    run_request()
    return 0


def _in(module: str, function: str = "run") -> Callable[[Any], int]:
    """Return a function that imports a module of cli/commands/ and calls the function, which returns the exit code."""
    return lambda options: getattr(import_module(f"grpo_mega.cli.commands.{module}"), function)(options)


COMMANDS: dict[str, tuple[Callable[[Any], int], type[Any], str | None]] = {
    "init": (_in("init"), of.InitOptions, "write a first config for a model and a dataset, with reasons"),
    "sft": (_in("train", "run_sft"), of.SftOptions, "fine-tune on demonstrations (SFT) with a YAML config"),
    "train": (_in("train"), of.TrainOptions, "train with a YAML config"),
    "grpo": (
        _in("trl"),
        of.TrlOptions,
        "train with the flags of TRL and open-r1, without a file; grpo --help lists them",
    ),
    "plan": (_in("plan"), of.PlanOptions, "estimate without a GPU whether a job fits in memory, and how fast it is"),
    "check": (_in("check"), of.CheckOptions, "verify that layouts give the same numbers as a single rank"),
    "eval": (_in("eval"), of.EvalOptions, "generate and score responses to held-out or other prompts"),
    "sample": (_in("eval"), of.SampleOptions, "like eval, and print each response with log-prob and rewards"),
    "export": (_in("convert", "run_export"), of.ExportOptions, "write a checkpoint of a run as a Hugging Face folder"),
    "convert": (_in("convert"), of.ConvertOptions, "convert a Hugging Face folder to a Megatron checkpoint, or back"),
    "verify": (_in("verify"), of.VerifyOptions, "compare two checkpoints: config, bits, and the output of every layer"),
    "inspect": (
        _in("verify", "run_inspect"),
        of.InspectOptions,
        "describe a checkpoint: kind, family, parameters, dtype, step",
    ),
    "report": (_report, of.ReportOptions, "write a run's report.html, or serve a live page"),
    "config": (_in("config"), of.KeyOptions, "print the keys of the config: type, default and description"),
    "rank": (_rank, of.NoOptions, None),  # launchers use it, so --help does not list it
}
