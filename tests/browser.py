"""A real, headless Chromium, driven by its DevTools protocol over two pipes.

Source: https://chromedevtools.github.io/devtools-protocol (messages are JSON that ends with NUL).
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
import time
from base64 import b64decode
from pathlib import Path
from typing import Any

NAMES = (
    *("google-chrome", "google-chrome-stable", "chromium", "chrome", "chrome-headless-shell"),
    "chromium-browser",  # last: of Ubuntu, it may be a word on how to install one
)
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
    *("--disable-dev-shm-usage", "--hide-scrollbars", "--remote-debugging-pipe"),
)
SECONDS = 30.0
Message = dict[str, Any]

FAINT = """[...document.querySelectorAll('body *')].flatMap((node) => {
  const text = [...node.childNodes].some((one) => one.nodeType === 3 && one.data.trim());
  if (!text || !node.checkVisibility() || node.closest('svg, script, style')) return [];
  const parts = (color) => color.match(/[\\d.]+/g).map(Number);
  const light = (color) => {
    const curve = (part) => ((part / 255 + 0.055) / 1.055) ** 2.4;
    const linear = (part) => (part <= 10.3 ? part / 3294.6 : curve(part));
    const [red, green, blue] = parts(color).map(linear);
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue;
  };
  let under = node;
  const clear = (one) => (parts(getComputedStyle(one).backgroundColor)[3] ?? 1) === 0;
  while (under.parentElement && clear(under)) under = under.parentElement;
  const both = [getComputedStyle(node).color, getComputedStyle(under).backgroundColor].map(light);
  const contrast = (Math.max(...both) + 0.05) / (Math.min(...both) + 0.05);
  return contrast < 4.5 ? [`${contrast.toFixed(2)} ${node.className} ${node.textContent}`] : [];
})"""
"""Text that has not the contrast with its ground that WCAG 2.2 (1.4.3, AA) asks for."""


def found() -> str | None:
    """Return the browser of this machine."""
    return next((path for path in map(shutil.which, NAMES) if path), None)


class Browser:
    """One page of a browser; what it complains of is in ``complaints``."""

    def __init__(self) -> None:
        self._profile = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        theirs, self._out = os.pipe()
        self._in, mine = os.pipe()
        flags = (*FLAGS, f"--user-data-dir={self._profile.name}", "about:blank")
        line = f'exec "$@" 3<&{theirs} 4>&{mine}'
        self._process = subprocess.Popen(
            ["bash", "-c", line, "bash", found() or "", *flags],
            pass_fds=(theirs, mine),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(theirs)
        os.close(mine)
        self._rest = b""
        self._number = 0
        self._session: str | None = None
        self.complaints: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._in)
        os.close(self._out)
        self._profile.cleanup()

    def call(self, method: str, **parameters: object) -> Message:
        """Send a command and return its result."""
        self._number += 1
        message: Message = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self._number:
                assert "error" not in answer, (method, answer["error"])
                return dict(answer["result"])

    def open(self, page: Path, fragment: str = "") -> None:
        """Load a file and wait until its script has run."""
        self.call("Page.navigate", url="about:blank")
        self.call("Page.navigate", url=page.as_uri() + fragment)
        self.wait("document.readyState === 'complete'")

    def run(self, script: str) -> Any:
        """Return the value of an expression, read without the page's policy in the way."""
        found = self.call("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def wait(self, condition: str) -> None:
        """Wait until an expression is true."""
        end = time.monotonic() + SECONDS
        while not self.run(condition):
            assert time.monotonic() < end, condition
            time.sleep(0.02)

    def press(self, key: str) -> None:
        """Press a key, such as ``Enter``."""
        text = {"text": "\r"} if key == "Enter" else {}
        code = {"Enter": 13, "Escape": 27, "ArrowRight": 39, "ArrowDown": 40, "Tab": 9}[key]
        for kind in ("keyDown", "keyUp"):
            self.call(
                "Input.dispatchKeyEvent", type=kind, key=key, windowsVirtualKeyCode=code, **text
            )

    def size(self, width: int, height: int, dark: bool = False) -> None:
        """Set the window's size and color scheme."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def picture(self) -> bytes:
        """Return a screenshot, PNG."""
        return b64decode(self.call("Page.captureScreenshot", format="png")["data"])

    def _next(self) -> Message:
        while b"\0" not in self._rest:
            part = os.read(self._in, 1 << 16)
            assert part, "the browser has gone"
            self._rest += part
        line, _, self._rest = self._rest.partition(b"\0")
        message: Message = json.loads(line)
        if message.get("method") in ("Log.entryAdded", "Runtime.exceptionThrown"):
            self.complaints.append(json.dumps(message["params"]))
        return message
