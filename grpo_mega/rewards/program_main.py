"""The two processes of a case with tests in the sandbox: one runs the program, the other one runs the tests.

Each is a fresh interpreter, started with this file's text. (A program without tests runs in a fork of the sandbox.) The
tests call the program's functions through pipes, and compare the results in their own process. Results cross as the
text of Python literals. So a program can neither read the tests, nor change the comparison, nor end in their place.
Other objects stay in the program's process: the tests get a `Remote`, whose operations run there.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import ctypes
import errno
import json
import marshal
import operator
import os
import pickle
import sys
import traceback
import types
from typing import Any

OUT_OF_MEMORY, REFUSED, LOST = 71, 72, 73  # exit statuses; LOST: the tests lost the program
_PR_SET_DUMPABLE = 4
_DENIED = {errno.EPERM, errno.EACCES, errno.EROFS, errno.ENETUNREACH, errno.ENETDOWN, errno.EAGAIN}
# Builtins that are a special method of an object; the others are in `operator`.
_FORWARDED = "len iter next str repr bool hash abs int float getattr setattr"
_pipe: Any = None
_objects: dict[Any, Any] = {}  # the program's names and results, for its tests


def main() -> None:
    """Run one of the two processes. File descriptors 3 and 4 are the pipes, and 5 has the role and the texts."""
    global _pipe
    _pipe = os.fdopen(3, "rb", closefd=False)
    role, *texts = json.load(os.fdopen(5))
    os._exit(execute(globals()[role], *texts))


def execute(run: Any, *texts: str) -> int:
    """Run the text of a program or of tests like a script. Return the exit status."""
    sys.argv[:] = ["program.py"]
    sys.stdin, sys.stdout, sys.stderr = open(0), open(1, "w"), open(2, "w")  # noqa: SIM115  # the process ends
    status = 0
    try:
        run(*texts)
    except SystemExit as exit_:
        status = exit_.code if isinstance(exit_.code, int) else int(exit_.code is not None)
        if not isinstance(exit_.code, int | None):
            with contextlib.suppress(Exception):
                print(exit_.code, file=sys.stderr)  # like Python
    except MemoryError:
        return OUT_OF_MEMORY
    except BaseException as error:
        traceback.print_exception(error.with_traceback(error.__traceback__ and error.__traceback__.tb_next))
        cause = getattr(error, "reason", error)  # the cause of urllib's errors
        is_denied = type(cause).__name__ == "gaierror" or getattr(cause, "errno", None) in _DENIED
        status = REFUSED if is_denied or str(error) == "can't start new thread" else 1
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    return status


def run_program(program: str) -> dict[str, Any]:
    """Return the names of the program."""
    names: dict[str, Any] = {"__name__": "__main__", "__builtins__": builtins}
    exec(compile(program, "program.py", "exec"), names)
    return names


def serve_program(program: str) -> None:
    """Run the program, then the calls of its tests."""
    pickle.load(_pipe)  # the process of the tests is protected now
    _objects.update(run_program(program))
    _reply(list(_objects))
    while _pipe.peek(1):
        args: tuple[Any, ...] = ()
        try:
            function, args, options = pickle.load(_pipe)
            found, error = function(*args, **options), None
        except BaseException as raised:
            found, error = str(raised), type(raised).__name__
        key = len(_objects)
        _objects[key] = found
        text = found if isinstance(found, float) else repr(found)  # inf is no literal
        _reply([error, key, text, [repr(arg) if isinstance(arg, (list, dict, set)) else "" for arg in args]])


def _reply(message: Any) -> None:
    with os.fdopen(4, "w", closefd=False) as pipe:
        print(json.dumps(message), file=pipe)


def run_tests(setup: str, tests: str) -> None:
    """Run the tests with the program's names. A builtin stays, unless the tests use no other name of the program."""
    ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)  # the program has the same user
    offered = set(_ask(None))
    used = offered & {node.id for node in ast.walk(ast.parse(f"{setup}\n{tests}")) if isinstance(node, ast.Name)}
    names: dict[str, Any] = {"__name__": "__main__"}
    names |= {name: Remote(name) for name in used.difference(dir(builtins)) or used}
    exec(compile(setup, "setup.py", "exec"), names)
    # Instances of a class of the setup must be the program's.
    names |= {name: Remote(name) for name in offered if isinstance(names.get(name), type)}
    exec(compile(tests, "tests.py", "exec"), names)


class Remote:
    """An object of the program."""

    def __init__(self, key: Any) -> None:
        self.__dict__["_remote_key"] = key

    def __reduce__(self) -> Any:
        return find_object, (self.__dict__["_remote_key"],)

    def __instancecheck__(self, value: Any) -> bool:
        return bool(_call(isinstance, value, self))


def find_object(key: Any) -> Any:
    return _objects[key]


def make_function(code: bytes) -> Any:
    return types.FunctionType(marshal.loads(code), vars(builtins))


class _Pickler(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, types.FunctionType) and value.__code__.co_filename in ("setup.py", "tests.py"):
            return make_function, (marshal.dumps(value.__code__),)
        return NotImplemented


def _ask(message: Any) -> Any:
    """Send a message to the program. Return its reply."""
    with os.fdopen(4, "wb", closefd=False) as pipe:
        _Pickler(pipe).dump(message)
    if line := _pipe.readline():
        return json.loads(line)
    os._exit(LOST)


def _call(function: Any, *args: Any, **options: Any) -> Any:
    """Let the program's process call a function. Return the result, and change arguments that the function changed."""
    error, key, text, changed = _ask((function, args, options))
    if error is not None:
        kind = getattr(builtins, error, None)
        raise (kind if isinstance(kind, type) and issubclass(kind, Exception) else Exception)(ast.literal_eval(text))
    for arg, new in zip(args, changed, strict=False):
        with contextlib.suppress(ValueError, SyntaxError):
            if isinstance(arg, (list, dict, set)) and (value := ast.literal_eval(new)) != arg:
                arg.clear()
                (arg.extend if isinstance(arg, list) else arg.update)(value)
    try:
        return text if isinstance(text, float) else ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return Remote(key)


_special = {f"__{name}__": getattr(builtins, name) for name in _FORWARDED.split()}
for _name, _function in (vars(operator) | _special).items():
    if _name.startswith("__") and callable(_function):
        setattr(Remote, _name, lambda *args, _function=_function, **options: _call(_function, *args, **options))


if __name__ == "__main__":
    main()
