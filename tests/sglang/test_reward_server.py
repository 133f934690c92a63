"""The reward_model function with real SGLang servers: a model with a value head, and a text model that labels and
judges.
"""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_model
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification

from grpo_mega import processes
from grpo_mega.distributed.launch import free_ports
from grpo_mega.rewards import NoScore, Score, Step
from grpo_mega.rewards.reward_model import reward_model
from grpo_mega.rollout.sglang.server import server_environment
from tests.helpers.reward_pools import reward_pool
from tests.helpers.servers import START_DEADLINE_S, make_settings

pytestmark = [pytest.mark.sglang, pytest.mark.usefixtures("preloaded_python")]

ROOT = Path(__file__).resolve().parents[2]
CLASSES = {"value": LlamaForSequenceClassification, "causal": LlamaForCausalLM}
LABELS = [5, 9, 40]
PROMPT = "1+1+3=?"
RESPONSE = "1+1=2\n\nso 2+3=5 è 漢字\n\n<answer>5</answer>"
PREFIXES = ["1+1=2", "1+1=2\n\nso 2+3=5 è 漢字", RESPONSE]
ENDS = [len("1+1=2\n\n"), RESPONSE.index("<answer>"), len(RESPONSE)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder of tiny models by kind, with a byte tokenizer."""
    folder = tmp_path_factory.mktemp("reward_models")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["tiny_random_model.py", str(folder / "base")])
        runpy.run_path(str(ROOT / "examples" / "tiny_random_model.py"), run_name="__main__")
    tokenizer = AutoTokenizer.from_pretrained(folder / "base")
    torch.manual_seed(0)
    for name, kind in CLASSES.items():
        config = LlamaConfig(
            vocab_size=320,
            hidden_size=64,
            intermediate_size=96,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=512,
            pad_token_id=tokenizer.pad_token_id,
            eos_token_id=tokenizer.eos_token_id,
            bos_token_id=None,
            initializer_range=0.2,
            num_labels=1,
        )
        model = kind(config)
        if name == "causal":  # this model answers every prompt with a number
            model.model.embed_tokens.weight.data[:, 0] = 30.0
            model.lm_head.weight.data[:, 0] = 0.0
            model.lm_head.weight.data[tokenizer("7")["input_ids"][0]] = torch.eye(64)[0] * 2.0
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    return folder


@contextmanager
def serving(folder: Path, *arguments: str) -> Iterator[str]:
    """Start a server with the model's weights and tokenizer, as a user would for rewards. Yield its URL before it is
    ready.
    """
    port, nccl_port = free_ports(2)
    words = [
        "--model-path",
        str(folder),
        "--device",
        "cpu",
        "--dtype",
        "float32",
        "--attention-backend",
        "torch_native",
    ]
    words += ["--host", "127.0.0.1", "--port", str(port), "--nccl-port", str(nccl_port), "--context-length", "512"]
    words += ["--max-total-tokens", "8192", "--max-running-requests", "16", "--log-level", "warning", "--sleep-on-idle"]
    private, lock = processes.make_folder()
    owner = [str(os.getpid()), str(private), str(lock)]
    process = subprocess.Popen(
        [sys.executable, "-m", "grpo_mega.rollout.sglang.server_main", *owner, *words, *arguments],
        env=server_environment(os.environ, make_settings(folder, folder)),
        pass_fds=(lock,),
        stdout=(folder / "server.log").open("wb"),
        stderr=subprocess.STDOUT,
        process_group=0,
    )
    os.close(lock)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait()


@pytest.fixture(scope="module")
def urls(folder: Path) -> Iterator[dict[str, str]]:
    with ExitStack() as stack:
        found = {
            "value": stack.enter_context(serving(folder / "value", "--is-embedding")),
            "causal": stack.enter_context(serving(folder / "causal")),
        }
        until = time.monotonic() + START_DEADLINE_S
        for name, url in found.items():
            while not _is_healthy(url):
                assert time.monotonic() < until, (folder / name / "server.log").read_text()
                time.sleep(0.2)
        yield found


def _is_healthy(url: str) -> bool:
    try:
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(url + "/health", timeout=10):
            return True
    except OSError:
        return False


def _load(folder: Path, name: str) -> Any:
    """Load the model from its config and weights, because `from_pretrained` may leave buffers unset after other tests'
    imports."""
    model = CLASSES[name](LlamaConfig.from_pretrained(folder / name))
    load_model(model, folder / name / "model.safetensors")
    return model.eval()


def _logits(folder: Path, name: str, text: str) -> torch.Tensor:
    """Return transformers' logits after the last token; for a model with a value head its value."""
    model = _load(folder, name)
    ids = AutoTokenizer.from_pretrained(folder / name)(text, return_tensors="pt")["input_ids"]
    with torch.no_grad():
        logits = model(input_ids=ids).logits
    return logits[0, -1] if logits.dim() == 3 else logits[0]


def _score(url: str, **options: Any) -> Score:
    return reward_model(PROMPT, RESPONSE, "5", {}, url=url, timeout_s=60.0, **options)


@pytest.mark.parametrize("api", ["classify", "score"])
def test_a_value_head_gives_the_rewards_that_transformers_gives(api: str, urls: dict[str, str], folder: Path) -> None:
    expected = [_logits(folder, "value", PROMPT + prefix).item() for prefix in PREFIXES]
    assert _score(urls["value"], api=api) == Score(pytest.approx(expected[-1], abs=1e-4), "scored")
    found = _score(urls["value"], api=api, steps=True, scale=2.0)
    assert found.value is None
    assert [step.end for step in found.steps] == ENDS
    assert [step.value for step in found.steps] == pytest.approx([2 * value for value in expected], abs=2e-4)


def test_labels_after_the_text_have_transformers_probabilities(urls: dict[str, str], folder: Path) -> None:
    template = "{prompt}{response}\nIs it right? "
    logits = [_logits(folder, "causal", f"{PROMPT}{prefix}\nIs it right? ") for prefix in PREFIXES]
    options = {"api": "score", "template": template}
    share = [row[LABELS].softmax(-1)[0].item() for row in logits]
    found = _score(urls["causal"], labels=", ".join(map(str, LABELS)), steps=True, **options)
    assert [step.value for step in found.steps] == pytest.approx(share, rel=1e-3)
    alone = _score(urls["causal"], labels=LABELS[0], **options)
    assert alone.value == pytest.approx(logits[-1].softmax(-1)[LABELS[0]].item(), rel=1e-3)


def test_a_judge_is_asked_and_its_last_number_read(urls: dict[str, str], folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder / "causal")
    messages = [{"role": "user", "content": f"Judge {RESPONSE}"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    ids = tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"]
    said = _load(folder, "causal").generate(ids, do_sample=False, max_new_tokens=3)
    reply = tokenizer.decode(said[0, ids.shape[1] :])
    assert reply == "777"
    options = {"api": "chat", "model": "m", "template": "Judge {response}", "max_tokens": 3, "scale": 0.001}
    assert _score(urls["causal"], **options) == Score(pytest.approx(0.777), "scored")
    assert _score(urls["causal"], steps=True, **options).steps == tuple(Step(end, pytest.approx(0.777)) for end in ENDS)


def test_a_text_that_the_server_refuses_is_a_missing_score(urls: dict[str, str]) -> None:
    with pytest.raises(
        NoScore, match=r"/classify answers 400 \(.*longer than the model's context length.*correct the options"
    ):
        reward_model("x" * 600, "", "", {}, url=urls["value"], timeout_s=60.0)
    with pytest.raises(NoScore, match="answers 4"):  # this model has no value head
        _score(urls["causal"], api="score")


def test_the_pools_workers_find_the_server_and_score_by_it(urls: dict[str, str], folder: Path) -> None:
    options = {"reward_model": {"url": urls["value"], "steps": True, "timeout_s": 60.0}}
    with reward_pool([("reward_model", 0.5)], 2, 120.0, options=options, step_splitter="lines") as pool:
        pool.wait_until_ready()
        for key in range(4):
            pool.submit(key, PROMPT, RESPONSE, "5", {})
        results = pool.collect()
    value = _logits(folder, "value", PROMPT + RESPONSE).item()
    for result in results.values():
        assert result.total is None
        assert [step.end for step in result.steps] == [len("1+1=2\n"), RESPONSE.index("\n<answer>"), len(RESPONSE)]
        assert result.steps[-1] == Step(len(RESPONSE), pytest.approx(value / 2, abs=1e-4))
