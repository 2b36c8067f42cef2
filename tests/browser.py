"""Headless Chromium for tests of pages: the DevTools protocol over a pipe, and what is measured in a page."""

from __future__ import annotations

import base64
import fcntl
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

WAIT_S = 120
NAMES = ("chromium", "chromium-browser", "google-chrome")
# Text on a canvas has no element: each call is recorded with its box, in CSS pixels of the canvas.
RECORD_TEXT = """
window.canvasTexts = new Map();
const clear = CanvasRenderingContext2D.prototype.clearRect;
CanvasRenderingContext2D.prototype.clearRect = function (...box) {
  window.canvasTexts.set(this.canvas, []);
  return clear.apply(this, box);
};
const fill = CanvasRenderingContext2D.prototype.fillText;
CanvasRenderingContext2D.prototype.fillText = function (text, x, y, ...rest) {
  const size = this.measureText(text), ratio = devicePixelRatio;
  const end = { center: 0.5, right: 1, end: 1 }[this.textAlign] || 0;
  const corners = [
    [-end * size.width, -size.actualBoundingBoxAscent], [(1 - end) * size.width, size.actualBoundingBoxDescent],
  ];
  const points = corners.map(([dx, dy]) => this.getTransform().transformPoint(new DOMPoint(x + dx, y + dy)));
  const box = { left: Math.min(points[0].x, points[1].x) / ratio, right: Math.max(points[0].x, points[1].x) / ratio,
    top: Math.min(points[0].y, points[1].y) / ratio, bottom: Math.max(points[0].y, points[1].y) / ratio, text };
  if (!window.canvasTexts.has(this.canvas)) window.canvasTexts.set(this.canvas, []);
  window.canvasTexts.get(this.canvas).push(box);
  return fill.call(this, text, x, y, ...rest);
};
"""
# Every visible text with its box: of elements by their text nodes, of canvases by what was recorded.
MEASURE = """
(() => {
  const texts = [], problems = [];
  const page = document.documentElement;
  const leaves = (box, edge) =>
    Math.min(box.left - edge.left, edge.right - box.right, box.top - edge.top, edge.bottom - box.bottom) < -0.5;
  const add = (box, text) => texts.push(
    { left: box.left, right: box.right, top: box.top + scrollY, bottom: box.bottom + scrollY, text });
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const node = walker.currentNode, parent = node.parentElement, text = node.textContent.trim().slice(0, 60);
    if (!text || ["SCRIPT", "STYLE", "NOSCRIPT"].includes(parent.tagName)) continue;
    if (!parent.checkVisibility({ visibilityProperty: true }) || parent.closest("#tip, .skip, nav")) continue;
    const scroller = parent.closest(".table"), view = scroller && scroller.getBoundingClientRect();
    const frame = parent.closest("figure, .note, .tiles li, header"), edge = frame && frame.getBoundingClientRect();
    const range = document.createRange();
    range.selectNodeContents(node);
    for (const box of range.getClientRects()) {
      if (box.width < 1 || (view && leaves(box, view))) continue;
      add(box, text);
      if (box.left < -0.5 || box.right > page.clientWidth + 0.5) problems.push("outside of the page: " + text);
      if (edge && leaves(box, edge)) problems.push("outside of its frame: " + text);
    }
  }
  for (const [canvas, list] of window.canvasTexts) {
    if (!canvas.isConnected) continue;
    const at = canvas.getBoundingClientRect();
    for (const each of list) {
      if (leaves(each, { left: 0, top: 0, right: at.width, bottom: at.height })) problems.push("clipped: " + each.text);
      const moved = { left: each.left + at.left, right: each.right + at.left, top: each.top + at.top };
      add({ ...moved, bottom: each.bottom + at.top }, each.text);
    }
  }
  texts.sort((a, b) => a.top - b.top);
  texts.forEach((a, at) => {
    for (let next = at + 1; next < texts.length && texts[next].top < a.bottom - 2; next++) {
      const b = texts[next];
      const over = Math.min(a.right, b.right) - Math.max(a.left, b.left);
      const high = Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top);
      if (over > 1.5 && high > 3) problems.push(`overlap: ${a.text} | ${b.text}`);
    }
  });
  if (page.scrollWidth > page.clientWidth) problems.push("the page scrolls sideways");
  for (const table of document.querySelectorAll(".table")) {
    if (table.checkVisibility() && table.scrollWidth > table.clientWidth + 1) {
      problems.push("wider than its frame: " + table.getAttribute("aria-label"));
    }
  }
  return { texts: texts.map((each) => each.text), problems };
})()
"""


def find_browser() -> str:
    """The browser of ``DYNMO_CHROMIUM`` or of PATH; skips the test without one."""
    found = os.environ.get("DYNMO_CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)
    if found is None:
        pytest.skip(f"needs Chromium: set DYNMO_CHROMIUM, or install one of {', '.join(NAMES)}")
    return found


class Page:
    """A page in a browser."""

    def __init__(self, process: subprocess.Popen[bytes], write: int, read: int) -> None:
        self._process, self._write, self._read = process, write, read
        self._buffer = b""
        self._number = 0
        self._session = ""
        self.requests: list[str] = []
        self.errors: list[str] = []

    def send(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Call a method of the protocol and return its result."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == self._number:
                assert "error" not in answer, (method, answer["error"])
                return answer["result"]

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._read], [], [], WAIT_S)
            assert ready, f"the browser has not answered for {WAIT_S} s"
            chunk = os.read(self._read, 1 << 20)
            assert chunk, "the browser ended"
            self._buffer += chunk
        line, _, self._buffer = self._buffer.partition(b"\0")
        event = json.loads(line)
        match event.get("method"):
            case "Network.requestWillBeSent":
                self.requests.append(event["params"]["request"]["url"])
            case "Runtime.exceptionThrown":
                details = event["params"]["exceptionDetails"]
                self.errors.append(details.get("exception", {}).get("description") or details["text"])
            case "Runtime.consoleAPICalled" if event["params"]["type"] in ("error", "warning"):
                self.errors.append(str([each.get("value") for each in event["params"]["args"]]))
            case "Log.entryAdded" if event["params"]["entry"]["level"] in ("error", "warning"):
                self.errors.append(event["params"]["entry"]["text"])
        return event

    def attach(self) -> None:
        """Open an empty page."""
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Network", "Runtime", "Log"):
            self.send(f"{domain}.enable")
        self.send("Page.addScriptToEvaluateOnNewDocument", source=RECORD_TEXT)

    def open(self, path: Path, *, width: int = 1600, dark: bool = False, scripts: bool = True) -> None:
        """Load a file and wait until its charts are drawn."""
        self.requests, self.errors = [], []
        self.send("Emulation.setScriptExecutionDisabled", value=not scripts)
        self.size(width)
        self.send(
            "Emulation.setEmulatedMedia",
            features=[{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}],
        )
        self.send("Page.navigate", url=path.as_uri())
        self.wait(
            "document.readyState === 'complete' && document.body"
            + (" && document.documentElement.dataset.ready === 'true'" if scripts else "")
        )
        if scripts:
            self.frame()

    def size(self, width: int, height: int = 1000, ratio: float = 1) -> None:
        """Set the size of the window, in CSS pixels, and the pixels of the screen for each of them."""
        self.send(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=ratio, mobile=False
        )

    def frame(self) -> None:
        """Wait until observers and two frames have run."""
        self.evaluate(
            "new Promise((done) => setTimeout(() => requestAnimationFrame(() => requestAnimationFrame(done)), 60))"
            ".then(() => 1)"
        )

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression; waits for promises."""
        result = self.send("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    def wait(self, condition: str, seconds: float = 60) -> None:
        """Wait until an expression is true; fails with the errors of the page."""
        end = time.monotonic() + seconds
        while not self.evaluate(f"Boolean({condition})"):
            assert time.monotonic() < end, (condition, self.errors)
            time.sleep(0.02)  # a page has no event for any condition

    def mouse(self, kind: str, x: float, y: float, **more: Any) -> None:
        """Send ``mouseMoved``, ``mousePressed`` or ``mouseReleased``."""
        self.send("Input.dispatchMouseEvent", type=kind, x=x, y=y, **more)

    def center(self, selector: str) -> tuple[float, float]:
        """The middle of an element, scrolled into the window."""
        box = self.evaluate(
            f"(() => {{ const found = document.querySelector({json.dumps(selector)});"
            " found.scrollIntoView({ block: 'center' }); const box = found.getBoundingClientRect();"
            " return [box.left + box.width / 2, box.top + box.height / 2]; })()"
        )
        self.frame()
        return box[0], box[1]

    def drag(self, selector: str, begin: float, end: float) -> None:
        """Drag over an element, between two shares of its width."""
        x, y = self.center(selector)
        width = self.evaluate(f"document.querySelector({json.dumps(selector)}).getBoundingClientRect().width")
        first, last = x + (begin - 0.5) * width, x + (end - 0.5) * width
        self.mouse("mouseMoved", first, y)
        self.mouse("mousePressed", first, y, button="left", buttons=1, clickCount=1)
        for at in range(1, 6):
            self.mouse("mouseMoved", first + (last - first) * at / 5, y, button="left", buttons=1)
        self.mouse("mouseReleased", last, y, button="left", clickCount=1)
        self.frame()

    def screenshot(self, path: Path) -> None:
        """Write the whole page as PNG."""
        height = self.evaluate("document.documentElement.scrollHeight")
        width = self.evaluate("innerWidth")
        clip = {"x": 0, "y": 0, "width": width, "height": height, "scale": 1}
        image = self.send("Page.captureScreenshot", format="png", clip=clip, captureBeyondViewport=True)["data"]
        path.write_bytes(base64.b64decode(image))

    def problems(self) -> list[str]:
        """Texts that are clipped, overlap each other, or leave the page."""
        return self.evaluate(MEASURE)["problems"]

    def texts(self) -> list[str]:
        """All visible texts."""
        return self.evaluate(MEASURE)["texts"]


@contextmanager
def browser(user_folder: Path) -> Iterator[Page]:
    """A page of a new browser, which ends with the block."""
    to_browser, write = os.pipe()
    read, from_browser = os.pipe()

    def redirect() -> None:
        os.dup2(to_browser, 3)
        os.dup2(from_browser, 4)

    # Descriptors 3 and 4 are the protocol's; those of the pipes are moved above, so that neither covers the other.
    low = (to_browser, from_browser)
    to_browser, from_browser = (fcntl.fcntl(each, fcntl.F_DUPFD, 10) for each in low)
    for each in low:
        os.close(each)
    command = [
        find_browser(),
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--no-first-run",
        "--disable-extensions",
    ]
    command += ["--disable-background-networking", "--disable-component-update", "--remote-debugging-pipe"]
    process = subprocess.Popen(
        [*command, f"--user-data-dir={user_folder}", "about:blank"],
        preexec_fn=redirect,
        pass_fds=(3, 4),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(to_browser)
    os.close(from_browser)
    page = Page(process, write, read)
    try:
        page.attach()
        yield page
    finally:
        process.terminate()
        process.wait(30)
        os.close(write)
        os.close(read)
