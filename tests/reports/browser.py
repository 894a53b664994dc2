"""A headless Chromium that tests talk to over a pipe, in DevTools' protocol: no driver, no package, no port."""

import base64
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
SECONDS = 60
# The browser reads from descriptor 3 and writes to 4; copies first, since either may be the other's.
AS_3_AND_4 = """
import os, sys
read, write = (os.dup(int(number)) for number in sys.argv[1:3])
for number, at in ((read, 3), (write, 4)):
    os.dup2(number, at)
    os.set_inheritable(at, True)
os.execvp(sys.argv[3], sys.argv[3:])
"""


def where():
    """The browser that is here; None if there is none. NARROWCAST_BROWSER names another."""
    return os.environ.get("NARROWCAST_BROWSER") or next(filter(None, map(shutil.which, NAMES)), None)


class Browser:
    """One page in one browser. `errors` has what the console and the page said of errors."""

    def __init__(self, program):
        self.profile = tempfile.mkdtemp(prefix="narrowcast-browser-")
        to_browser, self._write = os.pipe()
        self._read, from_browser = os.pipe()
        options = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"]
        options += ["--remote-debugging-pipe", f"--user-data-dir={self.profile}", "--no-first-run", "about:blank"]
        self.process = subprocess.Popen(
            [sys.executable, "-c", AS_3_AND_4, str(to_browser), str(from_browser), program, *options],
            pass_fds=(to_browser, from_browser), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        os.close(to_browser)
        os.close(from_browser)
        self._number, self._left, self._session = 0, b"", None
        self.errors = []
        target = self.ask("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.ask(f"{domain}.enable")

    def close(self):
        """End it, and remove its profile."""
        self.process.terminate()
        try:
            self.process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(timeout=10)
        os.close(self._write)
        os.close(self._read)
        shutil.rmtree(self.profile, ignore_errors=True)

    def ask(self, method, **params):
        """What a command of the protocol gives."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self._number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                return answer["result"]

    def _next(self):
        """The next message; what is said of errors is kept."""
        end = time.monotonic() + SECONDS
        while b"\0" not in self._left:
            if not select.select([self._read], [], [], max(0, end - time.monotonic()))[0]:
                raise TimeoutError(f"the browser said nothing for {SECONDS} s")
            got = os.read(self._read, 1 << 20)
            if not got:
                raise RuntimeError("the browser ended")
            self._left += got
        text, _, self._left = self._left.partition(b"\0")
        message = json.loads(text)
        params = message.get("params", {})
        if message.get("method") == "Runtime.exceptionThrown":
            details = params["exceptionDetails"]
            self.errors.append(details.get("exception", {}).get("description") or details["text"])
        elif message.get("method") == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.errors.append(f"{params['entry']['text']} {params['entry'].get('url', '')}")
        elif message.get("method") == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning"):
            self.errors.append(str(params["args"]))
        return message

    def open(self, file, width=1400, height=900, scale=1, dark=False):
        """A file in a window of that size; `scale` is the zoom of a user: 4 is 400 %."""
        self.errors.clear()
        size = {"width": width // scale, "height": height // scale, "deviceScaleFactor": scale, "mobile": False}
        self.ask("Emulation.setDeviceMetricsOverride", **size)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.ask("Emulation.setEmulatedMedia", features=[scheme])
        self.ask("Page.navigate", url=Path(file).resolve().as_uri())
        self.until("document.documentElement?.dataset.ready === 'yes'")

    def until(self, condition):
        """Wait until an expression holds."""
        end = time.monotonic() + SECONDS
        while not self.value(f"Boolean({condition})"):
            if time.monotonic() > end:
                raise TimeoutError(f"{condition} does not hold; errors: {self.errors}")
            time.sleep(0.02)

    def value(self, expression):
        """What an expression has for a value, as JSON can say it."""
        got = self.ask("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in got:
            raise RuntimeError(f"{expression}: {got['exceptionDetails']}")
        return got["result"].get("value")

    def press(self, *keys):
        """Keys, one after the other, as a user presses them."""
        codes = {"Enter": 13, "Tab": 9, "Backspace": 8, "Escape": 27, "ArrowUp": 38, "ArrowDown": 40}
        codes |= {"ArrowLeft": 37, "ArrowRight": 39, ".": 190, "/": 191}
        for key in keys:
            text = {"Enter": "\r"}.get(key, key if len(key) == 1 else "")
            facts = {"key": key, "windowsVirtualKeyCode": codes.get(key, ord(key[0].upper()))}
            self.ask("Input.dispatchKeyEvent", type="keyDown", **facts, **({"text": text} if text else {}))
            self.ask("Input.dispatchKeyEvent", type="keyUp", **facts)

    def click(self, selector, times=1):
        """The middle of the first element that a selector finds, with the mouse."""
        found = self.value(
            f"(() => {{ const e = document.querySelector({json.dumps(selector)});"
            " e.scrollIntoView({block: 'center'});"
            " const r = e.getBoundingClientRect(); return [r.x + r.width / 2, r.y + r.height / 2]; })()"
        )
        for count in range(1, times + 1):
            facts = {"x": found[0], "y": found[1], "button": "left", "clickCount": count}
            self.ask("Input.dispatchMouseEvent", type="mousePressed", **facts)
            self.ask("Input.dispatchMouseEvent", type="mouseReleased", **facts)

    def picture(self, file, whole=False):
        """A picture of what is seen, or of the whole page."""
        got = self.ask("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        Path(file).write_bytes(base64.b64decode(got["data"]))
