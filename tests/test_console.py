"""No text of a model, of data or of an error controls the terminal, however it is printed."""

from __future__ import annotations

import ast
import io
import json
import os
import pty
import subprocess
import sys
import termios
import unicodedata
from pathlib import Path

import pytest

from grpo_mega import cli
from grpo_mega.text import SafeStream, printable

ROOT = Path(__file__).resolve().parents[1]
HOSTILE = (
    "red \x1b[31m, title \x1b]0;owned\x07, link \x1b]8;;http://x\x1b\\a\x1b]8;;\x1b\\, clear \x1b[2J\x1bc, "
    "8 bits \x9b2J\x9d0;t\x9c, "
    "back \b\b\x7f, over\rwritten, nul \0, isolates \u2066\u2067\u2068x\u2069, marks \u200e\u200f\u061c, "
    "overrides \u202a\u202b\u202c\u202d\u202eredro, lines \u2028\u2029\x85\x0b\x0c\x1c\x1d\x1e, "
    "[bold]markup[/bold] [/] :smile:, tab\t, é漢🙂, end"
)
OTHERWISE_FILTERED = {  # scripts whose __main__ block does not install the filter
    "grpo_mega/cli/__main__.py": "main installs it",
    "grpo_mega/grpo.py": "the command line's main installs it",
    "grpo_mega/rollout/sglang/server_main.py": "writes to the server's log file alone",
    "grpo_mega/cli/checks/render_template.py": "prints nothing, and imports nothing of the package",
    "grpo_mega/rewards/sandbox_main.py": "runs a program whose output goes to a pipe, not to a terminal",
    "tools/benchmarks/turns/responses.py": "prints figures, and imports the package of another checkout",
    "tools/check_node.py": "prints versions and figures of a node, and imports Python's own modules alone",
    **dict.fromkeys(
        (
            f"tools/{name}.py"
            for name in ("convert_hf_to_mcore", "convert_mcore_to_hf", "inspect_checkpoint", "verify_checkpoint")
        ),
        "run_script installs it",
    ),
}
KEPT = "redro, lines", "[bold]markup[/bold] [/] :smile:, tab", ", é漢🙂, end"


def steering(text: str) -> set[str]:
    """Return the characters in text that control a terminal, by Unicode's tables."""
    bidi = {"LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI"}
    marks = {"\N{LEFT-TO-RIGHT MARK}", "\N{RIGHT-TO-LEFT MARK}", "\N{ARABIC LETTER MARK}"}
    return {
        c
        for c in text
        if c not in "\n\t"
        and (unicodedata.category(c) in ("Cc", "Zl", "Zp") or unicodedata.bidirectional(c) in bidi or c in marks)
    }


def test_exactly_the_characters_that_control_a_terminal_are_escaped() -> None:
    for number in range(sys.maxunicode + 1):
        character = chr(number)
        assert (printable(character) != character) == bool(steering(character)), hex(number)
    assert len(steering(HOSTILE)) > 25 and not steering(printable(HOSTILE))
    assert printable("a\x1b[31mb\x1b[0;1mc\r\nd\re \x1b[2J") == "abc\nd\\re \\x1b[2J"
    assert printable("\u202e\ud800") == "\\u202e\ud800"


PROGRAM = """
import logging, sys, threading, time, warnings
from grpo_mega import errors
from grpo_mega.tracking import progress
from grpo_mega.tracking.writers import ConsoleWriter
from grpo_mega.text import filter_output, get_console
filter_output(); filter_output()
text = {text!r}
writer = ConsoleWriter(get_console(), 3)

def say():
    print("printed", text, flush=True)
    sys.stdout.writelines(["lines ", text, "\\n"])
    logging.error("logged %s", text)
    warnings.warn("warned " + text)
    writer.write_message("message " + text, level="warning")
    thread = threading.Thread(target=lambda: 1 / 0, name="thread " + text)
    thread.start(); thread.join()

say()
progress.SECONDS_BETWEEN_LINES = 0.0
with progress.progress(3, "bar " + text) as bar:
    bar.advance()
    say()
    time.sleep(0.3)
from tqdm import tqdm
for _ in tqdm(range(3), desc="tqdm " + text): pass
raise errors.UserError("raised " + text)
"""


def on_a_terminal(program: list[str]) -> str:
    """Return the output of a program on a terminal."""
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (50, 4000))
    environment = {"PATH": os.environ["PATH"], "TERM": "xterm-256color", "COLUMNS": "4000", "PYTHONIOENCODING": "utf-8"}
    environment |= {"PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(program, stdin=theirs, stdout=theirs, stderr=theirs, env=environment)
    os.close(theirs)
    pieces = []
    try:
        while piece := os.read(ours, 65536):
            pieces.append(piece)
    except OSError:  # the terminal was closed
        pass
    process.wait()
    os.close(ours)
    return b"".join(pieces).decode().replace("\r\n", "\n")


def test_on_a_terminal_no_printed_text_controls_it() -> None:
    output = on_a_terminal([sys.executable, "-c", PROGRAM.format(text=HOSTILE)])
    for way, times in {
        "printed": 2,
        "lines": 2,
        "logged": 2,
        "warned": 1,
        "message": 2,
        "bar": 1,
        "tqdm": 1,
        "raised": 1,
    }.items():
        assert output.count(f"{way} red ") >= times, (way, output)
    for part in ("\x1b]", "\x1bc", "\x1b[2J", "\x1b[31m", "\b", "\0", "\x07", "\x7f"):
        assert part not in output, repr(part)
    # Only rich's styles and cursor moves, and tqdm's carriage returns, are left.
    assert steering(output) <= {"\x1b", "\r"}
    assert "over\rwritten" not in output and "\\x1b]0;owned\\x07" in output
    assert all(part in output for part in KEPT)
    assert "\x1b[33mmessage" in output and "\x1b[2K" in output  # the project's styles and bars are kept


def test_no_control_character_is_written_into_a_file() -> None:
    command = [sys.executable, "-c", PROGRAM.format(text=HOSTILE)]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, cwd=ROOT)
    output = done.stdout.decode()
    assert steering(output) == {"\r"} and "bar red " in output  # tqdm writes it
    assert all(f"{way} red " in output for way in ("printed", "logged", "warned", "message", "tqdm", "raised"))


def test_errors_of_the_command_line_are_filtered(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["train", f"{HOSTILE.replace(chr(0), '')[:200]}.yaml"]) == 2
    shown = capsys.readouterr().err
    assert shown.startswith("grpo-mega: error: ") and not steering(shown)
    assert cli.main([HOSTILE]) == 2
    assert not steering(capsys.readouterr().err)


def test_a_safe_stream_keeps_the_methods_of_its_stream() -> None:
    inner = io.StringIO()
    stream = SafeStream(SafeStream(inner))  # type: ignore[arg-type]
    assert stream.write("a\x1b") == 2 and inner.getvalue() == "a\\x1b"
    assert stream.rich_proxied_file is inner and not stream.isatty()


def main_blocks(path: Path) -> list[list[ast.stmt]]:
    """Return the bodies of `if __name__ == "__main__"` blocks in a file."""
    blocks = [node for node in ast.parse(path.read_text(encoding="utf-8")).body if isinstance(node, ast.If)]
    return [node.body for node in blocks if ast.unparse(node.test) == "__name__ == '__main__'"]


def test_every_script_filters_its_output_first() -> None:
    paths = [
        path for folder in ("grpo_mega", "slurm", "tools", "examples") for path in sorted((ROOT / folder).rglob("*.py"))
    ]
    scripts = {path.relative_to(ROOT).as_posix(): blocks[-1] for path in paths if (blocks := main_blocks(path))}
    filters = ("filter_output()", "harness.start(")  # the harness of the benchmarks installs the filter, too
    unfiltered = {name for name, body in scripts.items() if not ast.unparse(body[0]).startswith(filters)}
    assert len(scripts) > 30 and unfiltered == set(OTHERWISE_FILTERED)


def output_of(*command: str) -> str:
    done = subprocess.run(
        [sys.executable, *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        cwd=ROOT,
        env=os.environ,
        check=False,
    )
    assert done.returncode != 0
    return done.stdout.decode()


def test_scripts_filter_the_names_of_refused_files(tmp_path: Path) -> None:
    in_path = tmp_path / HOSTILE.replace("\0", "").replace("/", "")[:60]
    outputs = [
        output_of("slurm/prepare.py", str(in_path), "--world-size=1", "--ranks-per-node=1", "--disk-gbps=1"),
        output_of("tools/inspect_checkpoint.py", str(in_path)),
        output_of("tools/convert_hf_to_mcore.py", str(in_path), str(tmp_path / "out")),
        output_of("tools/benchmarks/weight_sync", "--model", str(in_path)),
        output_of("tools/conformance/check.py", "--only", HOSTILE.replace("\0", "")),
    ]
    for output in outputs:
        assert "red " in output and not steering(output), output


def test_the_report_of_the_first_day_is_filtered(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "steps.jsonl").write_text(json.dumps({"name": HOSTILE, "code": 1, "seconds": 7}) + "\n")
    (tmp_path / "run" / "metrics.jsonl").write_text("")
    output = output_of("tools/first_day_report.py", str(tmp_path))
    assert output.count("red ") == 2 and not steering(output)
