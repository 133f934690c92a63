"""examples/env.sh: the interpreter that it chooses, and the packages that it installs, with fakes on the path."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Collection
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
TOOLS = "bash basename cat cksum cp dirname grep mkdir mktemp paste rm sort tee tr".split()  # noqa: SIM905
# A Python that knows its version, makes environments of itself, and records the calls of pip and of other programs.
PYTHON = """#!{bash}
case "$*" in
    *version_info*) echo {version} ;;
    "-m venv "*) mkdir -p "$3/bin" && cat "$0" > "$3/bin/python" && {chmod} +x "$3/bin/python" ;;
    "-m pip "*) echo "{version} $*" >> "{folder}/calls" ;;
    *) echo "{version} $*" >> "{folder}/programs" ;;
esac
"""


def ensure(
    folder: Path, pythons: dict[str, str], calls: str = "ensure_env dev", *, has_gpu: bool = False, **variables: str
) -> tuple[subprocess.CompletedProcess[str], list[str]]:
    """Call functions of env.sh with these interpreters, {name: version}. Return the result, and the calls of pip."""
    for name in (
        "examples/env.sh",
        ".ci/run",
        "pyproject.toml",
        *(f"tools/constraints-{one}.txt" for one in ("one", "two")),
        *(f"grpo_mega/rollout/sglang/requirements-cpu-{one}.txt" for one in ("one", "two")),
    ):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, folder / name)
    (folder / "bin").mkdir()
    found = {name: shutil.which(name) for name in (*TOOLS, "chmod")}
    for name in TOOLS:
        (folder / "bin" / name).symlink_to(found[name] or "missing")
    fakes = {
        name: PYTHON.format(bash=found["bash"], chmod=found["chmod"], version=version, folder=folder)
        for name, version in pythons.items()
    }
    fakes |= {"nvidia-smi": f"#!{found['bash']}\n"} if has_gpu else {}
    for name, text in fakes.items():
        path = folder / (name if "/" in name else f"bin/{name}")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)
    result = subprocess.run(
        ["bash", "-c", f"set -euo pipefail; source {folder}/examples/env.sh; {calls}"],
        env={"PATH": str(folder / "bin"), "HOME": str(folder / "home")} | variables,
        capture_output=True,
        text=True,
    )
    return result, (folder / "calls").read_text().splitlines() if (folder / "calls").exists() else []


ALL = {"python3": "3.12", "python3.11": "3.11", "python3.12": "3.12", "python3.13": "3.13"}


def without(names: Collection[str]) -> dict[str, str]:
    return {name: version for name, version in ALL.items() if name not in names}


@pytest.mark.parametrize(
    ("pythons", "has_gpu", "version", "says"),
    [
        (ALL, False, "3.11", False),
        (ALL, True, "3.12", False),
        ({"python3": "3.11"}, False, "3.11", False),
        ({"python3": "3.11"}, True, "3.11", False),
        (without(["python3.11"]), False, "3.12", True),
        ({"python3.13": "3.13", "python3": "3.14"}, False, "3.13", True),
        ({"python3.13": "3.13", "python3": "3.10"}, True, "3.13", False),
        # A shim of pyenv is there for every version that is installed, and fails for one that is not chosen.
        (ALL | {"python3.11": ""}, False, "3.12", True),
        (ALL | {"python3.12": "", "python3": "3.13"}, True, "3.13", False),
    ],
)
def test_cpus_prefer_python_3_11_and_gpus_3_12(
    pythons: dict[str, str], has_gpu: bool, version: str, says: bool, tmp_path: Path
) -> None:
    result, calls = ensure(tmp_path, pythons, has_gpu=has_gpu)
    assert result.returncode == 0, result.stderr
    assert calls and all(call.startswith(f"{version} ") for call in calls)
    assert all(f"/tools/constraints-{'one' if version == '3.11' else 'two'}.txt " in call for call in calls)
    assert ("downloading 3 GB" in result.stderr) == says
    if says:
        assert result.stderr.index("3 GB") < result.stderr.index("installing the project"), result.stderr


def test_a_chosen_interpreter_is_taken_and_its_size_said(tmp_path: Path) -> None:
    result, calls = ensure(tmp_path, ALL, PYTHON="python3.13")
    assert calls[0].startswith("3.13 ") and "3 GB" in result.stderr


@pytest.mark.parametrize(
    ("pythons", "variables", "problem"),
    [
        ({"python3": "3.10", "python3.14": "3.14"}, {}, "needs Python 3.11, 3.12 or 3.13, found none; set PYTHON"),
        (ALL, {"PYTHON": "python3.9"}, "PYTHON=python3.9: must be Python 3.11, 3.12 or 3.13, which SGLang has wheels"),
    ],
)
def test_an_unsupported_python_is_one_line_and_makes_nothing(
    pythons: dict[str, str], variables: dict[str, str], problem: str, tmp_path: Path
) -> None:
    result, calls = ensure(tmp_path, pythons, **variables)
    assert result.returncode == 1 and not calls and not (tmp_path / ".venv").exists()
    [line] = result.stderr.splitlines()
    assert f": error: {problem}" in line


@pytest.mark.parametrize(
    ("python", "name", "sglang"), [("3.11", "one", "0.5.21"), ("3.12", "two", "0.5.23"), ("3.13", "two", "0.5.23")]
)
def test_a_second_call_installs_nothing_and_another_folder_is_kept_apart(
    python: str, name: str, sglang: str, tmp_path: Path
) -> None:
    twice = "ensure_env dev; ensure_sglang; ensure_env; ensure_sglang"
    venv = f"{tmp_path}/.venv-x"
    result, calls = ensure(tmp_path, ALL, twice, GRPO_MEGA_VENV=venv, PYTHON=f"python{python}")
    assert result.returncode == 0, result.stderr
    assert len(calls) == 3 and (tmp_path / ".venv-x/.installed-sglang").exists()
    assert not (tmp_path / ".venv").exists()
    assert f"--editable {tmp_path}[dev]" in calls[0]
    assert f"--constraint {tmp_path}/tools/constraints-{name}.txt" in calls[0]
    assert calls[1].endswith(f"/rollout/sglang/requirements-cpu-{name}.txt")
    assert calls[2].endswith(f" --no-deps sglang=={sglang}")


def test_constraints_of_the_user_replace_the_pinned_versions(tmp_path: Path) -> None:
    _, calls = ensure(tmp_path, ALL, CONSTRAINTS="/dev/null")
    assert "--constraint /dev/null --editable" in calls[0]


def test_set_two_has_an_environment_of_its_own_and_continues_set_one(tmp_path: Path) -> None:
    quickstart = tmp_path / "examples/quickstart.sh"
    quickstart.parent.mkdir()
    quickstart.write_text(f'#!{shutil.which("bash")}\necho "$VENV_PYTHON $*" >> {tmp_path}/programs\n')
    quickstart.chmod(0o755)
    result, calls = ensure(tmp_path, ALL, f"export VENV_PYTHON; bash {tmp_path}/.ci/run second")
    assert result.returncode == 0, result.stderr
    assert [call.partition(" ")[0] for call in calls] == ["3.11", "3.12", "3.12", "3.12"]
    assert (tmp_path / ".venv/.installed").exists() and (tmp_path / ".venv-two/.installed-sglang").exists()
    programs = (tmp_path / "programs").read_text().splitlines()
    words = ("/kinds one", "installed_set", "/kinds two one", "/kinds back two", "tests/sglang", "--short")
    places = [next(i for i, line in enumerate(programs) if word in line) for word in words]
    assert places == sorted(places) and len(set(places)) == len(places), programs
    firsts = [line for line in programs if line.startswith("3.11 ")]
    assert firsts == [programs[places[0]], programs[places[3]]], programs


def test_a_machine_without_python_3_12_says_that_set_two_was_not_run(tmp_path: Path) -> None:
    result, calls = ensure(tmp_path, {"python3": "3.11", "python3.13": "3.13"}, f"bash {tmp_path}/.ci/run second")
    assert result.returncode == 0, result.stderr
    assert "no Python 3.12" in result.stdout and result.stdout.count("\n") == 1 and len(calls) == 1


def test_a_python_3_12_of_pyenv_is_found_behind_a_shim_that_fails(tmp_path: Path) -> None:
    pythons = {"python3": "3.11", "python3.12": "", "home/.pyenv/versions/3.12.7/bin/python": "3.12"}
    (tmp_path / "examples").mkdir()
    (tmp_path / "examples/quickstart.sh").symlink_to("/bin/true")
    result, calls = ensure(tmp_path, pythons, f"bash {tmp_path}/.ci/run second")
    assert result.returncode == 0, result.stderr
    assert [call.partition(" ")[0] for call in calls] == ["3.11", "3.12", "3.12", "3.12"]
