"""Agent functions and tools of the tests. Workers import this file, so it imports nothing of the package."""

import asyncio
import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time


async def run(chat, prompt):
    """Do what the first message says."""
    what, _, argument = prompt.messages[0]["content"].partition(" ")
    return await globals()[f"_{what}"](chat, prompt, argument)


async def _value(chat, prompt, argument):
    return eval(argument)


async def _turns(chat, prompt, argument):
    messages, texts = list(prompt.messages), []
    for number in range(int(argument)):
        message = await chat(messages, max_tokens=5)
        texts.append(message["content"])
        messages += [message, {"role": "user", "content": "more"}]
        chat.reward(0.5 * number)
    return {"first": len(texts), "second": float(prompt.gold)} if prompt.answer == "42" else None


async def _talks(chat, prompt, argument):
    messages = list(prompt.messages)
    for number in range(int(argument)):
        messages += [await chat(messages, max_tokens=5), {"role": "user", "content": "and now?"}]
        chat.reward(0.5 * number)
    return {"first": len(messages), "second": float(prompt.gold)}


async def _raises(chat, prompt, argument):
    raise KeyError(argument)


async def _exits(chat, prompt, argument):
    sys.exit(3)


async def _torch(chat, prompt, argument):
    return float("torch" in sys.modules)


async def _sleeps(chat, prompt, argument):
    await asyncio.sleep(600)


async def _ignores(chat, prompt, argument):
    while True:
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(600)


async def _blocks(chat, prompt, argument):
    time.sleep(600)


async def _talks_and_blocks(chat, prompt, argument):
    await chat(prompt.messages)
    await _blocks(chat, prompt, argument)


async def _keeps_lock(chat, prompt, argument):
    """Run a C function that keeps the interpreter's lock for years."""
    re.match("(a+)+$", "a" * 60 + "b")


async def _calls_back(chat, prompt, argument):
    asyncio.get_running_loop().call_later(0.1, time.sleep, 600)
    await asyncio.sleep(600)


async def _dies(chat, prompt, argument):
    os._exit(3)


async def _dies_once(chat, prompt, argument):
    if os.path.exists(argument):
        return 0.5
    open(argument, "w").close()
    os.abort()


async def _dies_later(chat, prompt, argument):
    """Leave a thread behind that ends the process."""
    threading.Timer(1.0, os._exit, [5]).start()
    return 0.25


async def _cancels(chat, prompt, argument):
    for task in asyncio.all_tasks():
        task.cancel()
    await asyncio.sleep(600)


async def _stops(chat, prompt, argument):
    asyncio.get_running_loop().stop()
    await asyncio.sleep(600)


async def _closes(chat, prompt, argument):
    os.closerange(3, 1000)
    await asyncio.sleep(600)


async def _kills_parent(chat, prompt, argument):
    os.kill(os.getppid(), signal.SIGKILL)
    await asyncio.sleep(600)


async def _notes(chat, prompt, argument):
    """Write the process id to the file."""
    with open(argument, "w") as file:
        file.write(str(os.getpid()))
    return 1.0


async def _leaves(chat, prompt, argument):
    """Leave a task behind that writes to the file."""

    async def write():
        await asyncio.sleep(0.05)
        open(argument, "w").close()

    chat.task = asyncio.create_task(write())
    return 1.0


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: The first number.
        b: The second number.
    """
    return a + b


async def add_later(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: The first number.
        b: The second number.
    """
    await asyncio.sleep(0.01)
    return a + b


async def never() -> int:
    """Wait forever."""
    await asyncio.sleep(600)


def misbehave(how: str) -> str:
    """Misbehave.

    Args:
        how: What to do.
    """
    if how == "raise":
        raise KeyError("k")
    if how == "hang":
        while True:
            pass
    if how == "exit":
        os._exit(7)
    if how == "sys.exit":
        sys.exit(7)
    if how == "child":
        subprocess.Popen(["sleep", "600"], start_new_session=True)
    if how == "thread":
        threading.Thread(target=time.sleep, args=(600,)).start()
    if how == "long":
        return "x" * 100_000
    if how == "torch":
        return str("torch" in sys.modules)
    return "fine"


def undocumented(a):
    return a


def not_async(chat, prompt):
    return 1.0
