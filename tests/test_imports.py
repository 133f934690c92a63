"""Allowed imports between packages: the direction of every import, read from the source, including imports in
functions.
"""

import ast
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "grpo_mega"

# A module or package below grpo_mega or grpo_mega.cli imports only names that are earlier in this list.
# The library runs on every rank. The clients run only in commands. __init__ starts both.
LIBRARY = """
errors text yaml_text processes workers http_client types paths user_code config weights batching rewards
data algorithm tracking
distributed checkpoint_io rollout megatron trainer train
"""
CLIENTS = """
cli.checks cli.planner cli.report cli.commands cli.__init__ cli.__main__ grpo
"""
ORDER = LIBRARY + CLIENTS + "__init__"

# Third-party packages that only one folder of the package may import.
CONFINED = {"megatron": ("megatron/",), "sglang": ("rollout/sglang/",)}

# Modules that must start quickly or only do arithmetic -> packages that they never import.
WITHOUT = {
    "errors": {"torch", "transformers", "numpy", "pydantic"},
    "processes": {"torch", "transformers", "numpy", "pydantic"},
    "workers": {"torch", "transformers", "numpy", "pydantic"},
    "text": {"torch", "transformers", "numpy", "pydantic"},
    "paths": {"torch", "transformers", "numpy", "pydantic"},
    "yaml_text": {"torch", "transformers", "numpy", "pydantic"},
    "types": {"torch", "transformers", "numpy", "pydantic"},
    "config": {"torch", "transformers", "numpy"},
    "cli.checks": {"torch", "transformers"},
    "distributed.kernels": {"torch", "transformers"},
    "distributed.versions": {"torch", "transformers"},
    "rollout.sglang.requirements": {"torch", "transformers"},
    "weights.architecture": {"torch", "transformers"},
    "checkpoint_io.hf_files": {"torch", "transformers"},
    "checkpoint_io.checkpoints": {"torch", "numpy", "pydantic"},
    "cli.commands.eval": {"torch", "transformers", "numpy"},
    "cli.commands.check": {"torch", "transformers", "numpy"},
    "cli.commands.convert": {"torch", "transformers", "numpy"},
    "cli.commands.verify": {"torch", "transformers", "numpy"},
    "cli.commands.train": {"torch", "transformers", "numpy"},
    "distributed.launch": {"torch", "transformers", "numpy", "pydantic"},
    "cli.__init__": {"torch", "transformers", "numpy"},
    "cli.planner": {"torch"},
    "cli.report": {"torch", "transformers"},
    "distributed.environment": {"torch"},
    "data": {"torch"},
    "tracking": {"torch"},
    "rewards": {"torch"},
    "cli.commands.trl": {"torch", "transformers", "numpy"},
}
# Functions of these modules import heavy packages themselves, most of them on ranks or in child processes.
WITH_RANKS = ("cli.commands.eval", "cli.commands.check", "cli.commands.convert", "tracking.writers")


@dataclass(frozen=True)
class Import:
    path: Path
    line: int
    name: str  # full dotted name
    is_lazy: bool  # the import is inside a function
    is_for_types: bool  # the import is under TYPE_CHECKING

    def __str__(self) -> str:
        return f"{self.path.relative_to(ROOT)}:{self.line} imports {self.name}"

    @property
    def importer(self) -> str:
        """Return the name in ORDER of the module or package that contains the file."""
        return in_order(self.module)

    @property
    def module(self) -> str:
        """Return the importing module as a dotted name below grpo_mega."""
        return ".".join(self.path.relative_to(PACKAGE).with_suffix("").parts)

    @property
    def ours(self) -> str | None:
        """Return the name in ORDER of the imported module or package, or None if it is not ours."""
        top, _, name = self.name.partition(".")
        return in_order(name) if top == "grpo_mega" and name else None

    def is_of(self, module: str) -> bool:
        return f"{self.name}.".startswith(f"{module}.")


def in_order(module: str) -> str:
    """Return the name in ORDER of a module, given as a dotted name below grpo_mega."""
    top, *rest = module.split(".")
    if top != "cli":
        return top
    name = f"cli.{rest[0]}" if rest else "cli.__init__"
    return name if name in CLIENTS.split() else "cli.__init__"  # a function of cli/__init__.py


def imports_of(path: Path) -> Iterator[Import]:
    yield from _walk(ast.parse(path.read_text(encoding="utf-8")), path, is_lazy=False, is_for_types=False)


def _walk(node: ast.AST, path: Path, *, is_lazy: bool, is_for_types: bool) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        for name in _imported_names(child, path):
            yield Import(path, child.lineno, name, is_lazy, is_for_types)  # type: ignore[attr-defined]
        is_type_block = isinstance(child, ast.If) and ast.unparse(child.test).endswith("TYPE_CHECKING")
        is_function = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef)
        yield from _walk(child, path, is_lazy=is_lazy or is_function, is_for_types=is_for_types or is_type_block)


def _imported_names(node: ast.AST, path: Path) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if not isinstance(node, ast.ImportFrom):
        return []
    module = node.module or ""
    if node.level:
        parents = path.relative_to(ROOT).parts[: -node.level]
        module = ".".join([*parents, module] if module else parents)
    # In `from grpo_mega import config` and `from torch import distributed`, the imported name is a module.
    return [f"{module}.{alias.name}" for alias in node.names]


@cache
def all_imports(*folders: str) -> list[Import]:
    paths = [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]
    return [found for path in paths for found in imports_of(path)]


def test_every_module_has_a_place_in_the_order() -> None:
    names = {in_order(".".join(path.relative_to(PACKAGE).with_suffix("").parts)) for path in PACKAGE.rglob("*.py")}
    assert names == set(ORDER.split())


def test_packages_import_only_earlier_packages_in_the_order() -> None:
    place = {name: i for i, name in enumerate(ORDER.split())}
    wrong = [found for found in all_imports("grpo_mega") if found.ours and place[found.ours] > place[found.importer]]
    assert not wrong, "\n".join(map(str, wrong))


def test_the_library_never_imports_a_client() -> None:
    """Not in a function, and not for types. It starts clients only as processes, by name."""
    wrong = [
        found
        for found in all_imports("grpo_mega")
        if found.importer in LIBRARY.split() and found.ours in CLIENTS.split()
    ]
    assert not wrong, "\n".join(map(str, wrong))
    files = [path for path in PACKAGE.rglob("*.py") if "cli" not in path.parts and path != PACKAGE / "__init__.py"]
    texts = [path.read_text(encoding="utf-8") for path in files]
    named = Counter(name for text in texts for name in re.findall(r"grpo_mega\.cli\b[.\w]*", text))
    assert named == {"grpo_mega.cli": 2}, "the launcher starts `grpo_mega.cli rank`, and grpo.py imports it"


@pytest.mark.parametrize("module", CONFINED)
def test_megatron_and_sglang_are_imported_in_only_one_place(module: str) -> None:
    wrong = [
        found
        for found in all_imports("grpo_mega", "tools", "examples")
        if found.is_of(module) and not any(found.path.is_relative_to(PACKAGE / place) for place in CONFINED[module])
    ]
    assert not wrong, "\n".join(map(str, wrong))


def test_emulated_kernels_are_not_used_outside_the_tests() -> None:
    """They are neither imported nor mentioned, so a run cannot enable them."""
    files = [path for folder in ("grpo_mega", "tools", "examples", "slurm") for path in (ROOT / folder).rglob("*")]
    texts = {
        path: path.read_text(encoding="utf-8") for path in files if path.suffix in (".py", ".sh", ".yaml", ".toml")
    }
    assert len(texts) > 200
    named = {path.name for path, text in texts.items() if re.search("emulated_te|te_on_cpu", text, re.IGNORECASE)}
    assert named == {"first_day.sh"}, "only first_day.sh uses them, with --cpu"


@pytest.mark.parametrize("importer", WITHOUT)
def test_light_modules_import_nothing_heavy(importer: str) -> None:
    path = PACKAGE / importer.replace(".", "/")
    assert path.is_dir() or path.with_suffix(".py").is_file()
    wrong = [
        found
        for found in all_imports("grpo_mega")
        if f"{found.module}.".startswith(f"{importer}.")
        and not found.is_for_types
        and not (found.is_lazy and found.module in WITH_RANKS)
        and any(found.is_of(module) for module in WITHOUT[importer])
    ]
    assert not wrong, "\n".join(map(str, wrong))


def test_the_command_line_imports_nothing_heavy_until_a_command_runs() -> None:
    eager = [
        found
        for found in all_imports("grpo_mega")
        if found.importer == "cli.__init__" and not found.is_lazy and not found.is_for_types
    ]
    assert {found.ours for found in eager if found.ours} == {"text", "errors", "cli.commands"}


def test_the_planner_never_communicates_with_other_ranks() -> None:
    planner = [found for found in all_imports("grpo_mega") if found.importer == "cli.planner"]
    wrong = [found for found in planner if found.is_of("torch.distributed")]
    assert not wrong, "\n".join(map(str, wrong))


def test_the_reader_of_imports_detects_every_form(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{__name__}.ROOT", tmp_path)
    path = tmp_path / "grpo_mega/trainer/a.py"
    path.parent.mkdir(parents=True)
    path.write_text(
        "import torch.distributed as dist\n"
        "from grpo_mega import config\n"
        "from .b import c\n"
        "from ..types import Prompt\n"
        "if TYPE_CHECKING:\n    from torch import Tensor\n"
        "def f():\n    from torch import distributed\n"
    )
    found = list(imports_of(path))
    assert [one.name for one in found] == [
        "torch.distributed",
        "grpo_mega.config",
        "grpo_mega.trainer.b.c",
        "grpo_mega.types.Prompt",
        "torch.Tensor",
        "torch.distributed",
    ]
    assert [one.is_lazy for one in found] == [False] * 5 + [True]
    assert [one.is_for_types for one in found] == [False] * 4 + [True, False]
