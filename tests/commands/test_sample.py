"""`grpo-mega sample`: scored responses with log-probs, compared with transformers, and a chat in the terminal."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from grpo_mega import cli
from grpo_mega.cli.commands.sample import ReplyStream
from grpo_mega.run.model_files import decoder
from grpo_mega.text import printable
from tests.helpers.runs import run
from tools.benchmarks import kills

pytestmark = pytest.mark.usefixtures("preloaded_python")

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train one step. The exported model has many positions, so a greedy reply can be long."""
    folder = tmp_path_factory.mktemp("sample")
    config = kills.write_inputs(folder, "tp=1", max_position_embeddings=1 << 20)
    code, output = run(config, folder / "run", "--set", "steps=1", "--set", "eval.num_prompts=1")
    assert code == 0, output
    return folder / "run"


@contextmanager
def pressing(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """Press Ctrl-C again and again. One press just before Python reads from the terminal waits for the next input."""
    ended = threading.Event()

    def press() -> None:
        while not ended.wait(0.5):
            process.send_signal(signal.SIGINT)

    thread = threading.Thread(target=press)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


@contextmanager
def started(run_dir: Path, *arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-m", "grpo_mega.cli", "sample", *arguments]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    process = subprocess.Popen(command, cwd=run_dir.parent, env=environment, **pipes)
    timer = threading.Timer(240, process.kill)
    timer.start()
    try:
        yield process
    finally:
        timer.cancel()
        process.kill()
        process.wait()


def sampled(run_dir: Path, *arguments: str) -> str:
    with started(run_dir, *arguments) as process:
        output = process.communicate()[0].decode()
        assert process.returncode == 0, output
    return output


def read_until(process: subprocess.Popen[bytes], pattern: str) -> str:
    """Return the output up to a pattern, which may end an unfinished line."""
    assert process.stdout is not None
    output = b""
    while not re.search(pattern, output.decode(errors="replace")):
        part = os.read(process.stdout.fileno(), 1)
        assert part, output.decode(errors="replace")
        output += part
    return output.decode(errors="replace")


def end_a_reply(process: subprocess.Popen[bytes]) -> None:
    """Ask, press Ctrl-C while the reply is printed, and leave the chat."""
    assert process.stdin is not None
    process.stdin.write(b"Hello\n")
    process.stdin.flush()
    read_until(process, r"model: (?s:.){20}")  # the reply is printed while it is sampled
    process.send_signal(signal.SIGINT)
    assert "ended by you" in read_until(process, "\n\nyou: ")
    process.stdin.close()
    assert process.wait(timeout=60) == 0


def logprobs_of(model: Any, prompt: list[int], response: list[int]) -> list[float]:
    with torch.inference_mode():
        logits = model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
    return logits.log_softmax(-1).gather(1, torch.tensor(response)[:, None]).squeeze(1).tolist()


def test_responses_to_a_data_set_have_rewards_and_transformers_logprobs(run_dir: Path, tmp_path: Path) -> None:
    out, data = tmp_path / "rows.jsonl", run_dir.parent / "heldout.jsonl"
    output = sampled(run_dir, str(run_dir), "--data", str(data), "--n", "3", "--out", str(out))
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [(row["gold"], row["index"]) for row in rows] == [(gold, i) for gold in ("nine", "ten") for i in range(3)]
    assert "sampling from" in output and "the policy after step 1" in output
    tokenizer = AutoTokenizer.from_pretrained(run_dir / "hf")
    model = AutoModelForCausalLM.from_pretrained(run_dir / "hf")
    for row in rows:
        prompt = tokenizer(row["prompt"], add_special_tokens=False)["input_ids"]
        assert row["logprobs"] == pytest.approx(logprobs_of(model, prompt, row["token_ids"]), abs=1e-4)
        vowels = kills.share_of_vowels("", row["response"], "", {})
        assert row["reward"] == pytest.approx(vowels)
        line = f"[{row['index'] + 1}/3] reward {vowels:.3f} (tools.benchmarks.kills.share_of_vowels {vowels:.3f}),"
        assert f"{line} log-prob {sum(row['logprobs']):.3f}, " in output
    summary = json.loads(output.splitlines()[-1])
    assert (summary["step"], summary["responses"]) == (1, 6)
    assert summary["reward"] == pytest.approx(sum(row["reward"] for row in rows) / 6)


@pytest.mark.parametrize(
    ("arguments", "scores"), [((), "reward none (accuracy: no gold answer)"), (("--answer", "4"), "reward 0.000")]
)
def test_a_model_without_a_run_is_scored_by_accuracy(run_dir: Path, arguments: tuple[str, ...], scores: str) -> None:
    shorter = ("--max-response-length", "8")
    output = sampled(run_dir, str(run_dir / "hf"), "--prompt", "What is 2+2?", "--n", "2", *shorter, *arguments)
    assert "<user>What is 2+2?<end><assistant>" in output
    assert output.count(scores) == 2
    assert json.loads(output.splitlines()[-1])["reward"] == (0.0 if arguments else None)


def test_a_chat_keeps_the_conversation_and_ends_by_quit_or_end_of_file(run_dir: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(run_dir / "hf")
    model = AutoModelForCausalLM.from_pretrained(run_dir / "hf")
    decode = decoder(tokenizer)
    text, expected, replies = "", [], []
    for message in ("Hello", "Again"):
        text += f"<user>{message}<end><assistant>"
        inputs = tokenizer(text, add_special_tokens=False, return_tensors="pt")
        with torch.inference_mode():
            out = model.generate(**inputs, do_sample=False, max_new_tokens=20, pad_token_id=0)
        prompt, reply = inputs["input_ids"][0].tolist(), out[0, inputs["input_ids"].shape[1] :].tolist()
        expected.append(f"[log-prob {sum(logprobs_of(model, prompt, reply)):.3f}, ")
        replies.append(f"\nmodel: {printable(decode(reply))}\n[log-prob ")
        text += decode(reply) + "<end>"
    with started(run_dir, str(run_dir / "hf"), "--temperature", "0", "--max-response-length", "20") as process:
        output = process.communicate(b"Hello\n\nAgain\n/quit\nnever read\n")[0].decode(errors="replace")
        assert process.returncode == 0, output
    assert re.findall(r"\[log-prob -[0-9.]+, ", output) == expected
    assert all(reply in output for reply in replies), (replies, output)
    with started(run_dir, str(run_dir / "hf")) as process:
        assert "you: " in process.communicate(b"")[0].decode() and process.returncode == 0


def test_a_conversation_above_the_limit_starts_again_with_the_last_message(run_dir: Path) -> None:
    limits = ("--set", "data.max_prompt_length=30", "--max-response-length", "4")
    with started(run_dir, str(run_dir / "hf"), *limits) as process:
        long = "x" * 40
        output = process.communicate(f"Hello\nAgain, and more\n{long}\nHi\n/quit\n".encode())[0].decode()
        assert process.returncode == 0, output
    assert output.count("above data.max_prompt_length=30; it starts again with this message") >= 1
    assert output.count("\nmodel: ") == 3, output  # Hello, Again, and Hi; the long message alone does not fit
    assert "above data.max_prompt_length=30; shorten it" in output


def test_ctrl_c_ends_the_current_reply_and_not_the_chat(run_dir: Path) -> None:
    arguments = ("--temperature", "0", "--max-response-length", "500000")
    with started(run_dir, str(run_dir / "hf"), *arguments) as process:
        read_until(process, "you: ")
        with pressing(process):
            read_until(process, "/quit or Ctrl-D ends the chat\n\nyou: ")
        end_a_reply(process)


def test_a_character_of_several_tokens_is_printed_once_it_is_whole(capsys: pytest.CaptureFixture[str]) -> None:
    token_ids = list("Ünïcödé 漢字 ok".encode())  # a token per byte
    shown, parts = ReplyStream(lambda ids: bytes(ids).decode(errors="replace")), []
    for i in range(len(token_ids) - 1):
        shown.show(token_ids[: i + 1])
        parts.append(capsys.readouterr().out)
    shown.finish(token_ids)
    assert "".join(parts) + capsys.readouterr().out == "Ünïcödé 漢字 ok"
    assert parts[:3] == ["", "Ü", "n"] and "\ufffd" not in "".join(parts)


SERVER = ("rollout.cache_tokens=16384", "rollout.max_concurrent=8", "rollout.start_deadline_s=300")


@pytest.mark.full
@pytest.mark.sglang
def test_a_server_samples_and_chats_like_transformers(run_dir: Path, tmp_path: Path) -> None:
    out, model = tmp_path / "rows.jsonl", str(run_dir / "hf")
    server = ("--engine", "sglang", "--max-response-length", "6", *(word for key in SERVER for word in ("--set", key)))
    output = sampled(run_dir, model, "--prompt", "Hello", "--n", "2", "--out", str(out), *server)
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert len(rows) == 2 and json.loads(output.splitlines()[-1])["responses"] == 2
    tokenizer, oracle = AutoTokenizer.from_pretrained(model), AutoModelForCausalLM.from_pretrained(model)
    prompt = tokenizer("<user>Hello<end><assistant>", add_special_tokens=False)["input_ids"]
    for row in rows:
        assert row["logprobs"] == pytest.approx(logprobs_of(oracle, prompt, row["token_ids"]), abs=1e-3)
    inputs = torch.tensor([prompt])
    with torch.inference_mode():
        reply = oracle.generate(inputs, do_sample=False, max_new_tokens=6, pad_token_id=0)[0, len(prompt) :].tolist()
    with started(run_dir, model, "--temperature", "0", *server) as process:
        output = process.communicate(b"Hello\n/quit\n")[0].decode(errors="replace")
        assert process.returncode == 0, output
    assert f"\nmodel: {printable(decoder(tokenizer)(reply))}\n[log-prob " in output
    with started(run_dir, model, "--temperature", "0", *server, "--max-response-length", "9000") as process:
        read_until(process, "you: ")
        end_a_reply(process)


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--prompt", "a", "--data", "b"], "--prompt and --data b both give prompts"),
        (["--prompt", " "], "--prompt=' ': must be a text"),
        (["--answer", "4"], "--answer=4: must go with --prompt"),
        (["--out", "o"], "--out=o: must go with --prompt or --data"),
        (["--prompt", "a", "--prompts", "3"], "--prompts=3: must go with --data"),
        (["--prompt", "a", "--n", "0"], "--n=0: must be at least 1"),
        (["--prompt", "a", "--temperature", "-1"], "--temperature=-1.0: must be 0 or above"),
        (["--prompt", "a", "--step", "1"], "--step=1: must go with a run's folder"),
        (["--prompt", "a", "--set", "model.size=1"], "unknown key 'model.size'"),
        (["--data", "none.jsonl"], "dataset none.jsonl does not exist"),
        (["--prompt", "a"], "holds no config.json; name the folder of a Hugging Face checkpoint"),
    ],
)
def test_bad_options_are_refused_in_one_line(
    arguments: list[str], problem: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["sample", str(tmp_path), *arguments]) == 2
    output = capsys.readouterr()
    lines = [line for line in output.err.splitlines() if "error: " in line]
    assert output.out == "" and sum(problem in line for line in lines) == 1
