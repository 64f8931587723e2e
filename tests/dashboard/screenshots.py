"""Makes the pictures in docs/screenshots: ``python -m tests.dashboard.screenshots URL [seconds]``.

The server at URL should be under load. Needs Chromium; pictures are written with few colours, to stay small.
"""

from __future__ import annotations

import io
import sys
from typing import Any

from PIL import Image
from playwright.sync_api import sync_playwright

from tests.dashboard.conftest import find_chromium, flags
from tests.server_process import ROOT

FOLDER = ROOT / "docs" / "screenshots"

#: Name, colour scheme, width, height, pixels per CSS pixel.
PICTURES = (
    ("dashboard-light", "light", 1360, 1430, 1.0),
    ("dashboard-dark", "dark", 1360, 1430, 1.0),
    ("dashboard-phone", "light", 390, 844, 2.0),
)


def main(url: str, seconds: float) -> None:
    """Watch the page for some time, then take all pictures."""
    FOLDER.mkdir(exist_ok=True)
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=find_chromium(), args=flags())
        pages: list[tuple[str, Any]] = []
        for name, scheme, width, height, scale in PICTURES:
            context = browser.new_context(
                color_scheme=scheme,
                viewport={"width": width, "height": height},
                device_scale_factor=scale,
                timezone_id="Etc/UTC",
            )
            pages.append((name, context.new_page()))
            pages[-1][1].goto(f"{url}/dashboard")
        pages[0][1].wait_for_timeout(1000 * seconds)
        for name, page in pages:
            picture = Image.open(io.BytesIO(page.screenshot()))
            path = FOLDER / f"{name}.png"
            picture.convert("RGB").quantize(
                128, method=Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE
            ).save(path, optimize=True)
            print(path.name, path.stat().st_size, "bytes")
        browser.close()


if __name__ == "__main__":
    main(sys.argv[1].rstrip("/"), float(sys.argv[2]) if len(sys.argv) > 2 else 60.0)
