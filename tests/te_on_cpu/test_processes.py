"""Starts the tests that run on Transformer Engine's emulated kernels, each set in a process of its own, and shows what failed.

Those processes alone have TE's wheel on their path. The default version runs everything, the others what depends on TE most.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from emulated_te import launcher

ROOT, HERE = launcher.ROOT, Path(__file__).parent
GPU = ROOT / "tests" / "gpu"
EVERY_VERSION = (
    *(HERE / f"test_{name}.py" for name in ("attention_backends", "extension", "modules", "optimizers")),
    GPU / "test_checkpoint.py",
    GPU / "test_recompute.py",
    f"{GPU / 'test_fp8.py'}::test_layers_in_bf16_are_bit_for_bit_those_of_a_run_without_fp8",
)
ALLOWED_SKIPS = ("needs a GPU, and torch sees none here", "found H100, emulated")

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the tests themselves run here, on a GPU")


def run_tests(version: str, *targets: object) -> str:
    """Return the output of a pytest process on emulated kernels in which everything passed."""
    if reason := launcher.why_not(version):
        pytest.skip(reason)
    command = [sys.executable, "-m", "pytest", "-p", "emulated_te.plugin", "--te-version", version, *map(str, targets)]
    options = ["-q", "-rs", "-W", "ignore", "-p", "no:cacheprovider", "--durations=10"]
    result = subprocess.run(
        [*command, *options], env=launcher.environment(), capture_output=True, text=True, cwd=ROOT, timeout=900
    )
    if result.returncode:
        pytest.fail(result.stdout[-20_000:] + result.stderr[-5_000:], pytrace=False)
    skipped = [line for line in result.stdout.splitlines() if line.startswith("SKIPPED")]
    unexpected = [line for line in skipped if not any(reason in line for reason in ALLOWED_SKIPS)]
    assert not unexpected, "\n".join(unexpected)
    print(result.stdout)
    return result.stdout


def num_passed(output: str) -> int:
    found = re.search(r"(\d+) passed", output)
    return int(found[1]) if found else 0


def test_everything_that_needs_transformer_engine_passes_on_emulated_kernels() -> None:
    assert num_passed(run_tests(launcher.DEFAULT, HERE, GPU)) >= 160


@pytest.mark.parametrize("version", launcher.OTHERS)
def test_other_versions_pass_what_depends_on_them_most(version: str) -> None:
    assert num_passed(run_tests(version, *EVERY_VERSION)) >= 50


def test_megatron_is_imported_without_transformer_engine_everywhere_else() -> None:
    """The bare wheel on the path would end its import, which is why no other process has it there."""
    code = "from importlib.util import find_spec; import megatron.core; assert find_spec('transformer_engine') is None"
    plain = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert plain.returncode == 0, plain.stderr
    if reason := launcher.why_not(launcher.DEFAULT):
        pytest.skip(reason)
    environment = os.environ | {"PYTHONPATH": str(launcher.wheel(launcher.DEFAULT))}
    bare = subprocess.run([sys.executable, "-c", "import megatron.core"], env=environment, capture_output=True, text=True)
    assert bare.returncode != 0 and "empty `transformer-engine` meta package" in bare.stderr
