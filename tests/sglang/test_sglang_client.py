"""Endpoints of a real server. A fake server replaces SGLang versions that are not installed."""

import asyncio
import json
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Callable, Coroutine
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import pytest
import torch
from aiohttp import web

from grpo_mega.errors import EngineError
from grpo_mega.rollout.engine import Sampling
from grpo_mega.rollout.sglang import loader
from grpo_mega.rollout.sglang.buckets import HostBuckets, payload
from grpo_mega.rollout.sglang.client import ServerClient, is_by_adapter
from grpo_mega.rollout.sglang.engine import SGLangEngine
from grpo_mega.rollout.sglang.server import Server
from grpo_mega.types import Prompt, Sample
from grpo_mega.weights.layout import ShardLayout
from tests.helpers.servers import LOADER, Tree, changed, check_gone, generate, is_true_within, make_settings

T = TypeVar("T")
STRANGERS_ID = 65534  # a user without privileges

pytestmark = pytest.mark.sglang


def call(server: Server, use: Callable[[ServerClient], Coroutine[Any, Any, T]], deadline_s: float = 30) -> T:
    session = ServerClient(server.url, server.headers, deadline_s=deadline_s)
    try:
        return session.run(use(session))
    finally:
        session.close()


def keyless(url: str) -> Any:
    return SimpleNamespace(url=url, headers={})


def load(path: Path | str, version: str | None = None) -> tuple[str, dict[str, Any]]:
    """Return a request for the loader. The loader writes to the file named by the tensor."""
    body = {"serialized_named_tensors": [payload(str(path), torch.empty(0))], "load_format": LOADER}
    body |= {"flush_cache": False} if version is None else {"flush_cache": True, "weight_version": version}
    return "/update_weights_from_tensor", body


def test_an_update_goes_to_the_loader_and_sets_the_version(server: Server, tmp_path: Path) -> None:
    async def update(session: ServerClient) -> None:
        await session.post("/begin_weight_update")
        await session.post(*load(tmp_path / "first"))
        await session.post(*load(tmp_path / "second", "7"))
        await session.post("/end_weight_update")

    call(server, update)
    for name in ("first", "second"):
        assert "model.layers.1.self_attn.qkv_proj.weight" in json.loads((tmp_path / name).read_text())
    assert generate(server)[0]["meta_info"]["weight_version"] == "7"


def test_a_refusal_is_reported_in_the_servers_words(server: Server, tmp_path: Path) -> None:
    async def end_without_beginning(session: ServerClient) -> None:
        await session.post("/end_weight_update")

    with pytest.raises(EngineError, match=r"/end_weight_update was refused \(400\): no weight-update session is open"):
        call(server, end_without_beginning)

    async def load_without_beginning(session: ServerClient) -> None:
        await session.post(*load(tmp_path / "x"))

    with pytest.raises(EngineError, match="must run between begin_weight_update"):
        call(server, load_without_beginning)


# Runs as another user: calls the server and tries to read its owner's files.
STRANGER = """
import json, os, sys, urllib.error, urllib.request
url, folder, pid, written = sys.argv[1:]
update = json.loads(sys.stdin.read())
opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
answers = []
for path, body in (("/v1/models", None), ("/generate", {"input_ids": [1]}), ("/update_weights_from_tensor", update)):
    for key in ({}, {"Authorization": "Bearer x"}):
        data, headers = body and json.dumps(body).encode(), {"Content-Type": "application/json"} | key
        try:
            answers.append(opener.open(urllib.request.Request(url + path, data, headers), timeout=20).status)
        except urllib.error.HTTPError as error:
            answers.append(error.code)
secrets = []
for read in (lambda: os.listdir(folder), lambda: open(f"/proc/{pid}/environ").read()):
    try:
        secrets.append(bool(read()))
    except PermissionError:
        secrets.append(False)
print(json.dumps([os.getuid(), answers, secrets, open(f"/proc/{pid}/cmdline").read()]))
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="needs the right to become another user (run as root)")
def test_another_user_can_neither_call_a_server_nor_look_into_its_folder(server: Server, tmp_path: Path) -> None:
    _, update = load(tmp_path / "evil")
    python = shutil.which("python3", path="/usr/bin:/bin")
    if python is None:
        pytest.skip("needs a python3 in /usr/bin that another user can run")
    command = [
        python,
        "-I",
        "-c",
        STRANGER,
        server.url,
        str(server.private_folder),
        str(server.pid),
        str(tmp_path / "evil"),
    ]
    ids = {"user": STRANGERS_ID, "group": STRANGERS_ID}
    found = subprocess.run(command, input=json.dumps(update), capture_output=True, text=True, cwd="/", **ids)
    assert found.returncode == 0, found.stderr
    uid, answers, secrets, words = json.loads(found.stdout)
    assert uid == STRANGERS_ID and answers == [401] * 6 and secrets == [False, False]
    assert server.key not in words and not (tmp_path / "evil").exists()
    assert server.private_folder.stat().st_mode & 0o777 == 0o700


def test_the_loader_writes_into_the_servers_own_folder_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    outside = tmp_path.with_name("outside.json")
    request = {"action": "check", "parameters": {}, "padded": [], "number": 5, "tp_rank": 1, "report": str(outside)}
    loader.load(torch.nn.Linear(3, 2), [(json.dumps(request), torch.empty(0))])
    assert [path.name for path in tmp_path.iterdir()] == ["loader_1_1.json"] and not outside.exists()
    with pytest.raises(ValueError, match="invalid literal"):
        loader.load(torch.nn.Linear(3, 2), [(json.dumps(request | {"tp_rank": "../../outside"}), torch.empty(0))])


def test_a_server_stays_healthy_while_its_memory_is_released_and_resumed(server: Server) -> None:
    async def sleep_and_wake(session: ServerClient) -> list[bool]:
        await session.post("/release_memory_occupation", {"tags": ["weights", "kv_cache"]})
        health = [await session.is_healthy(10)]
        await session.post("/resume_memory_occupation", {"tags": ["weights"]})
        await session.post("/resume_memory_occupation", {"tags": ["kv_cache"]})
        await session.post("/flush_cache")
        return [*health, await session.is_healthy(10)]

    assert call(server, sleep_and_wake) == [True, True]
    assert len(generate(server, num_tokens=4)[0]["output_ids"]) == 4


def test_a_server_in_a_long_batch_is_healthy_and_can_be_aborted(server: Server) -> None:
    async def interrupt(session: ServerClient) -> tuple[bool, list[dict[str, Any]]]:
        batch = asyncio.create_task(asyncio.to_thread(generate, server, 450, 32))
        await asyncio.sleep(1.5)
        is_healthy = await session.is_healthy(10)
        assert not batch.done()
        with pytest.raises(EngineError, match="/flush_cache was refused"):
            await session.post("/flush_cache")
        await session.post("/abort_request", {"abort_all": True})
        return is_healthy, await batch

    is_healthy, answers = call(server, interrupt)
    assert is_healthy
    assert {answer["meta_info"]["finish_reason"]["type"] for answer in answers} == {"abort"}
    assert all(0 < len(answer["output_ids"]) < 450 for answer in answers)


def test_a_paused_server_is_healthy_and_samples_once_it_is_resumed(server: Server) -> None:
    async def pause(session: ServerClient) -> tuple[bool, bool]:
        await session.post("/pause_generation", {"mode": "abort"})
        sample = asyncio.create_task(asyncio.to_thread(generate, server))
        await asyncio.sleep(0.5)
        was_done, is_healthy = sample.done(), await session.is_healthy(10)
        await session.post("/continue_generation")
        await sample
        return was_done, is_healthy

    assert call(server, pause) == (False, True)


def test_a_server_whose_scheduler_is_stopped_is_not_healthy(server: Server) -> None:
    (scheduler,) = Tree.of(server).named("sglang::scheduler")
    os.kill(scheduler, signal.SIGSTOP)
    try:
        assert not call(server, lambda session: session.is_healthy(1))
        with pytest.raises(EngineError, match="/flush_cache gave no answer for 1 s"):
            call(server, lambda session: session.post("/flush_cache"), deadline_s=1)
    finally:
        os.kill(scheduler, signal.SIGCONT)
    assert call(server, lambda session: session.is_healthy(10))


def test_a_server_that_is_gone_is_an_error_and_not_healthy() -> None:
    url = "http://127.0.0.1:9"
    assert not call(keyless(url), lambda session: session.is_healthy(5))
    with pytest.raises(EngineError, match="flush_cache cannot be reached"):
        call(keyless(url), lambda session: session.post("/flush_cache"))


def with_fake_server(routes: list[web.RouteDef], act: Callable[[str], T]) -> T:
    """Return `act(url)`, called in a thread other than the server's."""

    async def serve() -> T:
        app = web.Application()
        app.add_routes(routes)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        try:
            return await asyncio.to_thread(act, f"http://127.0.0.1:{runner.addresses[0][1]}")
        finally:
            await runner.cleanup()

    return asyncio.run(serve())


def test_a_version_without_update_sessions_is_not_asked_for_them() -> None:
    seen: list[str] = []

    async def answer(request: web.Request) -> web.Response:
        seen.append(request.path)
        return web.json_response({"paths": {"/update_weights_from_tensor": {}}, "success": True})

    async def update(session: ServerClient) -> None:
        await session.post("/begin_weight_update")
        await session.post(*load("x", "1"))
        await session.post("/end_weight_update")

    routes = [web.get("/openapi.json", answer), web.post("/update_weights_from_tensor", answer)]
    with_fake_server(routes, lambda url: call(keyless(url), update))
    assert seen == ["/openapi.json", "/update_weights_from_tensor"]


def test_a_server_is_asked_to_sleep_only_once_it_is_idle(tmp_path: Path) -> None:
    """With overlapped scheduling the server runs one more decode step after the last sample, and refuses a flush until
    then.
    """
    seen: list[str] = []

    async def answer(request: web.Request) -> web.Response:
        seen.append(request.path)
        if seen.count("/flush_cache") in (1, 2) and request.path == "/flush_cache":
            return web.json_response({"error": {"message": "there are running requests"}}, status=400)
        return web.json_response({"success": True})

    def act(url: str) -> None:
        server: Any = SimpleNamespace(
            headers={},
            url=url,
            wait_until_healthy=lambda: None,
            is_alive=lambda: True,
            stop=lambda: None,
            tail=lambda: "(no log)",
        )
        settings = changed(make_settings(tmp_path, tmp_path), {}, device_type="cuda", cores=())
        rendezvous: Any = SimpleNamespace(rank=0)
        engine = SGLangEngine(settings, ShardLayout(((),)), rendezvous, HostBuckets(), server)
        engine.wait_until_ready()
        engine.sleep()
        failure = engine.failure
        engine.close()
        assert failure is None

    with_fake_server([web.post("/flush_cache", answer), web.post("/release_memory_occupation", answer)], act)
    assert seen == ["/flush_cache"] * 3 + ["/release_memory_occupation"]


def test_long_samples_are_read_and_lost_ones_are_requested_again() -> None:
    prompt, sampling = Prompt(0, "", (1, 2), ""), Sampling(2, 1.0, 100_000, stop_token_ids=frozenset())
    ids = list(range(100_000))  # more than a megabyte in one line
    asked: list[int] = []

    async def answer(request: web.Request) -> web.StreamResponse:
        num_samples = (await request.json())["sampling_params"]["n"]
        asked.append(num_samples)
        response = web.StreamResponse()
        await response.prepare(request)
        for index in reversed(range(num_samples)):
            meta = {"finish_reason": {"type": "length"}, "weight_version": "3"}
            meta |= {"output_token_logprobs": [[-0.5, token, None] for token in ids]}
            text = f"data: {json.dumps({'index': index, 'output_ids': ids, 'meta_info': meta})}\n\n".encode()
            if num_samples == 2 and index == 0:
                await response.write(text[: len(text) // 2])
                assert request.transport is not None
                request.transport.close()
                break
            await response.write(text)
        else:
            await response.write(b"data: [DONE]\n\n")
        return response

    def samples(url: str) -> list[Any]:
        session = ServerClient(url, {})
        try:
            session.generate(7, [Sample(prompt, index, [], [], None) for index in range(2)], sampling, step=0)
            return [session.events.get(timeout=60) for _ in range(sampling.group_size)]
        finally:
            session.close()

    events = with_fake_server([web.post("/generate", answer)], samples)
    assert asked == [2, 1]
    assert [(event.prompt_index, event.error, event.sample.index) for event in events] == [(7, None, 1), (7, None, 0)]
    assert all(event.sample.response_ids == ids for event in events)


def test_the_server_ends_when_its_scheduler_is_killed(server: Server, temporary: Path) -> None:
    """Kill the shared server. No later test of this file uses it, and another file starts it again."""
    tree = Tree.of(server)
    assert len(tree.shared_memory) == 1
    (scheduler,) = tree.named("sglang::scheduler")
    os.kill(scheduler, signal.SIGKILL)
    assert is_true_within(20, lambda: not server.is_alive())
    check_gone(tree, temporary)


@pytest.mark.parametrize(
    ("used", "reason", "ids", "is_accepted"),
    [
        (["version-2.1", "version-2.1"], "stop", [5], True),
        ([], "abort", [5], False),  # aborted in the queue: the server does not tell, so its tokens are not used
        ([], "abort", [], True),
        (["none"], "stop", [5], None),
        (["version-2.1", "none"], "length", [5], None),
        (["version-1.1"], "stop", [5], None),
        ([], "stop", [5], None),
    ],
)
def test_a_sample_of_another_adapter_is_an_error(
    used: list[str], reason: str, ids: list[int], is_accepted: bool | None
) -> None:
    answer = {"output_ids": ids, "meta_info": {"adapter": used, "finish_reason": {"type": reason}}}
    assert is_by_adapter(None, answer)
    if is_accepted is not None:
        assert is_by_adapter("version-2.1", answer) == is_accepted
        return
    with pytest.raises(EngineError, match=r"must use the adapter version-2\.1, but the server used"):
        is_by_adapter("version-2.1", answer)
