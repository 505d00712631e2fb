"""Chat page of the server, in headless Chromium."""

import contextlib
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
IS_DONE = "document.getElementById('stop').hidden"
SHOWN = "[...document.querySelectorAll('.user, .assistant')].map(box => box.textContent)"
INPUT = "document.getElementById('input').value"


@contextlib.contextmanager
def opened_page(model, max_length, **options):
    """Serves a model and opens its page in a browser, once both are ready."""
    engine = Engine(model, num_slots=1, max_length=max_length)
    with running(engine, **options) as server, browser.opened(server.url) as page:
        page.url = server.url
        if not options:
            page.wait_for("document.getElementById('model').textContent === 'tiny'")
        yield page


def sent_messages(page):
    """Returns the contents of the messages in the last request for an answer."""
    bodies = [json.loads(each["postData"]) for each in page.requests if "postData" in each]
    return [message["content"] for message in bodies[-1]["messages"]]


def click(page, name):
    page.evaluate(f"document.getElementById('{name}').click()")


def test_page_in_a_conversation_sends_what_it_shows(model, tmp_path):
    """A stopped answer leaves the history, Enter cuts an answer, or a reload loses the text."""
    with opened_page(model, 800) as page:
        page.type("Hello <b>")
        page.wait_for(f"{ANSWER}.length > 10")
        length = page.evaluate(f"{ANSWER}.length")
        page.type("Why?")  # Enter during the answer
        page.wait_for(f"{ANSWER}.length > {length + 10}")
        click(page, "stop")
        page.wait_for(IS_DONE)
        stopped = page.evaluate(ANSWER)
        assert 20 < len(stopped) < 700
        assert page.evaluate(INPUT) == "Why?"
        page.type("")
        page.wait_for(f"!({IS_DONE})")
        page.wait_for(IS_DONE)
        assert sent_messages(page) == ["Hello <b>", stopped, "Why?"]
        shown = page.evaluate(SHOWN)
        assert shown[:3] == ["Hello <b>", stopped, "Why?"]
        page.reload()
        assert page.evaluate(SHOWN) == shown
        page.screenshot(os.environ.get("SCREENSHOT") or tmp_path / "page.png")
        click(page, "clear")
        assert page.evaluate(SHOWN) == []
        page.reload()
        assert page.evaluate(SHOWN) == []
        urls = {request["url"] for request in page.requests} - {"data:,"}
        assert all(url.startswith(page.url) for url in urls), urls


def test_page_with_refused_message_returns_it_to_the_input(model):
    """A message that got no answer stays in the history, or the error is for the operator."""
    with opened_page(model, 300) as page:
        page.type("More" * 200)
        error = page.wait_for("document.querySelector('.error')?.firstChild.textContent")
        assert error.startswith("The conversation is too long")
        assert page.evaluate("document.querySelector('.error details').open") is False
        assert (page.evaluate(SHOWN), page.evaluate(INPUT)) == ([], "More" * 200)


def test_page_after_the_server_has_ended_says_so(model):
    """A network error is shown in the words of the browser, or the message is lost."""
    with contextlib.ExitStack() as stack:
        with running(Engine(model, num_slots=1, max_length=300)) as server:
            page = stack.enter_context(browser.opened(server.url))
            page.wait_for("document.getElementById('model').textContent === 'tiny'")
        page.type("Hello")
        error = page.wait_for("document.querySelector('.error')?.textContent")
        assert error.startswith("The server cannot be reached")
        assert page.evaluate(INPUT) == "Hello"


def test_page_of_a_server_with_a_key_asks_for_it(model):
    """The page of a server with a key cannot be used."""
    with opened_page(model, 100, api_key="secret") as page:
        page.wait_for("!document.getElementById('key').hidden")
        assert "API key" in page.wait_for("document.querySelector('.error')?.textContent")
        page.evaluate("document.getElementById('key').value = 'secret'")
        page.evaluate("document.getElementById('input').focus()")
        page.type("Hello")
        page.wait_for(f"{IS_DONE} && {ANSWER}.length > 10")
