"""Split the tests of a program in two, so that they are decided outside the program's interpreter.

    assert abs(area(2) - 12.56) < 0.01

The first text runs after the program, in its interpreter, and reports the smallest parts that need the program:
`__report__(0, __value__(area(2)))`. The second text, the judge, runs in another process after the program has ended,
and computes the rest from the reported values: `abs(value - 12.56) < 0.01`. So a program that changes `abs` changes
nothing, and one that ends early or writes reports of its own has to know the expected value.

If a reported value is no data, the whole text runs in one interpreter instead. Loop variables and other names of the
tests are values in the program's interpreter. Conditions with `or`, asserts in `with` and `try`, and calls such as
`self.assertEqual(f(1), 2)` stay there whole.
"""

from __future__ import annotations

import ast
import builtins
import copy
from collections.abc import Iterable, Iterator
from typing import Any

_PURE = {"math", "cmath", "fractions", "collections", "itertools", "functools", "operator", "string", "statistics"}
_IMPURE = {"eval", "exec", "globals", "locals", "vars", "dir", "id", "hash", "input", "open", "print", "exit", "quit"}
_IMPURE |= {"breakpoint", "super", "object", "__import__", "setattr", "delattr", "next"}
_BUILT_IN = set(dir(builtins)) - _IMPURE
_STARRED = {"abs", "all", "any", "max", "min", "pow", "round", "sum"}  # changed by `from numpy import *`
_SPLIT = ast.Compare | ast.Call | ast.List | ast.Tuple | ast.BinOp | ast.UnaryOp | ast.Starred | ast.keyword
_KEPT = ast.Constant | ast.List | ast.Set | ast.Dict | ast.Compare | ast.Not  # not for the program to know
_COMPREHENSIONS = ast.ListComp | ast.SetComp | ast.GeneratorExp | ast.DictComp
_JUDGE = """
_counts = dict.fromkeys(_checks, 0)
for _number, _values in __reports__():
    assert _checks[_number](*_values)
    _counts[_number] += 1
assert any(_counts.values()) and all(_counts[_number] >= _least for _number, _least in _required)
"""
_CALL = """
import json as _json
_function = getattr(Solution(), {name!r}) if "Solution" in globals() else {name}
__report__(0, _json.loads(_json.dumps(_function(*_json.loads({arguments!r})))))
"""
_CALL_JUDGE = """
import json
_expected = json.loads({expected!r})
_checks, _required = {{0: lambda found: found == _expected or [found] == _expected}}, [(0, 1)]
"""


def split_call(name: str, arguments: str, expected: str) -> tuple[str, str]:
    """Return both texts for a call with JSON values. The value must be `expected`, or its only item."""
    return _CALL.format(name=name, arguments=arguments), _CALL_JUDGE.format(expected=expected) + _JUDGE


def split_tests(tests: str, program: str) -> tuple[str, str] | None:
    """Return the text for the program's interpreter and the text of the judge; None if no assert can be split.

    The judge wants a report, one of each assert that always runs, and one for each item in a loop over known items.
    """
    if "AssertionError" in tests or "expectedFailure" in tests:
        return None  # the error of an assert may be expected
    try:
        splitter = _Splitter(tree := ast.parse(tests), ast.parse(program))
        inside = splitter.visit(tree)
        required = ", ".join(f"({number}, {least})" for number, least in splitter.required(inside.body, {}, "1"))
        checks = ", ".join(f"{number}: {check}" for number, check in enumerate(splitter.checks))
        judge = f"_checks = {{{checks}}}\n_required = [{required}]\n"
        used = {node.id for node in ast.walk(ast.parse(judge)) if isinstance(node, ast.Name)}
        imports = (ast.unparse(node) for node in splitter.imports if used & set(_imported(node)))
        text = ast.unparse(ast.fix_missing_locations(inside))
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # it is no Python, or too deep for `ast`
        return None
    return (text, "\n".join([*imports, judge, _JUDGE])) if checks else None


class _Splitter(ast.NodeTransformer):
    """Replace asserts by reports. `checks` has the text of a function of its values for each report."""

    def __init__(self, tests: ast.Module, program: ast.Module) -> None:
        nodes = list(ast.walk(tests))
        own, stored = set(_stored(program.body)), set(_stored(nodes))
        imports = [node for node in nodes if isinstance(node, ast.ImportFrom | ast.Import)]
        imports += [node for node in program.body if isinstance(node, ast.Import)]
        self.imports = [node for node in imports if _is_pure(node) and own.isdisjoint(_imported(node))]
        names = {name for node in self.imports for name in _imported(node)}
        self.known = (_BUILT_IN | names) - stored  # names that mean the same in the judge
        if any(isinstance(node, ast.ImportFrom) and node.names[0].name == "*" for node in program.body):
            self.known -= _STARRED
        if (own - _BUILT_IN).isdisjoint(node.id for node in nodes if isinstance(node, ast.Name)):
            self.known -= own  # its own built-in function is tested, and is no way to change a comparison
        self.checks: list[str] = []

    def visit_Assert(self, node: ast.Assert) -> ast.stmt | list[ast.stmt]:
        return self._reports(node.test) if self._needs_program(node.test) else node

    def visit_Try(self, node: ast.stmt) -> ast.stmt:
        return node  # it may catch the error of an assert

    visit_TryStar = visit_With = visit_AsyncWith = visit_Try

    def required(
        self, body: list[ast.stmt], functions: dict[str, list[ast.stmt]], times: str
    ) -> Iterator[tuple[int, str]]:
        """Yield the reports that always come, and how often at least: the text of a number."""
        for node in body:
            parts = list(ast.walk(node))
            if isinstance(node, ast.ClassDef | ast.AsyncFunctionDef):
                continue
            if isinstance(node, ast.FunctionDef):
                if not node.decorator_list and not any(isinstance(part, ast.Yield | ast.YieldFrom) for part in parts):
                    functions[node.name] = node.body
                continue
            in_loop = () if isinstance(node, ast.For | ast.While) else (ast.Break, ast.Continue)
            if any(isinstance(part, (ast.Return, ast.Raise, *in_loop)) for part in parts):
                return
            call = node.value if isinstance(node, ast.Expr) else None
            if isinstance(call, ast.Call) and isinstance(call.func, ast.Name):
                if call.func.id == "__report__":
                    yield call.args[0].value, times  # type: ignore[attr-defined]
                elif call.func.id in functions:
                    yield from self.required(functions.pop(call.func.id), functions, times)
            elif isinstance(node, ast.For) and not self._needs_program(node.iter):
                has_break = any(isinstance(part, ast.Break) for part in parts)
                num_items = f"{times} * len(list({ast.unparse(node.iter)}))"
                yield from () if has_break else self.required(node.body, functions, num_items)

    def _reports(self, test: ast.expr) -> list[ast.stmt]:
        """Return the reports of an assert, one for each side of an `and`."""
        if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And):
            return [report for value in test.values for report in self._reports(value)]
        values: list[ast.expr] = []
        check = self._split(test, values)
        if isinstance(check, ast.Name) or ast.unparse(check) == "not _v0":
            values = [ast.UnaryOp(ast.Not(), ast.UnaryOp(ast.Not(), values[0]))]  # any object is true or false
        self.checks.append(f"lambda {', '.join(f'_v{index}' for index in range(len(values)))}: {ast.unparse(check)}")
        number = ast.Constant(len(self.checks) - 1)
        return [ast.Expr(ast.Call(ast.Name("__report__", ast.Load()), [number, *values], []))]

    def _split(self, node: ast.AST, values: list[ast.expr], computes: bool = False) -> ast.AST:
        """Return the expression of the judge, and append the parts for the program's interpreter to `values`.

        `computes`: whether the judge computes with them, and the program must not change them in the meantime.
        """
        if not self._needs_program(node):
            return node
        first, new, fields = len(values), node, {}
        is_not = isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not)
        inner = computes or not (is_not or isinstance(node, ast.Compare | ast.List | ast.Tuple))
        make: Any = type(node)
        if isinstance(node, _COMPREHENSIONS) and not self._needs_program(_with_first(node, ast.Constant(0))):
            new = _with_first(node, self._split(node.generators[0].iter, values, True))
        elif isinstance(node, _SPLIT) and not self._is_of_program(node):
            for name, value in ast.iter_fields(node):
                parts = [self._split(one, values, inner) for one in (value if isinstance(value, list) else [value])]
                fields[name] = parts if isinstance(value, list) else parts[0]
            new = make(**fields)
        if isinstance(node, ast.Starred | ast.keyword) or (new is not node and _keeps(new)):
            return new
        call = ast.Call(ast.Name("__value__", ast.Load()), [node], [])  # type: ignore[list-item]
        values[first:] = [call if computes else node]  # type: ignore[list-item]
        return ast.Name(f"_v{first}", ast.Load())

    def _is_of_program(self, node: ast.AST) -> bool:
        """Return whether only the program's interpreter can compute it: its functions, and `is`, except `is None`."""
        if isinstance(node, ast.Compare) and any(isinstance(op, ast.Is | ast.IsNot) for op in node.ops):
            sides = (node.left, *node.comparators)
            return not any(isinstance(one, ast.Constant) and isinstance(one.value, bool | None) for one in sides)
        return isinstance(node, ast.Call) and self._needs_program(node.func)

    def _needs_program(self, node: object) -> bool:
        return isinstance(node, ast.AST) and any(name not in self.known for name in _free(node))


def _free(node: ast.AST) -> Iterator[str]:
    """Yield the names that an expression takes from outside, and "" for one that assigns or waits."""
    if isinstance(node, ast.Name):
        yield node.id
        return
    if isinstance(node, ast.NamedExpr | ast.Await | ast.Yield | ast.YieldFrom) or getattr(node, "is_async", False):
        yield ""
    bound: set[str] = set()
    if isinstance(node, ast.Lambda):
        for default in (*node.args.defaults, *filter(None, node.args.kw_defaults)):
            yield from _free(default)
        bound = {part.arg for part in ast.walk(node.args) if isinstance(part, ast.arg)}
    elif isinstance(node, _COMPREHENSIONS):
        yield from _free(node.generators[0].iter)
        bound = set(_stored(part for one in node.generators for part in ast.walk(one.target)))
    yield from (name for child in ast.iter_child_nodes(node) for name in _free(child) if name not in bound)


def _with_first(node: Any, values: ast.AST) -> Any:
    """Return a comprehension over other values."""
    new = copy.deepcopy(node)
    new.generators[0].iter = values
    return new


def _keeps(node: ast.AST) -> bool:
    return any(isinstance(part, _KEPT) for part in ast.walk(node))


def _stored(nodes: Iterable[ast.AST]) -> Iterator[str]:
    """Yield the names that nodes, or assignments among them, give a value to, except by imports."""
    for node in nodes:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.ExceptHandler):
            yield node.name or ""
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            yield from _stored(part for target in targets for part in ast.walk(target))
        elif isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            yield node.id


def _imported(node: ast.Import | ast.ImportFrom) -> Iterator[str]:
    for alias in node.names:
        yield alias.asname or alias.name.partition(".")[0]


def _is_pure(node: ast.Import | ast.ImportFrom) -> bool:
    names = [node.module or ""] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]
    return {name.partition(".")[0] for name in names} <= _PURE and "*" not in {alias.name for alias in node.names}
