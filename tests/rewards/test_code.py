"""The reward `code`: where test cases are read, and the verdicts of programs in the sandbox."""

import json
import os
import subprocess
import sys
import tempfile
import venv
from pathlib import Path
from typing import Any

import pytest

from grpo_mega.cli.checks import find_violations, this_machine
from grpo_mega.config import load
from grpo_mega.errors import ConfigError
from grpo_mega.rewards import NoScore, code, registry
from grpo_mega.rewards.api import Score
from grpo_mega.rewards.code import Program, SandboxFailed, missing_sandbox, run_programs
from grpo_mega.rewards.scorer import VERDICTS
from tests.helpers.reward_pools import reward_pool
from tests.helpers.runs import write_small

pytestmark = [pytest.mark.pool, pytest.mark.waiting]

ROOT = Path(__file__).parents[2]
DOUBLE = "print(2 * int(input()))"
FUNCTION = "def double(x):\n    return 2 * x"
METHOD = "class Solution:\n    def double(self, x):\n        return (2 * x,)"
CASES = [{"input": "2\n", "output": "4", "type": "stdin_stdout"}, {"input": "3", "output": "6 \n"}]
PRIME = json.dumps({"inputs": ["2\n", "3\n"], "outputs": ["4\n", "6\n"]})
CALLS = json.dumps({"inputs": ["2", "3"], "outputs": ["4", "[6]"], "fn_name": "double"})
ASSERTS = ["assert double(2) == 4", "assert double(3) == 6"]
HUMANEVAL = "def check(candidate):\n    assert candidate(2) == 4\n"


def score(program: str, answer: str = "x", *, timeout_s: float = 60.0, partial: bool = False, **extras: Any) -> Score:
    response = f"Text.\n```python\nx\n```\nBetter:\n```python\n{program}\n```\nDone."
    return code.code("", response, answer, extras, timeout_s=timeout_s, partial=partial)


@pytest.mark.parametrize(
    ("program", "answer", "extras"),
    [
        (DOUBLE, "x", {"verification_info": {"language": "python", "test_cases": CASES}}),
        (DOUBLE, "x", {"verification_info": json.dumps({"test_cases": json.dumps(CASES)})}),
        (DOUBLE, PRIME, {}),
        (DOUBLE, json.dumps({"inputs": [["2"]], "outputs": [["4"]]}), {}),
        (FUNCTION, CALLS, {}),
        (METHOD, json.dumps({"inputs": [[2]], "outputs": [[4]], "fn_name": "double"}), {}),
        (FUNCTION, "x", {"test_list": ASSERTS, "test_setup_code": "import math"}),
        (FUNCTION, json.dumps({"assert_case": ASSERTS}), {}),
        (FUNCTION, "x", {"test": HUMANEVAL, "entry_point": "double"}),
        (FUNCTION, "\n".join(ASSERTS), {}),
    ],
)
def test_right_programs_pass_in_every_format_and_wrong_ones_fail(program: str, answer: str, extras: Any) -> None:
    assert score(program, answer, **extras) == Score(1.0, "correct")
    assert score(program.replace("2 * ", "3 * "), answer, **extras) == Score(0.0, "wrong")


@pytest.mark.parametrize(
    ("program", "verdict"),
    [
        ("1 / 0", "error"),
        ("x = 'a' * (1 << 33)", "memory"),
        ("while True: print('x' * 1000)", "output"),
        ("open('/usr/x', 'w')", "refused"),
        ("def double(:", "error"),
        ("import os; print(4); os._exit(3)", "error"),
    ],
)
def test_the_verdict_says_why_a_program_fails(program: str, verdict: str) -> None:
    assert score(program, PRIME) == Score(0.0, verdict)
    assert verdict in VERDICTS


def test_a_program_that_does_not_end_is_late() -> None:
    assert score("while True: pass", PRIME, timeout_s=1.0) == Score(0.0, "timeout")


@pytest.mark.parametrize("ending", ["import os; os._exit(0)", "raise SystemExit", "import sys; sys.exit(0)"])
def test_a_program_that_ends_before_the_asserts_has_not_passed_them(ending: str) -> None:
    assert score(f"{FUNCTION}\n{ending}", "x", test_list=ASSERTS) == Score(0.0, "wrong")
    flushing = DOUBLE[:-1] + ", flush=True)"
    assert score(f"{flushing}\n{ending}", PRIME) == Score(1.0, "correct"), "its output is complete"


@pytest.mark.parametrize("ending", ["sys.exit('no\\nroots')", "raise SystemExit({'x': 1})", "exit(1.5)", "sys.exit(0)"])
def test_the_tool_python_tells_what_sys_exit_was_given(ending: str) -> None:
    program = f"import sys; print(7); {ending}"
    real = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    expected = f"{real.stdout}\nError: {real.stderr}".rstrip() if real.returncode else real.stdout
    assert code.python(program) == expected
    assert "Error" in expected or ending == "sys.exit(0)"


def test_partial_scores_are_shares_and_unreadable_tests_drop_the_group() -> None:
    assert score("print(4)", PRIME, partial=True) == Score(0.5, "wrong")
    assert score(DOUBLE, "no tests") == Score(None, "gold_unparsable")
    assert code.code("", "no program", PRIME, {}) == Score(0.0, "wrong")
    assert code.code("", f"<think>\n```python\n{DOUBLE}\n```", PRIME, {}) == Score(0.0, "wrong"), "a thought"


def test_a_sandbox_that_fails_is_tried_again_and_then_costs_no_score(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def fail(*_: Any, **__: Any) -> Any:
        calls.append(1)
        raise SandboxFailed("no process")

    monkeypatch.setattr(code, "run_programs", fail)
    with pytest.raises(NoScore, match="no process"):
        score(DOUBLE, PRIME)
    assert len(calls) == 2


def test_a_deadline_that_leaves_no_time_for_the_programs_is_refused() -> None:
    registry.check_rewards("code", {"timeout_s": 1.0}, "lines", 5.0)
    with pytest.raises(ConfigError, match=r"rewards.deadline_s=5 leaves no time .* raise it to 8"):
        registry.check_rewards("code", {}, "lines", 5.0)


def test_workers_run_programs_and_a_hang_outside_them_costs_no_score() -> None:
    with reward_pool([("code", 1.0)], deadline_s=60) as pool:
        pool.submit(0, "", f"```python\n{DOUBLE}\n```", PRIME, {})
        assert pool.collect()[0].total == 1.0
    with reward_pool([("code", 1.0)], deadline_s=0.01) as pool:
        pool.submit(0, "", f"```python\n{DOUBLE}\n```", PRIME, {})
        result = pool.collect()[0]
        assert (result.total, result.verdicts) == (None, {"code": "timeout"})


PLACES = """
import os
from grpo_mega.rewards.code import Program, missing_sandbox, run_programs
print(missing_sandbox())
text = "import decimal, of_this_python; open('kept', 'w').write('x'); print(decimal.Decimal(2), os.listdir('.'))"
for run in run_programs([Program("import os; " + text)] * 2, 60.0):
    print(run.verdict, run.output.strip() or run.error)
"""


def test_programs_find_a_python_below_tmp() -> None:
    allowed = subprocess.run(["sh", "-c", "unshare -Urmpnif true"], capture_output=True, text=True, check=False)
    if allowed.returncode or "not implemented" in str(missing_sandbox()):  # this Python may be below /tmp too
        pytest.skip(f"no namespaces: {allowed.stderr or missing_sandbox()}")
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        Path(folder).chmod(0o755)
        venv.create(folder)
        (packages,) = Path(folder).glob("lib/python*/site-packages")
        (packages / "of_this_python.py").touch()
        path = os.pathsep.join([str(ROOT), *(path for path in sys.path if path.endswith("-packages"))])
        command, environment = [f"{folder}/bin/python", "-c", PLACES], os.environ | {"PYTHONPATH": path}
        run = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.stdout.splitlines() == ["None", *["finished 2 ['kept']"] * 2], run.stdout + run.stderr


@pytest.mark.parametrize("missing", ["", "Operation not permitted"])
def test_programs_are_refused_if_their_user_cannot_enter_python(
    missing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Root's programs run as another user. With namespaces they see only the folders of Python."""
    folder = tmp_path / "root/lib"
    folder.mkdir(parents=True)
    hidden = folder.parent if missing else folder
    hidden.chmod(0o700)
    monkeypatch.setattr(code, "_run_sandbox", lambda *_: {"missing": missing})
    monkeypatch.setattr(code, "_python_folders", lambda: [str(folder)])
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    config = load(write_small(tmp_path), ["rewards.functions=[{name: code}]"])
    cached = (code.missing_sandbox, code.hidden_python)
    for one in cached:
        one.cache_clear()
    try:
        with pytest.raises(SandboxFailed, match=f"another user, who cannot enter {hidden}$"):
            run_programs([Program("1")], 60.0)
        (problem,) = (one for one in find_violations(config, this_machine(config.layout)) if str(hidden) in one)
    finally:
        for one in cached:
            one.cache_clear()
    assert problem.startswith("rewards.functions: code: the model's programs run as another user")
    assert problem.endswith("install Python where all users can read it")
