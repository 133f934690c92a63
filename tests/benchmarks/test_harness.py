"""The benchmarks' harness: variants take turns, medians count, and every end has its exit code."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from grpo_mega.errors import ConfigError
from tools.benchmarks import harness


def test_variants_take_turns_in_both_orders_after_the_warm_up() -> None:
    calls: list[str] = []
    rounds: list[int] = []

    def variant(name: str) -> harness.Figures:
        calls.append(name)
        return {"seconds": float(len(calls))}

    variants = {name: lambda name=name: variant(name) for name in ("a", "b", "c")}  # type: ignore[misc]
    found = harness.take_turns(variants, 2, warm_up=1, after_round=lambda: rounds.append(len(calls)))
    assert calls == [*"cba", *"abc", *"cba"] and rounds == [3, 6, 9]
    assert [one["seconds"] for one in found["a"]] == [4, 9] and [one["seconds"] for one in found["c"]] == [6, 7]


def test_the_median_of_every_figure_counts() -> None:
    found = harness.medians({"ours": [{"s": 1.0, "gib": 5.0}, {"s": 9.0, "gib": 3.0}, {"s": 2.0, "gib": 4.0}]})
    assert found == {"ours": {"s": 2.0, "gib": 4.0}}


def test_a_variant_is_timed_between_two_waits_for_the_device() -> None:
    events: list[str] = []
    found = harness.timed(lambda: events.append("act"), lambda: events.append("wait"))()
    assert events == ["wait", "act", "wait"]
    assert found.keys() == {"seconds", "cpu_seconds"} and min(found.values()) >= 0


@pytest.mark.parametrize(
    ("ratio", "problems", "code", "said"),
    [
        (1.2, [], 0, ""),
        (None, [], 0, ""),
        (1.21, [], 1, "ratio is 1.21, above its limit of 1.2"),
        (1.0, ["a bit differs"], 1, "a bit differs"),
    ],
)
def test_the_exit_code_says_if_a_limit_is_met(
    ratio: float | None, problems: list[str], code: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        harness.report([("", "s"), ("ours", "10.5")], {"ratio": ratio}, limits={"ratio": 1.2}, problems=problems)
        == code
    )
    output = capsys.readouterr()
    lines = output.out.splitlines()
    assert lines[:2] == ["         s", "ours  10.5"] and json.loads(lines[-1]) == {"ratio": ratio}
    assert [*lines[2:-1], *output.err.splitlines()] == [said] * bool(said)


@pytest.mark.parametrize(("error", "code"), [(ConfigError, 2), (harness.RunFailed, 1)])
def test_an_error_is_one_line_with_its_exit_code(
    error: type[Exception], code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    @harness.benchmark
    def main(arguments: list[str] | None) -> int:
        raise error("tp=3: must divide 4; use 2")

    assert main([]) == code
    assert capsys.readouterr().err == "tp=3: must divide 4; use 2\n"


def test_an_option_below_its_least_value_is_refused_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    parser = harness.Parser("A benchmark.")
    parser.add_argument("--bucket-mib", type=int)
    assert (
        parser.parse([], bucket_mib=1).bucket_mib is None
        and parser.parse(["--bucket-mib=1"], bucket_mib=1).bucket_mib == 1
    )
    with pytest.raises(SystemExit) as end:
        parser.parse(["--bucket-mib", "0"], bucket_mib=1)
    assert end.value.code == 2
    line = capsys.readouterr().err
    assert line.startswith("--bucket-mib=0 ") and " 1; see --help" in line and line.count("\n") == 1


def test_a_child_returns_the_json_of_its_last_line_or_ends_the_benchmark(tmp_path: Path) -> None:
    script = tmp_path / "child.py"
    script.write_text("import os, sys\nprint('a line')\nprint(os.environ['FOUND'])\nsys.exit(int(sys.argv[1]))\n")
    assert harness.run_child("ours", [script, 0], FOUND='{"seconds": 1}') == {"seconds": 1}
    with pytest.raises(harness.RunFailed, match=r"ours .*code 3"):
        harness.run_child("ours", [script, 3], FOUND="{}")


def test_a_failed_training_run_shows_the_end_of_its_log(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text("import sys\nprint(sys.argv[1:])\nsys.exit(4)\n")
    with pytest.raises(
        harness.RunFailed,
        match=r"plain .*code 4:\n\['train', 'c.yaml', '--set=run_dir=.*/plain', '--set=steps=2'",
    ):
        harness.train(Path("c.yaml"), tmp_path / "plain", {"steps": 2}, program=[program])


def test_a_training_run_returns_its_metrics_and_continues_if_it_exists(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import json, pathlib, sys\nrow = json.dumps({'resumes': sys.argv[-1] == '--resume'})\n"
        f"pathlib.Path({str(tmp_path)!r}, 'metrics.jsonl').write_text(row)\n"
    )
    assert harness.train(Path("c.yaml"), tmp_path, {}, program=[program]) == [{"resumes": False}]
    (tmp_path / "run.json").touch()
    assert harness.train(Path("c.yaml"), tmp_path, {}, program=[program]) == [{"resumes": True}]


def test_a_script_filters_its_output_before_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    monkeypatch.setattr(harness, "filter_output", lambda: events.append("install"))
    with pytest.raises(SystemExit) as end:
        harness.start(lambda: len(events))
    assert end.value.code == 1 and events == ["install"]
