"""The one rule for the names of users' functions: the current folder, then the config's folder."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from grpo_mega.errors import ConfigError
from grpo_mega.user_code import check_exists, import_file, is_user_name, load_function, source_files

Write = Callable[[str, str], Path]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    """Start in the folder `here`. Return a function that writes a module whose `f` returns the module's folder."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "modules", dict(sys.modules))
    for name in ("here", "config"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "here")

    def write_module(path: str, text: str = "") -> Path:
        file = tmp_path / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{text}\ndef f(): return {path.partition('/')[0]!r}\n")
        return file

    return write_module


@pytest.mark.parametrize("name", ["mine.f", "mine.py:f", "pack.mine.f", "pack/mine.py:f"])
@pytest.mark.parametrize(
    ("folders", "found"), [(("here",), "here"), (("config",), "config"), (("here", "config"), "here")], ids=str
)
def test_the_current_folder_comes_before_the_configs(
    name: str, folders: tuple[str, ...], found: str, write: Write, tmp_path: Path
) -> None:
    for folder in folders:
        write(f"{folder}/{'pack/' if name.startswith('pack') else ''}mine.py", "")
    check_exists(name, tmp_path / "config")
    assert load_function(name, tmp_path / "config")() == found


def test_without_a_config_only_the_current_folder_is_searched(write: Write, tmp_path: Path) -> None:
    write("config/only_there.py", "")
    for name in ("only_there.f", "only_there.py:f"):
        with pytest.raises(ConfigError, match="'only_there"):
            check_exists(name, None)
        check_exists(name, tmp_path / "config")


def test_an_own_module_comes_before_an_installed_one(write: Write) -> None:
    write("here/wave.py", "")  # also in the standard library
    assert load_function("wave.f", None)() == "here"


def test_absolute_paths_and_the_users_home_are_read(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write("home/mine.py", "")
    monkeypatch.setenv("HOME", str(path.parent))
    for name in (f"{path}:f", "~/mine.py:f"):
        check_exists(name, None)
        assert load_function(name, None)() == "home"


def test_a_file_imports_the_files_beside_it(write: Write) -> None:
    write("here/deep/beside.py", "")
    write("here/deep/mine.py", "from beside import f as g\nassert g() == 'here'")
    assert load_function("deep/mine.py:f", None)() == "here"


def test_of_two_modules_the_source_file_is_the_imported_one(write: Write, tmp_path: Path) -> None:
    for folder in ("here", "config"):
        write(f"{folder}/twice.py", "")
    write("config/deep/mine.py", "from twice import f as g\nassert g() == 'here'")
    assert load_function("deep/mine.py:f", tmp_path / "config")() == "config"
    files = source_files(["deep/mine.py:f"], tmp_path / "config")
    assert files == {
        "deep/mine.py": tmp_path / "config" / "deep" / "mine.py",
        "twice.py": tmp_path / "here" / "twice.py",
    }


def test_two_files_of_one_name_are_two_modules(write: Write) -> None:
    one, other = write("one/mine.py", ""), write("other/mine.py", "")
    assert (import_file(one).f(), import_file(other).f()) == ("one", "other")
    assert import_file(one) is import_file(one)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("no_such.f", "'no_such.f': there is no module no_such to import; .* set PYTHONPATH"),
        ("no_such.py:f", "'no_such.py:f': there is no file no_such.py in .*here or .*config; check the path"),
        ("/no/such.py:f", "'/no/such.py:f': there is no file /no/such.py; check the path"),
    ],
)
def test_a_missing_module_or_file_is_named_with_the_folders(
    name: str, words: str, write: Write, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=words):
        check_exists(name, tmp_path / "config")


@pytest.mark.parametrize("name", ["mine.{}", "mine.py:{}"])
def test_what_cannot_be_imported_is_one_line_with_the_reason(name: str, write: Write) -> None:
    path = write("here/mine.py", "")
    with pytest.raises(ConfigError, match=" g; check the name"):
        load_function(name.format("g"), None)
    sys.modules.pop("mine", None)
    sys.modules.pop(f"file:{path.with_suffix('')}", None)
    path.write_text("raise ValueError('broken')")
    with pytest.raises(ConfigError, match=r"mine.* ValueError: broken"):
        load_function(name.format("f"), None)


def test_only_the_two_forms_are_names() -> None:
    assert all(map(is_user_name, ("a.f", "a.b.f", "a.py:f", "dir/a-b.py:f", "~/a.py:f")))
    assert not any(map(is_user_name, ("f", "a.py:", "a.txt:f", "a.b c", "a.py:f.g", "a/b.f")))
