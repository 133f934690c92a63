"""Run a command from a script of tools/: the same options, and errors as plain lines with exit code 2."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable

from grpo_mega import console
from grpo_mega.commands.options import Options, add_options, read_options
from grpo_mega.errors import EXIT_INTERRUPTED, EXIT_USER_ERROR, UserError


def run_script(
    doc: str | None, options: type[Options], act: Callable[[Options], int], arguments: list[str] | None
) -> int:
    """Parse the arguments (None: sys.argv), call `act`, and return its exit code."""
    console.filter_output()
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser, options)
    try:
        return act(read_options(options, parser.parse_args(arguments)))
    except UserError as error:
        print(error, file=sys.stderr)
        return EXIT_USER_ERROR
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
