"""Checks a trainer's advantages, KL penalties, corrections and losses against naive twins: `N of N agree`, or exit code 1.

The numbers to compare with are those of grpo_mega/algorithm/conformance.json, computed in float64 token by token
(grpo_mega/algorithm/reference.py). The code checked is this trainer's, or another's: `--implementation package.module:function`
names a function (kind, inputs, settings) -> result, called once for each case. All its arguments are plain Python:

  kind "kl"          inputs {logprobs, old_logprobs, ref_logprobs}: lists of numbers
                     result {values, gradients}: the penalty of each token, and its derivative by the token's log-prob
  kind "correction"  inputs {responses}: a list of {old_logprobs, rollout_logprobs, mask}
                     result {importance, kept}: a list for each response; both 0 on masked tokens
  kind "loss"        inputs {responses}: a list of {logprobs, old_logprobs, ref_logprobs, rollout_logprobs, entropy,
                     advantages, mask}, all the responses of one mini-batch
                     result {loss, gradients}: a number; for each response the loss's derivatives by its log-probs
  kind "advantages"  inputs {groups}: a list of groups, each a list of {length, reward, step_rewards, step_ends, logprobs,
                     ref_logprobs}; reward None: none was given. Log-probs are those before the update
                     result {advantages}: for each group and sample a list of `length` numbers

`settings` has keys of the config's section `algorithm`, explained in grpo_mega/config/algorithm.py, and max_response_length.
Where mask is 0 values may be NaN (null in the file), which must not be read. A number may be off by --tolerance times the
largest number of its case. A function raises NotImplementedError for a case that it does not know: it is named, and does not
count as agreed. Exit code 2 and one line: there was nothing that could be checked.
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
import sys
from pathlib import Path
from typing import Any

import conformance_cases
import torch

from grpo_mega.algorithm import conformance

FILE = Path(conformance.__file__).with_name("conformance.json")
OURS = "grpo_mega.algorithm.conformance:ours"
# This trainer keeps advantages in float32.
TOLERANCES = {"kl": 1e-9, "correction": 1e-9, "loss": 1e-9, "advantages": 1e-6}
DIGITS = 12  # of the expected numbers in the file, so that another machine's rounding writes the same


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--implementation", default=OURS, metavar="MODULE:FUNCTION", help="what is checked (%(default)s)")
    parser.add_argument("--tolerance", type=float, help="of all kinds; by default 1e-6 for advantages, else 1e-9")
    parser.add_argument("--only", default="", metavar="TEXT", help="cases that have this in their name")
    parser.add_argument("--file", type=Path, default=FILE, help="the cases (%(default)s)")
    parser.add_argument("--write", action="store_true", help="compute the expected numbers anew and write the file")
    options = parser.parse_args(arguments)
    if options.write:
        options.file.write_text(dumps(computed_cases()))
        print(f"{options.file}: written")
        return 0
    try:
        implementation = load_implementation(options.implementation)
        cases = [case for case in loads(options.file.read_text()) if options.only in case["name"]]
    except (OSError, ValueError, ImportError, AttributeError) as error:
        print(f"check_conformance: {error}", file=sys.stderr)
        return 2
    if not cases:
        print(f"check_conformance: no case of {options.file} has {options.only!r} in its name", file=sys.stderr)
        return 2
    return check(cases, implementation, options.tolerance)


def check(cases: list[dict[str, Any]], implementation: conformance.Implementation, tolerance: float | None) -> int:
    num_agreed, unknown = 0, []
    for case in cases:
        try:
            result = implementation(case["kind"], case["inputs"], case["settings"])
            allowed = TOLERANCES[case["kind"]] if tolerance is None else tolerance
            found = conformance.differences(case["expected"], result, allowed)
        except NotImplementedError:
            unknown.append(case["name"])
            continue
        except Exception as error:  # another trainer's code may raise anything; the other cases are to be seen as well
            found = [f"raised {type(error).__name__}: {error}"]
        num_agreed += not found
        for line in found[:3]:
            print(f"{case['name']}: {line}")
        if len(found) > 3:
            print(f"{case['name']}: and {len(found) - 3} more")
    if unknown:
        print(f"not implemented: {'; '.join(unknown)}")
    print(f"{num_agreed} of {len(cases)} agree")
    return int(num_agreed != len(cases))


def load_implementation(name: str) -> conformance.Implementation:
    module, _, function = name.partition(":")
    if not function:
        raise ValueError(f"--implementation {name} names no function; write package.module:function")
    sys.path.insert(0, "")  # a module in the current folder, as `python -m` finds it
    found: conformance.Implementation = getattr(importlib.import_module(module), function)
    return found


def computed_cases() -> list[dict[str, Any]]:
    return [
        case | {"expected": rounded(conformance.expected(case["kind"], case["inputs"], case["settings"]))}
        for case in conformance_cases.all_cases()
    ]


def rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: rounded(item) for name, item in value.items()}
    if isinstance(value, list):
        return [rounded(item) for item in value]
    return float(f"{value:.{DIGITS}g}") + 0.0  # no -0.0


def dumps(cases: list[dict[str, Any]]) -> str:
    """A line for each response, group, or set of settings, so that changes can be read; NaN is null."""
    return "[\n" + ",\n".join(_case_text(case) for case in cases) + "\n]\n"


def loads(text: str) -> list[dict[str, Any]]:
    """The cases; null in an array is NaN again."""
    cases: list[dict[str, Any]] = json.loads(text)
    return [case | {"inputs": _null_to_nan(case["inputs"])} for case in cases]


def _case_text(case: dict[str, Any]) -> str:
    lines = [f'  "name": {_line(case["name"])}', f'  "kind": {_line(case["kind"])}']
    lines += [f'  "{name}": {_block(case[name], "  ")}' for name in ("inputs", "settings", "expected")]
    return " {\n" + ",\n".join(lines) + "\n }"


def _block(value: Any, indent: str) -> str:
    """An array of arrays or objects takes a line for each, an object around one a line for each name; all else is one line."""
    if isinstance(value, list) and any(isinstance(item, list | dict) for item in value):
        return "[\n" + ",\n".join(f"{indent} {_line(item)}" for item in value) + f"\n{indent}]"
    if isinstance(value, dict) and any(isinstance(item, list) for item in value.values()):
        body = [f"{indent} {_line(name)}: {_block(item, indent + ' ')}" for name, item in value.items()]
        return "{\n" + ",\n".join(body) + f"\n{indent}}}"
    return _line(value)


def _line(value: Any) -> str:
    return json.dumps(_nan_to_null(value), allow_nan=False)


def _nan_to_null(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _nan_to_null(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_nan_to_null(item) for item in value]
    return None if isinstance(value, float) and math.isnan(value) else value


def _null_to_nan(value: Any) -> Any:
    """In arrays alone: {"reward": null} is no number at all."""
    if isinstance(value, dict):
        return {name: _null_to_nan(item) if isinstance(item, list | dict) else item for name, item in value.items()}
    return [_null_to_nan(item) if isinstance(item, list | dict) else math.nan if item is None else item for item in value]


if __name__ == "__main__":
    torch.set_num_threads(1)  # for a few tokens several are many times slower
    sys.exit(main())
