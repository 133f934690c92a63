"""One rank of test_checkpoints.py: saves of a few bytes of state, by three ranks on one node."""

from __future__ import annotations

import atexit
import hashlib
import json
import os
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch.distributed as dist

from grpo_mega.checkpoint_io.checkpoints import latest, read_manifest
from grpo_mega.config import ModelConfig, TeacherConfig
from grpo_mega.distributed.watchdog import recorder
from grpo_mega.errors import ResumeError
from grpo_mega.trainer import inputs, saving
from grpo_mega.trainer.inputs import InputDigests
from grpo_mega.trainer.saving import Checkpoints
from tests.helpers.ranks import run_cases
from tests.helpers.slow_policy import SlowPolicy, manifest

WORLD_SIZE = 3
SECONDS = 30.0  # limit of every wait
WARNINGS: list[str] = []
saving._CHUNK = 1000


def open_checkpoints(rank: int, folder: Path, keep: int = 2) -> Checkpoints:
    """Open checkpoints with a separate memory folder, in another file system than `folder`."""
    saving.MEMORY = Path("/dev/shm", f"{os.getppid()}-{folder.name}")
    if rank == 0:
        saving.MEMORY.mkdir()
        atexit.register(shutil.rmtree, saving.MEMORY, ignore_errors=True)
    dist.barrier()
    store = dist.PrefixStore(folder.name, dist.distributed_c10d._get_default_store())
    return Checkpoints(folder, keep, rank, store, WARNINGS.append)


def is_true_soon(condition: Callable[[], bool]) -> bool:
    until = time.monotonic() + SECONDS
    while not condition():
        if time.monotonic() > until:
            return False
        time.sleep(0.05)
    return True


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def raised(act: Callable[..., object], *arguments: Any) -> str:
    try:
        act(*arguments)
    except (ResumeError, RuntimeError) as error:
        return str(error)
    raise AssertionError("nothing was raised")


def becomes_visible_without_the_main_threads(rank: int, folder: Path) -> None:
    """A save is visible when the last rank's thread finishes, without any call by a rank, but not before the step is
    logged.
    """
    found = open_checkpoints(rank, folder / "visible")
    found.save(SlowPolicy(rank, pause_s=0.5 if rank == 2 else 0.0), manifest(4))
    for _ in range(2):
        found.poll()
        assert not (found.folder / "latest").exists()
    assert is_true_soon((found.folder / "latest").exists)
    checksums = read_manifest(found.folder / "step-000004").checksums
    expected = {f"__{r}_0.distcp": SlowPolicy(r).content for r in range(WORLD_SIZE)} | {"common.pt": b"common"}
    assert checksums == {name: hashlib.sha256(content).hexdigest() for name, content in expected.items()}
    for name, content in expected.items():
        assert (found.folder / "step-000004" / "state" / name).read_bytes() == content
    dist.barrier()

    found.save(SlowPolicy(rank), manifest(5))
    assert is_true_soon(found._writer.is_written.is_set)
    dist.barrier()
    time.sleep(1)  # all parts are written, but the step is not logged
    assert names(found.folder) == {"latest", "step-000004", ".step-000005.partial"}
    dist.barrier()
    found.poll()
    assert is_true_soon(lambda: latest(found.folder) == found.folder / "step-000005")
    found.finish()
    found.save(SlowPolicy(rank), manifest(5))  # an engine failed before another step was done
    assert found._writer is None


def goes_back(rank: int, folder: Path) -> None:
    found = open_checkpoints(rank, folder / "back", keep=1)
    for step in (6, 8, 5, 6):
        found.save(SlowPolicy(rank), manifest(step))
        found.finish()
        dist.barrier()
        assert names(found.folder) == {"latest", f"step-{step:06d}"}
        dist.barrier()


def stages_in_private(rank: int, folder: Path) -> None:
    """Stage in a folder that only this user can read, with a new name each time, and remove it before training
    continues.
    """
    found, policy = open_checkpoints(rank, folder / "private"), SlowPolicy(rank, pause_s=0.2)
    places: set[Path] = set()
    for step in (1, 2):
        found.save(policy, manifest(step))
        assert not names(saving.MEMORY)
        assert policy.folder is not None and policy.folder.parent == saving.MEMORY and policy.mode == 0o700
        places.add(policy.folder)
        dist.barrier()
    found.finish()
    assert len(places) == 2
    everyone: list[set[Path]] = [set()] * WORLD_SIZE
    dist.all_gather_object(everyone, places)
    assert everyone == [places] * WORLD_SIZE


def stages_on_the_disk(rank: int, folder: Path) -> None:
    """If a node has too little memory, write in place, without a second copy."""
    found = open_checkpoints(rank, folder / "disk")
    policy = SlowPolicy(rank)
    policy.state_bytes = shutil.disk_usage(saving.MEMORY).free // 4  # all ranks together need too much
    policy_fits = SlowPolicy(rank)
    found._check_disk = lambda policy: None  # in this test the disk is the memory
    found.save(policy, manifest(3))
    assert policy.folder == found.folder / ".step-000003.partial" / "state"
    found.finish()
    beats: list[int] = []
    with recorder().on_heartbeat(lambda kind: beats.append(1)):
        saving.verify_files(found.folder / "step-000003", read_manifest(found.folder / "step-000003"), rank, WORLD_SIZE)
    assert len(beats) >= 3, "each verified chunk must count as progress"
    found.save(policy_fits, manifest(4))
    assert policy_fits.folder is not None and policy_fits.folder.parent == saving.MEMORY
    found.finish()
    dist.barrier()
    if rank == 0:
        shutil.rmtree(saving.MEMORY)
    dist.barrier()
    found.save(policy_fits, manifest(5))
    assert policy_fits.folder == found.folder / ".step-000005.partial" / "state"
    found.finish()


def writes_in_place_what_is_in_memory_anyway(rank: int, folder: Path) -> None:
    """If the checkpoints are in the same file system as the memory, a copy would need twice the space."""
    found = open_checkpoints(rank, folder / "in_place")
    saving.MEMORY, policy = folder, SlowPolicy(rank)
    found.save(policy, manifest(3))
    assert policy.folder == found.folder / ".step-000003.partial" / "state"
    found.finish()
    assert latest(found.folder) == found.folder / "step-000003"


def names_what_was_not_written(rank: int, folder: Path) -> None:
    found = open_checkpoints(rank, folder / "failing")
    if rank == 1:
        (found.folder / ".step-000007.partial" / "state" / "__1_0.distcp").mkdir(parents=True)  # the path of its file
    dist.barrier()
    found.save(SlowPolicy(rank), manifest(7))
    assert is_true_soon(lambda: not found._writer.is_alive())
    dist.barrier()
    text = raised(found.poll)
    assert text.startswith("checkpoint of step 7 was not written ([Errno 21]") and "__1_0.distcp" in text, text
    assert not names(found.folder) and not names(saving.MEMORY)
    dist.barrier()
    found.save(SlowPolicy(rank), manifest(7))
    found.finish()
    assert names(found.folder) == {"latest", "step-000007"}


def leaves_nothing_after_an_error(rank: int, folder: Path) -> None:
    """The error is raised while the state is written, before the step is logged, or after."""
    found = open_checkpoints(rank, folder / "errors")
    policy = SlowPolicy(rank)

    def fail(folder: Path) -> None:
        SlowPolicy.save(policy, folder)
        dist.barrier()
        raise RuntimeError("out of memory")

    policy.save = fail  # type: ignore[method-assign]
    assert raised(found.save, policy, manifest(1)) == "out of memory"
    dist.barrier()
    assert not names(saving.MEMORY)
    found.save(SlowPolicy(rank, num_parts=1000, pause_s=0.2), manifest(2))
    started_at = time.monotonic()
    found.close()  # the step is not logged, so close does not wait
    assert time.monotonic() - started_at < 10 and not _writing()
    assert not names(saving.MEMORY) and not any(name.startswith(("step", "latest")) for name in names(found.folder))
    dist.barrier()
    found.save(SlowPolicy(rank, pause_s=0.3), manifest(3))
    found.poll()
    found.close()  # each rank separately
    assert is_true_soon((found.folder / "latest").exists)
    assert (found.folder / "latest").read_text() == "step-000003\n" and not _writing()


def notices_another_start_model(rank: int, folder: Path) -> None:
    """Hash the whole content of every file. Ranks share the pieces, and no file size is a multiple of the piece
    size.
    """
    inputs.PIECE, inputs._CHUNK = 1000, 300
    path = folder / "model"
    contents = {
        "config.json": b"{}",
        "tokenizer.json": b"",
        "generation_config.json": b"x" * 1000,
        "README.md": b"read",
    }
    contents |= {f"model-{i}.safetensors": bytes([65 + i]) * (2701 + i) for i in range(3)}
    contents["model.safetensors.index.json"] = json.dumps(
        {"weight_map": {str(i): f"model-{i}.safetensors" for i in range(3)}}
    ).encode()
    if rank == 0:
        path.mkdir()
        for name, content in contents.items():
            (path / name).write_bytes(content)
    dist.barrier()

    def opened(init: str = "checkpoint", **teachers: Path) -> InputDigests:
        config: Any = SimpleNamespace(
            model=ModelConfig.model_validate({"path": path, "init": init}),
            teachers={name: TeacherConfig(path=teacher) for name, teacher in teachers.items()},
            log=SimpleNamespace(progress=False),
        )
        found = InputDigests(config, {"data.train=t": "d"}, rank, WORLD_SIZE)
        found.start()
        return found

    def change(name: str, content: bytes | None) -> None:
        dist.barrier()
        if rank == 0 and content is None:
            (path / name).unlink()
        elif rank == 0:
            (path / name).write_bytes(content or b"")
        dist.barrier()

    recorded = opened().digests()
    assert recorded.keys() == {f"model/{name}" for name in contents if "index" not in name and name != "README.md"} | {
        "data.train=t"
    }
    for name in ("config.json", "tokenizer.json", "generation_config.json"):
        assert recorded[f"model/{name}"] == hashlib.sha256(contents[name]).hexdigest()
    assert opened().changes(recorded) == []
    change("README.md", b"other")
    assert opened().changes(recorded) == []
    flipped = bytearray(contents["model-1.safetensors"])
    flipped[2050] ^= 1
    for name, content, what in (
        ("model-1.safetensors", bytes(flipped), "model-1.safetensors differs"),
        ("generation_config.json", None, "generation_config.json is gone"),
        ("chat_template.jinja", b"new", "chat_template.jinja is new"),
    ):
        change(name, content)
        text = raised(opened().changes, recorded)
        assert text.startswith(f"model.path={path}: must hold") and what in text, text
        change(name, contents.get(name))
    [line] = opened().changes(recorded | {"data.train=t": "other"})
    assert line.startswith("data.train=t has changed")
    without_weights, taught = opened("random").digests(), opened("random", large=path).digests()
    change("model-1.safetensors", bytes(flipped))
    assert opened("random").changes(without_weights) == []
    [line] = opened("random", large=path).changes(taught)
    assert line.startswith("teachers.large/model-1.safetensors has changed")


def _writing() -> bool:
    return any(thread.name == "checkpoint" for thread in threading.enumerate())


def warns_where_nothing_could_train(rank: int, folder: Path) -> None:
    found, policy = open_checkpoints(rank, folder / "moving"), SlowPolicy(rank)

    def save(step: int, fingerprint: str) -> None:
        content = json.loads(json.dumps(vars(manifest(step)))) | {"fingerprint": fingerprint}
        found.save(policy, type(manifest(step))(**content))
        found.finish()

    del WARNINGS[:]
    save(1, "a")
    save(2, "a")  # all rewards were equal until now
    assert len(WARNINGS) == 1 and "did not change" in WARNINGS[0] and "step 1:" in WARNINGS[0]
    policy.num_effective_steps = 1
    save(3, "b")
    save(4, "b")
    assert len(WARNINGS) == 2
    policy.num_effective_steps = 2
    assert "step 4; is optimizer.lr" in raised(save, 5, "b")


if __name__ == "__main__":
    os.umask(0o022)
    run_cases(
        {
            case.__name__: case
            for case in (
                becomes_visible_without_the_main_threads,
                goes_back,
                stages_in_private,
                stages_on_the_disk,
                writes_in_place_what_is_in_memory_anyway,
                names_what_was_not_written,
                leaves_nothing_after_an_error,
                warns_where_nothing_could_train,
                notices_another_start_model,
            )
        }
    )
