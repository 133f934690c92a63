"""The report as a user sees it: opened from a file in a headless browser, in light and dark mode."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from grpo_mega.cli.report.report import write_report
from tests.helpers.browser import BINARY, MISSING, Page, open_browser
from tests.helpers.run_folders import HOSTILE, make_conversation, make_run, write_lines

pytestmark = pytest.mark.skipif(BINARY is None, reason=MISSING)


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    with open_browser(tmp_path_factory.mktemp("profile")) as page:
        page.look(1300, 1000)
        yield page


def show(browser: Page, run: Path) -> None:
    """Open the run's report. It must load without errors and request no other address."""
    browser.problems.clear()
    browser.requests.clear()
    path = write_report(run)
    browser.go(path)
    browser.wait_for("document.documentElement.dataset.ready")
    check(browser)
    assert browser.requests == [path.as_uri()]


def check(browser: Page) -> None:
    assert browser.run("document.documentElement.dataset.failures ?? ''") == ""
    assert browser.problems == []


def put(browser: Page, selector: str, value: object) -> None:
    """Set a field or slider like a user."""
    browser.run(
        f"(() => {{ const field = document.querySelector({selector!r}); field.value = {value!r};"
        "field.dispatchEvent(new Event('input')); })()"
    )


def count(browser: Page, selector: str) -> int:
    return browser.run(f"document.querySelectorAll({selector!r}).length")


def text(browser: Page, selector: str) -> str:
    return browser.run(f"document.querySelector({selector!r}).innerText")


def test_every_chart_is_drawn_and_an_unknown_metric_has_one_too(browser: Page, tmp_path: Path) -> None:
    show(browser, make_run(tmp_path / "run"))
    titles = browser.run("[...document.querySelectorAll('#curves > .charts > .chart')].map((c) => c.dataset.title)")
    wanted = [
        "Reward",
        "Held-out",
        "Verdicts: accuracy",
        "KL to the reference",
        "Entropy",
        "Response length",
    ]
    wanted += [
        "Mismatch of engine and trainer",
        "Seconds per step, by phase",
        "Throughput",
        "Evaluation",
    ]
    assert titles == wanted
    browser.wait_for("document.querySelectorAll('#curves > .charts > .chart path.line').length >= 11")
    assert text(browser, "#constants .values").split() == ["clip/fraction", "0", "lr", "1e-6"]
    assert count(browser, '[data-title="Seconds per step, by phase"] path.area') == 3
    assert "57%" in text(browser, ".shares")  # sampling takes 2 of 3.5 s
    browser.run("document.querySelector('details.more').open = true")
    browser.wait_for("document.querySelector('[data-title=\"new/metric\"] path.line')")
    check(browser)


def test_expert_loads_are_a_map_that_describes_its_cells(browser: Page, tmp_path: Path) -> None:
    """Two layers of three experts. An idle expert is blue, a busy expert red, an average expert has the card's
    color.
    """
    run = make_run(tmp_path / "run")
    (run / "experts.json").write_text('{"step": 12, "tokens": [[], [0, 4, 2], [2, 2, 2]]}\n')
    show(browser, run)
    cells = browser.run(
        "(() => { const c = document.querySelector('#experts');"
        "return [c.width, c.height, ...c.getContext('2d').getImageData(0, 0, c.width, c.height).data]; })()"
    )
    assert cells[:2] == [3, 2]
    idle, busy, mean, *even = (cells[i : i + 4] for i in range(2, len(cells), 4))
    assert idle[3] == 255 and idle[2] > idle[0] and busy[0] > busy[2] and 60 < busy[3] < 110
    assert all(cell[3] == 0 for cell in (mean, *even))
    browser.run(
        "(() => { const c = document.querySelector('#experts'), b = c.getBoundingClientRect();"
        "c.dispatchEvent(new MouseEvent('mousemove', { clientX: b.left + b.width / 2, clientY: b.top + 2 })); })()"
    )
    assert text(browser, "#tip").split("\n")[0] == "layer 1, expert 1" and "times the mean" in text(browser, "#tip")
    check(browser)


def test_the_pointer_shows_a_step_in_all_charts_and_dragging_zooms(browser: Page, tmp_path: Path) -> None:
    show(browser, make_run(tmp_path / "run"))
    browser.wait_for("document.querySelector('.chart path.line')")

    def at(share: float, kind: str) -> None:
        browser.run(
            "(() => { const s = document.querySelector('.chart svg'), b ="
            f" s.getBoundingClientRect();s.setPointerCapture = () => {{}};const x = b.left + 50 + {share} * (b.width -"
            f" 62), y = b.top + 60;s.dispatchEvent(new PointerEvent('{kind}', {{ clientX: x, clientY: y, button: 0,"
            " bubbles: true })); })()"
        )

    at(0.5, "pointermove")
    assert text(browser, '[data-title="KL to the reference"] .at') == "step 6"
    assert "0.06" in text(browser, '[data-title="KL to the reference"] .legend')
    at(0.5, "pointerdown")
    at(0.75, "pointermove")
    at(0.75, "pointerup")
    ticks = (
        "[...document.querySelectorAll('[data-title=\"Entropy\"] text[text-anchor=middle]')].map((t) => t.textContent)"
    )
    assert browser.run(ticks) == ["6", "7", "8", "9"]
    browser.press("#smoothing [data-value=strong]")
    browser.press(".unzoom")
    assert "12" in browser.run(ticks)
    check(browser)


def test_samples_of_a_step_are_side_by_side_with_colored_tokens(browser: Page, tmp_path: Path) -> None:
    show(browser, make_run(tmp_path / "run"))
    browser.press("#tab-samples")
    assert count(browser, "#samples .member") == 3 and "what is 12?" in text(browser, "#samples .prompt")
    assert [text(browser, f".member:nth-child({i}) .verdict") for i in (1, 2)] == ["wrong", "correct"]
    colours = (
        "[...document.querySelectorAll('.member:nth-child(3) .token')].map((t) => getComputedStyle(t).backgroundColor)"
    )
    seen = set()
    for heat in ("none", "logprob", "advantage", "mismatch"):
        browser.press(f"#heat [data-value={heat}]")
        seen.add(browser.run(colours)[0])
    assert len(seen) == 4
    event = "new PointerEvent('pointermove', {clientX: 9, clientY: 9})"
    browser.run(f"document.querySelector('.member:nth-child(3) .token').dispatchEvent({event})")
    assert "log-prob, trainer\t-0.9999" in text(browser, "#tip")
    browser.run(
        "(() => { const s = document.getElementById('step-slider'); s.value = 2; s.dispatchEvent(new Event('input'));"
        " })()"
    )
    assert "what is 3?" in text(browser, "#samples .prompt")
    put(browser, "#prompt-filter", "IS 1")
    assert text(browser, "#samples-count") == "4 groups in all steps"  # prompts 1, 10, 11 and 12 match
    check(browser)


def test_a_conversation_shows_turns_tools_histories_and_what_is_trained(browser: Page, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    write_lines(run / "samples.jsonl", [make_conversation(12)])
    show(browser, run)
    browser.press("#tab-samples")
    labels = "[...document.querySelectorAll('.part .label')].map((one) => one.innerText)"
    assert browser.run(labels) == [
        *("turn 1, calls add · advantage +0.5", "tool add", "turn 2 · advantage +0.5 · reward 0.25"),
        *("history rewritten", "user", "turn 3 · advantage -1"),
    ]
    assert "13 sampled and 7 inserted tokens · out of turns" in text(browser, ".member .top")
    browser.press("#heat [data-value=advantage]")
    styles = "[...document.querySelectorAll('.part.KIND .token')].filter((one) => one.getAttribute('style')).length"
    assert browser.run(styles.replace("KIND", "turn")) == 13
    assert browser.run(styles.replace("KIND", "inserted")) == 0
    event = "new PointerEvent('pointermove', {clientX: 9, clientY: 9})"
    browser.run(f"document.querySelector('.part.inserted .token').dispatchEvent({event})")
    assert "not sampled\tnot trained" in text(browser, "#tip")
    assert browser.run("document.title") != "taken"
    check(browser)


def test_answers_config_environment_and_warnings_are_shown(browser: Page, tmp_path: Path) -> None:
    show(browser, make_run(tmp_path / "run"))
    browser.press("#tab-heldout")
    assert "learned (2)" in text(browser, "#heldout-kind")
    browser.press("#heldout tr.line")
    assert "a<b" in text(browser, "#heldout .answers")
    for tab, what in (("config", "optimizer.lr"), ("environment", "node-1"), ("messages", "a gradient norm jumped")):
        browser.press(f"#tab-{tab}")
        assert what in text(browser, f"#{tab}")
    browser.press("#config-kind [data-value=set]")
    assert count(browser, "#config tbody tr") == 4 and count(browser, "nav .count.warn") == 1
    check(browser)


def test_the_theme_follows_the_browser(browser: Page, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    light = "getComputedStyle(document.body).backgroundColor"
    browser.look(1300, 1000, is_dark=True)
    show(browser, run)
    assert browser.run(light) == "rgb(15, 20, 27)"
    browser.look(1300, 1000)
    show(browser, run)
    assert browser.run(light) == "rgb(246, 247, 249)"


def test_hostile_text_is_shown_but_not_executed(browser: Page, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", response=HOSTILE)
    write_lines(run / "messages.jsonl", [{"step": 1, "time": HOSTILE, "level": "warning", "text": HOSTILE}])
    write_lines(
        run / "metrics.jsonl",
        [{"step": 1, "reward/mean": 1.0, f"reward/{HOSTILE}": 1.0, f"verdict/{HOSTILE}/{HOSTILE}": 1.0}],
    )
    show(browser, run)
    for tab in ("samples", "heldout", "config", "environment", "messages", "curves"):
        browser.press(f"#tab-{tab}")
    browser.press("#heldout tr.line")
    assert browser.run("document.getElementById('messages').textContent.includes('onerror=')")
    assert "taken" not in browser.run("document.title")
    assert count(browser, "img") == 0 and count(browser, "script") == 2
    check(browser)


def test_a_run_without_steps_and_a_run_with_gaps_are_drawn(browser: Page, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    write_lines(
        run / "metrics.jsonl",
        [{"step": s, "kl/mean": "NaN" if s == 2 else 0.5, "grad_norm": "Infinity"} for s in (1, 2, 3)],
    )
    show(browser, run)
    browser.wait_for("document.querySelectorAll('.chart .notfinite').length === 4")
    for name in (
        "metrics.jsonl",
        "samples.jsonl",
        "heldout-000000.jsonl",
        "heldout-000012.jsonl",
        "messages.jsonl",
        "run.json",
    ):
        (run / name).unlink()
    show(browser, run)
    assert "No step is logged yet" in text(browser, "#curves")
    write_lines(run / "metrics.jsonl", [{"step": 1, "kl/mean": 0.5, "lr": 1e-6}])
    show(browser, run)
    assert count(browser, ".chart") == 0 and "First values" in text(browser, "#constants")
    assert "kl/mean 0.5" in text(browser, "#constants")
    (run / "metrics.jsonl").unlink()
    show(browser, run)
    for tab in ("samples", "heldout", "environment", "messages"):
        browser.press(f"#tab-{tab}")
        assert text(browser, f"#{tab} .empty")
    check(browser)
