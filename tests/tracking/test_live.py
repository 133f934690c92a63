"""`grpo-mega report RUN_DIR --watch`: new steps in a browser without a reload, and how the server starts and ends."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from grpo_mega import cli
from tests.helpers.browser import BINARY, MISSING, Page, open_browser
from tests.helpers.run_folders import make_group, make_run

ROOT = Path(__file__).resolve().parents[2]


@dataclass
class Watch:
    process: subprocess.Popen[str]
    url: str

    def interrupt(self) -> list[str]:
        """Send one Ctrl-C. Return the lines of output since the first."""
        self.process.send_signal(signal.SIGINT)
        output, _ = self.process.communicate(timeout=60)
        return output.splitlines()


@contextmanager
def watching(run: Path, *arguments: str) -> Iterator[Watch]:
    command = [sys.executable, "-m", "grpo_mega.cli", "report", str(run), "--watch", *arguments]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line.startswith(f"watching {run}: http://127.0.0.1:") and line.endswith("/ (Ctrl-C ends)\n"), line
        yield Watch(process, line.split(": ", 1)[1].split()[0])
    finally:
        process.kill()
        process.wait()


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[Page]:
    with open_browser(tmp_path / "profile") as page:
        page.look(1300, 900)
        yield page


def add_step(run: Path, step: int, **metrics: float) -> None:
    row = {"step": step, "kl/mean": 0.01 * step, "reward/mean": 1.0, "seconds/step": 3.5} | metrics
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(row) + "\n")
    with (run / "samples.jsonl").open("a") as file:
        file.writelines(json.dumps(sample) + "\n" for sample in make_group(step, "new"))


def get(url: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(url, timeout=30) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


@pytest.mark.skipif(BINARY is None, reason=MISSING)
def test_a_new_step_appears_without_a_reload_and_keeps_the_users_choices(browser: Page, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", num_planned=200)
    with watching(run) as watch:
        browser.go(watch.url)
        browser.wait_for("document.documentElement.dataset.ready")
        browser.run("window.isSamePage = true")
        chart = "document.querySelector('[data-title=\"KL to the reference\"]')"
        assert browser.run(f"{chart}.querySelector('.at').textContent") == "step 12"
        browser.run("document.querySelector('[data-title=\"Reward\"] .key').click()")  # hides the first line
        browser.run("document.querySelector('details.more').open = true")
        browser.run("window.scrollTo(0, 300)")
        add_step(run, 13)
        browser.wait_for(f"{chart}.querySelector('.at').textContent === 'step 13'")
        browser.wait_for("document.querySelector('.tile .value').textContent === '13 / 200'")
        assert browser.run("document.querySelector('[data-title=\"Reward\"] .key').classList.contains('off')")
        assert browser.run("document.querySelector('details.more').open") and browser.run("scrollY") == 300

        browser.press("#tab-samples")
        assert browser.run("document.querySelector('#samples b').textContent") == "step 13"
        add_step(run, 14, **{"mismatch/k3": 0.5})
        browser.wait_for("document.querySelector('#samples b').textContent === 'step 14'")  # the last step is followed
        assert "KL (k3) of 0.5" in browser.run("document.querySelector('.alert').textContent")
        browser.run(
            "(() => { const field = document.querySelector('#prompt-filter'); field.focus(); field.value = 'is 14';"
            "field.dispatchEvent(new Event('input')); })()"
        )
        browser.run("document.activeElement.setSelectionRange(1, 2)")
        add_step(run, 15)
        browser.wait_for("document.querySelector('#step-slider').max === '14'")
        assert browser.run("document.querySelectorAll('.alert').length") == 0  # step 15 is healthy
        caret = (
            "[document.activeElement.id, document.activeElement.selectionStart, document.activeElement.selectionEnd]"
        )
        assert browser.run(caret) == ["prompt-filter", 1, 2]
        assert browser.run("document.querySelector('#prompt-filter').value") == "is 14"
        assert browser.run("document.querySelector('#samples-count').textContent") == "1 group in all steps"

        assert browser.run("window.isSamePage") and browser.problems == []
        assert {url.partition("?")[0] for url in browser.requests} == {watch.url, f"{watch.url}data"}
        assert browser.run("document.querySelector('#live').textContent") == "● live"
        watch.interrupt()
        browser.wait_for("document.querySelector('#live').textContent.startsWith('not updated: ')")


def test_the_first_interrupt_ends_the_server_with_one_line(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    with watching(run) as watch:
        with socket.create_connection(("127.0.0.1", int(watch.url.split(":")[2].split("/")[0]))) as idle:
            idle.sendall(b"GET /")  # a client that never finishes its request, so the server does not wait for it
            assert get(watch.url)[0] == 200
            assert watch.interrupt() == [f"stopped watching {run}; the run is not affected"]
        assert watch.process.returncode == 0
    assert not (run / "report.html").exists()


def test_only_the_printed_address_has_the_run_and_equal_data_is_not_sent(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    with watching(run) as watch:
        host = watch.url.rsplit("/", 2)[0]
        for path in ("/", "/data", "/x/", "/x/data", f"/{'a' * 16}/", "//", "/%00"):
            assert get(host + path) == (404, "not found")
        status, page = get(watch.url)
        assert status == 200 and "connect-src 'self'" in page
        status, text = get(f"{watch.url}data")
        version = json.loads(text)["version"]
        assert status == 200 and get(f"{watch.url}data?version={version}") == (204, "")
        add_step(run, 13)
        until = time.monotonic() + 60
        while (found := get(f"{watch.url}data?version={version}"))[0] == 204:
            assert time.monotonic() < until
            time.sleep(0.05)
        assert json.loads(found[1])["steps_done"] == 13
        shutil.rmtree(run)
        status, text = get(f"{watch.url}data")
        assert status == 503 and "is not the folder of a run" in text


def test_a_wrong_folder_or_port_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(tmp_path / "run")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for arguments, line in (
            (
                [tmp_path, "--watch"],
                f"{tmp_path} is not the folder of a run; name the run_dir of a run that has started",
            ),
            (
                [run, "--watch", "--port", port],
                f"--port={port}: must be a free port (Address already in use); use another, or leave it out",
            ),
            ([run, "--watch", "--port", 70000], "--port=70000: must be from 0 to 65535; use another, or leave it out"),
            ([run, "--port", 8000], "--port=8000: must be with --watch; add it, or leave --port out"),
        ):
            assert cli.main(["report", *map(str, arguments)]) == 2
            assert capsys.readouterr().err == f"grpo-mega: error: {line}\n"
