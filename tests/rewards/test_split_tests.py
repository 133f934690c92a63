"""Tests of a program are split: right programs pass as in one interpreter, and what decides is not in the program's.

The oracle of right and wrong is the plain text in one Python process, without the package.
"""

import json
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from grpo_mega.rewards import code
from grpo_mega.rewards.api import Score
from grpo_mega.rewards.code import run_programs
from grpo_mega.rewards.split_tests import split_tests

pytestmark = [pytest.mark.pool, pytest.mark.waiting]

ORDINARY = """
import collections, contextlib, dataclasses, decimal, enum, fractions, math
class Node:
    def __init__(self, value, next=None): self.value, self.next = value, next
    def __eq__(self, other): return isinstance(other, Node) and self.value == other.value
    def __repr__(self): return f"({self.value}, 2)"
class Vector:
    def __init__(self, x): self.x = x
    def __mul__(self, other): return Vector(self.x * other)
    __rmul__ = __mul__
    def __enter__(self): return self
    def __exit__(self, *_): self.x = 7
class Word(str):
    def __eq__(self, other): return self.lower() == str(other).lower()
    __hash__ = str.__hash__
class Color(enum.Enum): RED = 1
class Level(enum.IntEnum): LOW = 3
class Refused(ValueError): pass
Pair = collections.namedtuple("Pair", "x y")
@dataclasses.dataclass
class Point: x: int
def count(words): return collections.Counter(words)
def groups(x): d = collections.defaultdict(list); d["a"].append(x); return d
def squares(n): return (i * i for i in range(n))
def sort(items): items.sort()
def refuse(x):
    if x < 0: raise Refused("negative")
    return float("inf")
def sum(a, b): return a + b
def apply(function, items): return [function(item) for item in items]
def nested(x): return {"a": [(x, None)], (1, 2): {x}, "c": 2 - 1j, "b": b"\\x00", 3: frozenset({True})}
def poly(xs, x): return math.fsum(c * x**i for i, c in enumerate(xs))
def half(x): return fractions.Fraction(x, 2)
def cost(x): return decimal.Decimal(x) / 10
def big(n): return math.factorial(n)
def cycle(): a = [1]; a.append(a); return a
def same(x): return x
def map(xs): return [2 * x for x in xs]
async def later(): return 5
"""
TESTS = [  # each is right for ORDINARY
    "first = Node(1); first.next = Node(2); assert first.next.value == 2 and first.next.next is None",
    "assert Node(5) == Node(5) and Node(5) != Node(7) and isinstance(Node(1), Node) and Node(5) != (5, 2)",
    "assert (2 * Vector(3)).x == 6 and (Vector(2) * 2).x == 2 * 2",
    "with Vector(1) as v:\n    assert v.x == 1\nassert v.x == 7",
    "assert Word('A') == 'a' and [Word('A')] == ['a'] and Word('b') in ['B'] and Word('b').upper() == 'B'",
    "assert Color(1) is Color.RED and Color(1) == Color.RED and Level.LOW == 3 and Level.LOW in (3, 4)",
    "assert Pair(1, 2) == (1, 2) and Pair(1, y=2).x == 1 and Point(4) == Point(4) and Point(4).x == 4",
    "assert count(['a', 'b', 'a']) == {'a': 2, 'b': 1} and isinstance(count(''), dict) and count('a') == count('a')",
    "from collections import Counter, deque\nassert count('abca') == Counter('abca') and same(deque([1])) != [1]",
    "assert groups(1) == {'a': [1]} and type(groups(1)) != dict and type(same([])) == type([]) == list",
    "assert list(squares(4)) == [0, 1, 4, 9] and 4 in squares(3) and next(squares(3)) == 0",
    "items = [3, 1, 2]\nsort(items)\nassert items == [1, 2, 3], f'{items}'\nassert sort([]) is None",
    "try:\n    refuse(-1)\n    assert False\nexcept ValueError as error:\n    assert 'negative' in str(error)",
    "import math\nassert math.isinf(refuse(1)) and refuse(1) == float('inf') and refuse(2) > 1e308",
    "assert sum(3, 4) == 7 and sum(b=1, **{'a': 2}) == 3 and sum(*[1, 1]) == 2",
    "k = 3\nassert apply(lambda x: x + k, [1, 2]) == [4, 5] and sorted([1, 2], key=lambda x: -x) == [2, 1]",
    "assert nested(7) == {'a': [(7, None)], (1, 2): {7}, 'c': 2 - 1j, 'b': b'\\x00', 3: frozenset({1})}",
    "assert abs(poly([-2.5, 1], 2.5)) < 1e-9 and round(poly([0.126], 1), 2) == 0.13 and 0 <= poly([], 3) < 1",
    "import random\nfor _ in range(20):\n    x = random.random()\n    assert poly([1, x], x) == 1 + x * x",
    "from fractions import Fraction\nassert half(3) == Fraction(3, 2) == 1.5 and int(half(8)) == 4",
    "from decimal import Decimal\nassert cost(15) == Decimal('1.5') and f'{abs(2 - cost(15)):.2f}' == '0.50'",
    "import math\nassert big(2000) == math.factorial(2000) and len(str(big(50))) == 65",
    "assert cycle()[1][0] == 1 and len(cycle()) == 2",
    "def check(candidate):\n    for x, y in [(1, 1), ('\\u2028', '\\u2028')]:\n        assert candidate(x) == y\n"
    "    if candidate(0):\n        assert candidate(1) == 2\ncheck(same)",
    "def check(candidate):\n    for x in range(5):\n        if x % 2: continue\n        assert candidate(x) == x\n"
    "    return\n    assert candidate(0) == 1\ncheck(same)",
    "import unittest\nclass T(unittest.TestCase):\n    def test(self): self.assertEqual(same(1), 1)\n"
    "assert unittest.TextTestRunner().run(unittest.defaultTestLoader.loadTestsFromTestCase(T)).wasSuccessful()",
    "import asyncio\nasync def main():\n    assert await later() == 5\nasyncio.run(main())",
    "assert all(same(x) == x for x in (1, 2)) and any([same(0), same(1) == 1])",
    "assert max(same([1, 3]), key=lambda x: -x) == 1",
    "assert all(abs(a - b) < 1e-6 for a, b in zip(same([1.0, 2.0]), [1.0, 2.0]))",
    "class O:\n    x = 3\nassert same(O()).x == 3 and same(O) is O and (y := same(4)) == 4 and y == 4",
    "z = 1\nassert [f(z) for f in (same,)] == [1] and (lambda q: same(q))(2) == 2 and same(1) if z else False",
    "import os\nopen('left', 'w').write('x')\nassert os.path.exists(same('left')) and open('left').read() == 'x'",
    "calls = []\nassert same(calls.append)(4) is None and calls == [4] and same.__name__ == 'same'",
    "assert not same(0) and not same([]) and same(Node(1)) and not not same(1)",
    "g = squares(3)\nassert list(zip(g, 'ab')) == [(0, 'a'), (1, 'b')]\ntry:\n    next(g)\n    assert False\n"
    "except StopIteration:\n    pass",
    "class C(str, enum.Enum):\n    RED = 'red'\nassert same(C.RED) == 'red'",
    "assert '%s' % (same(Pair(1, 2)),) == 'Pair(x=1, y=2)'",
    "class M(list):\n    def __mul__(self, n): return [n]\nassert same(M([1])) * 2 == [2] and 4 in same(M([4]))",
    "a = [1, 2]\nassert a + [4] == (a.append(4) or a) and a * 2 == [1, 2, 4] + (a.pop() and a + [4])",
    "a = [1, 2]\nassert [x + 1 for x in a] == [x + 1 for x in (a.clear() or [1, 2])]\nassert a == sort(a) or a == []",
    "import math\nassert same([1, math.nan]) == [1, math.nan] and same(math.nan) in [math.nan]",
    "n = 2\nassert sorted(same([3, 4]), key=lambda t, n=n: t % n, reverse=True) == [3, 4]",
    "def deep(n):\n    x = []\n    for _ in range(n): x = [x]\n    return x\nassert len(same(deep(600))) == 1",
    "assert same('\\ud83d\\ude00') != '\\U0001F600' and len(same('\\ud83d\\ude00')) == 2",
    "assert decimal.Decimal(2).sqrt() == same(decimal.Decimal(2)).sqrt()\nassert same(2**30000) == 2**30000",
    "def bad():\n    assert same(1) == 3\ntry:\n    bad()\nexcept AssertionError:\n    bad = None\nassert bad is None",
    "assert same('Yes') is 'Yes'[:] and f\"{'\u200b'.join(['a', 'b'])}\" == same('a\u200bb')",
    "x = [1, 2]\nassert map(x) == [2, 4]",
    "assert 1" + " + 1" * 700 + " == same(701)",
]
WRONG = [  # each is wrong for ORDINARY
    "assert same(1) == 2", "assert not same(1)", "assert same(1) is None", "assert same((1, 2)) == [1, 2]",
    "assert same('1') == 1", "assert Node(1) == 1", "assert Node(1) == Node(2)", "assert count('ab') == {'a': 1}",
    "assert [Word('A')] == ['b']", "assert abs(same(1.1) - 1) < 1e-3", "assert same(0)", "assert half(3) == 2",
    "for x in range(3):\n    assert same(x) < 2", "def check(f):\n    assert f(1) == 2\ncheck(same)",
    "with Vector(1) as v:\n    assert v.x == 2", "assert same(1) == 1 and same(2) == 3",
    "assert sorted(same([2, 1])) == [2, 1]",
    "import math\nassert math.isclose(same(1.0), 1.1)", "assert type(groups(1)) == dict",
    "assert big(900) == 1 + big(900)",
]  # fmt: skip


def score(program: str, *tests: str, answer: str = "x") -> Score:
    response = f"```python\n{textwrap.dedent(program)}\n```"
    return code.code("", response, answer, {"test_list": list(tests)}, timeout_s=60.0)


def test_tests_decide_as_in_one_interpreter(tmp_path: Path) -> None:
    for test in TESTS + WRONG:
        plain = subprocess.run(
            [sys.executable, "-c", f"{ORDINARY}\n{test}"], capture_output=True, text=True, cwd=tmp_path
        )
        assert (plain.returncode == 0) == (test in TESTS), (test, plain.stderr)
    parts = [split_tests(test, ORDINARY) for test in TESTS + WRONG]
    assert sum(part is None for part in parts) <= 5, "the others have an assert to split"
    runs = run_programs([code.Case(asserts=test).program(ORDINARY) for test in TESTS + WRONG], 60)
    for test, run in zip(TESTS + WRONG, runs, strict=True):
        assert run.is_complete == (test in TESTS), (test, run)
        assert run.is_complete or "AssertionError" in run.error, (test, run)


def test_expected_values_are_not_in_the_text_that_runs_with_the_program() -> None:
    tests = """
import math
SECRET = same(0)
def check(candidate):
    assert candidate(2) == 1234.5 and not candidate([3]) in [1234, "1234"], "not 1234"
    assert math.isclose(candidate(4), 1234.5, rel_tol=1e-1234)
    assert abs(candidate(6) - 1234.5) < 1234 and round(candidate(7)[0], 1234) > -1234
    for x in [1, 2]:
        assert sorted(candidate(x), key=lambda y: y["1234"], reverse=True) == [{"1234": 1234}]
    assert all(a == b for a, b in zip(candidate(8), [1234, 1234])) and len(candidate(9)) + 1234 == 1234
    assert isinstance(candidate(10), int) and [candidate(1), 1234] == [1234, candidate(2)]
check(same)
"""
    parts = split_tests(tests, "import math")
    assert parts is not None
    assert "1234" not in parts[0]
    assert parts[1].count("1234") >= 12
    assert "same" not in parts[1] and "candidate" not in parts[1]


CALLS = json.dumps({"inputs": ["2", "3"], "outputs": ["4", "[6]"], "fn_name": "double"})
WRITE_WORD = """
import os
def write_word():
    import os, sys
    frame = sys._getframe()
    while frame:
        for value in list(frame.f_locals.values()):
            if isinstance(value, bytes) and len(value) == 16:
                os.write(3, value)
        frame = frame.f_back
    os._exit(0)
"""
CHEATS = {  # each pretends to pass asserts or a call
    "the word of the end": f"{WRITE_WORD}\nwrite_word()",
    "the word of the end after one right value": f"{WRITE_WORD}\ndef double(x): return 4 if x == 2 else write_word()",
    "expected values in frames": """
        import re, sys
        def double(x):
            frame = sys._getframe()
            while frame:
                for value in [*frame.f_locals.values(), *frame.f_globals.values(), *frame.f_code.co_consts]:
                    if found := re.search(r"double\\(%d\\) (?:==|-) (\\d+)" % x, str(value)):
                        return int(found[1])
                frame = frame.f_back""",
    "expected values in memory": """
        import ctypes, gc, re
        def double(x):
            for one in gc.get_objects():
                for value in list(one.values()) if type(one) is dict else one if type(one) in (list, tuple) else ():
                    if type(value) is str and (found := re.search(r"double\\(%d\\) (?:==|-) (\\d+)" % x, value)):
                        return int(found[1])""",
    "the request in the file of stdin": """
        import os, re
        def double(x):
            for fd in range(64):
                try: text = os.pread(fd, 1 << 20, 0).decode(errors="replace")
                except OSError: continue
                if found := re.search(r"double\\(%d\\) (?:==|-) (\\d+)" % x, text):
                    return int(found[1])""",
    "changed functions of json": """
        import json
        json.loads = lambda text: [0]
        json.dumps = lambda value: ""
        def double(x): return 0""",
    "changed builtins": """
        import builtins
        builtins.abs = builtins.sum = builtins.all = lambda *a: 0
        def abs(x): return 0
        def double(x): return 5""",
    "reports of its own": """
        import os
        def double(x): return 5
        for number in range(9):
            for value in (True, 0, 4):
                os.write(4, b"[%d, [%d]]\\n" % (number, value))
        def __report__(*_): pass""",
    "no reports": """
        def double(x): return 5
        def __report__(*_): pass""",
    "a report that the program runs": """
        import os
        os.write(4, b'[0, [{"type": ["exit"]}]]\\n[0, [{"x": [1]}]]\\n')
        def double(x): raise SystemExit""",
    "a trace that jumps": """
        import sys
        def double(x):
            sys._getframe(1).f_globals["double"] = None
            raise SystemExit(0)""",
    "an end in the call": """
        import os, atexit
        atexit.register(os._exit, 0)
        def double(x): os._exit(0)""",
    "tests as a text": "def double(x): return 5\ndef __getattr__(name): return True\nx = '''",
    "the memory of other processes": """
        import os, re
        def double(x):
            for pid in filter(str.isdigit, os.listdir("/proc") if os.path.exists("/proc") else ()):
                try:
                    memory = open(f"/proc/{pid}/mem", "rb", 0)
                    for line in open(f"/proc/{pid}/maps"):
                        first, last = (int(end, 16) for end in line.split()[0].split("-"))
                        memory.seek(first)
                        if found := re.search(rb"double\\(%d\\) (?:==|-) (\\d+)" % x, memory.read(last - first)):
                            return int(found[1])
                except (OSError, ValueError, OverflowError, MemoryError): pass""",
    "a report after the end": """
        import os
        def double(x): return 5
        if os.fork() == 0:
            import time; time.sleep(0.2)
            for number, value in ((0, 4), (1, 6), (0, 4.0)): os.write(4, b"[%d, [%d]]\\n" % (number, value))""",
}


@pytest.mark.parametrize("name", CHEATS)
def test_a_program_cannot_pretend_to_pass(name: str) -> None:
    for tests in (
        ["assert double(2) == 4", "assert double(3) == 6"],
        ["assert abs(double(2) - 4) < 1e-6\nassert double(3) == 6"],
    ):
        assert score(CHEATS[name], "\n".join(tests)).value == 0.0, tests
    assert score(CHEATS[name], "for x in (2, 3):\n    assert double(x) == 2 * x").value == 0.0
    assert score(CHEATS[name], answer=CALLS).value == 0.0


def test_reports_bring_the_judge_no_function_that_runs_code() -> None:
    program = f"""{WRITE_WORD}
import json
def double(x): return [{WRITE_WORD + "write_word()"!r}]
def rank(x): return x
def __value__(value): return {{"type": "exec"}} if value is rank else value
def __report__(number, *values): os.write(4, json.dumps([number, values]).encode() + b"\\n")
"""
    assert score(program, "assert max(double(3), key=rank, default=0) == 6").value == 0.0


def test_values_that_both_come_from_the_program_can_be_forged() -> None:
    program = """
real = __report__
def __report__(number, *values): real(number, *[0 for _ in values])
def double(x): return None"""
    assert score(program, "for x in (2, 3):\n    assert double(x) == 2 * x").value == 1.0, "the README says so"
    assert score(program, "assert double(2) == 4").value == 0.0


def test_an_object_that_equals_everything_still_passes() -> None:
    program = "class A:\n    def __eq__(self, other): return True\ndef double(x): return A()"
    assert score(program, "assert double(2) == 4") == Score(1.0, "correct"), "the README says so"
    assert score(program, answer=CALLS) == Score(0.0, "error"), "a call's value is JSON"


def test_a_judge_has_time_on_a_busy_machine_after_many_others() -> None:
    test = "assert same(1) == sum(1 for _ in range(15_000_000)) // 15_000_000"
    assert "15000000" in str(split_tests(test, ORDINARY)[1]), "the judge counts"
    runs = run_programs([code.Case(asserts=test).program(ORDINARY)] * 4, 60)
    assert all(run.is_complete for run in runs), runs
