"""The run's report: reading a run, the content of the page, and distrust of the run's text."""

from __future__ import annotations

import fcntl
import itertools
import json
import re
from pathlib import Path
from typing import Any

import pytest

from grpo_mega.cli.report import report
from grpo_mega.cli.report.live import Source
from grpo_mega.cli.report.report import embedded, read_run, write_report
from grpo_mega.errors import ConfigError
from grpo_mega.tracking.run_log import RunLog
from grpo_mega.tracking.writers import JsonLinesWriter
from tests.helpers.run_folders import HOSTILE, make_conversation, make_run, write_lines


def data_of(path: Path) -> dict[str, Any]:
    """Return the data in the page."""
    found = re.search(
        r'<script type="application/json" id="data">(.*?)</script>', path.read_text(encoding="utf-8"), re.DOTALL
    )
    assert found is not None
    return json.loads(found[1])


def test_the_page_has_curves_samples_answers_config_and_warnings(tmp_path: Path) -> None:
    data = data_of(write_report(make_run(tmp_path / "run")))
    assert data["status"] == {"text": "finished", "kind": "good"} and data["steps_done"] == 12
    kl = data["metrics"]["series"]["kl/mean"]
    assert data["metrics"]["steps"][kl["s"]] == list(range(1, 13)) and kl["v"][-1] == 0.12
    last = data["samples"]["steps"][-1]
    (group,) = last["groups"]
    assert last["step"] == 12 and [s["reward"] for s in group["samples"]] == [0.0, 1.0, 2.0]
    assert group["samples"][1]["tokens"] == ["a", "<", "b"] and group["samples"][1]["mismatch"] == [1e-4] * 3
    assert [[a["ok"] for a in row["answers"]] for row in data["heldout"]["rows"]] == [[0.0, 1.0], [1.0, 1.0]] * 2
    assert ["steps", "12", False] in data["config"] and ["seed", "0", True] in data["config"]
    assert data["subtitle"] == f"{tmp_path / 'run'} · model m · tp 1, pp 1, dp 4, engine embedded"
    assert data["environment"]["starts"][0]["versions"] == {"torch": "2.13.0"}
    assert data["messages"][0]["text"] == "a gradient norm jumped"
    assert data["experts"] is None  # dense models and older runs have no expert loads


def test_the_subtitle_has_tp_pp_dp_and_keys_that_are_not_default() -> None:
    raw = {"layout": {"tp": 2, "pp": 2, "dp": None, "cp": 2, "vpp": None, "order": "tp-dp-pp", "engine_ranks": 8}}
    assert report._subtitle(Path("r"), raw, 24).endswith("tp 2, pp 2, dp 2, cp 2, engine_ranks 8")
    raw["layout"] |= {"dp": 4, "order": "tp-pp-dp"}
    assert report._subtitle(Path("r"), raw, None).endswith("tp 2, pp 2, dp 4, cp 2, order tp-pp-dp, engine_ranks 8")
    assert report._subtitle(Path("r"), {"layout": {"tp": 2}}, None) == "r · tp 2, pp 1"  # an older run
    assert report._subtitle(Path("r"), {}, None) == "r"


def test_expert_loads_are_from_the_last_step_and_their_file_may_be_broken(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    log = RunLog([JsonLinesWriter(run)])
    for step in (11, 12):
        log.log_loads(step, [[], [step, 0, 5], [1, 2, 3]])
    expected = {"step": 12, "rows": [{"layer": 1, "tokens": [12, 0, 5]}, {"layer": 2, "tokens": [1, 2, 3]}]}
    assert data_of(write_report(run))["experts"] == expected
    log.log_loads(13, [[], []])  # a dense model logs no loads
    assert data_of(write_report(run))["experts"] == expected
    for text in ("", "{}", "[1]", '{"step": 1, "tokens": [["x"]]}', '{"step": null, "tokens": []}'):
        (run / "experts.json").write_text(text)
        assert data_of(write_report(run))["experts"] is None


def test_the_page_needs_no_other_files(tmp_path: Path) -> None:
    text = write_report(make_run(tmp_path / "run")).read_text()
    assert not re.search(
        r"""(src|href|action)\s*=\s*["'](?!data:)|@import|url\((?!#)|https?://(?!www\.w3\.org/2000/svg)""", text
    )
    assert "default-src 'none'" in text


def test_text_of_a_run_cannot_leave_its_element(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", response=HOSTILE)
    text = write_report(run).read_text()
    assert text.count("<script") == 2 and text.count("</script>") == 2 and "<img" not in text
    assert data_of(run / "report.html")["samples"]["steps"][0]["groups"][0]["samples"][0]["tokens"][0] == "<"
    assert "<" not in embedded({"a": HOSTILE + "\ud800"}) and json.loads(embedded({"a": "<&>\u2028"})) == {
        "a": "<&>\u2028"
    }


def test_the_status_of_a_run_that_is_starting_running_or_over(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", num_planned=20)
    assert data_of(write_report(run))["status"]["text"] == "not running here; step 12 of 20 is done"
    assert data_of(write_report(run, is_over=True))["status"]["text"] == "ended after step 12 of 20"
    with (run / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        data = data_of(write_report(run))
        assert data["status"] == {"text": "still running", "kind": "live"} and data["time_left"] == 8 * 3.5
        for name in (
            "metrics.jsonl",
            "samples.jsonl",
            "heldout-000000.jsonl",
            "heldout-000012.jsonl",
            "messages.jsonl",
            "run.json",
        ):
            (run / name).unlink()
        data = data_of(write_report(run))
    assert data["status"]["text"] == "starting: no step is done yet"
    assert data["samples"]["steps"] == [] and data["heldout"]["rows"] == [] and data["metrics"]["series"] == {}
    assert data_of(write_report(run))["status"]["text"] == "no step was logged"


def test_values_that_are_not_finite_and_broken_lines_are_reported(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    with (run / "metrics.jsonl").open("a") as file:
        file.write(
            'not json\n{"step": 13, "kl/mean": "NaN", "grad_norm": NaN, "odd": null, "seconds/step": 1}\n{"step":'
            ' 14, "kl'
        )
    for name in ("samples.jsonl", "messages.jsonl", "heldout-000012.jsonl"):
        with (run / name).open("a") as file:
            file.write('[1]\n{"step": 99, "half')
    (run / "run.json").write_text("[]")
    data = data_of(write_report(run))
    assert data["metrics"]["series"]["kl/mean"]["v"][-1] is None and "odd" not in data["metrics"]["series"]
    assert data["findings"] == [
        ["step 13", "not finite: grad_norm, kl/mean; lower optimizer.lr=1e-06", True],
        ["", "1 lines of metrics.jsonl cannot be read and are left out", False],
    ]


DEEP = "[" * 5000
ODD = ["null", '"x"', "-3", "9" * 400, "1e999", "true", "[]", '["x"]', "[[1]]", "{}", '{"a": {"b": [1]}}', DEEP]
# The nesting that json reads and cannot write again, when it lies inside the page's data, depends on the version.
ODD += ["[" * depth + "]" * depth for depth in (900, 930, 945, 955, 965, 975, 985, 995)]


def test_a_damaged_value_leaves_only_its_own_part_out_of_the_page(tmp_path: Path) -> None:
    """Every field of every line, with every odd value. The live page reads the same data."""
    run = make_run(tmp_path / "run", response="abc")
    whole = data_of(write_report(run))
    good = {
        "metrics.jsonl": {"step": 12, "kl/mean": 0.12, "seconds/step": 3.5, "reward/mean": 1.0, "grad_norm": 1.0},
        "samples.jsonl": make_conversation(12),
        "heldout-000012.jsonl": {"id": 9, "set": "s", "prompt": "p", "gold": "g", "scores": {"a": 1}, "response": "r"},
        "messages.jsonl": {"step": 1, "time": "t", "level": "info", "text": "x"},
    }
    for name, row in good.items():
        lines = [(row | {field: "VALUE"}, value) for field in (*row, "turns", "solved", "samples") for value in ODD]
        with (run / name).open("a") as file:
            for one, value in lines:
                file.write(json.dumps(one).replace('"VALUE"', value) + "\n")
            file.write(json.dumps(row) + '\n{"step": ' + "9" * 5000 + "}\n")
    data = data_of(write_report(run))
    assert embedded(Source(run).read()).encode()
    assert data["steps_done"] == 12 and data["metrics"]["series"]["kl/mean"]["v"][-1] == 0.12
    for part in ("samples", "heldout", "messages"):
        assert len(json.dumps(data[part])) > len(json.dumps(whole[part]))
    assert data["heldout"]["rows"][0] == whole["heldout"]["rows"][0]
    assert data["messages"][0] == whole["messages"][0] and data["messages"][-1]["text"] == "x"
    assert (
        data["samples"]["steps"][-1]["groups"][0]["samples"][:3]
        == whole["samples"]["steps"][-1]["groups"][0]["samples"]
    )


def test_a_damaged_run_json_or_config_costs_only_its_part_of_the_page(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", num_steps=2)
    kl = read_run(run)["metrics"]["series"]["kl/mean"]
    starts = ('{"starts": VALUE}', '{"starts": [VALUE, {"num_ranks": VALUE, "versions": VALUE}]}')
    loads = ('{"step": VALUE, "tokens": [[1]]}', '{"step": 1, "tokens": [[VALUE], VALUE]}')
    for value, (start, load) in itertools.product(ODD, zip(starts, loads, strict=True)):
        (run / "run.json").write_text(start.replace("VALUE", value))
        (run / "experts.json").write_text(load.replace("VALUE", value))
        assert json.loads(embedded(read_run(run)))["metrics"]["series"]["kl/mean"] == kl
    keys = ("steps", "model", "layout", "rollout", "layout.tp", "model.path", "optimizer.lr")
    for key, value in itertools.product(keys, ("5", '"x"', "[[1]]", "9" * 400)):
        section, _, leaf = key.rpartition(".")
        text = f'"{leaf}": {value}'
        (run / "config.yaml").write_text("{%s}" % (f'"{section}": {{{text}}}' if section else text))
        assert json.loads(embedded(read_run(run)))["metrics"]["series"]["kl/mean"] == kl


def test_folders_in_the_place_of_a_runs_files_are_left_out(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    for name in ("samples.jsonl", "heldout-000012.jsonl", "messages.jsonl", "run.json"):
        (run / name).unlink()
        (run / name).mkdir()
    data = data_of(write_report(run))
    assert data["steps_done"] == 12 and data["samples"]["steps"] == [] and data["heldout"]["steps"] == [0]


def test_a_long_run_is_thinned_but_keeps_its_maxima() -> None:
    found = {
        "a": {s: float(s) for s in range(5000)},
        "b/max": {s: float(s == 3) for s in range(5000)},
        "eval/x": {0: 1.0},
    }
    series = report.series(found)
    assert series["points_averaged"] == 3
    a, largest = (series["series"][name] for name in ("a", "b/max"))
    assert series["steps"][a["s"]][:2] == [2, 5] and a["v"][:2] == [1.0, 4.0] and len(a["v"]) <= report.MAX_POINTS
    assert largest["v"][:3] == [0.0, 1.0, 0.0] and series["series"]["eval/x"]["v"] == [1.0]


def test_the_page_is_bounded_and_reports_omissions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_run(tmp_path / "run", num_steps=300, num_planned=300, response="x" * 50)
    data = data_of(write_report(run))
    shown = [one["step"] for one in data["samples"]["steps"]]
    assert len(shown) == report.MAX_SAMPLE_STEPS and (shown[0], shown[-1]) == (1, 300)
    assert data["samples"]["note"] == "in this page: 200 of 300 steps with samples; all are in samples.jsonl"
    monkeypatch.setattr(report, "MAX_SAMPLE_BYTES", 20_000)
    few = data_of(write_report(run))["samples"]
    assert len(json.dumps(few)) < 20_000 and (few["steps"][0]["step"], few["steps"][-1]["step"]) == (1, 300)
    monkeypatch.setattr(report, "MAX_HELDOUT_PROMPTS", 3)
    assert report.heldout(run)["note"] == "in this page: 3 of 4 answers; all are in heldout-*.jsonl"


def test_rows_of_older_runs_are_shown_without_colors(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    write_lines(
        run / "samples.jsonl", [{"step": 1, "prompt_id": 3, "index": 2, "prompt": "p", "response": "r", "reward": 1.0}]
    )
    (group,) = data_of(write_report(run))["samples"]["steps"][0]["groups"]
    assert group["samples"][0]["tokens"] is None and group["samples"][0]["response"] == "r"


def test_a_conversation_is_split_into_turns_inserted_tokens_and_histories(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    row = make_conversation(1)
    broken = [row | {"turns": value} for value in ([[1]], "x", [["a", "b"]], [[0, 99]])]
    rows = [row, row | {"messages": None, "contexts": [], "turn_rewards": []}, *broken, row | {"token_ends": None}]
    write_lines(run / "samples.jsonl", rows)
    (group,) = data_of(write_report(run))["samples"]["steps"][0]["groups"]
    whole, bare, *others = group["samples"]
    assert whole["parts"] == [
        {"kind": "turn", "label": "turn 1, calls add", "start": 0, "end": 4},
        {"kind": "inserted", "label": "tool add", "start": 4, "end": 10},
        {"kind": "turn", "label": "turn 2", "start": 10, "end": 14, "reward": 0.25},
        {"kind": "history", "label": "history rewritten", "text": f"new history {HOSTILE}"},
        {"kind": "inserted", "label": "user", "start": 14, "end": 15},
        {"kind": "turn", "label": "turn 3", "start": 15, "end": 20},
    ]
    assert [(part["kind"], part["label"]) for part in bare["parts"]][:2] == [
        ("turn", "turn 1"),
        ("inserted", "template"),
    ]
    assert len(others) == 5 and all(one["tokens"] or one["response"] for one in others)


def test_a_folder_without_a_run_is_a_one_line_error_with_its_name(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"nothing is not the folder of a run; name the run_dir of a run that has started"
    ):
        write_report(tmp_path / "nothing")
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="name the run_dir"):
        write_report(tmp_path / "file")
    assert not list(tmp_path.glob("*/report*"))


def test_the_report_is_replaced_atomically(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_run(tmp_path / "run")
    before = write_report(run).read_text()
    monkeypatch.setattr("os.replace", lambda *paths: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(ConfigError, match="No space left on device"):
        write_report(run)
    assert (run / "report.html").read_text() == before and not list(run.glob(".report*"))


def test_a_file_is_read_up_to_a_half_written_line(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"a": 1}\n{"a": ')
    assert report.read_lines(path) == ([{"a": 1}], 0)
