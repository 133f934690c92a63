"""The benchmark of the weight sync: bounds compared with counted elements, and bad arguments refused in one line.

The ranks run weight_sync_worker.py, which contains the assertions.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings

from grpo_mega.weights.plan import plan_transfers
from tests.helpers.mapping import lower_bound as counted_lower_bound
from tests.helpers.mapping import numbered
from tests.helpers.models import make_config
from tests.helpers.random_layouts import Case, cases, shards_by_rank
from tests.helpers.ranks import Results, launch
from tools.benchmarks.weight_sync import __main__ as bench_weight_sync
from tools.benchmarks.weight_sync.dry import dry_run, full_gather, lower_bound, num_parameters

pytestmark = pytest.mark.usefixtures("preloaded_python")

LLAMA = "--dry --model llama-70b --source tp=4,pp=4,dp=4 --target tp=8,engines=8"
QWEN = "--dry --model qwen3-235b --source tp=4,pp=4,dp=4,ep=4 --target tp=8,engines=8"
TINY = "--source tp=2,pp=2 --target tp=2,engines=2 --repeat 2 --ranks-per-node 2 --model"


def run(arguments: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, list[str], list[str]]:
    """Return exit code, lines of output, and lines of errors."""
    try:
        code = bench_weight_sync.main(arguments.split())
    except SystemExit as end:
        assert isinstance(end.code, int)
        code = end.code
    out, err = capsys.readouterr()
    return code, out.splitlines(), err.splitlines()


@settings(max_examples=40, deadline=None)
@given(cases())
def test_the_bounds_equal_counted_elements(case: Case) -> None:
    trainer, servers = case.trainer(), case.servers()
    tensors = numbered(case.family, case.shape)
    held, wanted = shards_by_rank(trainer), shards_by_rank(servers)
    held += [{}] * (len(wanted) - len(held))
    expected = sum(counted_lower_bound(have, want, tensors) for have, want in zip(held, wanted, strict=True))
    # Some elements are always float32.
    moved = plan_transfers(trainer, servers, ranks_per_node=2).traffic(itemsize=4).moved
    assert (lower_bound(trainer, servers), moved) == (expected, 4 * expected)

    total = sum(t.numel() for t in tensors.values())
    assert num_parameters(case.shape) == total
    own = sum(piece.box.size for holding in held for local in holding.values() for piece in local.pieces)
    assert full_gather(trainer, total, case.world_size) == case.world_size * total - own


@pytest.mark.parametrize(("arguments", "bytes_of_model"), [(LLAMA, 141_107_412_992), (QWEN, 470_187_269_120)])
def test_the_last_line_has_the_bytes_that_a_large_model_moves(
    arguments: str, bytes_of_model: int, capsys: pytest.CaptureFixture[str]
) -> None:
    code, lines, errors = run(arguments, capsys)
    found: dict[str, Any] = json.loads(lines[-1])
    assert (code, errors) == (0, [])
    assert found["bytes_moved"] == found["lower_bound"]
    # Eight engines, a part of the weights is local.
    assert 7 * bytes_of_model < found["bytes_moved"] < 8.2 * bytes_of_model
    assert 59 * bytes_of_model < found["full_gather_bytes"] < 64 * bytes_of_model
    assert 0 < found["between_nodes_bytes"] < found["bytes_moved"]
    assert found["plan_seconds"] > 0
    assert found["seconds"] is found["full_gather_seconds"] is None


def test_both_orders_are_compared_and_the_better_one_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    _, lines, _ = run(LLAMA, capsys)
    [row] = [line for line in lines if line.startswith("between nodes")]
    by_default, stages_near = map(float, row.split()[-2:])
    assert stages_near < 0.7 * by_default
    assert any("layout.order=tp-pp-dp" in line and "33%" in line for line in lines)
    assert json.loads(lines[-1])["between_nodes_bytes"] == pytest.approx(by_default * 1e9, rel=1e-3)
    _, lines, _ = run(LLAMA.replace("dp=4 ", "dp=4,order=tp-pp-dp "), capsys)
    assert json.loads(lines[-1])["between_nodes_bytes"] == pytest.approx(stages_near * 1e9, rel=1e-3)
    _, lines, _ = run(QWEN, capsys)
    assert any(line.startswith("only the order tp-dp-pp") for line in lines)


def test_by_default_the_sync_moves_at_most_half_of_a_full_gather() -> None:
    spec = bench_weight_sync.spec_of(bench_weight_sync.parse([]))
    assert (spec.source.tp, spec.source.pp, spec.target.tp) == (2, 2, 2)
    found = dry_run(spec)
    assert 0 < found.traffic.moved == found.lower_bound <= found.full_gather_bytes / 2


def test_a_large_model_is_planned_in_less_than_a_second() -> None:
    """Including rounds. The best of a few tries counts, because other processes may use the cores."""
    spec = bench_weight_sync.spec_of(bench_weight_sync.parse(LLAMA.split()))
    assert min(dry_run(spec).plan_seconds for _ in range(5)) < 1


def test_a_model_may_be_a_config_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(make_config("qwen2", tied=True).to_dict()))
    code, lines, _ = run(f"--dry --model {path} --source tp=2 --target tp=2,engines=1 --ranks-per-node 2", capsys)
    assert code == 0
    assert any(line.startswith("both orders move 0.0 GB") for line in lines)


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Results:
    return launch(Path(__file__).with_name("weight_sync_worker.py"), 4, tmp_path_factory.mktemp("ranks"))


@pytest.mark.distributed
def test_a_sync_fills_all_tensors_and_bytes_are_counted(measured: Results) -> None:
    layouts = {case: failures for case, failures in measured.items() if " to " in case}
    assert len(layouts) == 10
    assert not any(layouts.values()), layouts


@pytest.mark.distributed
def test_a_bit_that_differs_is_found_and_its_tensor_is_named(measured: Results) -> None:
    assert not measured["difference"], "\n".join(measured["difference"])


@pytest.mark.distributed
def test_weights_differ_at_all_places(measured: Results) -> None:
    assert not measured["contents"], "\n".join(measured["contents"])


@pytest.mark.distributed
def test_a_measured_run_ends_with_bytes_and_seconds(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(make_config("qwen3", vocab_size=128).to_dict()))
    assert bench_weight_sync.main([*TINY.split(), str(path)]) == 0
    out, err = capfd.readouterr()
    assert err == ""
    found: dict[str, Any] = json.loads(out.splitlines()[-1])
    assert "bit for bit" in out
    assert (
        found["bytes_moved"] == found["lower_bound"] == found["between_nodes_bytes"] <= found["full_gather_bytes"] / 2
    )
    assert found["ratio"] == pytest.approx(found["bytes_moved"] / found["full_gather_bytes"], rel=1e-3)
    assert all(found[name] > 0 for name in ("seconds", "full_gather_seconds", "plan_seconds"))


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("llama-70b", "llama-71b", "--model=llama-71b is none of tiny, "),
        ("llama-70b", "/nowhere/config.json", "--model=/nowhere/config.json is none of"),
        ("pp=4,dp=4", "pp=4,cp=4", "--source: 'cp=4' is not understood; give some of tp, pp,"),
        ("pp=4,dp=4", "pp=4,dp=0", "--source: dp=0 must be a whole number above 0"),
        ("pp=4,dp=4", "pp=4,dp=x", "--source: dp=x must be a whole number above 0"),
        ("pp=4,dp=4", "pp=4,order=dp", "--source: order=dp is not known; use tp-dp-pp or tp-pp-dp"),
        ("tp=4,pp=4", "tp=3,pp=4", "tp=3 does not divide the model's 64 attention heads; use 1, 2, 4, 8"),
        ("pp=4,dp=4", "pp=81", "pp=81 with vpp=1 makes 81 model chunks, but the model has 80 layers"),
        ("pp=4,dp=4", "vpp=2", "vpp=2 interleaves pipeline stages, but pp=1"),
        ("pp=4,dp=4", "dp=4,ep=2", "ep=2 spreads experts, but the model is dense"),
        ("tp=8,engines=8", "tp=6", "tp=6 does not divide the model's 64 attention heads"),
        ("tp=8,engines=8", "tp=8,nodes=8", "--target: 'nodes=8' is not understood"),
        ("--dry", "", "64 ranks with these weights need "),
        ("--dry", "--layers 81", "--layers=81 is more than the model's 80; use fewer"),
        ("--dry", "--dry --layers 0", "--layers=0 must be at least 1"),
        (
            "--dry --model llama-70b --source tp=4,pp=4,dp=4",
            "--model llama-70b --layers 1 --source tp=4",
            "--target needs 64 ranks and --source has 4; measured",
        ),
        ("--dry", "--dry --ranks-per-node 0", "--ranks-per-node=0 must be at least 1"),
        ("--dry", "--dry --ranks-per-node two", "invalid int value: 'two'"),
    ],
)
def test_invalid_arguments_are_refused_in_one_line(
    old: str, new: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, lines, errors = run(LLAMA.replace(old, new), capsys)
    assert (code, lines) == (2, [])
    [line] = errors
    assert message in line


@pytest.mark.parametrize(
    ("new", "message"),
    [
        ("ep=4,order=tp-pp-dp", "order=tp-pp-dp: must be tp-dp-pp"),
        ("ep=3", "ep=3 does not divide the 4 ranks (tp * cp * dp / etp)"),
    ],
)
def test_experts_that_megatron_cannot_distribute_are_refused(
    new: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, errors = run(QWEN.replace("ep=4", new), capsys)
    assert code == 2
    assert any(message in line for line in errors)
