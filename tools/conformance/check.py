"""Check a trainer's advantages, KL penalties, corrections and losses against oracles. Print `N of N agree`, or exit
with 1.

oracle_losses.py and oracle_advantages.py computed the expected numbers in vectors.json, token by token in float64. The
default is to check this trainer. `--implementation package.module:function` checks another function (kind, inputs,
settings) -> result. It is called once per case with plain Python values:

  kind "kl"          inputs {logprobs, old_logprobs, ref_logprobs}: lists of numbers
                     result {values, gradients}: the penalty of each token, and its derivative by the token's log-prob
  kind "correction"  inputs {responses}: a list of {old_logprobs, rollout_logprobs, mask}
                     result {importance, kept}: a list per response; both 0 on masked tokens
  kind "loss"        inputs {responses}: a list of {logprobs, old_logprobs, ref_logprobs, rollout_logprobs, entropy,
                     advantages, mask}, all responses of one mini-batch; for positive_nll also a reward, for
                     distill_beta also teacher_logprobs
                     result {loss, gradients}: a number; for each response the loss's derivatives by its log-probs
  kind "advantages"  inputs {groups}: a list of groups, each a list of {length, reward, step_rewards, step_ends,
                     logprobs, ref_logprobs}; reward is None for a sample without a reward; log-probs are from before
                     the update; for gdpo also scores by reward function
                     result {advantages}: for each group and sample a list of `length` numbers
  kind "beta"        inputs {kl, num_samples}: one number for each of a series of steps
                     result {betas}: kl_beta after each step

`settings` has max_response_length and keys of the config's section `algorithm` (see grpo_mega/config/algorithm.py); for
gdpo also reward_weights by reward function. Tokens with mask 0 may hold NaN (null in the file) and must not be read. A
number may be off by --tolerance times the largest number of its case. If a function does not support a case, it raises
NotImplementedError. The tool prints the case's name and does not count it as agreed. If nothing can be checked, the
tool prints one line and exits with 2.
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
import sys
from pathlib import Path
from typing import Any

import torch

if __name__ == "__main__":  # this file also runs as a plain script, from any folder
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from grpo_mega.paths import user_path
from grpo_mega.text import filter_output
from tools.conformance import adapter
from tools.conformance.cases import all_cases

FILE = Path(__file__).with_name("vectors.json")
OURS = "tools.conformance.adapter:ours"
# Advantages have a larger tolerance, because this trainer stores them in float32.
TOLERANCES = {"kl": 1e-9, "correction": 1e-9, "loss": 1e-9, "advantages": 1e-6, "beta": 1e-12}
DIGITS = 12  # precision of expected numbers in the file, so rounding differences between machines do not change it


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--implementation", default=OURS, metavar="MODULE:FUNCTION", help="default: %(default)s")
    parser.add_argument("--tolerance", type=float, help="for all kinds; default: 1e-6 for advantages, otherwise 1e-9")
    parser.add_argument("--only", default="", metavar="TEXT", help="check only cases with TEXT in their name")
    parser.add_argument("--file", type=user_path, default=FILE, help="the cases (%(default)s)")
    parser.add_argument("--write", action="store_true", help="write the file with the oracles' numbers")
    options = parser.parse_args(arguments)
    if options.write:
        options.file.write_text(dumps(computed_cases()))
        print(f"{options.file}: written")
        return 0
    try:
        implementation = load_implementation(options.implementation)
        cases = [case for case in loads(options.file.read_text()) if options.only in case["name"]]
    except (OSError, ValueError, ImportError, AttributeError) as error:
        print(f"conformance: {error}", file=sys.stderr)
        return 2
    if not cases:
        print(f"conformance: no case of {options.file} has {options.only!r} in its name", file=sys.stderr)
        return 2
    return check(cases, implementation, options.tolerance)


def check(cases: list[dict[str, Any]], implementation: adapter.Implementation, tolerance: float | None) -> int:
    num_agreed, unknown = 0, []
    for case in cases:
        try:
            result = implementation(case["kind"], case["inputs"], case["settings"])
            allowed = TOLERANCES[case["kind"]] if tolerance is None else tolerance
            differing = adapter.differences(case["expected"], result, allowed)
        except NotImplementedError:
            unknown.append(case["name"])
            continue
        except Exception as error:  # another trainer's code may raise anything; the other cases must still be checked
            differing = [f"raised {type(error).__name__}: {error}"]
        num_agreed += not differing
        for line in differing[:3]:
            print(f"{case['name']}: {line}")
        if len(differing) > 3:
            print(f"{case['name']}: and {len(differing) - 3} more")
    if unknown:
        print(f"not implemented: {'; '.join(unknown)}")
    print(f"{num_agreed} of {len(cases)} agree")
    return int(num_agreed != len(cases))


def load_implementation(name: str) -> adapter.Implementation:
    module, _, function = name.partition(":")
    if not function:
        raise ValueError(f"--implementation {name} names no function; write package.module:function")
    sys.path.insert(0, "")  # also find modules in the current folder, as `python -m` does
    implementation: adapter.Implementation = getattr(importlib.import_module(module), function)
    return implementation


def computed_cases() -> list[dict[str, Any]]:
    arguments = ("kind", "inputs", "settings")
    return [c | {"expected": rounded(adapter.expected(*(c[name] for name in arguments)))} for c in all_cases()]


def rounded(value: Any) -> Any:
    """Round all numbers of nested lists and objects to DIGITS. Replace -0.0 by 0.0."""
    return json.loads(json.dumps(value), parse_float=lambda text: float(f"{float(text):.{DIGITS}g}") + 0.0)


def dumps(cases: list[dict[str, Any]]) -> str:
    """Return JSON with one line per response, group or settings, for readable diffs. NaN becomes null."""
    bodies = [",\n".join(f"  {_line(name)}: {_block(value, '  ')}" for name, value in case.items()) for case in cases]
    return "[\n" + ",\n".join(f" {{\n{body}\n }}" for body in bodies) + "\n]\n"


def loads(text: str) -> list[dict[str, Any]]:
    """Parse the cases. A null in an array becomes NaN."""
    cases: list[dict[str, Any]] = json.loads(text)
    return [case | {"inputs": _null_to_nan(case["inputs"])} for case in cases]


def _block(value: Any, indent: str) -> str:
    """Return JSON with one line per item of nested arrays, and per name of objects of arrays."""
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
    """Replace null by NaN, but only in arrays, because {"reward": null} means that there is no reward."""
    if isinstance(value, dict):
        return {name: _null_to_nan(item) for name, item in value.items()}
    return [math.nan if item is None else _null_to_nan(item) for item in value] if isinstance(value, list) else value


if __name__ == "__main__":
    filter_output()
    torch.set_num_threads(1)  # more threads are many times slower for so few tokens
    sys.exit(main())
