"""The run's report: one HTML file that stands alone, made from what a run leaves in its folder.

`write_report(run_dir)` reads the folder (also of a run under way, a broken one or one of an older version: the page says what
is missing) and writes RUN_DIR/report.html, whole or not at all. The page is made of the files in page/ and the run's data, as
JSON with "<", ">" and "&" escaped, so that no text of a run can end the element that holds it. Its content security policy
allows the one script whose hash it names, and no requests.
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
    """Return the path of the page. `is_over`: the run is ending now, though it still holds its folder.

    Raises ConfigError if the folder is not a run's, or cannot be written.
    """
    if not is_run(run_dir):
        raise ConfigError(f"{run_dir} is not the folder of a run; name the run_dir of a run that has begun")
    path = run_dir / REPORT_FILE
    try:
        write_atomically(path, render(read_run(run_dir, is_over=is_over)).encode())
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}; give it a folder that can be written") from None
    return path


def render(data: dict[str, Any]) -> str:
    """Return the page for `data` as read.read_run returns it."""
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
