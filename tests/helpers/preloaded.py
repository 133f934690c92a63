"""A Python for tests that has imported torch, Megatron-core and transformers already: a new process starts in 0.1 s,
not in 6.

`python()` starts a server, which imports them once, and returns an executable. Called as `EXECUTABLE -m MODULE ...` or
`EXECUTABLE FILE.py ...`, it asks the server for a fork with its arguments, environment, folder, stdin, stdout and
stderr. It passes on signals, and exits with the code of the fork. The fork is killed if the executable is. In the fork
sys.executable is the executable again, so that `grpo-mega train` starts its ranks in the same way. Any other call runs
the real Python.

SGLang's servers on the CPU (`-m grpo_mega.rollout.sglang.server_main`) fork from a second process, which has imported
SGLang. They join their client's process group, so that whoever kills the group kills them, too.

The fork is a child of the server. A test that looks at the tree of processes uses the real Python, REAL.
"""

from __future__ import annotations

import array
import atexit
import contextlib
import gc
import json
import os
import runpy
import select
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
import warnings
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

from grpo_mega.distributed.launch import num_cores
from grpo_mega.processes import die_with_parent

ROOT = Path(__file__).resolve().parents[2]
IMPORTS = (
    "torch.distributed.checkpoint",
    "transformers.models.qwen2.modeling_qwen2",
    "transformers.models.llama.modeling_llama",
    "transformers.models.auto.modeling_auto",
    "tokenizers",
    "math_verify",
    "grpo_mega.train",
    "grpo_mega.cli.commands.eval",
    "grpo_mega.cli.commands.check",
    "grpo_mega.cli.commands.convert",
    "grpo_mega.rollout.embedded.engine",
    "grpo_mega.cli.checks",
)
# Variables that are read when Python starts or a library is imported, so they must be the server's.
READ_AT_IMPORT = (
    "PYTHON",
    "OMP_",
    "MKL_",
    "KMP_",
    "ATEN_",
    "ONEDNN_",
    "HF_",
    "TRANSFORMERS_",
)
SET_LATER = ("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "PYTHONPATH", "PYTHONUNBUFFERED", "PYTHONWARNINGS")  # in `run`
PRELOADABLE = ("grpo_mega.cli", "grpo_mega.grpo", "grpo_mega.cli.commands.verify_outputs")
SGLANG = "grpo_mega.rollout.sglang.server_main"
SGLANG_IMPORTS = ("sglang.launch_server", "sglang.srt.entrypoints.http_server", "sglang.srt.server_args")
# Variables of a server on the CPU that are read when SGLang is imported. The engine sets them (server_environment).
SGLANG_VARIABLES = {"SGLANG_USE_CPU_ENGINE": "1", "TORCHDYNAMO_DISABLE": "1", "HF_HUB_OFFLINE": "1"}
CLIENT = """#!{python} -IS
import array, json, os, select, signal, socket, sys
arguments = sys.argv[1:]
variables = {{k: v for k, v in os.environ.items() if k.startswith({read_at_import!r}) and k not in {set_later!r}}}
is_module, is_program = arguments[:1] == ["-m"], arguments[0].endswith(".py") or os.path.isdir(arguments[0])
is_sglang = is_module and arguments[1] == {sglang!r}
is_known = is_sglang or arguments[1] in {preloadable!r} if is_module else is_program
wanted = {sglang_variables!r} if is_sglang else {{}}
if not is_known or variables | wanted != {variables!r} | wanted or not wanted.items() <= os.environ.items():
    os.execv({python!r}, [{python!r}, *arguments])
forwarded = {{signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2}}
signal.pthread_sigmask(signal.SIG_BLOCK, forwarded)  # a signal waits until the program's process is known
server = socket.socket(socket.AF_UNIX)
server.connect({address!r} + (".sglang" if is_sglang else ""))
files = array.array("i", [0, 1, 2, *map(int, arguments[4:5] if is_sglang else [])])  # the lock of a server's folder
request = {{"arguments": arguments, "folder": os.getcwd(), "environment": dict(os.environ), "group": os.getpgrp()}}
request = json.dumps(request).encode()
server.sendmsg([len(request).to_bytes(8, "big")], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, files)])
for file in files[3:]:  # only the server's processes hold the lock
    os.close(file)
server.sendall(request)
answers = server.makefile("rb", buffering=0)
pid = int(answers.readline())
for number in forwarded:
    if signal.getsignal(number) != signal.SIG_IGN:
        signal.signal(number, lambda number, frame: os.kill(pid, number))
signal.pthread_sigmask(signal.SIG_UNBLOCK, forwarded)
while not select.select([server], [], [], 1)[0]:  # a signal just before a call does not interrupt it
    if is_sglang and os.getppid() != int(arguments[2]):  # the server's owner is gone
        os._exit(0)
code = int(answers.readline() or -signal.SIGKILL)
if code < 0:
    signal.signal(-code, signal.SIG_DFL) if -code not in (signal.SIGKILL, signal.SIGSTOP) else None
    os.kill(os.getpid(), -code)
os._exit(code)
"""


@dataclass
class Request:
    arguments: list[str]
    folder: str
    environment: dict[str, str]
    group: int  # the client's process group
    files: list[int]  # stdin, stdout and stderr of the client; for SGLang the lock of its folder, too


REAL = sys.executable


@cache
def python() -> str:
    """Start the server of this process, and return the path of the executable. Tests in several processes share one."""
    if "PRELOADED_PYTHON" in os.environ:
        return os.environ["PRELOADED_PYTHON"]
    folder = Path(tempfile.mkdtemp(prefix="py", dir="/tmp"))  # a socket's path has at most 107 bytes
    address, executable = str(folder / "socket"), folder / "python"
    environment = os.environ | {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive", "PYTHONPATH": str(ROOT)}
    variables = {
        name: value for name, value in environment.items() if name.startswith(READ_AT_IMPORT) and name not in SET_LATER
    }
    names = {"python": REAL, "address": address, "variables": variables, "sglang": SGLANG}
    names |= {"read_at_import": READ_AT_IMPORT, "preloadable": PRELOADABLE, "set_later": SET_LATER}
    executable.write_text(CLIENT.format(**names, sglang_variables=SGLANG_VARIABLES))
    executable.chmod(0o700)
    command = [REAL, __file__, address, str(executable)]
    ask = partial(die_with_parent, os.getpid())
    server = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True, preexec_fn=ask)
    assert server.stdout is not None and server.stdout.readline() == "ready\n"
    return str(executable)


def main(address: str, executable: str) -> None:
    """Serve forks until this process is killed. A fork does what was asked, and exits."""
    listener, of_sglang = listen(address), listen(f"{address}.sglang")
    print("ready", flush=True)
    parent = os.getpid()
    is_sglang = not os.fork()
    if is_sglang:
        die_with_parent(parent)
        listener, of_sglang = of_sglang, listener
    of_sglang.close()
    select.select([listener], [], [])  # it imports only if somebody asks
    if is_sglang:
        prepare_sglang()
    for name in SGLANG_IMPORTS if is_sglang else IMPORTS:
        __import__(name)
    gc.collect()
    gc.freeze()  # a collection in a fork would copy these objects' pages
    request = serve(listener)
    if is_sglang:
        be_server(request)
    else:
        sys.executable = executable
    code = 1
    try:
        run(request)
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    finally:  # Python exits like this too, but first destroys all modules in 1.6 s
        if not is_sglang:  # a server's guardian imports nothing that needs it
            threading._shutdown()  # type: ignore[attr-defined]
            atexit._run_exitfuncs()
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
        os._exit(code)


def listen(address: str) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address)
    listener.listen(64)
    return listener


def prepare_sglang() -> None:
    from grpo_mega.rollout.sglang import server_main

    os.environ |= SGLANG_VARIABLES
    server_main.prepare_server()


def be_server(request: Request) -> None:
    """Join the client's group. The guardian's arguments name its owner and the lock of its folder, as they are here."""
    with contextlib.suppress(OSError):  # another session
        os.setpgid(0, request.group)
    request.arguments[2], request.arguments[4] = str(os.getppid()), str(request.files[3])


def serve(listener: socket.socket) -> Request:
    """Fork for each request, and report how the fork ends. Return the request in the fork."""
    selector = selectors.DefaultSelector()
    selector.register(listener, selectors.EVENT_READ)
    running: dict[Any, tuple[socket.socket, int, int]] = {}  # connection, process and its descriptor, by each of both
    while True:
        for key, _ in selector.select():
            if key.fileobj is listener:
                connection, _ = listener.accept()
                request = receive(connection)
                if request is None:
                    connection.close()
                    continue
                pid = os.fork()
                if not pid:
                    for opened in {entry[0] for entry in running.values()} | {connection, listener}:
                        opened.close()
                    for descriptor in {entry[2] for entry in running.values()}:
                        os.close(descriptor)
                    selector.close()
                    return request
                for file in request.files:
                    os.close(file)
                entry = connection, pid, os.pidfd_open(pid)
                running[connection] = running[entry[2]] = entry
                selector.register(connection, selectors.EVENT_READ)
                selector.register(entry[2], selectors.EVENT_READ)
                with contextlib.suppress(OSError):
                    connection.sendall(b"%d\n" % pid)
                continue
            if key.fileobj not in running:  # its other half was first
                continue
            connection, pid, descriptor = running[key.fileobj]
            if key.fileobj is connection:  # the client is gone
                os.kill(pid, signal.SIGKILL)
                selector.unregister(connection)
                continue
            code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            with contextlib.suppress(OSError):
                connection.sendall(b"%d\n" % code)
            selector.unregister(descriptor)
            with contextlib.suppress(KeyError):
                selector.unregister(connection)
            del running[connection], running[descriptor]
            connection.close()
            os.close(descriptor)


def receive(connection: socket.socket) -> Request | None:
    """Read a request. Return None if the client is gone."""
    files = array.array("i")
    head, ancillary, _, _ = connection.recvmsg(8, socket.CMSG_SPACE(4 * files.itemsize))
    for _, _, data in ancillary:
        files.frombytes(data[: len(data) - len(data) % files.itemsize])
    if len(head) < 8:
        return None
    rest, size = b"", int.from_bytes(head, "big")
    while len(rest) < size:
        part = connection.recv(size - len(rest))
        if not part:
            return None
        rest += part
    return Request(**json.loads(rest), files=list(files))


def run(request: Request) -> None:
    """Be the process that was asked for."""
    import torch

    for number, file in enumerate(request.files[:3]):
        os.dup2(file, number)
        os.close(file)
    before = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    os.environ.clear()
    os.environ.update(request.environment)
    os.chdir(request.folder)
    tempfile.tempdir = None  # from its own TMPDIR
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", num_cores())))
    sys.warnoptions[:] = filter(None, os.environ.get("PYTHONWARNINGS", "").split(","))
    warnings._processoptions(sys.warnoptions)  # type: ignore[attr-defined]
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    is_unbuffered = bool(os.environ.get("PYTHONUNBUFFERED"))
    sys.stdout = open(1, "w", buffering=1 if os.isatty(1) or is_unbuffered else -1, closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, errors="backslashreplace", closefd=False)  # noqa: SIM115
    own = [part for part in sys.path[1:] if part not in before]
    more = list(filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)))
    if request.arguments[0] == "-m":
        sys.argv = request.arguments[1:]
        sys.path[:] = [request.folder, *more, *own]
        sys.modules.pop(sys.argv[0], None)
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv = request.arguments
        path = Path(sys.argv[0]).resolve()
        sys.path[:] = [str(path if path.is_dir() else path.parent), *more, *own]
        runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main(*sys.argv[1:])
