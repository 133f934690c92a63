"""Agent functions and tools in worker processes: results, deadlines, crashes. Nothing is left over."""

import contextlib
import json
import os
import re
import subprocess
import sys
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from grpo_mega.config.rollout import RolloutConfig
from grpo_mega.processes import descendants, living
from grpo_mega.rollout.sessions.agent_job import agent_prompt
from grpo_mega.rollout.sessions.agents import AgentResult, AgentWorkers
from grpo_mega.types import Prompt
from tests.rollout.sessions.endpoint import Endpoint, say

pytestmark = [pytest.mark.pool, pytest.mark.waiting]

HERE = Path(__file__).resolve().parent
AGENT = "agent_functions.run"
TIMEOUT_S = 120.0


@pytest.fixture
def endpoint() -> Iterator[Endpoint]:
    served = Endpoint(lambda messages: say(f"answer {len(messages)}") if len(messages) < 6 else 400)
    yield served
    served.close()


def workers(schemas: tuple[dict[str, Any], ...] = (), **keys: Any) -> AgentWorkers:
    rollout = RolloutConfig.model_validate({"agent_timeout_s": TIMEOUT_S} | keys)
    return AgentWorkers(rollout, HERE, schemas=schemas)


def prompt(text: str, answer: str = "42") -> SimpleNamespace:
    columns = {"question": text, "gold": 7, "prompts": text}
    return agent_prompt(Prompt(0, text, (), answer, extras={"level": "hard"}, raw_columns=columns))


def outcomes(running: AgentWorkers, url: str, *texts: str, answer: str = "42") -> dict[str, AgentResult]:
    """Start one session per text, and return the results by text."""
    for text in texts:
        running.start(text, url, "key", prompt(text, answer))
    results = [running.results.get(timeout=TIMEOUT_S) for _ in texts]
    return {result.session_id: result for result in results}


def test_agent_functions_return_rewards_or_none_or_fail(endpoint: Endpoint) -> None:
    texts = ("value 0.5", "value None", "value {'a': 1, 'b': 2.5}", "value float('nan')", "value 'x'", "raises k")
    with workers(agent=AGENT, agent_workers=2) as running:
        found = outcomes(running, endpoint.url, *texts, "exits", "torch")
    kinds = [(found[text].value, found[text].kind) for text in (*texts, "exits", "torch")]
    assert kinds == [
        (0.5, "returned"), (None, "returned"), ({"a": 1.0, "b": 2.5}, "returned"), (None, "raised"), (None, "raised"),
        (None, "raised"), (None, "raised"), (0.0, "returned"),
    ]  # fmt: skip
    assert "reward is nan" in str(found["value float('nan')"].error)
    assert "KeyError: 'k' (in _raises, agent_functions.py" in str(found["raises k"].error)


def test_chat_samples_turns_with_the_key_and_rewards_them(endpoint: Endpoint) -> None:
    with workers(agent=AGENT) as running:
        result = outcomes(running, endpoint.url, "turns 3")["turns 3"]
        limited = outcomes(running, endpoint.url, "turns 5")["turns 5"]
    assert result.value == {"first": 3.0, "second": 7.0}
    assert result.turn_rewards == {"turn-1": 0.0, "turn-3": 0.5, "turn-5": 1.0}
    assert endpoint.requests[2]["messages"][1::2] == [say("answer 1"), say("answer 3")]
    assert endpoint.requests[0]["path"] == "/sessions/s/v1/chat/completions"
    assert (endpoint.requests[0]["key"], endpoint.requests[0]["max_tokens"]) == ("Bearer key", 5)
    assert (limited.kind, limited.value, list(limited.turn_rewards)) == (
        "returned",
        None,
        ["turn-1", "turn-3", "turn-5"],
    )


def test_an_endpoint_that_fails_is_not_the_fault_of_the_sample() -> None:
    failing = Endpoint(lambda messages: 503)
    with workers(agent=AGENT) as running:
        away = outcomes(running, "http://127.0.0.1:1/v1", "turns 1")["turns 1"]
        broken = outcomes(running, failing.url, "turns 2")["turns 2"]
    failing.close()
    assert [away.kind, broken.kind] == ["died", "died"]
    assert "does not answer" in str(away.error) and "status 503" in str(broken.error)


def test_samples_beyond_their_deadline_end_and_others_are_not_blamed(endpoint: Endpoint) -> None:
    with workers(agent=AGENT, agent_timeout_s=2.0, tool_timeout_s=60) as running:
        found = outcomes(running, endpoint.url, "sleeps", "ignores", "value 1")
        assert [found[text].kind for text in ("sleeps", "ignores", "value 1")] == ["deadline", "deadline", "returned"]
        assert outcomes(running, endpoint.url, "value 2")["value 2"].value == 2.0


BLOCKS = (HERE / "agent_functions.py").read_text().partition("    time.sleep(600)\n")[0].count("\n") + 1  # its line


@pytest.mark.parametrize("how", ["blocks", pytest.param("keeps_lock", marks=pytest.mark.full)])
def test_a_blocked_loop_names_its_line_and_blames_no_sample(endpoint: Endpoint, how: str) -> None:
    with workers(agent=AGENT, tool_timeout_s=1.0) as running:
        found = outcomes(running, endpoint.url, "sleeps", how, "sleeps 2")
        assert {(result.kind, result.num_sharing) for result in found.values()} == {("died", 3)}
        place = rf"\(in _blocks, agent_functions.py:{BLOCKS}\)"
        text = f"agent_functions.run blocked its event loop for 1 s {place}; use await"
        assert re.fullmatch(text if how == "blocks" else ".* ended with status 1; .*", str(found["sleeps"].error))
        assert outcomes(running, endpoint.url, "value 2")["value 2"].value == 2.0


def test_a_worker_that_ends_is_replaced_and_its_samples_died(endpoint: Endpoint) -> None:
    with workers(agent=AGENT) as running:
        found = outcomes(running, endpoint.url, "sleeps", "dies")
        assert {result.kind for result in found.values()} == {"died"}
        assert outcomes(running, endpoint.url, "value 2")["value 2"].value == 2.0


@pytest.mark.full
def test_few_samples_share_a_worker_when_they_start_again(endpoint: Endpoint, tmp_path: Path) -> None:
    """Each worker writes its process id. It gets no more samples than may share it, also when earlier ones have ended,
    because a thread of an ended sample may end the process."""
    texts = [f"notes {tmp_path / str(number)}" for number in range(11)]
    with workers(agent=AGENT) as running:
        for most, names in ((1, texts[:3]), (2, texts[3:])):
            for text in names:
                running.start(text, endpoint.url, "key", prompt(text), most)
        results = [running.results.get(timeout=TIMEOUT_S) for _ in texts]
        assert [result.value for result in results if result] == [1.0] * 11
    pids = [(tmp_path / str(number)).read_text() for number in range(11)]
    assert len({*pids[:3]}) == 3 and not {*pids[:3]} & {*pids[3:]}
    assert max(Counter(pids[3:]).values()) == 2


def test_killed_samples_end_without_a_result(endpoint: Endpoint) -> None:
    with workers(agent=AGENT) as running:
        for text in ("sleeps", "ignores", "value 1"):
            running.start(text, endpoint.url, "key", prompt(text))
        assert running.results.get(timeout=TIMEOUT_S).session_id == "value 1"
        running.kill(["sleeps", "ignores", "unknown"])
        assert outcomes(running, endpoint.url, "value 2")["value 2"].value == 2.0
        assert running.results.empty()


def test_a_socks_proxy_that_httpx_would_refuse_is_not_seen(endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALL_PROXY", "socks5://127.0.0.1:1")
    monkeypatch.setenv("https_proxy", "http://127.0.0.1:1")
    text = "value float(__import__('httpx').Client().get('http://127.0.0.1:1', timeout=9))"
    names = "value {name: 1.0 for name in __import__('os').environ if name.lower().endswith('_proxy')}"
    with workers(agent=AGENT) as running:
        found = outcomes(running, endpoint.url, text, names)
    assert "ConnectError" in str(found[text].error)
    assert {"https_proxy"} <= (found[names].value or {}).keys() and "ALL_PROXY" not in found[names].value


def test_tasks_that_an_agent_function_leaves_behind_end_with_it(endpoint: Endpoint, tmp_path: Path) -> None:
    with workers(agent=AGENT) as running:
        outcomes(running, endpoint.url, f"leaves {tmp_path / 'file'}")
        outcomes(running, endpoint.url, "value __import__('time').sleep(0.2)")
    assert not (tmp_path / "file").exists()


def test_no_process_outlives_the_workers(endpoint: Endpoint) -> None:
    before = set(descendants(os.getpid()))
    with workers(agent=AGENT, agent_workers=2) as running:
        for text in ("sleeps", "ignores", "blocks"):
            running.start(text, endpoint.url, "key", prompt(text))
        outcomes(running, endpoint.url, "value 1")
    _wait_for_end_of_new(before)


def _wait_for_end_of_new(before: set[int]) -> None:
    _wait_for(lambda: not _started(before))


def _started(before: set[int]) -> list[str]:
    """Return the new processes below this one, without multiprocessing's resource tracker."""
    new = [pid for pid in descendants(os.getpid()) if pid not in before]
    commands = {pid: Path(f"/proc/{pid}/cmdline") for pid in new}
    texts = [path.read_text() for path in commands.values() if path.exists()]
    return [text for text in texts if "resource_tracker" not in text]


TOOLS = tuple(f"agent_functions.{name}" for name in ("add", "add_later", "never", "misbehave"))


def test_the_built_in_agent_answers_calls_until_there_is_none() -> None:
    calls = [
        ("add", '{"a": 2, "b": 3}'), ("add_later", {"a": 1, "b": 1}), ("never", {}), ("unknown", {}), ("add", "{"),
        ("add", {"a": 1}), *(("misbehave", {"how": how}) for how in HOW),
    ]  # fmt: skip
    replies = [say("", *calls), say("x", invalid=[{"text": "{", "error": "not JSON"}]), say("done")]
    served = Endpoint(lambda messages: replies[min(2, sum(one["role"] == "assistant" for one in messages))])
    before = set(descendants(os.getpid()))
    schemas = ({"type": "function", "function": {"name": "add"}},)
    with workers(schemas, tools=TOOLS, tool_timeout_s=3.0) as running:
        result = outcomes(running, served.url, "q")["q"]
    served.close()
    assert (result.kind, result.value) == ("returned", None), result
    assert [request["tools"] for request in served.requests] == [list(schemas)] * 3
    messages = served.requests[-1]["messages"]
    contents = [one["content"] for one in messages if one["role"] == "tool"]
    assert contents[:2] == ["5", "2"]
    assert contents[2] == "Error: never took longer than 3 s"
    assert contents[3].startswith("Error: there is no tool 'unknown'; the tools are add, add_later, never, misbehave")
    assert contents[4].startswith("Error: the arguments are not JSON")
    assert "missing 1 required positional argument: 'b'" in contents[5]
    by_how = dict(zip(HOW, contents[6:], strict=True))
    assert by_how["raise"].startswith("Error: KeyError: 'k'") and by_how["sys.exit"].startswith("Error: SystemExit")
    assert by_how["hang"] == "Error: misbehave took longer than 3 s"
    assert by_how["exit"] == "Error: the tool's process ended with status 7"
    assert (by_how["child"], by_how["thread"], by_how["torch"]) == ("fine", "fine", "False")
    assert len(by_how["long"]) < 21_000 and "100000 characters" in by_how["long"]
    assert messages[-1] == {"role": "user", "content": "Error: this is not a tool call: '{', not JSON"}
    assert [one["tool_call_id"] for one in messages if one["role"] == "tool"][:2] == ["c0", "c1"]
    _wait_for_end_of_new(before)


HOW = ("raise", "hang", "exit", "sys.exit", "child", "thread", "long", "torch")


def test_the_built_in_agent_ends_at_max_turns_without_running_calls() -> None:
    served = Endpoint(lambda messages: say("", ("add", {"a": 2, "b": 3})))
    with workers(tools=TOOLS, max_turns=2) as running:
        result = outcomes(running, served.url, "q")["q"]
    served.close()
    assert (result.kind, len(served.requests)) == ("returned", 2)
    assert json.dumps(served.requests[-1]["messages"]).count('"tool"') == 1


STATEFUL = """
import os, threading, time
with open({notes!r}, "a") as file:
    file.write(".")
{on_import}
CALLS = []

def count() -> str:
    CALLS.append(1)
    return str(len(CALLS))
"""
THREAD = "threading.Thread(target=time.sleep, args=(600,), daemon=True).start()"


@pytest.mark.parametrize("on_import", ["", THREAD], ids=["warm", "with a thread"])
def test_a_tool_call_does_not_see_what_another_left(on_import: str, tmp_path: Path) -> None:
    """The agent's worker imports the tool, and so does the process of the calls, which then forks them. A process with
    threads cannot fork, so it runs one call."""
    notes, turns = tmp_path / "notes", 4
    (tmp_path / "stateful.py").write_text(STATEFUL.format(notes=str(notes), on_import=on_import))
    replies = [*[say("", ("count", {}))] * turns, say("done")]
    served = Endpoint(lambda messages: replies[sum(one["role"] == "assistant" for one in messages)])
    with workers(tools=[f"{tmp_path / 'stateful.py'}:count"], max_turns=turns + 1) as running:
        outcomes(running, served.url, "q")
    served.close()
    contents = [one["content"] for one in served.requests[-1]["messages"] if one["role"] == "tool"]
    assert contents == ["1"] * turns
    num_imports = len(notes.read_text()) - 1
    assert num_imports == turns if on_import else num_imports < turns


def test_the_tool_python_runs_in_the_sandbox() -> None:
    programs = ("print(6 * 7)", "1 / 0", "import os; print(os.listdir('.'))")
    replies = [say("", *(("python", {"code": program}) for program in programs)), say("done")]
    served = Endpoint(lambda messages: replies[sum(one["role"] == "assistant" for one in messages)])
    with workers(tools=["python"]) as running:
        outcomes(running, served.url, "q")
    served.close()
    contents = [one["content"] for one in served.requests[-1]["messages"] if one["role"] == "tool"]
    assert [contents[0], contents[2]] == ["42\n", "[]\n"]
    assert contents[1].startswith("Error: Traceback") and contents[1].endswith("ZeroDivisionError: division by zero")


KILLED = """
import sys, time
from tests.rollout.sessions import test_agents as tests
with tests.workers(tools=tests.TOOLS, tool_timeout_s=600) as running:
    running.start("q", sys.argv[1], "key", tests.prompt("q"))
    time.sleep(600)
"""


def test_workers_and_tools_end_with_a_killed_rank() -> None:
    """The processes are recognized by a mark in their environment."""
    calls = [("misbehave", {"how": "hang"}), ("never", {})]
    served, mark = Endpoint(lambda messages: say("", *calls)), f"GRPO_MEGA_TEST_MARK={uuid.uuid4().hex}"
    name, _, value = mark.partition("=")
    environment = os.environ | {name: value, "PYTHONPATH": str(HERE.parents[2])}
    rank = subprocess.Popen([sys.executable, "-c", KILLED, served.url], env=environment)
    # the rank, a resource tracker, two fork servers, the agent worker, the warm process and the tool
    _wait_for(lambda: len(_marked(mark)) >= 7)
    rank.kill()
    rank.wait()
    _wait_for(lambda: not _marked(mark))
    served.close()


def _marked(mark: str) -> list[int]:
    """Return the living processes with this mark in their environment."""
    found = []
    for process in living():
        with contextlib.suppress(OSError):
            if mark.encode() in Path(f"/proc/{process.pid}/environ").read_bytes().split(b"\0"):
                found.append(process.pid)
    return found


def _wait_for(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)
