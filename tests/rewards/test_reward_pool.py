"""The pool: results, deadlines, crashes and broken functions. No process is left over."""

import itertools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from grpo_mega.config.data import RewardsConfig
from grpo_mega.errors import ConfigError, RewardError
from grpo_mega.rewards import RewardPool, RewardResult, registry
from tests.helpers.reward_pools import reward_pool

pytestmark = [pytest.mark.pool, pytest.mark.waiting]

HERE = str(Path(__file__).resolve().parent)
ROOT = str(Path(__file__).resolve().parents[2])
OBEY = "user_functions.obey"


@pytest.fixture(autouse=True)
def _user_functions_are_importable(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.syspath_prepend(HERE)
    yield


def _score(pool: RewardPool, *responses: str, answer: str = "1") -> list[RewardResult]:
    for number, response in enumerate(responses):
        pool.submit(number, "p", response, answer, {})
    return list(pool.collect().values())


def _wait_until(condition: Callable[[], bool], seconds: float = 10.0) -> bool:
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.05)
    return condition()


def _is_alive(pid: int) -> bool:
    """Return whether the process runs. A zombie that its parent does not collect counts as ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_totals_are_weighted_sums_over_the_functions_that_apply() -> None:
    functions = [("accuracy", 1.0), ("format", 0.5), ("user_functions.only_for_math", 2.0)]
    with reward_pool(functions, num_workers=2, deadline_s=20) as pool:
        good = "<think>\n9*2\n</think>\n<answer>18</answer>"
        pool.submit(("a", 0), "p", good, "#### 18", {})
        pool.submit(("a", 1), "p", "17", "#### 18", {"kind": "math"})
        pool.submit("prefilled", "p", good.removeprefix("<think>"), "18", {"prefill": "<think>"})
        # The template opened a thought and the text was cut off inside it. Without the thought, the same text is an
        # answer.
        pool.submit("cut off", "p", r"maybe \boxed{2x}", "2x", {"prefill": "<think>\n"})
        pool.submit("stated", "p", r"maybe \boxed{2x}", "2x", {})
        results = pool.collect()
        assert list(results) == [("a", 0), ("a", 1), "prefilled", "cut off", "stated"]
        assert [results[key].scores["accuracy"] for key in ("cut off", "stated")] == [0.0, 1.0]
        assert results["a", 0] == RewardResult(
            1.5,
            {"accuracy": 1.0, "format": 1.0, "user_functions.only_for_math": None},
            {"accuracy": "correct", "format": "well_formed", "user_functions.only_for_math": "not_applicable"},
        )
        assert results["a", 1].total == 1.0
        assert results["a", 1].verdicts["user_functions.only_for_math"] == "math"
        assert results["prefilled"].total == 1.5
        assert pool.collect() == {}
        assert pool.counters == {
            "correct": 3, "wrong": 1, "unparsable": 1, "well_formed": 2, "malformed": 3, "math": 1, "not_applicable": 4,
            "killed_workers": 0,
        }  # fmt: skip


def test_an_unparsable_gold_answer_has_no_value() -> None:
    with reward_pool([("accuracy", 1.0)], num_workers=1, deadline_s=20) as pool:
        pool.submit(0, "p", "18", "???", {})
        assert pool.collect() == {0: RewardResult(None, {"accuracy": None}, {"accuracy": "gold_unparsable"})}


def test_a_users_function_gets_prompt_response_answer_and_extras() -> None:
    with reward_pool([("user_functions.length", 1.0)], num_workers=1, deadline_s=20) as pool:
        pool.submit(0, "12", "345" * 100_000, "6", {"bonus": 0.25})  # larger than a pipe's buffer
        assert pool.collect()[0].total == 2 + 10 * 300_000 + 100 + 0.25


@pytest.mark.parametrize("deed", ["hang in C", "sleep"])
def test_a_hanging_check_is_killed_and_counted_and_other_checks_succeed(deed: str) -> None:
    with reward_pool([(OBEY, 1.0)], num_workers=2, deadline_s=2) as pool:
        _score(pool, "warm", "warm")
        started = time.monotonic()
        results = _score(pool, deed, *["fine"] * 20)
        assert time.monotonic() - started < 10  # the check sleeps for 600 s
        assert results[0] == RewardResult(0.0, {OBEY: 0.0}, {OBEY: "timeout"})
        assert [r.total for r in results[1:]] == [1.0] * 20
        assert pool.counters == {"scored": 22, "timeout": 1, "killed_workers": 1}
        assert _score(pool, "fine")[0].total == 1.0  # the replacement works


def test_startup_and_queueing_do_not_count_towards_the_deadline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nap = "def nap(prompt, response, answer, extras):\n    time.sleep(1.6)\n    return 1.0\n"
    (tmp_path / "slow_to_import.py").write_text(f"import time\n\ntime.sleep(7)\n\n\n{nap}")
    monkeypatch.syspath_prepend(str(tmp_path))
    # The deadline is shorter than the import, and than four naps.
    with reward_pool([("slow_to_import.nap", 1.0)], num_workers=1, deadline_s=6) as pool:
        assert [result.total for result in _score(pool, *"abcd")] == [1.0] * 4


@pytest.mark.parametrize(
    ("deed", "cause"),
    [("segfault", "SIGSEGV"), ("be killed", "SIGKILL"), ("exit", "status 3"), ("exhaust memory", "status 71")],
)
def test_a_check_that_kills_two_workers_loses_only_its_own_score(deed: str, cause: str) -> None:
    with reward_pool([(OBEY, 1.0)], num_workers=1, deadline_s=20) as pool:
        results = _score(pool, "fine", deed, "fine")
        assert [r.total for r in results] == [1.0, 0.0, 1.0]
        assert results[1].verdicts == {OBEY: "error"}
        assert pool.first_error and cause in pool.first_error and OBEY in pool.first_error
        assert pool.counters == {"scored": 2, "error": 1, "retried": 1, "killed_workers": 0}


@pytest.mark.parametrize("victim", ["worker", "template"])
def test_a_check_whose_worker_is_killed_runs_on_another_worker(victim: str, tmp_path: Path) -> None:
    mark = tmp_path / "pid"
    with reward_pool([(OBEY, 1.0)], num_workers=1, deadline_s=60) as pool:
        pool.submit(0, "p", f"sleep at first: {mark}", "1", {})
        pool.submit(1, "p", "fine", "1", {})
        assert _wait_until(lambda: mark.exists() and bool(mark.read_text()), 60)
        worker = int(mark.read_text())
        os.kill(worker if victim == "worker" else _parent(worker), signal.SIGKILL)
        results = pool.collect()
        assert [result.total for result in results.values()] == [1.0, 1.0] and pool.first_error is None
        assert pool.counters == {"scored": 2, "retried": 1, "killed_workers": 0}
        assert _wait_until(lambda: not _is_alive(worker))


def test_a_discarded_check_whose_worker_is_killed_does_not_run_again(tmp_path: Path) -> None:
    mark = tmp_path / "pid"
    with reward_pool([(OBEY, 1.0)], num_workers=1, deadline_s=60) as pool:
        pool.submit(0, "p", f"sleep at first: {mark}", "1", {})
        pool.submit(1, "p", "fine", "1", {})
        assert _wait_until(lambda: mark.exists() and bool(mark.read_text()), 60)
        pool.discard([0])
        os.kill(int(mark.read_text()), signal.SIGKILL)
        assert [result.total for result in pool.collect().values()] == [1.0]


@pytest.mark.parametrize(
    ("deed", "error"),
    [
        ("raise", "ZeroDivisionError: division by zero (in <lambda>, user_functions.py:"),
        ("sys.exit", "SystemExit: 4"),
        ("nan", "ValueError: the reward is nan"),
        ("text", "TypeError: the reward is str"),
    ],
)
def test_an_exception_costs_only_its_check_and_the_first_one_is_kept(deed: str, error: str) -> None:
    with reward_pool([(OBEY, 1.0)], num_workers=1, deadline_s=20) as pool:
        results = _score(pool, "fine", deed, "fine")
        assert [r.total for r in results] == [1.0, 0.0, 1.0]
        assert results[1].verdicts == {OBEY: "error"}
        assert pool.first_error and f"{OBEY}: {error}" in pool.first_error


def test_results_contain_the_exceptions() -> None:
    with reward_pool([("format", 1.0), (OBEY, 1.0)], num_workers=2, deadline_s=20) as pool:
        raised, fine = _score(pool, "raise", "fine")
        assert list(raised.errors) == [OBEY] and raised.errors[OBEY].startswith("ZeroDivisionError: division by zero")
        assert fine.errors == {} and fine.total == 1.0
        assert _score(pool, "raise")[0].errors == raised.errors  # one sample does not end the run


def test_a_function_that_prints_or_reads_does_not_disturb_the_pool() -> None:
    with reward_pool([(OBEY, 1.0)], num_workers=1, deadline_s=20) as pool:
        assert [r.total for r in _score(pool, "print", "fine")] == [1.0, 1.0]


def test_workers_do_not_import_torch() -> None:
    with reward_pool([("accuracy", 1.0), ("format", 1.0), (OBEY, 1.0)], num_workers=1, deadline_s=20) as pool:
        assert _score(pool, "torch")[0].scores[OBEY] == 0.0
    code = "import sys, grpo_mega.rewards; print('torch' in sys.modules, 'sympy' in sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True).stdout
    assert out.split() == ["False", "False"]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("broken_module.reward", "importing broken_module failed with ValueError: this module is broken"),
        ("no_such_module.reward", "No module named 'no_such_module'"),
        ("user_functions.no_such_function", "user_functions has no function no_such_function"),
    ],
)
def test_a_function_that_cannot_be_imported_is_an_error_with_the_reason(name: str, text: str) -> None:
    with reward_pool([(name, 1.0)], num_workers=2, deadline_s=20) as pool, pytest.raises(RewardError, match=text):
        _score(pool, "x")


def test_an_unknown_name_is_refused_with_a_suggestion() -> None:
    with pytest.raises(ConfigError, match=r"'acuracy' is unknown; did you mean accuracy\? use one of accuracy, "):
        registry.check_rewards("acuracy", {}, "lines", 5.0)


def test_a_pool_without_workers_starts_none_and_is_ready_at_once() -> None:
    with RewardPool(RewardsConfig(), has_workers=False) as pool:
        pool.wait_until_ready()
        assert pool.worker_pids == [] and pool.collect() == {}


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def _children(pid: int) -> list[int]:
    found = []
    for other in (int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()):
        try:
            found += [other] if _parent(other) == pid else []
        except (FileNotFoundError, ProcessLookupError):
            continue
    return found


def test_a_killed_worker_is_replaced_from_the_template_without_leftovers() -> None:
    with reward_pool([("accuracy", 1.0), (OBEY, 1.0)], num_workers=2, deadline_s=2) as pool:
        _score(pool, "fine", "fine")
        assert _wait_until(lambda: len(pool.worker_pids) == 2)
        before, template, fds = pool.worker_pids, _parent(pool.worker_pids[0]), len(os.listdir("/proc/self/fd"))
        assert len(os.listdir(f"/proc/{template}/task")) == 1, "forking a process with several threads can hang"
        results = _score(pool, *["sleep"] * 4, "fine")
        assert [r.verdicts[OBEY] for r in results] == [*["timeout"] * 4, "scored"]
        assert pool.counters["killed_workers"] == 4
        assert _wait_until(lambda: len(pool.worker_pids) == 2)
        assert not set(before) & set(pool.worker_pids)
        assert {_parent(pid) for pid in pool.worker_pids} == {template}
        assert not any(map(_is_alive, before))

        def is_clean() -> bool:
            _score(pool, "segfault")  # the request makes the template collect workers that have ended
            return _wait_until(lambda: set(_children(template)) == set(pool.worker_pids))

        assert any(is_clean() for _ in range(3))
        assert len(os.listdir("/proc/self/fd")) == fds
    assert _wait_until(lambda: not _is_alive(template))


def test_answers_that_do_not_need_math_verify_are_scored_without_workers() -> None:
    with reward_pool([("accuracy", 1.0)], num_workers=1, deadline_s=20) as pool:
        for key, response in enumerate(["18", "17", r"\boxed{18.0}", r"\boxed{}"]):
            pool.submit(key, "p", response, "#### 18", {})
        assert pool.worker_pids == []
        assert pool.counters == {"correct": 2, "wrong": 1, "unparsable": 1, "killed_workers": 0}
        pool.discard([0])
        assert [result.total for result in pool.collect().values()] == [0.0, 1.0, 0.0]


def test_equal_answers_get_equal_scores_if_checked_shared_or_remembered() -> None:
    answers = {"x+1": "correct", "1+x": "correct", "x+2": "wrong", "???": "unparsable", r"\frac{1": "unparsable"}
    with reward_pool([("accuracy", 1.0), ("format", 0.5)], num_workers=2, deadline_s=20) as pool:
        for _ in range(2):
            responses = [rf"So \boxed{{{answer}}}" for answer in answers] * 4
            for key, response in enumerate(responses):
                pool.submit(key, "p", response, r"\boxed{1 + x}", {})
            results = pool.collect()
            assert [results[key].verdicts["accuracy"] for key in range(len(responses))] == list(answers.values()) * 4
            assert {result.verdicts["format"] for result in results.values()} == {"malformed"}
        assert pool.counters == {"correct": 16, "wrong": 8, "unparsable": 16, "malformed": 40, "killed_workers": 0}


def test_submitting_a_key_twice_or_to_a_closed_pool_is_an_error() -> None:
    with reward_pool([("format", 1.0)], num_workers=1, deadline_s=20) as pool:
        pool.submit(0, "p", "r", "a", {})
        with pytest.raises(ValueError, match="key 0 is submitted twice"):
            pool.submit(0, "p", "r", "a", {})
    with pytest.raises(RewardError, match="closed"):
        pool.submit(1, "p", "r", "a", {})


def test_submit_does_not_block_and_checks_run_before_collect() -> None:
    with reward_pool([(OBEY, 1.0)], num_workers=1, deadline_s=2) as pool:
        pool.submit("slow", "p", "sleep", "a", {})
        for number in range(50):
            pool.submit(number, "p", "fine", "a", {})
        assert not pool.counters.get("timeout")  # the only worker is still busy or not started
        assert _wait_until(lambda: pool.counters.get("scored") == 50)
        assert len(pool.collect()) == 51


def test_the_pool_neither_waits_for_discarded_samples_nor_counts_them() -> None:
    with reward_pool([(OBEY, 1.0)], num_workers=1, deadline_s=2) as pool:
        _score(pool, "fine")
        for key, deed in enumerate(["raise", "sleep", "sleep", "fine", "raise"]):
            pool.submit(key, "p", deed, "1", {})
        assert _wait_until(lambda: pool.counters.get("error") == 1)
        pool.discard([0, 1, 2, 4])  # one is done, one is running, two wait
        assert [result.total for result in pool.collect().values()] == [1.0]
        pool.submit(5, "p", "raise", "1", {})
        pool.discard([5])
        assert pool.collect() == {}, "nothing is left to collect, but that is no error"
        assert pool.counters["killed_workers"] == 1  # the running check; the queued check never started
        assert [result.total for result in _score(pool, "fine", "fine")] == [1.0, 1.0]


def test_close_leaves_no_process_even_if_a_check_hangs() -> None:
    with reward_pool([(OBEY, 1.0)], num_workers=2, deadline_s=600) as pool:
        child = int(_score(pool, "child")[0].total or 0)
        assert _wait_until(lambda: len(pool.worker_pids) == 2)
        pids = [child, *pool.worker_pids]
        assert len(pids) == 3 and all(map(_is_alive, pids))
        pool.submit(0, "p", "hang in C", "1", {})
        started = time.monotonic()
    assert time.monotonic() - started < 10  # the check would take 600 s
    assert _wait_until(lambda: not any(map(_is_alive, pids)))  # the child of a check ends with its worker
    pool.close()


def test_workers_ignore_interrupts() -> None:
    with reward_pool([(OBEY, 1.0)], num_workers=1, deadline_s=20) as pool:
        before = _score(pool, "pid")[0].total
        os.kill(pool.worker_pids[0], signal.SIGINT)
        assert _score(pool, "pid")[0].total == before


def test_checks_that_hang_one_after_another_count_as_progress() -> None:
    """Each check costs its deadline. Hundreds of checks take longer than a rank may be silent."""
    with reward_pool([(OBEY, 1.0)], num_workers=1, deadline_s=1.2) as pool:
        pool.wait_until_ready()
        for key in range(6):
            pool.submit(key, "p", "sleep", "1", {})
        beats = [time.monotonic()]
        pool.collect(lambda: beats.append(time.monotonic()))
        assert pool.counters["timeout"] == 6
    assert len(beats) == 7 and max(later - sooner for sooner, later in itertools.pairwise(beats)) < 5
