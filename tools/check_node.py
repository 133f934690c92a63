"""Check that this node is fit for training: `python tools/check_node.py --expect-gpus 8 [--disks "/scratch:500
/tmp:64"]`.

Checks the number of GPUs, each GPU's state (uncorrected memory errors, rows to be remapped, throttled clocks, memory in
use by others), that the driver supports the CUDA version of the installed torch, that all NVLinks are up, and free disk
space. With --nvcc it also checks that nvcc is installed, because SGLang needs it at startup, and that a process starts
with the library that lets a server sleep. On a fit node it prints a
line with versions; otherwise it prints one line with the node and its problems, and exits with 1. `--out FOLDER` also
writes FOLDER/NODE.json. Then `--compare FOLDER NODE ...` prints the nodes that failed, did not answer, or have other
versions than most nodes. It prints none if no node could run the check or all have the same problem. Versions include
the CUDA libraries that a process really loads, and the environment variables that change numbers. This file imports
only the standard library, so it runs even if the environment is broken.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import platform
import re
import shutil
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, distribution, version
from importlib.util import find_spec
from pathlib import Path

PACKAGES = ("grpo-mega", "torch", "megatron-core", "transformers", "transformer-engine", "sglang")
FIELDS = (  # arguments of nvidia-smi --query-gpu; later drivers may know *throttle* only as *event*
    "index",
    "name",
    "driver_version",
    "ecc.errors.uncorrected.volatile.total",
    "clocks_throttle_reasons.hw_slowdown",
    "clocks_throttle_reasons.hw_thermal_slowdown",
    "clocks_throttle_reasons.hw_power_brake_slowdown",
    "clocks.max.sm",
    "memory.used",
)
ROW_FIELDS = ("gpu_uuid", "remapped_rows.pending", "remapped_rows.failure")
DRIVERS = {11: 450, 12: 525, 13: 580}  # oldest driver branch that runs all releases of a CUDA major version
MEMORY_IN_USE_MIB = 4096  # an idle GPU has a few hundred in use
SECONDS_FOR_NVIDIA_SMI = 60
SECONDS_FOR_IMPORTS = 200
# What a rank imports, so that the same libraries are loaded; see grpo_mega/distributed/libraries.py.
LOAD = """
import importlib, importlib.util, json, os, sys
from grpo_mega.distributed.environment import cudnn_of_torch
from grpo_mega.distributed.libraries import read_libraries, read_variables
variables = read_variables()
if len(sys.argv) > 1:
    os.environ.setdefault("CUDNN_HOME", str(cudnn_of_torch() or ""))
    importlib.import_module("torch")
    if importlib.util.find_spec("transformer_engine"):
        importlib.import_module("transformer_engine.pytorch")
print(json.dumps(read_libraries() | variables))
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--expect-gpus", type=int, default=0, help="0: check no GPU")
    parser.add_argument("--disks", default="", help='least free GB, "PATH:GB PATH:GB"; %%n is the node\'s name')
    parser.add_argument("--nvcc", action="store_true", help="require nvcc; SGLang compiles kernels at startup")
    parser.add_argument("--out", type=user_path, help="folder for NODE.json")
    parser.add_argument("--compare", nargs="+", metavar=("FOLDER", "NODE"), help="compare the files of these nodes")
    options = parser.parse_args()
    if options.compare:
        folder, *nodes = options.compare
        return compare(user_path(folder), nodes)
    node = node_name()
    problems, fingerprint = check(options.expect_gpus, options.disks.replace("%n", node), needs_nvcc=options.nvcc)
    if options.out:
        (options.out / f"{node}.json").write_text(json.dumps({"problems": problems, "fingerprint": fingerprint}))
    if problems:
        print(f"node {node}: {'; '.join(problems)}", flush=True)
        return 1
    print(f"node {node}: fit, {', '.join(f'{name} {found}' for name, found in fingerprint.items())}", flush=True)
    return 0


def user_path(text: str) -> Path:
    """Expand ~, as grpo_mega.paths.user_path does."""
    return Path(os.path.expanduser(text))


def compare(folder: Path, nodes: list[str]) -> int:
    """Print the bad nodes, one per line, and the reasons on stderr. Return 1 if there are any.

    Return 2 and print no node if none could run the check, or if several nodes all have the same problem.
    """
    reports = {}
    reasons: dict[str, list[str]] = {}
    for node in nodes:
        try:
            reports[node] = json.loads((folder / f"{node}.json").read_text())
        except (OSError, ValueError):
            reasons[node] = ["the check did not end"]
    usual = usual_fingerprint([report["fingerprint"] for report in reports.values()])
    for node, report in reports.items():
        found = [(name, report["fingerprint"].get(name, "none"), most) for name, most in usual.items()]
        others = [f"{name} {value} (others: {most})" for name, value, most in found if value != most]
        reasons[node] = [*report["problems"], *others]
    bad = {node: problems for node, problems in reasons.items() if problems}
    for node, problems in bad.items():
        print(f"node {node}: {'; '.join(problems)}", file=sys.stderr, flush=True)
    kinds = [{re.sub(r"[\d.]+", "0", reason.replace(node, "%n")) for reason in reasons[node]} for node in nodes]
    if not reports or (len(nodes) > 1 and set.intersection(*kinds)):
        why = "the same is wrong on all nodes" if reports else "no node could run the check"
        print(f"{why}, so no node is to blame", file=sys.stderr, flush=True)
        return 2
    for node in bad:
        print(node)
    return 1 if bad else 0


def usual_fingerprint(fingerprints: list[dict[str, str]]) -> dict[str, str]:
    """Return the most frequent value of each name; of equally frequent values the first one."""
    names = {name for fingerprint in fingerprints for name in fingerprint}
    return {name: collections.Counter(f.get(name, "none") for f in fingerprints).most_common(1)[0][0] for name in names}


def check(num_gpus: int, disks: str, *, needs_nvcc: bool = False) -> tuple[list[str], dict[str, str]]:
    """Return (problems, versions by name)."""
    loads, loaded = loaded_libraries(torch_cuda())
    problems = disk_problems(disks) + (server_problems(torch_cuda()) if needs_nvcc else []) + loads
    fingerprint = {"python": platform.python_version()} | {name: package_version(name) for name in PACKAGES} | loaded
    if num_gpus:
        try:
            gpus = parse_csv(query_gpus(), FIELDS)
            rows = parse_csv(nvidia_smi(f"--query-remapped-rows={','.join(ROW_FIELDS)}"), ROW_FIELDS)
            links = parse_links(nvidia_smi("nvlink", "-s"))
        except (OSError, subprocess.SubprocessError) as error:
            return [*problems, f"nvidia-smi fails ({' '.join(str(error).split())})"], fingerprint
        problems += [*gpu_problems(gpus, num_gpus), *driver_problems(gpus, torch_cuda())]
        problems += [*row_problems(rows), *link_problems(links, num_gpus)]
        fingerprint |= {"driver": gpus[0]["driver_version"], "gpu": gpus[0]["name"]} if gpus else {}
    return problems, fingerprint


def parse_csv(text: str, fields: tuple[str, ...]) -> list[dict[str, str]]:
    """Return the rows that `nvidia-smi --query-... --format=csv,noheader,nounits` printed."""
    lines = [line for line in text.splitlines() if line.count(",") == len(fields) - 1]
    return [dict(zip(fields, (value.strip() for value in line.split(",")), strict=True)) for line in lines]


def gpu_problems(gpus: list[dict[str, str]], num_expected: int) -> list[str]:
    problems = [] if len(gpus) == num_expected else [f"{len(gpus)} GPUs instead of {num_expected}"]
    fastest = max((number(gpu["clocks.max.sm"]) for gpu in gpus), default=0)
    for gpu in gpus:
        name = f"GPU {gpu['index']}"
        if errors := number(gpu["ecc.errors.uncorrected.volatile.total"]):
            problems.append(f"{name} has {errors} uncorrected memory errors")
        slowed = [field.rpartition(".")[2] for field in FIELDS if "throttle" in field and gpu[field] == "Active"]
        if slowed:
            problems.append(f"{name} is slowed down ({', '.join(slowed)})")
        if number(gpu["clocks.max.sm"]) < fastest:
            problems.append(f"{name} runs at up to {gpu['clocks.max.sm']} MHz, others at {fastest}")
        if (used := number(gpu["memory.used"])) > MEMORY_IN_USE_MIB:
            problems.append(f"{used} MiB of {name} are in use by someone else")
    if len({gpu["name"] for gpu in gpus}) > 1:
        problems.append(f"its GPUs differ: {', '.join(sorted({gpu['name'] for gpu in gpus}))}")
    return problems


def driver_problems(gpus: list[dict[str, str]], cuda: str | None) -> list[str]:
    """Check that the driver supports torch's CUDA. Otherwise only the first kernel would fail."""
    needed = DRIVERS.get(number(cuda.partition(".")[0])) if cuda else None
    driver = gpus[0]["driver_version"] if gpus else ""
    if needed is None or number(driver.partition(".")[0]) >= needed:
        return []
    return [f"driver {driver} is too old for torch's CUDA {cuda}, which needs {needed} or later"]


def torch_cuda() -> str | None:
    """Return the CUDA version of the installed torch without importing it; None without torch or CUDA."""
    try:
        text = Path(str(distribution("torch").locate_file("torch/version.py"))).read_text(encoding="utf-8")
    except (PackageNotFoundError, OSError):
        return None
    found = re.search(r"^cuda\b.*'([\d.]+)'", text, re.MULTILINE)
    return found[1] if found else None


def loaded_libraries(cuda: str | None) -> tuple[list[str], dict[str, str]]:
    """Return (problems, versions) of the CUDA libraries that a process loads, and the variables that change numbers.

    Without a CUDA build of torch there are only variables.
    """
    command = [sys.executable, "-c", LOAD, *([cuda] if cuda else [])]
    root = Path(__file__).resolve().parents[1]
    try:
        done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=SECONDS_FOR_IMPORTS)
    except (OSError, subprocess.SubprocessError) as error:
        return [f"torch does not load ({' '.join(str(error).split())[:200]})"], {}
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["no reason"])[-1]
        return [reason.removeprefix("grpo_mega.errors.ConfigError: ")], {}
    return [], json.loads(done.stdout.splitlines()[-1])


def server_problems(cuda: str | None) -> list[str]:
    """Check what SGLang's server needs to start."""
    return compiler_problems(cuda) + preload_problems(cuda)


def preload_problems(cuda: str | None) -> list[str]:
    """Check that a process starts with the memory saver's library, which SGLang preloads into its scheduler.

    The library needs the driver's libcuda and the CUDA runtime, in a folder of LD_LIBRARY_PATH or of pip's packages
    (grpo_mega/distributed/environment.py).
    """
    saver, nvidia = find_spec("torch_memory_saver"), find_spec("nvidia")
    if cuda is None or saver is None or saver.origin is None:
        return []
    name = f"torch_memory_saver_hook_mode_preload_cu{cuda.partition('.')[0]}*.so"
    library = next(iter(Path(saver.origin).parent.parent.glob(name)), None)
    if library is None:
        return [f"torch_memory_saver has no {name}; install the version that SGLang requires"]
    folders = [Path(folder) for folder in (nvidia.submodule_search_locations or [] if nvidia else [])]
    runtimes = [str(path.parent) for folder in folders for path in folder.glob("*/lib/libcudart.so.*")]
    paths = os.pathsep.join(filter(None, (os.environ.get("LD_LIBRARY_PATH"), *runtimes)))
    environ = os.environ | {"LD_PRELOAD": str(library), "LD_LIBRARY_PATH": paths}
    done = subprocess.run(["/bin/true"], env=environ, capture_output=True, text=True, timeout=60)
    if done.returncode or done.stderr:
        reason = " ".join(done.stderr.split()).removeprefix("/bin/true: ")
        return [f"no process starts with {library} ({reason}); install the driver's and torch's CUDA libraries"]
    return []


def compiler_problems(cuda: str | None) -> list[str]:
    """Check that nvcc is in one of the places where SGLang looks for it (CUDA_HOME, CUDA_PATH, PATH, /usr/local/cuda),
    and that it has the major version of torch's CUDA version `cuda`.
    """
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    places = f"{home}/bin" if home else f"{os.environ.get('PATH', '')}{os.pathsep}/usr/local/cuda/bin"
    nvcc = shutil.which("nvcc", path=places)
    if nvcc is None:
        return [
            "nvcc is missing; SGLang compiles kernels with it when it starts; install the CUDA toolkit or set CUDA_HOME"
        ]
    try:
        printed = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=True, timeout=60).stdout
    except (OSError, subprocess.SubprocessError) as error:
        return [f"nvcc fails ({' '.join(str(error).split())})"]
    release = re.search(r"release ([\d.]+)", printed)
    if cuda is None or (release and release[1].partition(".")[0] == cuda.partition(".")[0]):
        return []
    version = release[1] if release else "unknown"
    return [f"{nvcc} is of CUDA {version}, but torch has CUDA {cuda}; set CUDA_HOME to a toolkit of torch's version"]


def row_problems(rows: list[dict[str, str]]) -> list[str]:
    """Report GPUs with memory rows to be remapped (they need a reset) or with failed remaps (they must be replaced)."""
    states = {"pending": "wait for a reset to be remapped", "failure": "could not be remapped"}
    return [
        f"{row['gpu_uuid']} has memory rows that {text}"
        for row in rows
        for state, text in states.items()
        if row[f"remapped_rows.{state}"] in ("1", "Yes")
    ]


def parse_links(text: str) -> dict[int, list[str]]:
    """Return the rate of each link by GPU, as `nvidia-smi nvlink -s` prints it."""
    gpus = re.split(r"^GPU (\d+):", text, flags=re.MULTILINE)[1:]  # alternately a number and its lines
    pairs = zip(gpus[::2], gpus[1::2], strict=True)
    return {int(gpu): re.findall(r"^\s+Link \d+: (.*\S)", lines, re.MULTILINE) for gpu, lines in pairs}


def link_problems(links: dict[int, list[str]], num_gpus: int) -> list[str]:
    """Report links that are down or missing. A single GPU needs no link."""
    if num_gpus == 1:
        return []
    problems = []
    most = max((len(found) for found in links.values()), default=0)
    for gpu, found in links.items():
        down = [str(link) for link, rate in enumerate(found) if "inactive" in rate.lower()]
        if down:
            problems.append(f"GPU {gpu}: NVLink {', '.join(down)} down")
        elif len(found) < most:
            problems.append(f"GPU {gpu} has {len(found)} NVLinks, others {most}")
    return problems


def disk_problems(disks: str) -> list[str]:
    problems = []
    for path, wanted in re.findall(r"([^\s,]+):([^\s,:]+)", disks):
        try:
            free = shutil.disk_usage(path).free / 1e9
        except OSError as error:
            problems.append(f"{path}: {error.strerror}")
            continue
        if free < float(wanted):
            problems.append(f"{path} has {free:.1f} GB free instead of {wanted}")
        if not os.access(path, os.W_OK):
            problems.append(f"{path} cannot be written to")
    return problems


def number(text: str) -> int:
    """Return the number; 0 for a value that a GPU does not report ("[N/A]")."""
    return int(text) if text.isdecimal() else 0


def query_gpus() -> str:
    """Return the values of FIELDS. The clocks' fields were renamed in driver 535, and the old names may end."""
    query = f"--query-gpu={','.join(FIELDS)}"
    try:
        return nvidia_smi(query)
    except subprocess.CalledProcessError:
        return nvidia_smi(query.replace("clocks_throttle_reasons", "clocks_event_reasons"))


def nvidia_smi(*arguments: str) -> str:
    command = ["nvidia-smi", *arguments]
    if arguments[0].startswith("--query"):
        command.append("--format=csv,noheader,nounits")
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=SECONDS_FOR_NVIDIA_SMI).stdout


def package_version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "none"


def node_name() -> str:
    return os.environ.get("SLURMD_NODENAME") or platform.node()


if __name__ == "__main__":
    sys.exit(main())
