"""The policy's memory goes to the host and back between all steps, and nothing changes but where it is.

What needs Megatron runs in ranks of their own, many cases to a launch (offload_worker.py).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from grpo_mega.megatron.offload import ALIGNMENT, HostCopy, Movable, storages_of
from tests.helpers.ranks import Results, launch

MANY_STEPS = "many steps"  # the worker's case
DEVICES = [
    "cpu",
    pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]),
]


@pytest.fixture(scope="module")
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Results:
    """By case, what went wrong in ranks of their own."""
    world_size: int = request.param
    folder = tmp_path_factory.mktemp(f"offload_{world_size}")
    return launch(Path(__file__).with_name("offload_worker.py"), world_size, folder)


@pytest.mark.distributed
@pytest.mark.parametrize("found", [1, pytest.param(4, marks=pytest.mark.full)], indirect=True)
def test_moving_between_all_steps_changes_no_bit_and_frees_every_byte(found: Results) -> None:
    """Losses, gradient norms, weights and fingerprints; device bytes; save and restore while all is on the host."""
    wrong = [line for case, lines in found.items() for line in lines if case != MANY_STEPS]
    assert found and not wrong, "\n".join(wrong)


@pytest.mark.full
@pytest.mark.distributed
@pytest.mark.parametrize("found", [1], indirect=True)
def test_a_200_step_run_with_offload_on_gives_bit_identical_losses_to_one_without(found: Results) -> None:
    """And bit-identical weights in the end; both take turns in one process."""
    assert found[MANY_STEPS] == [], "\n".join(found[MANY_STEPS])


def movable(device: str, chunk_bytes: int = 4 * ALIGNMENT) -> Movable:
    return Movable(torch.cuda.Stream(), is_pinned=device == "cuda", chunk_bytes=chunk_bytes)


@pytest.mark.parametrize("device", DEVICES)
def test_views_stay_valid_and_what_shares_a_storage_moves_once(device: str) -> None:
    """Sizes around that of a chunk, odd ones among them; a chunk that the next storage begins in."""
    sizes = (1, 511, 512, 4 * ALIGNMENT - 1, 9 * ALIGNMENT + 3, 4 * ALIGNMENT, 0)
    wholes = [torch.randint(256, (n,), dtype=torch.uint8, device=device) for n in sizes]
    views = [w[len(w) // 2 :] for w in wholes]
    expected = [w.cpu().clone() for w in wholes]
    storages = storages_of([*wholes, *views])
    assert len(storages) == len(sizes) - 1  # the empty tensor holds nothing
    moved = movable(device)
    for _ in range(3):
        moved.offload(storages)
        assert moved.is_away and all(w.untyped_storage().nbytes() == 0 for w in (*wholes, *views))
        moved.onload()
        for whole, view, content in zip(wholes, views, expected, strict=True):
            assert torch.equal(whole.cpu(), content) and torch.equal(view.cpu(), content[len(content) // 2 :])
        wholes[4][7] += 1  # what changes on the device goes along the next time
        expected[4][7] += 1


@pytest.mark.parametrize("device", DEVICES)
def test_host_memory_grows_with_the_need_and_is_used_again(device: str) -> None:
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
    """A stream, as far as a CPU can have one, that notes what is asked of it."""

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
    moved = Movable(own, is_pinned=False)
    moved.offload(storages_of([tensor]))
    assert own.asked == ["wait_stream", "synchronize"], "freed only after the copy has ended"
    moved.begin_onload()
    assert own.asked[2:] == ["wait_stream", "record_event"] and waited == []
    moved.onload()
    moved.onload()
    assert waited == ["event 4"]


def test_storages_are_left_out_with_whatever_shares_them() -> None:
    weights, moments = torch.zeros(8), torch.zeros(8)
    assert [s.data_ptr() for s in storages_of([weights[:4], moments, moments[2:]], but_of=[weights])] == [moments.data_ptr()]


def test_a_storage_that_numpy_has_seen_is_refused_and_not_lost() -> None:
    tensor = torch.ones(4)
    tensor.numpy()
    with pytest.raises(AssertionError, match="numpy"):
        movable("cpu").offload(storages_of([tensor]))
    assert torch.equal(tensor, torch.ones(4))


def test_the_process_gives_memory_back() -> None:
    """On a CPU the first move allocates the host's share, so that only the second makes the process smaller."""
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
