"""The run's report: one self-contained HTML file, made from the files in the run's folder.

`write_report(run_dir)` reads the folder and writes RUN_DIR/report.html atomically. The run may be running, broken or
from an older version: the page reports missing parts. The page consists of the files in page/ and the run's data, as
JSON with "<", ">" and "&" escaped, so that no text of a run can close its script element. The content security policy
allows only the one script with the stated hash, and no requests.

If not all samples and answers fit, the page says so. It then shows the first and the last step and evenly spaced steps
between them.
"""

import base64
import hashlib
import html
import json
import math
import re
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median
from string import Template
from typing import Any, TypeVar

from grpo_mega import config as configs
from grpo_mega.config.base import MAX_COUNT
from grpo_mega.errors import ConfigError
from grpo_mega.paths import (
    CONFIG_FILE,
    EXPERTS_FILE,
    LOCK_FILE,
    MESSAGES_FILE,
    METRICS_FILE,
    REPORT_FILE,
    RUN_FILE,
    SAMPLES_FILE,
    heldout_files,
    read_json,
    write_atomically,
)
from grpo_mega.text import as_text, parse_json_line, read_json_lines, read_lines, well_formed
from grpo_mega.tracking.curves import Curves, by_step, curves
from grpo_mega.tracking.rules import find_warnings
from grpo_mega.yaml_text import parse_yaml

PAGE = Path(__file__).with_name("page")
SCRIPTS = ("base.js", "chart.js", "experts.js", "curves.js", "samples.js", "tables.js", "main.js")
MAX_MESSAGES = 1000
MAX_POINTS = 2000  # points of a curve; each is the mean of several steps, or the maximum if the name ends in "max"
_RECENT = 20  # number of recent steps whose median time predicts the rest
MAX_SAMPLE_BYTES = 6 << 20  # maximum size of the samples in the page
MAX_SAMPLE_STEPS = 200
MAX_EVALUATIONS = 8
MAX_HELDOUT_PROMPTS = 300
MAX_TEXT = 20_000  # maximum number of characters of a held-out answer

# What values of damaged files raise. The page leaves such values out.
_DAMAGED = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)

T = TypeVar("T")
Record = dict[str, Any]  # an object of JSON
_STEP = re.compile(rb'\{"step": (-?\d{1,15}),')


def write_report(run_dir: Path, *, is_over: bool = False) -> Path:
    """Return the path of the page. `is_over`: the run is ending now, although it still holds its folder.

    Raises ConfigError if the folder does not belong to a run, or cannot be written.
    """
    check_run(run_dir)
    path = run_dir / REPORT_FILE
    try:
        write_atomically(path, render_report(read_run(run_dir, is_over=is_over)).encode())
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}; make the folder writable") from None
    return path


def render_report(data: Record) -> str:
    """Return the page for `data` from read_run. With data["is_live_page"] it asks its server for new data."""
    files = {path.name: path.read_text(encoding="utf-8") for path in PAGE.iterdir()}
    body = "\n".join(files[name] for name in SCRIPTS)
    script = f'(() => {{\n"use strict";\n{body}\n}})();\n'
    page = Template(files["page.html"]).substitute(
        TITLE=html.escape(f"{data['title']} · GRPO run"),
        STYLE=files["page.css"],
        SCRIPT=script,
        CONNECT="; connect-src 'self'" if data.get("is_live_page") else "",
        SCRIPT_HASH="sha256-" + base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        DATA=embedded(data),
    )
    return well_formed(page)


def embedded(data: Any) -> str:
    """Return JSON that is safe within a script element."""
    text = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return well_formed(text).translate({ord(sign): f"\\u{ord(sign):04x}" for sign in "<>&\u2028\u2029"})


def check_run(run_dir: Path) -> None:
    """Raise ConfigError if the folder does not belong to a run."""
    if not any((run_dir / name).is_file() for name in (METRICS_FILE, CONFIG_FILE)):
        raise ConfigError(f"{run_dir} is not the folder of a run; name the run_dir of a run that has started")


def read_run(run_dir: Path, *, is_over: bool = False) -> Record:
    """Return the data that page/*.js draws. `is_over`: the run is ending, although it still holds its folder."""
    records, num_bad = read_lines(run_dir / METRICS_FILE)
    found = curves(records)
    raw: Record = {}
    with suppress(OSError, ValueError):
        parsed = parse_yaml((run_dir / CONFIG_FILE).read_text(encoding="utf-8"))
        raw = parsed if isinstance(parsed, dict) else {}
    num_steps = steps if isinstance(steps := raw.get("steps"), int) and 0 < steps < MAX_COUNT else None
    done = max(found.get("seconds/step") or found.get("reward/mean") or found.get("loss/total") or {0: 0.0})
    is_live = not is_over and is_held(run_dir / LOCK_FILE)
    signs: list[list[Any]] = []
    with suppress(*_DAMAGED):
        signs = [
            [one.when, one.text, one.steps[-1] == done] for one in find_warnings(by_step(found), configs.leaves(raw))
        ]
    if num_bad:
        signs.append(["", f"{num_bad} lines of {METRICS_FILE} cannot be read and are left out", False])
    starts: list[Record] = []
    with suppress(OSError, *_DAMAGED):
        starts = [start for start in _checked(read_json(run_dir / RUN_FILE)["starts"]) if isinstance(start, dict)]
    num_ranks = starts[-1].get("num_ranks") if starts else None
    changed = None
    with suppress(ConfigError):
        changed = configs.changed(configs.validate(raw))
    experts = None  # {"step", "rows": [{"layer", "tokens": one number per expert}]}; None for a dense model
    with suppress(OSError, *_DAMAGED):
        loads = read_json(run_dir / EXPERTS_FILE)
        rows = [{"layer": i, "tokens": [int(n) for n in tokens]} for i, tokens in enumerate(loads["tokens"]) if tokens]
        experts = {"step": int(loads["step"]), "rows": rows}
    messages: list[Record] = []
    for record in read_lines(run_dir / MESSAGES_FILE)[0][-MAX_MESSAGES:]:
        with suppress(*_DAMAGED):
            messages.append(_checked({name: record.get(name, "") for name in ("step", "time", "level", "text")}))
    seconds = found.get("seconds/step", {})
    recent = [s for step in sorted(seconds)[-_RECENT:] if 0 <= (s := seconds[step]) < MAX_COUNT]
    return {
        "title": f"{run_dir.resolve().parent.name}/{run_dir.resolve().name}",
        "subtitle": _subtitle(run_dir, raw, num_ranks),
        "written": time.strftime("%Y-%m-%d %H:%M:%S %z"),
        "status": _status(done, num_steps, has_steps=bool(found), is_live=is_live, is_over=is_over),
        "num_steps": num_steps,
        "steps_done": done,
        "time_left": (num_steps - done) * median(recent) if is_live and num_steps and recent else None,
        "metrics": series(found),
        "experts": experts,
        "samples": samples(run_dir / SAMPLES_FILE),
        "heldout": heldout(run_dir),
        # Each row is a dotted key, its value as text, and whether it is the default; None if the config is not valid.
        "config": [[key, as_text(value), changed and key not in changed] for key, value in configs.leaves(raw).items()],
        "environment": {"starts": starts, "layout": _layout(raw, num_ranks)},
        "messages": messages,
        "findings": signs,
    }


def series(found: Curves) -> Record:
    """Return {"steps": lists of steps, "series": {name: {"s": index of a list, "v": values}}, "points_averaged":
    width}. Values have six digits; a value that is not finite is None.
    """
    width = max(1, math.ceil(max(map(len, found.values()), default=0) / MAX_POINTS))
    lists: dict[tuple[int, ...], int] = {}
    thinned = {}
    for name, curve in found.items():
        steps = sorted(curve)
        size = width if len(steps) > MAX_POINTS else 1
        bins = [steps[i : i + size] for i in range(0, len(steps), size)]
        summary = max if name.endswith("max") else fmean
        finite = [[curve[step] for step in one if math.isfinite(curve[step])] for one in bins]
        thinned[name] = {
            "s": lists.setdefault(tuple(one[-1] for one in bins), len(lists)),
            "v": [float(f"{summary(values):.6g}") if values else None for values in finite],
        }
    return {"steps": [list(key) for key in lists], "series": thinned, "points_averaged": width}


def _checked(value: T) -> T:
    """Return the value. Raise ValueError or RecursionError if the page's JSON cannot hold it, such as deep nesting."""
    embedded([[[[[[[[[[value]]]]]]]]]])
    return value


def _status(done: int, num_steps: int | None, *, has_steps: bool, is_live: bool, is_over: bool) -> dict[str, str]:
    if num_steps is not None and done >= num_steps:
        return {"text": "finished", "kind": "good"}
    if is_live:
        return {"text": "still running" if has_steps else "starting: no step is done yet", "kind": "live"}
    if not has_steps:
        return {"text": "no step was logged", "kind": "warn"}
    of = f" of {num_steps}" if num_steps is not None else ""
    return {
        "text": f"ended after step {done}{of}" if is_over else f"not running here; step {done}{of} is done",
        "kind": "warn",
    }


def is_held(lock: Path) -> bool:
    """Return True if a process of this machine holds the folder. Does not take the lock, because that could disturb a
    start.
    """
    locks = Path("/proc/locks")
    if not lock.exists() or not locks.exists():
        return False
    inode = f":{lock.stat().st_ino}"
    lines = [line.split() for line in locks.read_text().splitlines()]
    return any("FLOCK" in words and any(word.endswith(inode) for word in words) for words in lines)


def _subtitle(run_dir: Path, raw: Record, num_ranks: Any) -> str:
    model = model.get("path") if isinstance(model := raw.get("model"), dict) else None
    layout = ", ".join(f"{name.removeprefix('layout.')} {value}" for name, value in _layout(raw, num_ranks))
    return " · ".join(part for part in (str(run_dir), f"model {model}" if model else "", layout) if part)


def _layout(raw: Record, num_ranks: Any) -> list[list[str]]:
    """Return tp, pp and dp, the other layout keys that are set, and the engine. `num_ranks` determines a dp of None."""
    with suppress(*_DAMAGED):
        layout = dict(raw.get("layout") or {})
        if not layout:
            return []
        tp, pp, cp = (layout.get(name) or 1 for name in ("tp", "pp", "cp"))
        dp, engine = layout.get("dp"), (raw.get("rollout") or {}).get("engine")
        if dp is None and isinstance(num_ranks, int):
            dp = (num_ranks - (layout.get("engine_ranks") or 0)) // (tp * pp * cp)
        shown = {"tp": tp, "pp": pp, "dp": dp}
        defaults = configs.LayoutConfig().model_dump(mode="json")
        shown |= {k: v for k, v in layout.items() if k not in shown and v not in (None, defaults.get(k))}
        rows = [[f"layout.{name}", str(value)] for name, value in shown.items() if value is not None]
        return rows + ([["engine", str(engine)]] if engine else [])
    return []


def samples(path: Path) -> Record:
    """Return {"steps": [{"step", "groups": [{"prompt_id", "prompt", "answer", "samples"}]}], "note"}."""
    lines: dict[int, list[tuple[int, int]]] = defaultdict(list)  # (offset, length) of the lines of each step
    offset = 0
    with suppress(OSError), path.open("rb") as file:
        for line in file:
            match = _STEP.match(line)
            if match and line.endswith(b"\n"):  # a last line may be half-written
                lines[int(match[1])].append((offset, len(line)))
            offset += len(line)
    steps = sorted(lines)
    if not steps:
        return {"steps": [], "note": ""}
    shown = _even(steps, MAX_SAMPLE_STEPS)
    while len(shown) > 2 and sum(size for step in shown for _, size in lines[step]) > MAX_SAMPLE_BYTES:
        shown = _even(shown, max(2, len(shown) * 3 // 4))
    found = []
    num_bytes = num_left_out = 0
    with path.open("rb") as file:
        for step in shown:
            records: list[Record] = []
            for start, size in lines[step]:
                if num_bytes + size > MAX_SAMPLE_BYTES and records:
                    num_left_out += 1
                    continue
                file.seek(start)
                record = parse_json_line(file.read(size))
                if record is not None:
                    records.append(record)
                num_bytes += size
            if records:
                found.append({"step": step, "groups": _groups(records)})
    notes = [f"{len(shown)} of {len(steps)} steps with samples"] if len(shown) < len(steps) else []
    notes += [f"{num_left_out} samples left out"] if num_left_out else []
    return {"steps": found, "note": f"in this page: {', '.join(notes)}; all are in samples.jsonl" if notes else ""}


def heldout(run_dir: Path) -> Record:
    """Return {"steps", "rows": [{"prompt", "answers": [{"ok", "scores", "response"} or None by step]}], "note"}."""
    files = heldout_files(run_dir)
    steps = _even(sorted(files), MAX_EVALUATIONS)
    rows: dict[Any, Record] = {}
    num_prompts: set[Any] = set()
    for place, step in enumerate(steps):
        seen: dict[Any, int] = defaultdict(int)
        for _, record in read_json_lines(files[step]):
            if record is None:
                continue
            with suppress(*_DAMAGED):
                name = (record.get("set"), record.get("id"))
                key = (name, seen[name])
                seen[name] += 1
                num_prompts.add(key)
                if key not in rows and len(rows) == MAX_HELDOUT_PROMPTS:
                    continue
                head = {name: str(record.get(name, "")) for name in ("prompt", "gold")} | {"set": record.get("set")}
                row = rows.setdefault(key, _checked(head | {"answers": [None] * len(steps)}))
                row["answers"][place] = _answer(record)
    notes = [f"{len(steps)} of {len(files)} evaluations"] if len(steps) < len(files) else []
    notes += [f"{len(rows)} of {len(num_prompts)} answers"] if len(rows) < len(num_prompts) else []
    note = f"in this page: {', '.join(notes)}; all are in heldout-*.jsonl" if notes else ""
    return {"steps": steps, "rows": list(rows.values()), "note": note}


def _answer(record: Record) -> Record:
    scores, num_samples = record.get("scores") or {}, record.get("samples")
    marks = [v for v in scores.values() if isinstance(v, int | float)]
    ok = float(bool(marks) and min(marks) >= 1.0)  # the share of correct answers, from 0 to 1
    solved = record.get("solved")
    if "response" not in record:  # it has sampled answers instead of a greedy one
        ok = solved / num_samples if num_samples and solved is not None else 0.0
    return _checked(
        {
            "ok": ok,
            "scores": scores,
            "response": str(record["response"])[:MAX_TEXT] if "response" in record else None,
            "solved": f"{solved}/{num_samples}" if num_samples else None,
        }
    )


def _groups(records: list[Record]) -> list[Record]:
    """Return the samples by group as samples.js reads them, with the texts of tokens instead of their ends."""
    groups: dict[Any, Record] = {}
    for record in records:
        with suppress(*_DAMAGED):
            key = (record.get("group"), record.get("prompt_id"))
            texts = {name: str(record.get(name) or "") for name in ("prompt", "answer")}
            group: Record = {"prompt_id": record.get("prompt_id"), **texts, "samples": []}
            groups.setdefault(key, _checked(group))["samples"].append(_sample(record))
    return list(groups.values())


def _sample(record: Record) -> Record:
    response, ends = str(record.get("response", "")), record.get("token_ends")
    tokens = [response[start:end] for start, end in zip([0, *ends], ends, strict=False)] if ends else None
    names = ("index", "policy_version", "finish_reason", "reward", "rollout_logprobs", "mismatch")
    sample = {name: record.get(name) for name in names} | {
        "rewards": record.get("rewards") or {},
        "verdicts": record.get("verdicts") or {},
        "advantage": record.get("advantages") or record.get("advantage"),
        "tokens": tokens,
        "response": None if tokens else response,
    }
    if tokens and record.get("turns"):
        with suppress(*_DAMAGED):
            sample["parts"] = _checked(parts_of(record, len(tokens)))
    return _checked(sample)


def parts_of(record: Mapping[str, Any], num_tokens: int) -> list[Record]:
    """Return a conversation as its turns, the inserted tokens between them, and its rewritten histories, in order.

    Each part has "kind" (turn, inserted or history) and "label". Turns and inserted tokens have "start" and "end", a
    turn may have a "reward", and a history has its "text".
    """
    turns, histories = record["turns"], dict(record.get("contexts") or ())
    rewards = dict(record.get("turn_rewards") or ())
    labels = _labels(record.get("messages") or [], len(turns))
    parts: list[Record] = []
    last = 0
    for number, (start, end) in enumerate([*turns, (num_tokens, num_tokens)]):
        inserted = labels[number - 1][1] if number else "before the first turn"
        cuts = [last, *sorted(at for at in histories if last < at < start), start, start]  # no tokens after the last
        for first, stop in pairwise(cuts):
            if first in histories:
                parts.append({"kind": "history", "label": "history rewritten", "text": str(histories.pop(first))})
            if stop > first:
                parts.append({"kind": "inserted", "label": inserted, "start": first, "end": stop})
        if number < len(turns):
            turn = {"kind": "turn", "label": labels[number][0], "start": start, "end": end}
            parts.append(turn | ({"reward": rewards[end - 1]} if end - 1 in rewards else {}))
        last = end
    return parts


def _labels(messages: Sequence[Mapping[str, Any]], num_turns: int) -> list[tuple[str, str]]:
    """Return the label of each turn, with the tools that it calls, and of the tokens inserted after it."""
    calls: list[list[str]] = [[] for _ in range(num_turns)]
    followers: list[list[str]] = [[] for _ in range(num_turns)]
    turn = num_turns  # the last assistant message is the last turn
    for message in reversed(messages):
        name = str(message.get("name") or "")
        if message.get("role") == "assistant":
            turn -= 1
            if turn < 0:
                break
            for call in message.get("tool_calls") or ():
                calls[turn].append(str(call.get("function", call).get("name")))
        elif turn > 0:
            followers[turn - 1].insert(0, f"{message.get('role')} {name}".rstrip())
    return [
        (f"turn {number + 1}{', calls ' if called else ''}{', '.join(called)}", ", ".join(after) or "template")
        for number, (called, after) in enumerate(zip(calls, followers, strict=True))
    ]


def _even(items: Sequence[T], count: int) -> list[T]:
    """Return at most `count` of the items, evenly spaced, including the first and the last."""
    if len(items) <= count:
        return list(items)
    return [items[round(i * (len(items) - 1) / (count - 1))] for i in range(count)]
