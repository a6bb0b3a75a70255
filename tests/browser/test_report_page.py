"""The page about a run, opened by a real browser: `make test-browser`. Needs Chromium and the extra `browser`."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.unit.test_report import HOSTILE, PAUSE, Recorded, html, recorded

pytestmark = pytest.mark.browser
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
)


class Opened:
    """A page in the browser, with its requests and errors."""

    def __init__(self, page: Any) -> None:
        self.page = page
        self.requests: list[str] = []
        self.errors: list[str] = []
        page.on("request", lambda request: self.requests.append(request.url))
        page.on("pageerror", lambda error: self.errors.append(str(error)))
        page.on("console", lambda message: self.errors.append(message.text))


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    found = shutil.which("chromium")
    assert found, "there is no chromium: apt-get install chromium"
    with sync_playwright() as playwright:
        context = playwright.chromium.launch_persistent_context(
            str(tmp_path / "profile"), executable_path=found, args=list(FLAGS)
        )
        yield context
        context.close()


def opened(browser: Any, place: Path, text: str) -> Opened:
    file = place / "page.html"
    file.write_text(text, "utf-8")
    shown = Opened(browser.new_page())
    shown.page.goto(file.as_uri())
    assert shown.requests == [file.as_uri()], "the page made a request"
    return shown


def test_every_section_is_shown_without_requests_or_errors(browser: Any, tmp_path: Path) -> None:
    shown = opened(browser, tmp_path, html(recorded("killed")))
    titles = shown.page.locator("h2").all_inner_texts()
    assert titles == ["Failures", "Fleet", "Commands", "Replicas over time", "Latency", "Stragglers"]
    assert shown.page.locator(".lane svg path.out").count() == 1
    assert shown.errors == []


def test_the_message_of_an_engine_is_not_executed(browser: Any, tmp_path: Path) -> None:
    from schemas.outcomes import ErrorKind, Failed

    bus = Recorded("0.0")
    bus.issue(PAUSE)
    bus.answer(a0_0=Failed(ErrorKind.ENGINE_ERROR, HOSTILE))
    shown = opened(browser, tmp_path, bus.page())
    assert "owned" not in shown.page.title() and shown.page.locator("img").count() == 0
    assert shown.page.locator(".card pre").inner_text() == HOSTILE
    assert shown.errors == []


def test_light_and_dark_schemes_differ(browser: Any, tmp_path: Path) -> None:
    shown = opened(browser, tmp_path, html(recorded("torn-fleet")))
    pictures, rooms = [], []
    for scheme in ("light", "dark"):
        shown.page.emulate_media(color_scheme=scheme)
        pictures.append(shown.page.screenshot())
        rooms.append(shown.page.evaluate("getComputedStyle(document.body).backgroundColor"))
    assert rooms == ["rgb(255, 255, 255)", "rgb(20, 23, 26)"]
    assert pictures[0] != pictures[1] and min(map(len, pictures)) > 10_000


def test_commands_can_be_filtered_by_keyboard(browser: Any, tmp_path: Path) -> None:
    page = opened(browser, tmp_path, html(recorded("killed"))).page
    rows = page.locator("details.step tbody tr:visible")
    page.locator("#words").focus()
    page.keyboard.type("prepare v3")
    assert "prepare v3" in rows.first.inner_text() and rows.count() == 1
    assert page.locator("#found").inner_text() == "1 shown"
    page.locator("#words").fill("")
    page.locator("#bad").focus()
    page.keyboard.press("Space")
    bad = page.locator("details.step tbody tr.bad")
    assert rows.count() == bad.count() > 0 and bad.first.is_visible()
