"""Run the tests that need Transformer Engine's emulated kernels, each set in a separate process, and show the failures.

Only these processes have TE's wheel on their path. The default version runs all tests; other versions run the tests
that depend most on TE.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch

from grpo_mega.processes import die_with_parent
from tests.te_on_cpu.emulated_te import launcher

ROOT, HERE = launcher.ROOT, Path(__file__).parent
GPU = ROOT / "tests" / "gpu"
OLDEST = launcher.OTHERS[-1]
EVERY_VERSION = (
    *(
        HERE / f"test_{name}.py"
        for name in ("attention_backends", "buffers", "context", "extension", "modules", "mxfp8", "optimizers")
    ),
    f"{GPU / 'test_checkpoint.py'}::test_a_restored_policy_continues_like_the_saved_one",
    GPU / "test_recompute.py",
    f"{GPU / 'test_fp8.py'}::test_layers_in_bf16_are_bit_for_bit_those_of_a_run_without_fp8",
)
# The ranks of these tests take as long as all other tests of the default version.
LAYOUTS = (HERE / "test_layouts.py", HERE / "test_context.py")
LAYOUT = f"{HERE / 'test_layouts.py'}::test_a_layout_differs_from_one_rank_by_rounding"
# What changed most since set one, and is short enough to run by default on set two.
NEWEST = (
    *(HERE / f"test_{name}.py" for name in ("buffers", "casts", "modules")),
    *(f"{HERE / 'test_context.py'}::test_attention_over_ranks_is_that_of_fp64[{kind}-2]" for kind in ("p2p", "a2a")),
    f"{HERE / 'test_mxfp8.py'}::test_a_step_of_a_linear_layer_is_that_of_the_replay",
    f"{HERE / 'test_mxfp8.py'}::test_a_policy_in_mxfp8_is_restored_and_offloaded",
    *(f"{LAYOUT}[qwen3-{recipe}-tp=2,sequence_parallel=true]" for recipe in ("tensorwise", "delayed", "blockwise")),
    f"{LAYOUT}[qwen3_moe-blockwise-ep=2]",
    f"{GPU / 'test_checkpoint.py'}::test_a_restored_policy_continues_like_the_saved_one[delayed scaling]",
)
# version and targets of each process
TARGETS: dict[str, tuple[str, tuple[object, ...]]] = {
    "layouts": (launcher.DEFAULT, LAYOUTS),
    launcher.DEFAULT: (launcher.DEFAULT, (HERE, GPU, *(f"--ignore={path}" for path in LAYOUTS))),
    **{version: (version, EVERY_VERSION) for version in launcher.OTHERS},
    "newest": (launcher.DEFAULT, NEWEST),
    "oldest": (OLDEST, (HERE / "test_buffers.py", HERE / "test_modules.py")),
}
SHORT = "test_what_changed_most_passes_on_set_two"
# the test that reads the output of a process
TESTS = {
    "newest": SHORT,
    "oldest": SHORT,
    "layouts": "test_layouts_on_emulated_kernels_give_the_numbers_of_one_rank",
    launcher.DEFAULT: "test_everything_for_transformer_engine_passes_on_emulated_kernels",
}
ALLOWED_SKIPS = ("needs a GPU, and torch sees none here", "found H100, emulated", "this version has no such function")

Running = tuple["subprocess.Popen[bytes]", Path]  # process, output file

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.skipif(torch.cuda.is_available(), reason="the tests themselves run here, on a GPU"),
]


@pytest.fixture(scope="module")
def running(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Running]]:
    """Start the selected pytest processes whose Transformer Engine version is installed. They share the cores."""
    folder = tmp_path_factory.mktemp("emulated")
    started: dict[str, Running] = {}
    is_all = request.config.getoption("--all") or "full" in request.config.option.markexpr
    levels = ["--sweep"] if request.config.getoption("--sweep") else ["--all"] * is_all
    selected = [item.name for item in request.session.items if item.path == request.path]
    for name, (version, targets) in TARGETS.items():
        is_wanted = TESTS[name] in selected if name in TESTS else any(f"[{version}]" in test for test in selected)
        if is_wanted and not (is_all and TESTS.get(name) == SHORT) and launcher.why_not(version) is None:
            plugin = ["-p", "tests.te_on_cpu.emulated_te.plugin", "--te-version", version]
            options = ["-q", "-rs", "-W", "ignore", "-p", "no:cacheprovider", "--durations=10", *levels]
            command = [sys.executable, "-m", "pytest", *plugin, *options, *map(str, targets)]
            log = folder / f"{name}.log"
            with log.open("w") as file:
                ask = partial(die_with_parent, os.getpid())  # the child also dies if this process is killed
                environment = launcher.environment()
                process = subprocess.Popen(command, env=environment, stdout=file, stderr=file, cwd=ROOT, preexec_fn=ask)
                started[name] = process, log
    try:
        yield started
    finally:
        for process, _ in started.values():
            process.kill()


def output_of(running: dict[str, Running], name: str) -> str:
    """Return the output of a process after all of its tests passed."""
    if name not in running:
        pytest.skip(launcher.why_not(TARGETS[name][0]) or "with --all the other tests run these cases")
    process, log = running[name]
    code = process.wait(timeout=900)
    output = log.read_text()
    if code:
        pytest.fail(output[-20_000:], pytrace=False)
    skipped = [line for line in output.splitlines() if line.startswith("SKIPPED")]
    unexpected = [line for line in skipped if not any(reason in line for reason in ALLOWED_SKIPS)]
    assert not unexpected, "\n".join(unexpected)
    print(output)
    return output


def num_passed(output: str) -> int:
    found = re.search(r"(\d+) passed", output)
    return int(found[1]) if found else 0


@pytest.mark.full
@pytest.mark.usefixtures("running")  # the processes run during this test
def test_megatron_is_imported_without_transformer_engine_everywhere_else() -> None:
    """The bare wheel on the path breaks the import of Megatron, so no other process has the wheel on its path."""
    code = "from importlib.util import find_spec; import megatron.core; assert find_spec('transformer_engine') is None"
    plain = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert plain.returncode == 0, plain.stderr
    if reason := launcher.why_not(launcher.DEFAULT):
        pytest.skip(reason)
    environment = os.environ | {"PYTHONPATH": str(launcher.wheel(launcher.DEFAULT))}
    bare = subprocess.run(
        [sys.executable, "-c", "import megatron.core"], env=environment, capture_output=True, text=True
    )
    assert bare.returncode != 0 and "empty `transformer-engine` meta package" in bare.stderr


@pytest.mark.skipif(launcher.SET != "two", reason="CI runs set one with --all")
def test_what_changed_most_passes_on_set_two(running: dict[str, Running]) -> None:
    assert num_passed(output_of(running, "newest")) >= 100
    assert num_passed(output_of(running, "oldest")) >= 50


@pytest.mark.full
def test_everything_for_transformer_engine_passes_on_emulated_kernels(running: dict[str, Running]) -> None:
    assert num_passed(output_of(running, launcher.DEFAULT)) >= 155


@pytest.mark.full
def test_layouts_on_emulated_kernels_give_the_numbers_of_one_rank(running: dict[str, Running]) -> None:
    assert num_passed(output_of(running, "layouts")) >= 35


@pytest.mark.full
@pytest.mark.parametrize(
    "version", [*(pytest.param(one, marks=pytest.mark.sweep) for one in launcher.OTHERS[:-1]), OLDEST]
)
def test_other_versions_pass_the_tests_that_depend_most_on_them(version: str, running: dict[str, Running]) -> None:
    assert num_passed(output_of(running, version)) >= 50
