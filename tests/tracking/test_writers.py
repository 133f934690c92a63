"""The run log and its writers."""

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from grpo_mega import config
from grpo_mega.cli.report.writer import ReportWriter
from grpo_mega.tracking.run_log import Hooks, RunLog, num_logged, open_run_log, sample_row, token_ends
from grpo_mega.tracking.writers import ConsoleWriter, JsonLinesWriter
from grpo_mega.types import Context, Group, Prompt, Sample, Span

PROMPT = "<user>1+1=?<assistant>"
METRICS = {
    "reward/mean": 1.4231,
    "reward/accuracy": 0.93,
    "kl/mean": 0.01234,
    "response_length/mean": 812.44,
    "response_length/cut": 0.376,
    "clip/fraction": 0.0123,
    "mismatch/abs_mean": 1.2e-6,
    "seconds/sample": 101.23,
    "seconds/update": 45.01,
    "seconds/sync": 7.0,
    "seconds/score": 0.01,
    "seconds/other": 1.2,
    "seconds/step": 154.45,
}


def make_config(tmp_path: Path, **log: object) -> config.Config:
    return config.validate(
        {
            "run_dir": str(tmp_path / "run"),
            "steps": 200,
            "model": {"path": "m"},
            "data": {"train": "d.jsonl"},
            "log": log,
        }
    )


def make_group(num_samples: int) -> Group:
    prompt = Prompt(id=7, text=PROMPT, token_ids=(1, 2), answer="2")
    samples = [
        Sample(
            prompt,
            i,
            [65 + i, 66],
            [-0.1, -0.2],
            "stop",
            [Span(0, 0, 2)],
            {"accuracy": 1.0, "format": None},
            {"accuracy": "correct"},
            1.0,
        )
        for i in range(num_samples)
    ]
    samples[0].advantages = torch.tensor([0.5, 0.5])
    samples[0].old_logprobs = [-0.1, -0.199877]
    return Group(prompt, samples)


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def decode(token_ids: list[int]) -> str:
    return "".join(map(chr, token_ids))


def console_output(num_steps: int, metrics: dict[str, float]) -> str:
    output = io.StringIO()
    ConsoleWriter(Console(file=output, width=80), num_steps).write_step(12, metrics)
    return output.getvalue()


def test_the_console_prints_one_plain_line_of_at_most_120_columns() -> None:
    assert console_output(200, METRICS) == (
        "step  12/200  reward 1.423  kl 0.0123  length 812  cut 38%  clip 0.012  mismatch 1e-06  "
        "154 s: sample 101, update 45.0\n"
    )


def test_phases_of_a_short_step_are_all_shown() -> None:
    metrics = {
        "seconds/sample": 1.2,
        "seconds/score": 0.01,
        "seconds/other": 0.1,
        "seconds/update": 2.1,
        "seconds/step": 3.4,
    }
    assert console_output(20, metrics) == "step 12/20  3.4 s: update 2.1, sample 1.2, other 0.1\n"


def test_the_console_omits_values_that_were_not_measured() -> None:
    assert console_output(20, {"reward/mean": 0.5, "seconds/step": 3.21}) == "step 12/20  reward 0.500  3.2 s\n"


def test_json_lines_are_flushed_and_store_nonfinite_values_as_text(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    writer = JsonLinesWriter(tmp_path)
    writer.write_step(3, {"a": 0.5, "b": float("nan"), "c": float("inf"), "d": float("-inf")})
    text = path.read_text()  # the writer is still open
    assert text == '{"step": 3, "a": 0.5, "b": "NaN", "c": "Infinity", "d": "-Infinity"}\n'
    assert float(json.loads(text)["c"]) == float("inf")


def test_a_resumed_run_continues_the_same_file(tmp_path: Path) -> None:
    for step in (1, 2):
        writer = JsonLinesWriter(tmp_path)
        writer.write_step(step, {})
        writer.close()
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 2


def test_rank_0_writes_steps_evaluations_and_samples(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = open_run_log(make_config(tmp_path, samples_per_step=2), 0, Hooks(ReportWriter))
    log.message("loaded [3] prompts")
    log.log_eval(0, {"eval/score": 0.5, "eval/accuracy": 0.625})
    log.log_step(1, METRICS)
    log.log_samples(1, [make_group(4) for _ in range(3)], decode)
    log.warn("a gradient norm jumped")
    log.close()
    metrics = read(tmp_path / "run/metrics.jsonl")
    assert metrics == [{"step": 0, "eval/score": 0.5, "eval/accuracy": 0.625}, {"step": 1, **METRICS}]
    first, second, *others = read(tmp_path / "run/samples.jsonl")
    assert first == {
        "step": 1,
        "prompt_id": 7,
        "group": 0,
        "index": 0,
        "policy_version": 0,
        "prompt": PROMPT,
        "response": "AB",
        "answer": "2",
        "finish_reason": "stop",
        "reward": 1.0,
        "rewards": {"accuracy": 1.0, "format": None},
        "verdicts": {"accuracy": "correct"},
        "advantage": 0.5,
        "token_ends": [1, 2],
        "rollout_logprobs": [-0.1, -0.2],
        "mismatch": [0.0, 0.000123],
    }
    assert (second["index"], second["response"], second["advantage"], "mismatch" in second) == (1, "BB", None, False)
    assert len(others) == 2  # groups are logged completely
    told = [{**row, "time": ""} for row in read(tmp_path / "run/messages.jsonl")]
    assert told == [
        {"step": 0, "time": "", "level": "info", "text": "loaded [3] prompts"},
        {"step": 1, "time": "", "level": "warning", "text": "a gradient norm jumped"},
    ]
    assert "a gradient norm jumped" in (tmp_path / "run/report.html").read_text()
    output = capsys.readouterr().out
    assert "loaded [3] prompts\n" in output
    assert "held-out, step 0  score 0.500  accuracy 0.625\n" in output


def test_other_ranks_write_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = open_run_log(make_config(tmp_path), 1, Hooks())
    assert log.writers == []
    log.log_step(0, METRICS)
    log.log_samples(0, [make_group(2)], decode)
    log.close()
    assert not (tmp_path / "run").exists()
    assert capsys.readouterr().out == ""


def test_token_texts_add_up_to_the_response_for_any_tokenizer() -> None:
    """Tokens may be single bytes of a character, or words whose space depends on their position."""
    words = ["▁so", "▁", "e", "▁f", "ar"]

    def by_bytes(token_ids: list[int]) -> str:
        return bytes(token_ids).decode("utf-8", "replace")

    def by_words(token_ids: list[int]) -> str:
        return "".join(words[i] for i in token_ids).replace("▁", " ").removeprefix(" ")

    text = "aé€😀z"
    ids = list(text.encode())
    ends = token_ends(ids, text, by_bytes)
    assert ends == [1, 1, 2, 2, 2, 3, 3, 3, 3, 4, 5]
    assert token_ends([0, 3, 4], by_words([0, 3, 4]), by_words) == [2, 4, 6]
    assert token_ends(ids, "something else", by_bytes) is None
    assert token_ends([], "", by_bytes) == []


def test_a_row_of_a_conversation_has_turns_and_means_over_sampled_tokens() -> None:
    row = sample_row(1, 0, make_group(1).samples[0], decode, {})
    assert row["advantage"] == 0.5 and row.keys().isdisjoint({"messages", "turns", "contexts", "turn_rewards"})
    group = make_group(1)
    one = group.samples[0] = replace(
        group.samples[0],
        response_ids=[65, 66, 67, 68],
        rollout_logprobs=[-0.1, 0.0, 0.0, -0.2],
        sampled=[(0, 1), (3, 4)],
        contexts=[Context(3, (88, 89))],
        messages=[{"role": "assistant", "content": "D"}],
        step_ends=[0],
        step_rewards=[0.5],
        advantages=torch.tensor([2.0, 0.0, 0.0, 2.0]),
        old_logprobs=[-0.1, 0.0, 0.0, -0.1],
    )
    row = sample_row(1, 0, group.samples[0], decode, {})
    assert row["advantage"] == 2.0 and "advantages" not in row and row["mismatch"] == [0, 0, 0, 0.1]
    assert row["turns"] == [[0, 1], [3, 4]] and row["contexts"] == [[3, "XY"]] and row["messages"] == one.messages
    assert json.loads(json.dumps(row["turn_rewards"])) == [[0, 0.5]]
    one.advantages = torch.tensor([2.0, 0.0, 0.0, -1.0])
    row = sample_row(1, 0, group.samples[0], decode, {})
    assert row["advantage"] == 0.5 and row["advantages"] == [2, 0, 0, -1]


def test_whole_groups_are_logged() -> None:
    groups = [make_group(4) for _ in range(3)]
    assert [num_logged(groups, n) for n in (0, 1, 4, 5, 100)] == [0, 4, 4, 8, 12]
    assert num_logged([], 4) == 0


def test_a_warning_of_many_lines_is_one_line(tmp_path: Path) -> None:
    """An agent's exception may have many lines."""
    RunLog([JsonLinesWriter(tmp_path)]).warn("an error:  ValueError: 1\r\n\n  2\u2028\t3\n")
    (row,) = map(json.loads, (tmp_path / "messages.jsonl").read_text().splitlines())
    assert (row["level"], row["text"]) == ("warning", "an error: ValueError: 1 2 3")
