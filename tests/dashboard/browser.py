"""What the tests of the live page do in a browser."""

from __future__ import annotations

import re
from typing import Any

from tests.dashboard.stand_in import KEY

#: The fixture ``visit``.
Seen = Any

#: For Metrics.add_windows: of 16 draft tokens 9 are accepted; 13 of 20 tokens are written.
WINDOWS = [1, 0, 1, 1, 1]
#: Milliseconds that a change may take to be seen.
SOON = 30_000


class Visit:
    """A page in a context of its own, with all that it asked for and complained of."""

    def __init__(self, browser: Any, url: str, **options: Any) -> None:
        self.context = browser.new_context(timezone_id="Etc/UTC", **options)
        self.page = self.context.new_page()
        self.page.set_default_timeout(60_000)
        self.requests: list[str] = []
        self.errors: list[str] = []
        self.context.on("request", lambda request: self.requests.append(request.url))
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.url = f"{url}/dashboard"

    def open(self) -> Any:
        """Load the page and wait for its first figures."""
        self.page.goto(self.url)
        self.page.wait_for_selector("#main[aria-busy=false]")
        return self.page


def text(page: Any, selector: str) -> str:
    return re.sub(r"\s+", " ", page.inner_text(selector)).strip()


def drawn(page: Any, chart: str) -> str:
    """Return the path of a chart's first line."""
    return page.get_attribute(f"#{chart} path.line.first:not(.swatch path)", "d") or ""


def wait(page: Any, selector: str, words: str) -> None:
    """Wait until the element says so."""
    page.wait_for_function(
        "([selector, words]) => document.querySelector(selector).textContent.includes(words)",
        arg=[selector, words],
        timeout=SOON,
    )


def unlock(page: Any, key: str = KEY) -> None:
    page.fill("#key", key)
    page.click("#key-form button")
