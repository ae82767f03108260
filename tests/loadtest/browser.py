"""A headless Chromium, driven through Debian's chromedriver by WebDriver's own protocol: what a page is like for a person."""

import contextlib
import json
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ARGUMENTS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars")


class Browser:
    """One session. script: JavaScript whose value is returned."""

    def __init__(self, base: str) -> None:
        options = {"args": ARGUMENTS, "perfLoggingPrefs": {"enableNetwork": True}}
        wanted = {"browserName": "chrome", "goog:chromeOptions": options}
        wanted["goog:loggingPrefs"] = {"browser": "ALL", "performance": "ALL"}
        session = post(f"{base}/session", {"capabilities": {"alwaysMatch": wanted}})
        self._base = f"{base}/session/{session['sessionId']}"

    def open(self, page: Path | str, *, width: int, dark: bool = False) -> None:
        """page: a file, or an address."""
        metrics = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
        self.devtools("Emulation.setDeviceMetricsOverride", metrics)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.devtools("Emulation.setEmulatedMedia", {"features": [scheme]})
        post(f"{self._base}/url", {"url": page.as_uri() if isinstance(page, Path) else page})

    def script(self, text: str) -> Any:
        return post(f"{self._base}/execute/sync", {"script": f"return {text}", "args": []})

    def log(self, kind: str) -> list[dict[str, Any]]:
        """kind: browser (its console) or performance (DevTools' events, the network's among them)."""
        entries: list[dict[str, Any]] = post(f"{self._base}/se/log", {"type": kind})
        return entries

    def requested(self) -> set[str]:
        """Every address asked for since the last call."""
        messages = [json.loads(entry["message"])["message"] for entry in self.log("performance")]
        return {m["params"]["request"]["url"] for m in messages if m["method"] == "Network.requestWillBeSent"}

    def devtools(self, command: str, parameters: dict[str, Any]) -> Any:
        return post(f"{self._base}/goog/cdp/execute", {"cmd": command, "params": parameters})

    def close(self) -> None:
        with urllib.request.urlopen(urllib.request.Request(self._base, method="DELETE"), timeout=30):
            pass


@contextlib.contextmanager
def browser() -> Iterator[Browser]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    base = f"http://127.0.0.1:{port}"
    with subprocess.Popen(["chromedriver", f"--port={port}", "--log-level=OFF"], stdout=subprocess.DEVNULL) as driver:
        try:
            _until_ready(base, driver)
            opened = Browser(base)
            try:
                yield opened
            finally:
                opened.close()
        finally:
            driver.terminate()


def post(url: str, document: dict[str, Any]) -> Any:
    request = urllib.request.Request(url, json.dumps(document).encode(), {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)["value"]


def _until_ready(base: str, driver: "subprocess.Popen[bytes]") -> None:
    for _ in range(300):
        assert driver.poll() is None, "chromedriver ended"
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{base}/status", timeout=10) as answer:
            if json.load(answer)["value"]["ready"]:
                return
        time.sleep(0.1)
    raise TimeoutError("chromedriver is not ready")
