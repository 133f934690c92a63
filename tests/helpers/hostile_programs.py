"""Programs that try to escape from the sandbox, to outlive it, or to exhaust the machine.

`programs(port, folder)` yields names and programs: every act with every ending. PORT is a listening socket of the host,
and FOLDER one of its folders, in which no file may appear.
"""

from collections.abc import Iterator

_ENDINGS = r"""
# ends


# loops
while True: pass

# sleeps
import time; time.sleep(600)

# exits
import os; os._exit(0)

# raises
raise KeyError('k')

# aborts
import os; os.abort()

# kills itself
import os; os.kill(os.getpid(), 9)

# ignores signals
import signal, time
for n in (1, 2, 15): signal.signal(n, signal.SIG_IGN)
time.sleep(600)
"""
_ACTS = r"""
# forks
import os
if os.fork() == 0:
    while True: pass

# forks in a new session
import os, time
if os.fork() == 0:
    os.setsid()
    time.sleep(600)

# daemonizes
import os, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        time.sleep(600)
    os._exit(0)

# forks many
import os
try:
    while True: os.fork()
except OSError: pass

# makes zombies
import os
try:
    for _ in range(1000):
        if os.fork() == 0: os._exit(0)
except OSError: pass

# starts threads
import threading
def spin():
    while True: pass
try:
    while True: threading.Thread(target=spin).start()
except RuntimeError: pass

# starts daemon threads
import threading
def spin():
    while True: pass
for _ in range(8): threading.Thread(target=spin, daemon=True).start()

# starts a shell
import subprocess
subprocess.Popen(['sh', '-c', 'sleep 600 & sleep 600'], start_new_session=True)

# fills memory
try:
    x = []
    while True: x.append(bytearray(1 << 26))
except MemoryError: x = None

# floods the output
try:
    while True: print('x' * 100000, flush=True)
except OSError: pass

# floods the errors
import sys
try:
    while True: sys.stderr.write('x' * 100000)
except OSError: pass

# fills the folder
try:
    for i in range(100000):
        with open(f'f{i}', 'wb') as f: f.write(b'x' * 1000000)
except OSError: pass

# opens files
try:
    fs = [open('/dev/null') for _ in range(100000)]
except OSError: fs = None

# connects
import socket
for h in ('127.0.0.1', '::1', 'localhost', '0.0.0.0'):
    try: socket.create_connection((h, PORT), 2).send(b'x')
    except OSError: pass

# sends packets
import socket
for k in (socket.SOCK_DGRAM, socket.SOCK_RAW):
    try: socket.socket(socket.AF_INET, k).sendto(b'x', ('127.0.0.1', PORT))
    except OSError: pass

# connects abstract sockets
import socket
try: socket.socket(socket.AF_UNIX).connect('\0grpo-mega-PORT')
except OSError: pass

# writes outside
import os
for p in ('FOLDER', '/usr', '/etc', '/dev', '/', '/proc', '/sys', '/root', '/var/tmp', '/home'):
    for q in (p + '/escaped', '/proc/1/root' + p + '/escaped', '../' * 20 + p + '/escaped'):
        try:
            os.makedirs(os.path.dirname(q), exist_ok=True)
            open(q, 'w').write('x')
        except OSError: pass

# remounts
import ctypes
c = ctypes.CDLL(None)
for flags in (0x10000000, 0x20000, 0x10020000): c.unshare(flags)
c.mount(b'none', b'/', None, 0x20 | 0x1000, None)
c.mount(b'x', b'/tmp', b'tmpfs', 0, None)
try: open('/usr/escaped', 'w')
except OSError: pass

# signals all
import os
for n in (15, 2, 1, 9):
    for p in (-1, 1, 2, os.getppid()):
        try: os.kill(p, n)
        except OSError: pass

# traces its parent
import ctypes, os
c = ctypes.CDLL(None)
for p in (1, 2, os.getppid()):
    c.ptrace(16, p, 0, 0)
    try: open(f'/proc/{p}/mem', 'r+b').write(b'x')
    except OSError: pass

# raises its limits
import resource
for r in (resource.RLIMIT_AS, resource.RLIMIT_NPROC, resource.RLIMIT_CPU, resource.RLIMIT_FSIZE):
    try: resource.setrlimit(r, (resource.RLIM_INFINITY,) * 2)
    except (OSError, ValueError): pass

# becomes root
import os
for f in (os.setuid, os.setgid):
    try: f(0)
    except OSError: pass

# writes to all descriptors
import os
for fd in range(3, 4096):
    try: os.write(fd, b'x' * 16)
    except OSError: pass

# recurses
import sys
sys.setrecursionlimit(1 << 30)
def f(): f()
try: f()
except RecursionError: pass

# blocks in C
import re
re.match('(a+)+b', 'a' * 40)

# maps memory
import mmap
m = []
try:
    while True: m.append(mmap.mmap(-1, 1 << 28))
except (OSError, ValueError): pass
"""


def programs(port: int, folder: str) -> Iterator[tuple[str, str]]:
    """Yield every act with every ending."""
    for act, text in _sections(_ACTS):
        for ending, last in _sections(_ENDINGS):
            yield f"{act}, {ending}", f"{text}\n{last}\n".replace("PORT", str(port)).replace("FOLDER", folder)


def _sections(text: str) -> Iterator[tuple[str, str]]:
    for section in text.split("# ")[1:]:
        name, _, body = section.partition("\n")
        yield name, body.strip("\n")
