"""The policy's memory moves to the host and back between all steps, and only its location changes.

Tests that need Megatron run in separate ranks, many cases per launch (offload_worker.py).
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from grpo_mega.megatron.offload import ALIGNMENT, HostCopy, OffloadedStorages, storages_of
from tests.helpers.ranks import Results, launch

MANY_STEPS, PIECES = "many steps", "pieces: "  # names of cases of the worker
DEVICES = [
    "cpu",
    pytest.param(
        "cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
    ),
]


@pytest.fixture(scope="module")
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Results:
    """Return the errors of each case, run in separate ranks."""
    world_size: int = request.param
    folder = tmp_path_factory.mktemp(f"offload_{world_size}")
    return launch(Path(__file__).with_name("offload_worker.py"), world_size, folder)


@pytest.mark.distributed
@pytest.mark.parametrize("found", [1, pytest.param(4, marks=pytest.mark.full)], indirect=True)
def test_moving_between_all_steps_changes_no_bit_and_frees_every_byte(found: Results) -> None:
    """Compare losses, gradient norms, weights, fingerprints and device bytes; save and restore while the policy is on
    the host."""
    wrong = [line for case, lines in found.items() for line in lines if case != MANY_STEPS and PIECES not in case]
    assert found and not wrong, "\n".join(wrong)


@pytest.mark.distributed
@pytest.mark.parametrize("found", [1, pytest.param(4, marks=pytest.mark.full)], indirect=True)
def test_every_pass_and_optimizer_step_of_an_update_is_reported(found: Results) -> None:
    """The progress of an update counts them, in all layouts, with full recompute."""
    cases = [case for case in found if PIECES in case]
    assert len(cases) >= 3
    wrong = [line for case in cases for line in found[case]]
    assert not wrong, "\n".join(wrong)


@pytest.mark.full
@pytest.mark.distributed
@pytest.mark.parametrize("found", [1], indirect=True)
def test_a_200_step_run_with_offload_has_bit_identical_losses(found: Results) -> None:
    """The final weights are bit-identical too. Both runs use the same process."""
    assert found[MANY_STEPS] == [], "\n".join(found[MANY_STEPS])


def movable(device: str, chunk_bytes: int = 4 * ALIGNMENT) -> OffloadedStorages:
    return OffloadedStorages(torch.cuda.Stream(), is_pinned=device == "cuda", chunk_bytes=chunk_bytes)


@pytest.mark.parametrize("device", DEVICES)
def test_views_stay_valid_and_a_shared_storage_moves_once(device: str) -> None:
    """Sizes near the chunk size, some odd; one chunk also holds the start of the next storage."""
    sizes = (1, 511, 512, 4 * ALIGNMENT - 1, 9 * ALIGNMENT + 3, 4 * ALIGNMENT, 0)
    wholes = [torch.randint(256, (n,), dtype=torch.uint8, device=device) for n in sizes]
    views = [w[len(w) // 2 :] for w in wholes]
    expected = [w.cpu().clone() for w in wholes]
    storages = storages_of([*wholes, *views])
    assert len(storages) == len(sizes) - 1  # the empty tensor has no storage
    moved = movable(device)
    for _ in range(3):
        moved.offload(storages)
        assert moved.is_away and all(w.untyped_storage().nbytes() == 0 for w in (*wholes, *views))
        moved.onload()
        for whole, view, content in zip(wholes, views, expected, strict=True):
            assert torch.equal(whole.cpu(), content) and torch.equal(view.cpu(), content[len(content) // 2 :])
        wholes[4][7] += 1  # a change on the device moves with the next offload
        expected[4][7] += 1


@pytest.mark.parametrize("device", DEVICES)
def test_host_memory_grows_when_needed_and_is_reused(device: str) -> None:
    few, many = torch.ones(5 * ALIGNMENT, device=device), torch.ones(40 * ALIGNMENT, device=device)
    moved = movable(device)
    held = []
    for tensors in ([few], [few, many], [few], [few, many]):
        moved.offload(storages_of(tensors))
        held.append(moved.copy.nbytes)
        moved.onload()
        assert all(bool((t == 1).all()) for t in tensors)
    assert held == [20 * ALIGNMENT, *[180 * ALIGNMENT] * 3]


@pytest.mark.parametrize("device", DEVICES)
def test_switches_that_have_nothing_to_do_copy_nothing(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = torch.arange(1000.0, device=device)
    moved = movable(device)
    calls: list[str] = []
    for name in ("take", "put"):
        monkeypatch.setattr(HostCopy, name, counted(calls, name, getattr(HostCopy, name)))
    moved.onload()
    assert calls == []
    for _ in range(2):
        moved.offload(storages_of([tensor]))
    for _ in range(2):
        moved.begin_onload()
        moved.onload()
    assert calls == ["take", "put"] and torch.equal(tensor.cpu(), torch.arange(1000.0))


def counted(calls: list[str], name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args: (calls.append(name), function(*args))[1]


class Recorder:
    """A fake stream that records its calls."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def __getattr__(self, name: str) -> Callable[..., str]:
        def note(*args: Any) -> str:
            self.asked.append(name)
            return f"event {len(self.asked)}"

        return note


def test_copies_wait_for_the_current_stream_and_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    current, own = Recorder(), Recorder()
    waited: list[str] = []
    monkeypatch.setattr(current, "wait_event", waited.append, raising=False)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *args: current)
    tensor = torch.ones(10)
    moved = OffloadedStorages(own, is_pinned=False)
    moved.offload(storages_of([tensor]))
    assert own.asked == ["wait_stream", "synchronize"], "memory may be freed only after the copy has ended"
    moved.begin_onload()
    assert own.asked[2:] == ["wait_stream", "record_event"] and waited == []
    moved.onload()
    moved.onload()
    assert waited == ["event 4"]


def test_excluded_storages_exclude_all_tensors_that_share_them() -> None:
    weights, moments = torch.zeros(8), torch.zeros(8)
    assert [s.data_ptr() for s in storages_of([weights[:4], moments, moments[2:]], but_of=[weights])] == [
        moments.data_ptr()
    ]


def test_a_storage_that_numpy_has_seen_is_refused_and_not_lost() -> None:
    tensor = torch.ones(4)
    tensor.numpy()
    with pytest.raises(AssertionError, match="numpy"):
        movable("cpu").offload(storages_of([tensor]))
    assert torch.equal(tensor, torch.ones(4))


def test_offload_shrinks_the_process() -> None:
    """On a CPU the first move allocates the host copy, so only the second move shrinks the process."""
    size = 128 << 20
    tensor = torch.ones(size, dtype=torch.uint8)
    moved = movable("cpu", chunk_bytes=64 << 20)
    moved.offload(storages_of([tensor]))
    moved.onload()
    before = resident_bytes()
    moved.offload(storages_of([tensor]))
    assert before - resident_bytes() > 0.95 * size
    moved.onload()
    assert resident_bytes() - before < 0.05 * size and bool(tensor.all())


def resident_bytes() -> int:
    ctypes.CDLL(None).malloc_trim(0)  # malloc may keep freed memory
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmRSS:")[1].split()[0]) << 10


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_the_device_gets_its_memory_back() -> None:
    tensor = torch.ones(512 << 20, dtype=torch.uint8, device="cuda")
    moved = movable("cuda", chunk_bytes=256 << 20)
    free, _ = torch.cuda.mem_get_info()
    moved.offload(storages_of([tensor]))
    torch.cuda.empty_cache()
    assert torch.cuda.mem_get_info()[0] - free >= 512 << 20
    moved.onload()
    assert bool(tensor.all())
