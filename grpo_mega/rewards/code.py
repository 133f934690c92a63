"""The reward `code`: run the program of a response on test cases, in the sandbox.

The program is the last fenced block of Python after the thought. The cases are in the first of these places:

    verification_info        open-r1: {"test_cases": [{"input", "output", "type": "stdin_stdout", "fn_name"?}, ...]}
    the answer               verl (PRIME, TACO, APPS): {"inputs": [...], "outputs": [...], "fn_name"?}, or a list of
                             asserts, or {"assert_case": [...]}
    test_list, test_cases,   lists of asserts, or of the cases above; `test_setup_code` and `test_imports` come first
    tests, test

Values may be JSON texts. The test text of HumanEval, `def check(candidate): ...`, is called with the function
`entry_point`. A case with fn_name calls the function with a JSON value per line or argument, and compares JSON values.
Outputs are compared line by line without spaces at the ends.
"""

import json
import re
from collections.abc import Mapping
from typing import Any

from grpo_mega.rewards.api import NoScore, Score
from grpo_mega.rewards.math.answer import conclusion_of, whole_turn
from grpo_mega.rewards.sandbox import Run, SandboxFailed, run_programs

TIMEOUT_S = 4.0
START_S = 4.0  # rewards.deadline_s must exceed the time of the programs by this
_COLUMNS = ("test_list", "test_cases", "tests", "test")
_BLOCK = re.compile(r"(?ims)^[ \t]*```[ \t]*(?:python3?|py)?[ \t]*\n(.*?)^[ \t]*```")
_CALL = """
import json as _json
_function = getattr(Solution(), {name!r}) if "Solution" in globals() else {name}
_found = _json.loads(_json.dumps(_function(*_json.loads({arguments!r}))))
_expected = _json.loads({expected!r})
assert _found == _expected or [_found] == _expected, "wrong"
"""
Case = tuple[str, str, str | None]  # text to add to the program, standard input, expected output (None: asserts)


def code(
    prompt: str,
    response: str,
    answer: str,
    extras: dict[str, Any],
    *,
    timeout_s: float = TIMEOUT_S,
    max_cases: int = 20,
    partial: bool = False,
) -> Score:
    """Return 1 if the program passes the first `max_cases` cases within `timeout_s` in all, else 0.

    With `partial` it is the share of cases that pass. The verdict is that of the first case that fails.
    """
    cases = cases_of(answer, extras)[:max_cases]
    if not cases:
        return Score(None, "gold_unparsable")
    blocks = _BLOCK.findall(conclusion_of(whole_turn(response, extras)))
    if not blocks:
        return Score(0.0, "wrong")
    programs = [(f"{blocks[-1]}\n{text}", given) for text, given, _ in cases]
    try:
        runs = _run_twice(programs, timeout_s, stops_early=not partial)
    except SandboxFailed as error:
        raise NoScore(str(error)) from None
    verdicts = [_verdict(run, expected) for run, (_, _, expected) in zip(runs, cases, strict=False)]
    failed = [verdict for verdict in verdicts if verdict != "correct"]
    value = 1.0 - len(failed) / len(cases) if partial else float(not failed)
    return Score(value, failed[0] if failed else "correct")


def check_deadline(options: Mapping[str, Any], deadline_s: float) -> None:
    """Raise ValueError if the pool would end a check before its programs time out."""
    needed = options.get("timeout_s", TIMEOUT_S) + START_S
    if deadline_s < needed:
        raise ValueError(
            f"rewards.deadline_s={deadline_s:g} leaves no time for timeout_s and the start of the sandbox; raise it to"
            f" {needed:g}"
        )


def cases_of(answer: str, extras: Mapping[str, Any]) -> list[Case]:
    """Return the test cases of a row; [] if it has none that can be read."""
    setup = "\n".join(_lines(extras.get("test_imports")) + _lines(extras.get("test_setup_code")))
    for value in (extras.get("verification_info"), answer, *(extras.get(column) for column in _COLUMNS)):
        try:
            cases = _cases(_parsed(value), extras)
        except (KeyError, TypeError, ValueError):
            continue
        if cases:
            return [
                (f"{setup}\n{text}" if expected is None else text, given, expected) for text, given, expected in cases
            ]
    return []


def _cases(value: Any, extras: Mapping[str, Any]) -> list[Case]:
    if isinstance(value, str):
        entry = f"\ncheck({extras['entry_point']})" if "def check(" in value and "entry_point" in extras else ""
        return [(value + entry, "", None)] if "assert" in value else []
    if isinstance(value, list):
        return [case for one in value for case in _cases(one, extras)]
    if not isinstance(value, dict):
        return []
    if "inputs" in value and "outputs" in value:
        pairs, name = zip(value["inputs"], value["outputs"], strict=True), value.get("fn_name")
        return [_pair(given, expected, name) for given, expected in pairs]
    if "input" in value and "output" in value:
        return [_pair(value["input"], value["output"], value.get("fn_name"))]
    return _cases(_parsed(value.get("test_cases") or value.get("assert_case") or value.get("asserts")), extras)


def _pair(given: Any, expected: Any, name: str | None) -> Case:
    if not name:
        return "", _as_lines(given), _as_lines(expected)
    arguments = [json.loads(line) for line in given.splitlines()] if isinstance(given, str) else given
    expected = json.loads(expected) if isinstance(expected, str) else expected
    return _CALL.format(name=name, arguments=json.dumps(arguments), expected=json.dumps(expected)), "", None


def _verdict(run: Run, expected: str | None) -> str:
    if run.verdict != "finished":
        is_assert = expected is None and run.verdict == "error" and run.error.strip().rpartition("\n")[2]
        return "wrong" if is_assert and is_assert.startswith("AssertionError") else run.verdict
    if expected is None:
        return "correct" if run.is_complete else "wrong"
    lines = [[line.strip() for line in text.strip().splitlines()] for text in (run.output, expected)]
    return "correct" if lines[0] == lines[1] else "wrong"


def _run_twice(programs: list[tuple[str, str]], timeout_s: float, *, stops_early: bool) -> list[Run]:
    """Run the programs. If the sandbox itself fails, try again once."""
    try:
        return run_programs(programs, timeout_s, total_s=timeout_s, stops_early=stops_early)
    except SandboxFailed:
        return run_programs(programs, timeout_s, total_s=timeout_s, stops_early=stops_early)


def _parsed(value: Any) -> Any:
    """Return the value of a JSON text, and anything else as it is."""
    try:
        return json.loads(value) if isinstance(value, str) else value
    except ValueError:
        return value


def _as_lines(value: Any) -> str:
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value)


def _lines(value: Any) -> list[str]:
    return [] if not value else [value] if isinstance(value, str) else list(map(str, value))
