"""Chat page of the server, in headless Chromium."""

import json
import os

import pytest

from keras_recurrent.serving import Engine
from tests.serving import browser
from tests.serving.test_server import model, running

__all__ = ["model"]
pytestmark = [
    pytest.mark.once,
    pytest.mark.nightly,
    pytest.mark.skipif(browser.CHROMIUM is None, reason="requires Chromium"),
]

ANSWER = "[...document.querySelectorAll('.assistant')].at(-1)?.textContent"
IS_DONE = "document.getElementById('send').textContent === 'Send'"


def test_page_streams_stops_and_continues_a_conversation(model, tmp_path):
    """The page does not stream, stop, continue a conversation, or show errors."""
    engine = Engine(model, num_slots=1, max_length=800)
    with running(engine) as server, browser.opened(server.url) as page:
        page.wait_for("document.getElementById('model').textContent === 'tiny'")
        page.type("Hello <b>")
        assert page.evaluate("document.querySelector('.user').textContent") == "Hello <b>"
        page.wait_for(f"{ANSWER}.length > 10")
        page.evaluate("document.getElementById('send').click()")  # stop
        page.wait_for(IS_DONE)
        stopped = page.evaluate(ANSWER)
        assert 10 < len(stopped) < 700
        page.type("Why?")
        page.wait_for(f"!({IS_DONE})")
        page.wait_for(IS_DONE)
        assert page.evaluate(ANSWER) != stopped
        bodies = [json.loads(each["postData"]) for each in page.requests if "postData" in each]
        contents = [message["content"] for message in bodies[-1]["messages"]]
        assert contents == ["Hello <b>", stopped, "Why?"]
        page.type("More" * 200)
        assert "--max-length" in page.wait_for("document.querySelector('.error')?.textContent")
        page.screenshot(os.environ.get("SCREENSHOT") or tmp_path / "page.png")
        page.evaluate("document.getElementById('clear').click()")
        assert page.evaluate("document.getElementById('log').children.length") == 0
        urls = {request["url"] for request in page.requests} - {"data:,"}
        assert all(url.startswith(server.url) for url in urls), urls


def test_page_asks_for_the_key(model):
    """The page of a server with a key cannot be used."""
    engine = Engine(model, num_slots=1, max_length=100)
    with running(engine, api_key="secret") as server, browser.opened(server.url) as page:
        page.wait_for("!document.getElementById('key').hidden")
        assert "API key" in page.wait_for("document.querySelector('.error')?.textContent")
        page.evaluate("document.getElementById('key').value = 'secret'")
        page.evaluate("document.getElementById('input').focus()")
        page.type("Hello")
        page.wait_for(f"{IS_DONE} && {ANSWER}.length > 10")
