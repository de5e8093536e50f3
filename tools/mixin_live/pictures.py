# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""Pictures of boards, drawn by Grafana's front-end libraries in headless Chromium."""

import json
import re
import shutil
import tempfile
import threading
import time
from collections.abc import Mapping
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Any, Final
from urllib.parse import urlencode

from PIL import Image

from nixl_telemetry.testbed import LOOPBACK, ManagedProcess
from tools.mixin_live.frontend import PREVIEW
from tools.mixin_live.panels import STEP_SECONDS, Window

WIDTH: Final = 1400
_FIRST_HEIGHT: Final = 900
_DRAW_SECONDS: Final = 120.0
_POLL_SECONDS: Final = 0.1
_VIRTUAL_MS: Final = 20_000
_REPORT: Final = re.compile(r'<script id="report"[^>]*>(.*?)</script>', re.DOTALL)
_OPTIONS: Final = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--force-device-scale-factor=1"),
    # It is to talk to nobody but this page and Prometheus.
    *("--disable-quic", "--no-first-run", "--disable-background-networking", "--disable-component-update"),
    *("--disable-sync", "--disable-default-apps", "--disable-extensions"),
    f"--virtual-time-budget={_VIRTUAL_MS}",
)


class PictureError(RuntimeError):
    """A board was not drawn, or not as it should be; the message says why."""


class Pages:
    """Serves the renderer and the boards on loopback."""

    def __init__(self, boards: Path) -> None:
        """Listens at once, until it is closed.

        Args:
            boards: Folder with the JSON files.
        """

        class Handler(SimpleHTTPRequestHandler):
            def translate_path(self, path: str) -> str:
                name = path.partition("?")[0].removeprefix("/boards/")
                return str(boards / Path(name).name) if name != path.partition("?")[0] else super().translate_path(path)

            def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the name is the base class's
                """Nothing: each picture asks for the same few files."""

        handler = partial(Handler, directory=str(PREVIEW / "www"))
        self._server = ThreadingHTTPServer((LOOPBACK, 0), handler)
        self.url = f"http://{LOOPBACK}:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, name="pages", daemon=True)
        self._thread.start()

    def __enter__(self) -> "Pages":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def draw(pages: Pages, board: str, prometheus: str, window: Window, picture: Path) -> Mapping[str, Any]:
    """Draw one board, at its full height.

    Args:
        pages: Serves it.
        board: Its name.
        prometheus: Base URL.
        window: The time that is shown.
        picture: The PNG to write.

    Returns:
        The renderer's report: what each panel was given.

    Raises:
        PictureError: Chromium failed, or the renderer met an error.
    """
    address = f"{pages.url}/index.html?" + urlencode(
        {
            "board": f"/boards/{board}.json",
            "prometheus": prometheus,
            "from": round(window.start * 1000),
            "to": round(window.end * 1000),
            "scrape": STEP_SECONDS * 1000,
        }
    )
    with tempfile.TemporaryDirectory(prefix="nixl-telemetry-picture-") as folder:
        # Twice: how high a board is is known when it has been drawn.
        found = _REPORT.search(_chromium(Path(folder), _FIRST_HEIGHT, "--dump-dom", address))
        if found is None:
            raise PictureError(f"{board}: the page has no report")
        report: Mapping[str, Any] = json.loads(found[1])
        if report["errors"]:
            raise PictureError(f"{board}: {'; '.join(report['errors'])}")
        drawn = Path(folder, "board.png")
        _chromium(Path(folder), report["height"], f"--screenshot={drawn}", address)
        if not drawn.exists():
            raise PictureError(f"{board}: Chromium wrote no picture")
        picture.parent.mkdir(parents=True, exist_ok=True)
        # 256 colours make it a third as large; this method keeps those of thin lines.
        with Image.open(drawn) as image:
            small = image.convert("RGB").quantize(method=Image.Quantize.MAXCOVERAGE, kmeans=1, dither=Image.Dither.NONE)
            small.save(picture, optimize=True)
    return report


def _chromium(folder: Path, height: int, *arguments: str) -> str:
    """What one run writes."""
    profile = Path(tempfile.mkdtemp(dir=folder))
    process = ManagedProcess(
        f"chromium-{profile.name}",
        ["chromium", *_OPTIONS, f"--user-data-dir={profile}", f"--window-size={WIDTH},{height}", *arguments],
        work_dir=folder,
    )
    deadline = time.monotonic() + _DRAW_SECONDS
    with process:
        while process.is_running():
            if time.monotonic() > deadline:
                raise PictureError(f"Chromium took more than {_DRAW_SECONDS:.0f} s: {process.log_tail(5)}")
            time.sleep(_POLL_SECONDS)
    shutil.rmtree(profile, ignore_errors=True)
    return process.log_text()
