"""The page as text: template, style, scripts and data in one file.

Data are JSON with "<", ">" and "&" escaped, so that no text of a run can end the element that holds it; the page's content
security policy allows the one script whose hash it names, and no requests.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
from functools import cache
from pathlib import Path
from string import Template
from typing import Any

from grpo_mega.text import well_formed

FOLDER = Path(__file__).with_name("page")
SCRIPTS = ("base.js", "chart.js", "curves.js", "samples.js", "tables.js", "main.js")


def render(data: dict[str, Any]) -> str:
    """Return the page for `data` as read.read_run returns it."""
    script = _script()
    page = Template(_text("page.html")).substitute(
        TITLE=html.escape(f"{data['title']} · GRPO run"),
        STYLE=_text("page.css"),
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


@cache
def _script() -> str:
    body = "\n".join(_text(name) for name in SCRIPTS)
    return f'(() => {{\n"use strict";\n{body}\n}})();\n'


@cache
def _text(name: str) -> str:
    return (FOLDER / name).read_text(encoding="utf-8")
