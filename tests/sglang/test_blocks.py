"""FP8 blocks against SGLang's code: its arguments, the parameters that it creates, and the layers that keep the sent
format.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from grpo_mega.errors import ConfigError
from grpo_mega.rollout.sglang.buckets import parameters
from grpo_mega.rollout.sglang.loader import REMEDY
from grpo_mega.rollout.sglang.server import server_arguments
from grpo_mega.weights.boxes import LocalTensor
from tests.helpers.ranks import ROOT
from tests.helpers.servers import changed, make_settings

CPU = changed(make_settings(Path("/m"), Path("/f")), {"quantization": "fp8"}, dtype="bfloat16")
CUDA = changed(CPU, {}, device_type="cuda", cores=())


@pytest.fixture(scope="module")
def found(model: Path) -> dict[str, Any]:
    """Return SGLang's parsing of a GPU server's arguments, the parameters it creates, and the problems found in
    them.
    """
    fixed = CUDA.fixed_arguments()
    override = json.dumps(fixed["json_model_override_args"])
    script = str(Path(__file__).with_name("blocks_in_sglang.py"))
    words = [
        "--model-path",
        str(model),
        "--quantization",
        fixed["quantization"],
        "--json-model-override-args",
        override,
    ]
    command = [sys.executable, script, str(model), *words]
    result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=_environment())
    assert result.returncode == 0, result.stderr
    answer: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    return answer


def _environment() -> dict[str, str]:
    return {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}


@pytest.mark.full
def test_sglang_reads_blocks_of_128_from_the_servers_arguments(found: dict[str, Any]) -> None:
    assert found["config"] == {
        "class": "Fp8Config",
        "weight_block_size": [128, 128],
        "activation_scheme": "dynamic",
        "is_checkpoint_fp8_serialized": True,
        "ignored_layers": [],
    }


@pytest.mark.full
def test_the_tables_parameters_equal_sglangs(found: dict[str, Any]) -> None:
    ours = parameters({"weight": LocalTensor((300, 256), ())}, {"weight"}, torch.bfloat16)
    assert {name: [list(shape), dtype] for name, (shape, dtype) in ours.items()} == found["parameters"]


@pytest.mark.full
def test_layers_that_sglang_rearranges_are_named_with_the_remedy(found: dict[str, Any]) -> None:
    shuffled, packed = found["problems"]
    assert (
        shuffled == f"shuffling.weight: SGLang rearranges it on this device, so it cannot be filled in place; {REMEDY}"
    )
    assert packed.startswith("packing.weight_scale_inv: SGLang rearranges it")


@pytest.mark.full
def test_key_value_cache_scales_of_a_dummy_load_become_one(found: dict[str, Any]) -> None:
    assert found["cache"] == [1.0] * 4


def test_a_cpu_server_gets_no_blocks_and_users_cannot_set_them() -> None:
    words = server_arguments(CPU, "name", 1)
    assert not {"--quantization", "--json-model-override-args"} & set(words)
    assert "--quantization fp8" in " ".join(server_arguments(CUDA, "name", 1))
    for name in ("quantization", "json_model_override_args"):
        with pytest.raises(ConfigError, match=f"rollout.server_args.{name} is set by the trainer; remove it"):
            changed(CUDA, {"server_args": {name: "x"}})


def test_experts_in_one_parameter_have_their_scales_in_one() -> None:
    holding = {f"w13_weight[{e}]": LocalTensor((512, 128), ()) for e in range(3)}
    assert parameters(holding | {"router": LocalTensor((3, 128), ())}, set(holding), torch.bfloat16) == {
        "w13_weight": ((3, 512, 128), "torch.float8_e4m3fn"),
        "w13_weight_scale_inv": ((3, 4, 1), "torch.float32"),
        "router": ((3, 128), "torch.bfloat16"),
    }
