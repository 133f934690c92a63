"""Arguments and environment of a server, and our patches of SGLang. No server starts here."""

import importlib
import importlib.util
import math
import os
import queue
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch

from grpo_mega.config import load
from grpo_mega.distributed.environment import CORES_VARIABLE
from grpo_mega.distributed.launch import free_ports
from grpo_mega.errors import ConfigError, EngineError
from grpo_mega.rollout.engine import RolloutRequest, Sampling
from grpo_mega.rollout.sglang import server_main
from grpo_mega.rollout.sglang.buckets import ServedLora
from grpo_mega.rollout.sglang.client import Event
from grpo_mega.rollout.sglang.engine import GRAPHS
from grpo_mega.rollout.sglang.server import EngineSettings, Server, server_arguments, server_environment, warm_up
from grpo_mega.types import Prompt
from grpo_mega.weights.families import FAMILIES
from tests.helpers.servers import TRAINERS, changed, make_settings
from tests.helpers.simulated_server import Lengths, SimulatedSession, engine_of, fresh

ROOT = Path(__file__).resolve().parents[2]
SETTINGS = make_settings(Path("/m"), Path("/f"))
ON_GPU = {"tp": 4, "memory_fraction": 0.6, "cache_tokens": None}
CUDA = changed(SETTINGS, ON_GPU, device_type="cuda", base_gpu_id=4, cores=())


def sglang_source(path: str) -> str:
    spec = importlib.util.find_spec("sglang")
    assert spec is not None and spec.origin is not None
    return (Path(spec.origin).parent / path).read_text(encoding="utf-8")


def test_the_servers_environment_omits_the_trainers_variables() -> None:
    kept = {"PATH": "/bin", "HOME": "/h", "CUDA_VISIBLE_DEVICES": "0,1", "NCCL_DEBUG": "INFO", "RANKING": "x"}
    found = server_environment(TRAINERS | kept, CUDA)
    assert kept.items() <= found.items()
    assert not TRAINERS.keys() & found.keys()
    assert not any(name.endswith("OMP_THREADS_BIND") or name == "SGLANG_USE_CPU_ENGINE" for name in found)
    assert (
        server_environment({"SGLANG_EXTERNAL_MODEL_PACKAGE": "mine"}, CUDA)["SGLANG_EXTERNAL_MODEL_PACKAGE"] == "mine"
    )


def test_kernels_that_a_server_compiles_are_kept_on_its_node(tmp_path: Path) -> None:
    node = {"NODE_LOCAL": str(tmp_path), "HOME": "/shared"}
    assert Path(server_environment(node, CUDA)["SGLANG_CACHE_DIR"]).parent == tmp_path
    assert server_environment(node | {"SGLANG_CACHE_DIR": "/mine"}, CUDA)["SGLANG_CACHE_DIR"] == "/mine"
    assert "SGLANG_CACHE_DIR" not in server_environment(node, SETTINGS), "a CPU server compiles no kernels"


def test_graphs_sleep_and_a_restart_ignores_what_trainers_hold() -> None:
    found = server_environment({}, CUDA)
    assert found["SGLANG_MEMORY_SAVER_CUDA_GRAPH"] == "1" and found["SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK"] == "0"
    assert "SGLANG_MEMORY_SAVER_CUDA_GRAPH" not in server_environment({}, changed(CUDA, {"sleep": "never"}))
    assert server_environment({"SGLANG_MEMORY_SAVER_CUDA_GRAPH": "0"}, CUDA)["SGLANG_MEMORY_SAVER_CUDA_GRAPH"] == "0"
    assert not any("MEMORY" in name for name in server_environment({}, SETTINGS))
    assert f'"{GRAPHS}"' in sglang_source("srt/constants.py")
    environ = sglang_source("srt/environ.py")
    assert all(f"{name} = Env" in environ for name in found if "MEMORY" in name)


def test_a_preloaded_memory_saver_finds_the_cuda_runtime_of_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without it the process of the scheduler ends before its first line. The layout is that of pip's CUDA 13."""
    monkeypatch.syspath_prepend(tmp_path)
    folder = tmp_path / "nvidia/cu13/lib"
    folder.mkdir(parents=True)
    (tmp_path / "nvidia/__init__.py").touch()  # hides the packages of the installed torch
    assert "LD_LIBRARY_PATH" not in server_environment({}, CUDA), "torch brings no runtime"
    (folder / "libcudart.so.13").touch()
    assert server_environment({}, CUDA)["LD_LIBRARY_PATH"] == str(folder)
    assert server_environment({"LD_LIBRARY_PATH": "/mine:/b"}, CUDA)["LD_LIBRARY_PATH"] == f"/mine:/b:{folder}"
    for other in (SETTINGS, changed(CUDA, {"sleep": "never"})):
        assert server_environment({"LD_LIBRARY_PATH": "/mine"}, other)["LD_LIBRARY_PATH"] == "/mine"


def test_a_gpu_server_computes_fp32_products_in_fp32() -> None:
    """SGLang turns TF32 on for some models, whatever its arguments say."""
    assert server_environment({}, CUDA)["NVIDIA_TF32_OVERRIDE"] == "0"
    assert server_environment({"NVIDIA_TF32_OVERRIDE": "1"}, CUDA)["NVIDIA_TF32_OVERRIDE"] == "1"
    assert "NVIDIA_TF32_OVERRIDE" not in server_environment({}, SETTINGS)
    assert 'overrides["enable_tf32_matmul"] = True' in sglang_source("srt/arg_groups/model_overrides/glm4_moe.py")


def test_deepgemm_does_not_compile_all_shapes_before_an_fp8_server_answers() -> None:
    fp8 = changed(CUDA, {"quantization": "fp8"})
    names = ("SGLANG_JIT_DEEPGEMM_PRECOMPILE", "SGLANG_JIT_DEEPGEMM_FAST_WARMUP")
    assert [server_environment({}, fp8)[name] for name in names] == ["false", "true"]
    assert server_environment({names[0]: "true"}, fp8)[names[0]] == "true"
    assert not any(name in server_environment({}, CUDA) for name in names)
    assert all(f"{name} = EnvBool" in sglang_source("srt/environ.py") for name in names)


def test_a_server_uses_the_cores_that_its_rank_had_before_it_was_bound() -> None:
    code = (
        "import os, sys; from grpo_mega.rollout.sglang import server_main as main\n"
        "main.remove_unused = main.adopt_orphans = main.kill_descendants = lambda *a: None\n"
        "main._serve_and_exit = lambda arguments: os._exit(len(os.sched_getaffinity(0)))\n"
        "sys.exit(main.main(os.getppid(), '/tmp', os.open('/dev/null', 0), []))"
    )
    every = os.sched_getaffinity(0)
    cores = ",".join(map(str, sorted(every)))
    environment = server_environment(os.environ | {CORES_VARIABLE: cores}, CUDA) | {"PYTHONPATH": str(ROOT)}
    one = min(every)
    ended = subprocess.run(
        [sys.executable, "-c", code], env=environment, preexec_fn=lambda: os.sched_setaffinity(0, {one})
    )
    assert ended.returncode == len(every)


def test_waits_that_include_a_servers_start_are_longer_than_it() -> None:
    config = load(ROOT / "examples" / "quickstart.yaml", ["rollout.engine=sglang", "rollout.start_deadline_s=3600"])
    assert config.collective_timeout_s > 3600
    settings = changed(CUDA, {"start_deadline_s": 3600.0, "stall_deadline_s": 60.0})
    assert settings.leader_deadline_s > settings.stall_deadline_s(is_cold=True) == 3600
    assert settings.stall_deadline_s(is_cold=False) == 60


def test_the_warm_up_has_the_runs_sampling_and_a_prompt_of_full_length() -> None:
    rollout = {"temperature": 0.7, "top_p": 0.9, "top_k": 5, "max_response_length": 100}
    body = warm_up(changed(CUDA, rollout))
    assert len(body["input_ids"]) == 512 - 100 - 1 and body["return_logprob"]
    assert body["sampling_params"] == {
        "max_new_tokens": 2,
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": 5,
        "ignore_eos": True,
    }


@pytest.mark.parametrize("answers", [True, False])
def test_a_gpu_server_is_ready_only_after_its_warm_up(
    answers: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = Server(changed(CUDA, {"start_deadline_s": 700.0, "max_response_length": 100}, folder=tmp_path))
    (tmp_path / "server.log").write_text("the last line")
    asked: list[tuple[str, Any, float]] = []

    def ask(path: str, body: Any = None, deadline_s: float = 0.0) -> str | None:
        asked.append((path, body, deadline_s))
        is_warm_up = body == warm_up(server._settings)
        return None if is_warm_up and not answers else "{}"

    monkeypatch.setattr(server, "_ask", ask)
    if answers:
        server.wait_until_healthy()
    else:
        with pytest.raises(EngineError, match=r"no token for its longest prompt within .*=700 s; .*the last line"):
            server.wait_until_healthy()
    path, body, deadline_s = asked[-1]
    assert path == "/generate" and len(body["input_ids"]) > 100 and 100 < deadline_s <= 700


class RecordingSession(SimulatedSession):
    """A session that records its calls and answers at once."""

    def __init__(self) -> None:
        super().__init__({})
        self.calls: list[tuple[str, Any]] = []

    def post(self, path: str, body: Any = None) -> None:
        self.calls.append((path, body))

    def flush_cache_when_idle(self) -> None:
        self.calls.append(("flush when idle", None))


def test_weights_wake_before_the_cache_and_the_graphs() -> None:
    session = RecordingSession()
    engine = engine_of(session, slots=4)
    engine._settings = replace(engine._settings, device_type="cuda", cores=())
    engine.sleep()
    engine.wake_weights()
    engine.wake_cache()
    assert engine.failure is None
    assert session.calls == [
        ("flush when idle", None),
        ("/release_memory_occupation", {"tags": ["weights", "kv_cache", "cuda_graph"]}),
        ("/resume_memory_occupation", {"tags": ["weights"]}),
        ("/resume_memory_occupation", {"tags": ["kv_cache", "cuda_graph"]}),
        ("/flush_cache", {}),
    ]


class LateSession(SimulatedSession):
    """A session whose samples come only after `seconds` without an event. Its server does not answer health checks."""

    def __init__(self, lengths: Lengths, seconds: float) -> None:
        super().__init__(lengths)
        self.until = time.monotonic() + seconds

    def next_event(self, timeout: float) -> Event:
        if time.monotonic() < self.until:
            time.sleep(timeout)
            raise queue.Empty
        return super().next_event(timeout)

    def is_healthy(self, deadline_s: float) -> bool:
        return False


def test_only_a_server_that_finished_a_phase_must_keep_the_stall_deadline() -> None:
    """The first phase compiles kernels."""
    groups = {0: Prompt(0, "p", (5,), "")}
    limits = {"stall_deadline_s": 0.5, "start_deadline_s": 3600.0}
    session = LateSession({(0, 0): 3}, seconds=2.0)
    engine = engine_of(session, slots=4, **limits)
    request = RolloutRequest(fresh(groups), Sampling(1, 1.0, 9, frozenset()), step=0)
    assert engine.generate(request) and engine.failure is None
    session.until = math.inf
    assert not engine.generate(request)
    assert engine.failure is not None and "hangs, generating in step 0: nothing for" in engine.failure


@pytest.mark.parametrize(
    ("cores", "tp", "threads", "binding"),
    [((0, 1), 1, "2", None), ((4, 5, 6, 7, 8), 2, "2", "4,5|6,7,8"), ((3,), 2, "1", "3|3")],
)
def test_the_processes_of_a_server_share_its_cores(
    cores: tuple[int, ...], tp: int, threads: str, binding: str | None
) -> None:
    found = server_environment({}, changed(SETTINGS, {"tp": tp}, cores=cores))
    assert found["OMP_NUM_THREADS"] == threads
    assert found["OMP_WAIT_POLICY"] == "passive"
    assert found.get("SGLANG_CPU_OMP_THREADS_BIND") == binding


def test_arguments_come_from_the_settings_after_the_users_arguments() -> None:
    extra = {
        "attention_backend": "fa3",
        "enable-metrics": True,
        "sleep_on_idle": False,
        "json_model_override_args": {"a": 1},
    }
    words = server_arguments(changed(CUDA, {"server_args": extra}), "name", 1)
    text = " ".join(words)
    assert "--attention-backend fa3" in text
    assert "--enable-metrics --json-model-override-args" in text
    assert '{"a": 1}' in words
    assert "--sleep-on-idle" not in words
    assert "--tp-size 4 --base-gpu-id 4" in text
    assert "--mem-fraction-static 0.6 --enable-memory-saver --random-seed 0" in text
    assert text.endswith("--served-model-name name --host 127.0.0.1 --port 1")
    assert "--max-total-tokens" not in words
    assert "--max-total-tokens 99 --" in " ".join(server_arguments(changed(CUDA, {"cache_tokens": 99}), "name", 1))
    assert "--max-total-tokens 16384 --" in " ".join(server_arguments(SETTINGS, "name", 1))
    needed = server_arguments(changed(SETTINGS, {"cache_tokens": None}), "name", 1)
    assert f"--max-total-tokens {64 * 511 + 256} --" in " ".join(needed)
    assert "--attention-backend torch_native" in " ".join(server_arguments(SETTINGS, "name", 1))
    assert "--enable-memory-saver" not in server_arguments(changed(CUDA, {"sleep": "never"}), "name", 1)
    assert "--enable-memory-saver" not in server_arguments(changed(SETTINGS, {"sleep": "always"}), "name", 1)


def test_a_server_gets_the_numbers_of_its_adapter_and_keeps_the_base() -> None:
    lora = ServedLora(4, 8.0, ("o_proj", "q_proj"), {})
    text = " ".join(server_arguments(replace(SETTINGS, lora=lora), "name", 1))
    assert "--enable-lora --max-lora-rank 4 --lora-target-modules o_proj q_proj --max-loras-per-batch 2" in text
    assert "--lora-strict-loading --lora-backend torch_native" in text and "cpu-backup" not in text
    text = " ".join(server_arguments(replace(CUDA, lora=lora), "name", 1))
    assert "--enable-weights-cpu-backup" in text and "--lora-backend" not in text
    assert "lora" not in " ".join(server_arguments(CUDA, "name", 1))


@pytest.mark.parametrize(
    ("settings", "dtype", "extra", "expected"),
    [
        (CUDA, "bfloat16", {}, True),
        (CUDA, "bfloat16", {"enable_fp32_lm_head": False}, False),
        (CUDA, "float32", {}, False),
        (SETTINGS, "bfloat16", {}, False),
    ],
)
def test_a_bf16_engine_on_a_gpu_has_float32_logits_unless_set_otherwise(
    settings: EngineSettings, dtype: str, extra: dict[str, bool], expected: bool
) -> None:
    words = server_arguments(replace(changed(settings, {"server_args": extra}), dtype=dtype), "name", 1)
    assert ("--enable-fp32-lm-head" in words) == expected


@pytest.mark.parametrize("name", ["tp_size", "port", "load-format", "random_seed"])
def test_arguments_that_the_trainer_relies_on_cannot_be_set_by_a_user(name: str) -> None:
    with pytest.raises(ConfigError, match=f"rollout.server_args.{name} is set by the trainer; remove it"):
        changed(SETTINGS, {"server_args": {name: 1}})


def test_free_ports_differ() -> None:
    assert len(set(free_ports(20))) == 20


@pytest.fixture
def stubs(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(server_main, "STUBBED", ("no_such_package", "json"))
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    server_main.install_stubs()
    server_main.install_stubs()
    yield
    for name in [name for name in sys.modules if name.startswith("no_such_package")]:
        del sys.modules[name]


@pytest.mark.usefixtures("stubs")
def test_a_stub_can_be_imported_and_not_called_and_a_real_package_wins() -> None:
    module = importlib.import_module("no_such_package.of.this_kind")
    with pytest.raises(
        NotImplementedError, match=r"no_such_package\.of\.this_kind\.do does not exist for a CPU-only torch"
    ):
        module.do(1)
    assert not hasattr(module, "__path_of_no_kind__")
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("another_such_package")
    assert not isinstance(importlib.import_module("json.tool"), server_main.Stub)
    assert sum(isinstance(finder, server_main.StubFinder) for finder in sys.meta_path) == 1


# torch as a build for CUDA answers without a GPU, then SGLang's calls that depend on the build.
CUDA_BUILD = """
import torch
torch.version.cuda, torch.get_device_module = "13.0", lambda device=None: torch.cuda
from grpo_mega.rollout.sglang import server_main
server_main.prepare_server()
from sglang.srt.distributed.device_communicators.pynccl_wrapper import find_nccl_library
torch.get_device_module().synchronize()
print(torch.empty(3, device=torch.get_device_module().current_device()).device)
try:
    print(find_nccl_library())
except ValueError as error:
    print(error)
"""


@pytest.mark.sglang
def test_a_cpu_server_uses_no_cuda_of_a_torch_that_is_built_for_it() -> None:
    environment = os.environ | {"SGLANG_USE_CPU_ENGINE": "1"}
    done = subprocess.run([sys.executable, "-c", CUDA_BUILD], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    device, nccl = done.stdout.splitlines()
    assert device == "cpu" and nccl.startswith("NCCL only supports CUDA"), done.stdout


def test_every_change_of_sglang_is_still_needed() -> None:
    assert 'mp.set_start_method("spawn", force=True)' in sglang_source("srt/entrypoints/engine.py")
    assert "from megatron.core import" in sglang_source("srt/debug_utils/dumper.py")
    releases = sglang_source("srt/managers/scheduler_components/weight_updater.py")
    assert "torch.get_device_module().synchronize()" in releases
    nccl = sglang_source("srt/distributed/device_communicators/pynccl_wrapper.py")
    assert "if torch.version.cuda is not None:" in nccl
    assert '"post-warmup freeze_gc failed"' in sglang_source("srt/entrypoints/http_server.py")
    assert all(importlib.util.find_spec(name) is None for name in server_main.STUBBED) or torch.version.cuda
    register = (
        sglang_source("srt/mem_cache/pool_host/common.py")
        .partition("def _cuda_host_register(")[2]
        .partition("\ndef ")[0]
    )
    assert "cudart = torch.cuda.cudart()" in register and "is_available" not in register
    assert "pin_memory=True" in sglang_source("srt/lora/layers.py")
    assert "lora" not in sglang_source("srt/managers/scheduler_components/output_streamer.py").lower()
    assert '("torch", "load")' not in sglang_source("srt/utils/common.py")
    aborted = sglang_source("srt/managers/tokenizer_manager.py").partition("def _handle_abort_req(")[2]
    assert "lora_registry.release" not in aborted.partition("\n    def ")[0]
    router = sglang_source("srt/models/mixtral.py").partition("self.topk = TopK(")[2].partition("self.experts")[0]
    # Only 0.5.21 needs the patch. Later versions set the same number themselves.
    assert "top_k=top_k" in router and ("layer_id=layer_id" in router) == (version("sglang") != "0.5.21")
    # Patches of served_models/families.py: expert ids may be -1, angles follow YaRN, and prompts are not computed in
    # latent space.
    native = sglang_source("srt/layers/moe/fused_moe_native.py").partition("def moe_forward_native(")[2]
    assert "cnts.scatter_(1, topk_ids.to(torch.int64), 1)" in native
    assert "assert rope_scaling is not None" in sglang_source("srt/layers/rotary_embedding/factory.py")
    assert "torch_native" not in sglang_source("srt/models/deepseek_common/attention_backend_handler.py")


def test_the_patches_for_hybrid_models_are_still_needed() -> None:
    config = sglang_source("srt/configs/qwen3_next.py")
    assert "self.layer_types" not in config and 'rope_parameters["partial_rotary' not in config
    model = sglang_source("srt/models/qwen3_5.py")
    assert "torch.ones(self.num_v_heads // self.attn_tp_size)," in model, "dt_bias is float32"
    assert "fused_gdn_gating_cpu" in sglang_source("srt/layers/attention/linear/gdn_backend.py")
    norm = sglang_source("srt/layers/layernorm.py").partition("class GemmaRMSNorm(")[2]
    update = norm.partition("def _weight_loader(")[2].partition("def _forward_impl(")[0]
    assert "self.gemma_weight" in update, "the loader of a checkpoint updates the copy"
    assert "gemma" not in sglang_source("srt/model_executor/model_runner_components/weight_updater.py")
    gated = sglang_source("kernels/ops/attention/fla/layernorm_gated.py")
    assert "_use_cpu = is_cpu() and cpu_has_amx_support()" in gated


@pytest.mark.parametrize("name", [name for name, family in FAMILIES.items() if family.served_by])
def test_sglang_has_the_class_that_serves_a_family(name: str) -> None:
    module, _, class_name = str(FAMILIES[name].served_by).partition(":")
    source = sglang_source(f"srt/models/{module}.py")
    assert f"class {class_name}(" in source
