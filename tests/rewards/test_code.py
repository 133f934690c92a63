"""The reward `code`: where test cases are read, and the verdicts of programs in the sandbox."""

import json
import subprocess
import sys
import textwrap
from typing import Any

import pytest

from grpo_mega.errors import ConfigError
from grpo_mega.rewards import NoScore, code, registry
from grpo_mega.rewards.api import Score
from grpo_mega.rewards.code import SandboxFailed
from grpo_mega.rewards.scorer import VERDICTS
from tests.helpers.reward_pools import reward_pool

pytestmark = [pytest.mark.pool, pytest.mark.waiting]

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


REMOTE = """
import collections, functools
class Node:
    def __init__(self, value, next=None):
        self.value, self.next = value, next
    def __eq__(self, other): return isinstance(other, Node) and self.value == other.value
def total(node): return 0 if node is None else node.value + total(node.next)
def count(words): return collections.Counter(words)
def squares(n): return (i * i for i in range(n))
def sort_in_place(items): items.sort()
def refuse(x):
    if x < 0: raise ValueError("negative")
    return float("inf")
def sum(a, b): return a + b
def apply(function, items): return [function(item) for item in items]
def nested(x): return {"a": [(x, None)], (1, 2): {x}, "c": 2 - 1j, "b": b"\\x00"}
@functools.cache
def fib(n): return n if n < 2 else fib(n - 1) + fib(n - 2)
"""
REMOTE_TESTS = [
    "first = Node(1); first.next = Node(2); assert total(first) == 3 and first.next.value == 2",
    "assert Node(5) == Node(5) and Node(5) != Node(7) and isinstance(Node(1), Node)",
    "assert count(['a', 'b', 'a']) == {'a': 2, 'b': 1}",
    "assert list(squares(4)) == [0, 1, 4, 9] and 4 in squares(3)",
    "items = [3, 1, 2]\nsort_in_place(items)\nassert items == [1, 2, 3]",
    "try:\n    refuse(-1)\n    assert False\nexcept ValueError as error:\n    assert 'negative' in str(error)",
    "import math\nassert math.isinf(refuse(1)) and refuse(1) == float('inf')",
    "assert sum(3, 4) == 7",
    "assert apply(lambda x: x + 1, [1, 2]) == [2, 3]",
    "assert nested(7) == {'a': [(7, None)], (1, 2): {7}, 'c': 2 - 1j, 'b': b'\\x00'}",
    "assert max(map(fib, range(8))) == 13 and fib.cache_info().misses == 8",
]


def test_tests_use_values_objects_and_errors_of_a_program_as_before() -> None:
    for test in REMOTE_TESTS:
        assert score(REMOTE, test_list=[test]) == Score(1.0, "correct"), test
    wrong = REMOTE.replace("= value, next", "= 7, next").replace("items.sort()", "items.sort(reverse=True)")
    assert score(wrong, test_list=REMOTE_TESTS, partial=True).value == pytest.approx(8 / 11)
    setup = "class Leaf:\n    def __init__(self, x): self.x = x\ndef leaf(x): return Leaf(x)"
    tests = ["assert read(leaf(3)) == 3", "assert read(Leaf(4)) == 4"]
    assert score("def read(leaf): return leaf.x", test_list=tests, test_setup_code=setup).value == 1.0


# Each one pretends to pass asserts or a call.
CHEATS = {
    "the word of the end": """
        import os, sys
        frame = sys._getframe()
        while frame:
            for value in list(frame.f_locals.values()):
                if isinstance(value, bytes):
                    os.write(3, value)
            frame = frame.f_back
        os._exit(0)""",
    "the expected value in the program's own text": """
        import gc, re, sys
        def double(x):
            frame = sys._getframe()
            while frame:
                for value in [*frame.f_locals.values(), *frame.f_globals.values(), *frame.f_code.co_consts]:
                    if isinstance(value, str) and (found := re.search(r"double\\(%d\\) == (\\d+)" % x, value)):
                        return int(found[1])
                if "_expected" in frame.f_code.co_names:
                    return 2 * x
                frame = frame.f_back
            raise SystemExit""",
    "the texts of all objects": """
        import gc, json, re
        def double(x):
            texts = [value for one in gc.get_objects() if type(one) is dict for value in list(one.values())]
            texts += [value for one in gc.get_objects() if type(one) in (list, tuple) for value in one]
            for value in texts:
                if type(value) is str and (found := re.search(r"double\\(%d\\) == (\\d+)" % x, value)):
                    return int(found[1])""",
    "a changed loads": """
        import json
        json.loads = lambda text: [0]
        json.dumps = lambda value: ""
        def double(x): return 0""",
    "a changed builtin": """
        import builtins
        builtins.abs = builtins.sum = lambda *a: 0
        def abs(x): return 0
        def double(x): return 5""",
    "a trace that jumps": """
        import sys
        def double(x):
            sys._getframe(1).f_globals["double"] = None
            raise SystemExit(0)""",
    "an end in the call": """
        import os, atexit
        atexit.register(os._exit, 0)
        def double(x): os._exit(0)""",
    "replies": """
        import os
        for _ in range(9):
            os.write(4, b'[null, 0, "None", []]\\n')
        def double(x): return None""",
    "the memory of the tests": """
        import os, re
        def double(x):
            for pid in filter(str.isdigit, os.listdir("/proc")):
                try:
                    memory = open(f"/proc/{pid}/mem", "rb", 0)
                    for line in open(f"/proc/{pid}/maps"):
                        first, last = (int(end, 16) for end in line.split()[0].split("-"))
                        memory.seek(first)
                        if found := re.search(rb"double\\(%d\\) == (\\d+)" % x, memory.read(last - first)):
                            return int(found[1])
                except (OSError, ValueError, OverflowError, MemoryError): pass""",
    "a killed process of the tests": """
        import os, signal
        def double(x):
            for pid in filter(str.isdigit, os.listdir("/proc")):
                if int(pid) not in (1, os.getpid()): os.kill(int(pid), 15)""",
}


@pytest.mark.parametrize("name", CHEATS)
def test_a_program_cannot_pretend_to_pass(name: str) -> None:
    program = textwrap.dedent(CHEATS[name]).replace("\\\\", "\\")
    for tests in ({"test_list": ASSERTS}, {"answer": CALLS}, {"test_list": ["assert abs(double(2) - 4) < 1e-6"]}):
        assert score(program, **{"answer": "x", **tests}).value == 0.0, tests


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
