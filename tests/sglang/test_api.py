"""The endpoints of a real server; a pretended one stands in for the versions of SGLang that are not installed."""

import asyncio
import json
import os
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

import aiohttp
import pytest
import torch
from aiohttp import web
from servers import LOADER, Tree, generate

from grpo_mega.errors import EngineError
from grpo_mega.rollout.sglang.api import Api
from grpo_mega.rollout.sglang.buckets import payload
from grpo_mega.rollout.sglang.server import Server

T = TypeVar("T")

pytestmark = pytest.mark.sglang


def call(url: str, use: Callable[[Api], Awaitable[T]], deadline_s: float = 30) -> T:
    async def inside() -> T:
        async with aiohttp.ClientSession() as session:
            return await use(Api(session, url, deadline_s))

    return asyncio.run(inside())


def note(path: Path) -> str:
    """For the loader, which writes to the file that its tensor is named after."""
    return payload(str(path), torch.empty(0))


def test_an_update_goes_to_the_loader_and_sets_the_version(server: Server, tmp_path: Path) -> None:
    async def update(api: Api) -> None:
        await api.begin_update()
        await api.load([note(tmp_path / "first")], LOADER, None, False)
        await api.load([note(tmp_path / "second")], LOADER, "7", True)
        await api.end_update()

    call(server.url, update)
    for name in ("first", "second"):
        assert "model.layers.1.self_attn.qkv_proj.weight" in json.loads((tmp_path / name).read_text())
    assert generate(server.url)[0]["meta_info"]["weight_version"] == "7"


def test_what_the_server_refuses_is_said_in_its_words(server: Server, tmp_path: Path) -> None:
    async def end_without_beginning(api: Api) -> None:
        await api.end_update()

    with pytest.raises(EngineError, match=r"/end_weight_update was refused \(400\): no weight-update session is open"):
        call(server.url, end_without_beginning)

    async def load_without_beginning(api: Api) -> None:
        await api.load([note(tmp_path / "x")], LOADER, None, False)

    with pytest.raises(EngineError, match="must run between begin_weight_update"):
        call(server.url, load_without_beginning)


def test_memory_is_given_back_and_taken_again_while_the_server_stays_healthy(server: Server) -> None:
    async def sleep_and_wake(api: Api) -> list[bool]:
        await api.release(["weights", "kv_cache"])
        health = [await api.is_healthy(10)]
        await api.resume(["weights"])
        await api.resume(["kv_cache"])
        await api.flush_cache()
        return [*health, await api.is_healthy(10)]

    assert call(server.url, sleep_and_wake) == [True, True]
    assert len(generate(server.url, num_tokens=4)[0]["output_ids"]) == 4


def test_a_server_in_the_midst_of_a_long_batch_is_healthy_and_can_be_told_to_stop(server: Server) -> None:
    async def interrupt(api: Api) -> tuple[bool, list[dict[str, Any]]]:
        batch = asyncio.create_task(asyncio.to_thread(generate, server.url, 450, 32))
        await asyncio.sleep(1.5)
        is_healthy = await api.is_healthy(10)
        assert not batch.done()
        with pytest.raises(EngineError, match="/flush_cache was refused"):
            await api.flush_cache()
        await api.abort_all()
        return is_healthy, await batch

    is_healthy, answers = call(server.url, interrupt)
    assert is_healthy
    assert {answer["meta_info"]["finish_reason"]["type"] for answer in answers} == {"abort"}
    assert all(0 < len(answer["output_ids"]) < 450 for answer in answers)


def test_a_paused_server_is_healthy_and_samples_once_it_may(server: Server) -> None:
    async def pause(api: Api) -> tuple[bool, bool]:
        await api.pause()
        sample = asyncio.create_task(asyncio.to_thread(generate, server.url))
        await asyncio.sleep(0.5)
        was_done, is_healthy = sample.done(), await api.is_healthy(10)
        await api.unpause()
        await sample
        return was_done, is_healthy

    assert call(server.url, pause) == (False, True)


def test_a_server_whose_scheduler_is_stopped_is_not_healthy(server: Server) -> None:
    (scheduler,) = Tree.of(server).named("sglang::scheduler")
    os.kill(scheduler, signal.SIGSTOP)
    try:
        assert not call(server.url, lambda api: api.is_healthy(1))
        with pytest.raises(EngineError, match="/flush_cache gave no answer for 1 s"):
            call(server.url, lambda api: api.flush_cache(), deadline_s=1)
    finally:
        os.kill(scheduler, signal.SIGCONT)
    assert call(server.url, lambda api: api.is_healthy(10))


def test_a_server_tells_its_arguments_and_state(server: Server) -> None:
    info = call(server.url, lambda api: api.server_info())
    assert info["skip_tokenizer_init"] is True
    assert info["internal_states"][0]["world_size"] == 1


def test_a_server_that_is_gone_is_an_error_and_not_healthy() -> None:
    url = "http://127.0.0.1:9"
    assert not call(url, lambda api: api.is_healthy(5))
    with pytest.raises(EngineError, match="flush_cache cannot be reached"):
        call(url, lambda api: api.flush_cache())


def test_a_version_without_beginning_and_end_of_an_update_is_not_asked_for_them() -> None:
    seen: list[str] = []

    async def answer(request: web.Request) -> web.Response:
        seen.append(request.path)
        return web.json_response({"paths": {"/update_weights_from_tensor": {}}, "success": True})

    async def update_pretended() -> None:
        app = web.Application()
        app.add_routes([web.get("/openapi.json", answer), web.post("/update_weights_from_tensor", answer)])
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        try:
            async with aiohttp.ClientSession() as session:
                api = Api(session, f"http://127.0.0.1:{runner.addresses[0][1]}")
                await api.begin_update()
                await api.load(["x"], LOADER, "1", True)
                await api.end_update()
        finally:
            await runner.cleanup()

    asyncio.run(update_pretended())
    assert seen == ["/openapi.json", "/update_weights_from_tensor"]
