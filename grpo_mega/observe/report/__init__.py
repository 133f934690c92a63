"""The run's report: one self-contained HTML file, made from the files in the run's folder.

`write_report(run_dir)` reads the folder and writes RUN_DIR/report.html atomically. The run may be running, broken or from an
older version: the page reports missing parts. The page consists of the files in page/ and the run's data, as JSON with "<", ">"
and "&" escaped, so that no text of a run can close its script element. The content security policy allows only the one script
with the stated hash, and no requests.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
from pathlib import Path
from string import Template
from typing import Any

from grpo_mega.errors import ConfigError
from grpo_mega.observe.report.read import is_run, read_run
from grpo_mega.paths import REPORT_FILE, write_atomically
from grpo_mega.text import well_formed

PAGE = Path(__file__).with_name("page")
SCRIPTS = ("base.js", "chart.js", "experts.js", "curves.js", "samples.js", "tables.js", "main.js")


def write_report(run_dir: Path, *, is_over: bool = False) -> Path:
    """Return the path of the page. `is_over`: the run is ending now, although it still holds its folder.

    Raises ConfigError if the folder does not belong to a run, or cannot be written.
    """
    if not is_run(run_dir):
        raise ConfigError(f"{run_dir} is not the folder of a run; name the run_dir of a run that has started")
    path = run_dir / REPORT_FILE
    try:
        write_atomically(path, render(read_run(run_dir, is_over=is_over)).encode())
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}; make the folder writable") from None
    return path


def render(data: dict[str, Any]) -> str:
    """Return the page for `data` from read.read_run."""
    files = {path.name: path.read_text(encoding="utf-8") for path in PAGE.iterdir()}
    body = "\n".join(files[name] for name in SCRIPTS)
    script = f'(() => {{\n"use strict";\n{body}\n}})();\n'
    page = Template(files["page.html"]).substitute(
        TITLE=html.escape(f"{data['title']} · GRPO run"),
        STYLE=files["page.css"],
        SCRIPT=script,
        SCRIPT_HASH="sha256-" + base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        DATA=embedded(data),
    )
    return well_formed(page)


def embedded(data: Any) -> str:
    """Return JSON that is safe within a script element."""
    text = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    for sign in "<>&\u2028\u2029":
        text = text.replace(sign, f"\\u{ord(sign):04x}")
    return text
