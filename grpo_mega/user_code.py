"""Find a user's own function by its name: `module.function`, or `file.py:function`.

One rule for every place that takes such a name: the current folder comes first, then the folder of the config
(code_dir). A module may also be installed, or on PYTHONPATH. A file's path may be absolute, and ~ is the user's home.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import sys
from collections.abc import Callable, Iterable
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

from grpo_mega.errors import ConfigError
from grpo_mega.paths import user_path
from grpo_mega.text import nearest

FORMS = "my_package.my_module.my_function or my_file.py:my_function"
_IMPORTED = re.compile(r"(?:^|[:;])[ \t]*(?:from|import)\s+\.*\s*(?:import[\s(]+)?(\w+(?:\s*,\s*\w+)*)", re.MULTILINE)
_INSTALLED = re.compile(r"-packages$|/python3[^/]*(/lib-dynload)?$|\.zip$")  # folders of sys.path with libraries


def is_user_name(name: str) -> bool:
    """Return True if `name` has one of the two forms. The function need not exist."""
    file, separator, function = name.rpartition(":")
    if separator:
        return file.endswith(".py") and function.isidentifier()
    return "." in name and all(part.isidentifier() for part in name.split("."))


def check_exists(name: str, code_dir: Path | None) -> None:
    """Raise ConfigError if the module or file of a function does not exist. Import nothing of it."""
    module = name.rpartition(".")[0]
    if ":" in name:
        _find_file(name, code_dir)
    elif not _can_find(module, [*map(str, _folders(code_dir)), *sys.path]):
        raise ConfigError(
            f"{name!r}: there is no module {module} to import; check the name, start in its folder, move it to the"
            " config's folder, or set PYTHONPATH to its folder"
        )


def load_function(name: str, code_dir: Path | None) -> Callable[..., Any]:
    """Import the module or file of a function, and return the function. Raise ConfigError with one line.

    The current folder and code_dir become the first folders of sys.path. A file's own folder comes next.
    """
    file, separator, function_name = name.rpartition(":" if ":" in name else ".")
    path = _find_file(name, code_dir) if separator == ":" else None
    folders = [str(folder) for folder in (*_folders(code_dir), *([path.parent] if path else []))]
    sys.path[:] = [*dict.fromkeys(folders), *(folder for folder in sys.path if folder not in folders)]
    try:
        module = importlib.import_module(file) if path is None else import_file(path)
        function = getattr(module, function_name, None)
    except Exception as error:
        raise ConfigError(
            f"{name!r}: importing {file} failed with {type(error).__name__}: {error}; correct it, and what it imports"
            " must be importable from the current folder, the config's folder or PYTHONPATH"
        ) from error
    if not callable(function):
        known = [one for one, value in vars(module).items() if callable(value) and not one.startswith("_")]
        raise ConfigError(
            f"{name!r}: {file} has no function {function_name}; {nearest(function_name, known)}check the name"
        )
    return function


def source_files(names: Iterable[str], code_dir: Path | None) -> dict[str, Path]:
    """Return the files of functions or packages, and the modules that they import, also inside functions. Import
    nothing.

    A key is a path as written in a name, or relative to the folder in which a module is found, so it is the same on
    nodes with other folders. A package counts as a whole. Installed packages are left out.
    """
    shared = [*_folders(code_dir), *(Path(folder) for folder in sys.path if folder and not _INSTALLED.search(folder))]
    found: dict[str, Path] = {}
    todo: list[tuple[str, Path, str]] = []  # a module, its folder, and the start of the key
    for name in names:
        if ":" in name:
            path = _find_file(name, code_dir)
            todo.append((path.stem, path.parent, os.path.dirname(name)))
        else:
            todo += [(name.partition(".")[0], folder, "") for folder in shared]
    done = set[tuple[str, Path, str]]()
    for module, folder, start in todo:  # grows in the loop
        for file in (folder / f"{module}.py", *sorted((folder / module).rglob("*.py"))):
            key = os.path.normpath(os.path.join(start, file.relative_to(folder)))
            if key in found or not file.is_file():  # the first folder with a module has the one that is imported
                continue
            found[key] = file
            imported = " ".join(_IMPORTED.findall(file.read_text(errors="replace"))).replace(",", " ").split()
            folders = [(file.parent, os.path.dirname(key)), *((one, "") for one in shared)]
            new = dict.fromkeys((name, *one) for name in imported for one in folders)
            todo += [one for one in new if one not in done]
            done.update(new)
    return dict(sorted(found.items()))


def import_file(path: Path) -> ModuleType:
    """Import a Python file once. Other files may have the same name."""
    name = f"file:{path.with_suffix('')}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec and spec.loader
    module = sys.modules[name] = importlib.util.module_from_spec(spec)  # dataclasses look up their module here
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _folders(code_dir: Path | None) -> list[Path]:
    return list(dict.fromkeys([Path.cwd(), *([] if code_dir is None else [code_dir.absolute()])]))


def _find_file(name: str, code_dir: Path | None) -> Path:
    """Return the path of the file in `file.py:function`. Raise ConfigError if there is none."""
    file = user_path(name.rpartition(":")[0])
    for folder in _folders(code_dir):  # an absolute path replaces the folder
        if (folder / file).is_file():
            return (folder / file).absolute()
    searched = "" if file.is_absolute() else f" in {' or '.join(map(str, _folders(code_dir)))}"
    raise ConfigError(f"{name!r}: there is no file {file}{searched}; check the path")


def _can_find(module: str, path: list[str]) -> bool:
    """Return True if a module could be imported from the folders in `path`. Import nothing of it."""
    parts = module.split(".")
    for number, part in enumerate(parts):
        # Search for its last name, because without __init__.py a full name is only looked up among imported modules.
        spec = PathFinder.find_spec(part, path)
        if spec is None:
            # Another finder, for example of an editable installation, may know a top-level module.
            return number == 0 and importlib.util.find_spec(part) is not None
        if spec.submodule_search_locations is None:
            return number == len(parts) - 1
        path = list(spec.submodule_search_locations)
    return True
