"""A page in headless Chromium, driven by the Chrome DevTools Protocol over pipes."""

import base64
import contextlib
import json
import os
import shlex
import shutil
import subprocess
import tempfile
import time

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
OPTIONS = "--headless=new --no-sandbox --disable-gpu --no-first-run --remote-debugging-pipe"


class Page:
    """A page of a browser.

    Attributes:
        requests: a list of the requests that the page has sent, as the protocol has them.
    """

    def __init__(self, reader, writer, url):
        self._reader, self._writer, self._number, self._session = reader, writer, 0, {}
        self.requests = []
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        found = self._call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = {"sessionId": found["sessionId"]}
        self._call("Network.enable", maxPostDataSize=2**20)
        self._call("Page.navigate", url=url)
        self.wait_for("document.readyState === 'complete'")

    def _call(self, method, **params):
        self._number += 1
        command = {"id": self._number, "method": method, "params": params, **self._session}
        self._writer.write(json.dumps(command).encode() + b"\0")
        self._writer.flush()
        while True:
            message = json.loads(self._read())
            if message.get("method") == "Network.requestWillBeSent":
                self.requests.append(message["params"]["request"])
            if message.get("id") == self._number:
                assert "error" not in message, message
                return message["result"]

    def _read(self):
        parts = []
        while (byte := self._reader.read(1)) != b"\0":
            assert byte, "the browser has ended"
            parts.append(byte)
        return b"".join(parts)

    def evaluate(self, expression):
        """Returns the value of a JavaScript expression."""
        found = self._call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def wait_for(self, expression, seconds=30):
        """Waits until an expression is true; returns its value."""
        end = time.monotonic() + seconds
        while not (value := self.evaluate(expression)):
            assert time.monotonic() < end, (expression, self.evaluate("document.body.innerText"))
            time.sleep(0.02)
        return value

    def type(self, text):
        """Types text into the focused element, and presses Enter."""
        self._call("Input.insertText", text=text)
        for kind in ("keyDown", "keyUp"):
            key = {"key": "Enter", "code": "Enter", "windowsVirtualKeyCode": 13, "text": "\r"}
            self._call("Input.dispatchKeyEvent", type=kind, **key)

    def reload(self):
        """Loads the page again."""
        self.evaluate("window.isOld = true")
        self._call("Page.reload")
        self.wait_for("!window.isOld && document.readyState === 'complete'")

    def screenshot(self, path):
        """Writes a PNG file."""
        data = self._call("Page.captureScreenshot")["data"]
        with open(path, "wb") as file:
            file.write(base64.b64decode(data))


@contextlib.contextmanager
def opened(url):
    """Opens a page in a new browser."""
    (commands, writer), (reader, messages) = os.pipe(), os.pipe()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        command = f"exec {shlex.quote(CHROMIUM)} {OPTIONS} --user-data-dir={shlex.quote(folder)}"
        process = subprocess.Popen(
            ["bash", "-c", f"{command} 3<&{commands} 4>&{messages}"],
            pass_fds=(commands, messages),
            stderr=subprocess.DEVNULL,
        )
        os.close(commands)
        os.close(messages)
        try:
            with os.fdopen(reader, "rb") as input, os.fdopen(writer, "wb") as output:
                yield Page(input, output, url)
        finally:
            process.kill()
            process.wait()
