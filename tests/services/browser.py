"""A real Chromium: pages are opened in it, looked at in pictures, and examined by axe-core."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

#: script of axe-core, see origin.json beside it
AXE = Path(__file__).parent / "axe" / "axe.min.js"
#: widths of pictures in pixels, and schemes of colours
WIDTHS, SCHEMES = (1400, 400), ("light", "dark")
_NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")


@contextmanager
def chromium() -> Iterator[Any]:
    """Yield a browser: the system's Chromium, else the one that `playwright install chromium` has fetched.

    Without a browser the test is skipped, and fails where CI=true.
    """
    from playwright.sync_api import Error, sync_playwright

    path = next((found for name in _NAMES if (found := shutil.which(name))), None)
    with sync_playwright() as found:
        try:
            # Its sandbox does not work for root.
            browser = found.chromium.launch(executable_path=path, args=["--no-sandbox"] if os.geteuid() == 0 else [])
        except Error as error:
            why = f"no Chromium: {error.message.splitlines()[0]}"
            if os.environ.get("CI") == "true":
                pytest.fail(why, pytrace=False)
            pytest.skip(why)
        try:
            yield browser
        finally:
            browser.close()


class Opened:
    """A page in a browser, with all that it has logged and requested."""

    def __init__(self, browser: Any, url: str, width: int = 1400, scheme: str = "light") -> None:
        self.context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
        # In milliseconds; twice what playwright waits by default.
        self.context.set_default_timeout(60_000)
        self.page = self.context.new_page()
        #: messages of the console and errors of scripts; requests for anything but `url`
        self.logged: list[str] = []
        self.requested: list[str] = []
        self.page.on("console", lambda message: self.logged.append(f"{message.type}: {message.text}"))
        self.page.on("pageerror", lambda error: self.logged.append(str(error)))
        self.page.on("request", lambda request: request.url == url or self.requested.append(request.url))
        self.page.goto(url)

    def __enter__(self) -> Opened:
        return self

    def __exit__(self, *_: object) -> None:
        self.context.close()

    def scrolls_sideways(self) -> bool:
        return bool(self.page.evaluate("document.documentElement.scrollWidth > window.innerWidth"))

    def problems(self) -> list[str]:
        """Return what axe-core finds that is serious or critical, a line each."""
        # The page's own policy allows no further script; the protocol of the browser runs it nevertheless.
        self.page.evaluate(AXE.read_text())
        found = self.page.evaluate("axe.run()")
        return [
            f"{each['id']}: {node['html'][:200]}"
            for each in found["violations"]
            if each["impact"] in {"serious", "critical"}
            for node in each["nodes"]
        ]
