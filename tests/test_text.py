"""JSON lines for any text: one line per object for every reader, and valid UTF-8."""

import json
from pathlib import Path

import pytest

from grpo_mega.cli.report.report import read_run
from grpo_mega.text import find_surrogate, json_line, read_json_lines, well_formed
from grpo_mega.tracking.curves import read_curves
from grpo_mega.trainer.folder import truncate_logs_after
from tests.helpers.hostile_text import LINE_ENDS, SURROGATES

RECORD = {"step": 3, f"a{LINE_ENDS}": f"é€😀{LINE_ENDS}", "b": [1.5, float("nan"), {"c": "\ud83d"}], "d": SURROGATES}


def test_a_line_is_one_line_for_every_reader_and_keeps_the_object() -> None:
    line = json_line(RECORD)
    assert line.encode("utf-8").decode("utf-8").splitlines() == [line.removesuffix("\n")]
    assert "é€😀" in line
    assert json.loads(line) == {
        "step": 3,
        f"a{LINE_ENDS}": f"é€😀{LINE_ENDS}",
        "b": [1.5, "NaN", {"c": "\ufffd"}],
        "d": "\ufffd\ufffd \ufffd",
    }


def test_only_newlines_end_lines_with_or_without_a_byte_order_mark(tmp_path: Path) -> None:
    raw = [json.dumps({"step": n, "text": f"\u2028\u2029\x85{n}"}, ensure_ascii=False).encode() for n in range(3)]
    content = b"\xef\xbb\xbf" + b"\n".join([raw[0], b"[1]", b"\xff", raw[1]]) + b"\r\n" + raw[2][:-1]
    (tmp_path / "lines.jsonl").write_bytes(content)
    found = list(read_json_lines(tmp_path / "lines.jsonl"))
    assert b"".join(line for line, _ in found) == content
    assert [row and row["text"] for _, row in found] == ["\u2028\u2029\x850", None, None, "\u2028\u2029\x851", None]


@pytest.mark.parametrize("marks", ["\u2028", "\u2029", "\x85", "\u2028\u2029\x85"])
def test_logs_with_raw_line_ends_are_trimmed_plotted_and_reported(tmp_path: Path, marks: str) -> None:
    """Older versions wrote such logs, without escaping these characters."""
    rows = [{"step": step, f"verdict/{marks}": 1.0} for step in (1, 2, 3)]
    lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in rows]
    for name in ("metrics.jsonl", "samples.jsonl", "messages.jsonl"):
        (tmp_path / name).write_text("".join(lines) + '{"step": 2, "half', encoding="utf-8")
    truncate_logs_after(tmp_path, 2)
    for name in ("metrics.jsonl", "samples.jsonl", "messages.jsonl"):
        assert (tmp_path / name).read_bytes().decode() == "".join(lines[:2])
    assert read_curves(tmp_path / "metrics.jsonl") == {f"verdict/{marks}": {1: 1.0, 2: 1.0}}
    assert not [text for _, text, _ in read_run(tmp_path)["findings"] if "cannot be read" in text]


def test_surrogates_are_found_and_replaced_one_by_one() -> None:
    assert well_formed(f"a{SURROGATES}😀") == "a\ufffd\ufffd \ufffd😀"
    assert find_surrogate([{"role": "user", "content": [{"text": "ab\udc00"}]}]) == "U+DC00 at character 2"
    assert find_surrogate({"a": "😀", "b": [1, None, "é"]}) is None
