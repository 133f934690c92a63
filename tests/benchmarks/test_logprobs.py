"""The benchmark of log-probs at tiny sizes: all paths compute equal values, and the last line has the documented
keys.
"""

import json

import pytest
import torch

from tools.benchmarks import logprobs as bench_logprobs

pytestmark = pytest.mark.usefixtures("preloaded_python")

TINY = "--tokens 64 --vocab 500 --hidden 16"


@pytest.mark.parametrize("name", bench_logprobs.PATHS)
def test_each_path_has_the_values_and_gradients_of_our_code(name):
    expected, found = (bench_logprobs.Inputs(12, 50, 6, is_ours=path == "ours", trained=0.5) for path in ("ours", name))
    needed = expected.needed_T
    assert needed.sum() == 6
    values = bench_logprobs.step("ours", expected), bench_logprobs.step(name, found)
    for ours, theirs in zip(*values, strict=True):
        torch.testing.assert_close(ours[needed], theirs[needed], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(expected.hidden_TH.grad, found.hidden_TH.grad, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(expected.sink_VH, found.sink_VH, rtol=1e-5, atol=1e-5)


def test_the_tile_columns_of_trl_are_taken_from_trl():
    from trl.trainer import utils

    assert utils._CHUNKED_LOGPROB_CHUNK_SIZE == bench_logprobs.TRL_CHUNK
    assert utils._ChunkedLogProbFunction.__module__ == "trl.kernels.chunked_logprob"


def test_an_error_in_a_value_is_detected():
    given = bench_logprobs.Inputs(12, 50, 6, is_ours=True)
    logprobs, entropy = bench_logprobs.step("ours", given)
    assert bench_logprobs.max_error(given, logprobs, entropy) < 1e-5
    entropy[0] += 0.1
    assert bench_logprobs.max_error(given, logprobs, entropy) > 1e-2


def test_the_last_line_is_json_with_ratios_and_the_error(capsys):
    assert bench_logprobs.main(TINY.split()) in (0, 1)  # ratios at tiny sizes mean nothing
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert set(found["paths"]) == {"ours", "trl", "log_softmax"}
    ours, trl = found["paths"]["ours"], found["paths"]["trl"]
    assert found["cpu_ratio"] == pytest.approx(ours["cpu_seconds"] / trl["cpu_seconds"], rel=1e-2)
    assert {"memory_ratio", "memory_ratio_log_softmax", "cpu_ratio_log_softmax"} < set(found)
    assert max(figures["max_error"] for figures in found["paths"].values()) < 1e-5


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--tokens 0", "--tokens=0 must be at least 1"),
        ("--trained 1.5", "--trained=1.5 must be above 0 and at most 1"),
        ("--vocab many", "invalid int value: 'many'"),
    ],
)
def test_invalid_arguments_are_refused_in_one_line(arguments, message, capsys):
    with pytest.raises(SystemExit) as end:
        bench_logprobs.main(arguments.split())
    [line] = capsys.readouterr().err.splitlines()
    assert end.value.code == 2 and message in line
