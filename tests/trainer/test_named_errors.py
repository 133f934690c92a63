"""A run that ends by a named error saves its finished steps, if all ranks stand between the same two steps."""

from __future__ import annotations

import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed import TCPStore

from grpo_mega.distributed.rendezvous import Rendezvous
from grpo_mega.errors import NonFiniteError, ResumeError, RewardError
from grpo_mega.trainer.job import TrainingJob
from tests.helpers.runs import run
from tools.benchmarks import kills

FAILS = """
import os

num_called = 0

def vowels(prompt, response, answer, extras):
    global num_called
    num_called += 1
    if os.environ.get("FAILS") == os.environ["RANK"] and num_called > 3 * 16:  # a rank has 16 samples of each step
        raise ValueError("on purpose")
    return sum(c in "aeiou" for c in response) / max(1, len(response))
"""


@pytest.mark.distributed
@pytest.mark.waiting
@pytest.mark.usefixtures("preloaded_python")
def test_a_run_with_a_broken_reward_resumes_from_its_finished_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reward fails on one of two ranks, in the fourth step, of a run that saves no checkpoints."""
    path = kills.write_inputs(tmp_path, "dp=2", num_hidden_layers=2, layer_types=["full_attention"] * 2)
    (tmp_path / "fails.py").write_text(FAILS)
    config = json.loads(path.read_text()) | {"steps": 5, "code_dir": str(tmp_path), "eval": {"interval": 0}}
    config["rewards"]["functions"] = [{"name": "fails.vowels"}]
    config["batch"]["prompts_per_step"] = 8
    config["data"].pop("heldout")
    path.write_text(json.dumps(config))
    kills.finish(kills.start(path, tmp_path / "whole", []), tmp_path / "whole")
    monkeypatch.setenv("FAILS", "1")
    code, output = run(path, tmp_path / "run", "--set", "checkpoint.interval=0")
    assert code == 2 and "Traceback" not in output, output
    (error,) = [line for line in output.splitlines() if line.startswith("grpo-mega: error:")]
    assert "on purpose" in error
    assert error.endswith(f"; a checkpoint of step 3 is in {tmp_path / 'run/checkpoints'}")
    monkeypatch.delenv("FAILS")
    code, output = run(path, tmp_path / "run", "--resume")
    assert code == 0 and "resumed after step 3" in output, output
    assert kills.read_end(tmp_path / "run") == kills.read_end(tmp_path / "whole")


class SavingJob(TrainingJob):
    """A job of a rank that only notes what it saves."""

    saved: list[int]
    problem: ResumeError | None = None

    def save(self, step: int) -> None:
        if self.problem is not None:
            raise self.problem
        self.saved.append(step)


def make_job(store: TCPStore, rank: int, num_ranks: int, done: int, taken: int | None) -> SavingJob:
    """Return a rank's job after `done` steps, 2 optimizer steps each. `taken`: optimizer steps; None: no policy."""
    nothing: Any = None
    parts = {field.name: nothing for field in fields(TrainingJob)}
    parts |= {"runtime": SimpleNamespace(store=store, rank=rank, layout=SimpleNamespace(world_size=num_ranks))}
    parts |= {"checkpoints": SimpleNamespace(folder=Path("there"), finish=lambda: None)}
    parts |= {"config": SimpleNamespace(hang_deadline_s=30.0), "steps_done": done, "optimizer_steps": 2 * done}
    parts |= {"policy": None if taken is None else SimpleNamespace(optimizer_step=taken)}
    job = SavingJob(**parts)
    job.saved = []
    return job


def fail(job: SavingJob, error: Exception) -> Exception:
    with pytest.raises(type(error)) as caught, job.saved_on_failure():
        raise error
    return caught.value


def fail_all(
    ranks: Sequence[tuple[int, int | None]], failing: Sequence[int], problem: ResumeError | None = None
) -> list[tuple[str, list[int]]]:
    """Fail on these ranks. `ranks` has finished steps and optimizer steps. Return each error, and what was saved."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(minutes=1))
    num_ranks = sum(taken is not None for _, taken in ranks)
    jobs = [make_job(store, rank, num_ranks, *state) for rank, state in enumerate(ranks)]
    for job in jobs:
        job.problem = problem
    with ThreadPoolExecutor(len(jobs)) as pool:
        errors = list(pool.map(lambda rank: str(fail(jobs[rank], RewardError("broken"))), failing))
    return [(error, jobs[rank].saved) for rank, error in zip(failing, errors, strict=True)]


def test_ranks_between_the_same_two_steps_save_them() -> None:
    saved = "broken; a checkpoint of step 3 is in there", [3]
    assert fail_all([(3, 6)], [0]) == [saved]
    assert fail_all([(3, 6), (3, 6), (3, None)], [0, 1, 2]) == [saved, saved, ("broken", [])]


def test_a_rank_that_fails_alone_or_within_an_update_saves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("grpo_mega.trainer.job.SECONDS_FOR_OTHERS", 0.5)
    unsaved = "broken", list[int]()
    assert fail_all([(3, 6), (3, 6)], [1]) == [unsaved]
    assert fail_all([(3, 6), (3, 7)], [0, 1]) == [unsaved] * 2, "rank 1 has taken a step of the next update"
    assert fail_all([(3, 6), (2, 4)], [0, 1]) == [unsaved] * 2
    assert fail_all([(0, 0)], [0]) == [unsaved], "no step has finished"


def test_an_engine_rank_that_fails_alone_ends_before_a_hang_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("grpo_mega.trainer.job.SECONDS_FOR_OTHERS", 0.5)
    waits: list[tuple[str, float]] = []
    get = Rendezvous.get
    monkeypatch.setattr(Rendezvous, "get", lambda *parts: (waits.append(parts[1:]), get(*parts))[1])
    assert fail_all([(3, 6), (3, None)], [1]) == [("broken", [])]
    assert waits == [("failing", 0.5)]
    waits.clear()
    assert fail_all([(3, 7), (3, None)], [0, 1]) == [("broken", [])] * 2, "rank 0 cannot save, and says so"
    assert waits == [("failing", 0.5), ("saved", 30.0)]


def test_the_first_error_is_kept_when_the_jobs_store_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("grpo_mega.trainer.job.SECONDS_FOR_OTHERS", 0.5)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=1))
    other = TCPStore("127.0.0.1", store.port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=1))
    del store
    for taken in (6, None):
        assert str(fail(make_job(other, 1, 2, 3, taken), RewardError("broken"))) == "broken"


def test_an_error_of_the_save_is_reported_beside_the_first_error() -> None:
    assert fail_all([(3, 6)], [0], ResumeError("the disk is full")) == [("broken\nthe disk is full", [])]
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(minutes=1))
    job = make_job(store, 0, 1, 3, 6)
    assert str(fail(job, ResumeError("the checkpoint of step 3 was not written"))).endswith("not written")
    assert job.saved == []
    assert str(fail(job, NonFiniteError("not finite"))).endswith("; a checkpoint of step 3 is in there")
