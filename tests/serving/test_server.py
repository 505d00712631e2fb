"""The HTTP server with real clients: the `openai` package and curl."""

import contextlib
import json
import subprocess
import threading
import time

import httpx
import openai
import pytest

from keras_recurrent.models import GriffinCausalLMPreprocessor
from keras_recurrent.serving.server import Server, create_app
from keras_recurrent.tokenizers import ByteTokenizer
from tests.serving.fake_engine import TEXT, FakeEngine

pytestmark = pytest.mark.once

MODEL = {"model": "tiny"}
MESSAGES = [{"role": "user", "content": "Hello"}]


@contextlib.contextmanager
def running(engine, grace_period=5, max_connections=1024, **options):
    """Serves an engine on a free port; yields the server, with its address as `url`."""
    preprocessor = GriffinCausalLMPreprocessor(ByteTokenizer())
    app = create_app(engine, "tiny", preprocessor, **options)
    server = Server(app, port=0, max_connections=max_connections, grace_period=grace_period)
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    host, port = server.servers[0].sockets[0].getsockname()
    server.url = f"http://{host}:{port}"
    try:
        yield server
    finally:
        server.should_exit = True
        thread.join(20)
        assert not thread.is_alive()


@pytest.fixture(scope="module")
def server():
    with running(FakeEngine(), max_body=10_000) as server:
        yield server


def client_of(server, **options):
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, **options)


@pytest.fixture(scope="module")
def client(server):
    return client_of(server)


def post(server, path="completions", **fields):
    return post_bytes(server, json.dumps({**MODEL, **fields}).encode(), path)


def post_bytes(server, body, path="completions"):
    headers = {"content-type": "application/json"}
    return httpx.post(f"{server.url}/v1/{path}", content=body, headers=headers)


def wait_for_free_slots(server):
    stats = server.config.app.state.service.engine.stats
    end = time.monotonic() + 5
    while stats()["active"] or stats()["queued"]:
        assert time.monotonic() < end, stats()
        time.sleep(0.01)


def test_models(client):
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").object == "model"


def test_chat(client):
    answer = client.chat.completions.create(
        **MODEL, messages=MESSAGES, max_completion_tokens=9, logprobs=True, top_logprobs=2, seed=-1
    )
    (choice,) = answer.choices
    assert (choice.message.role, choice.message.content) == ("assistant", TEXT[:9])
    assert choice.finish_reason == "length"
    assert [len(each.top_logprobs) for each in choice.logprobs.content] == [2] * 9
    assert choice.logprobs.content[0].token == "G"
    assert choice.logprobs.content[0].bytes == [ord("G")]
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (5, 9)


def test_chat_streams(client):
    """Text is lost, or the role, the finish reason or the usage is missing."""
    chunks = list(
        client.chat.completions.create(
            **MODEL,
            messages=[{"role": "user", "content": [{"type": "text", "text": "Hello"}]}],
            max_tokens=200,
            stream=True,
            logprobs=True,
            stream_options={"include_usage": True},
        )
    )
    choices = [chunk.choices[0] for chunk in chunks[:-1]]
    assert choices[0].delta.role == "assistant"
    assert "".join(choice.delta.content or "" for choice in choices) == TEXT[:200]
    assert [c.finish_reason for c in choices] == [None] * (len(choices) - 1) + ["length"]
    assert sum(len(c.logprobs.content) for c in choices if c.logprobs) == 200
    assert chunks[-1].choices == []
    assert chunks[-1].usage.total_tokens == 205


def test_completions_of_several_prompts(client):
    answer = client.completions.create(**MODEL, prompt=["One", "Three"], stop="e", logprobs=1)
    assert [choice.index for choice in answer.choices] == [0, 1]
    for choice in answer.choices:
        assert (choice.text, choice.finish_reason) == (TEXT[: TEXT.index("e")], "stop")
        assert len(choice.logprobs.tokens) == TEXT.index("e") + 1
        assert choice.logprobs.text_offset[:3] == [0, 1, 2]
    assert answer.usage.prompt_tokens == 8
    stream = client.completions.create(**MODEL, prompt=[[5, 6], [7]], max_tokens=30, stream=True)
    texts = ["", ""]
    for chunk in stream:
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == [TEXT[:30]] * 2


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_disconnects_frees_its_slot(server, stream):
    body = {**MODEL, "prompt": "Hello", "max_tokens": len(TEXT), "stream": stream}
    with (
        httpx.Client(timeout=0.2) as connection,
        contextlib.suppress(httpx.TimeoutException),
        connection.stream("POST", f"{server.url}/v1/completions", json=body) as response,
    ):
        next(response.iter_lines())
    wait_for_free_slots(server)


@pytest.mark.parametrize(
    ("fields", "status", "param", "message"),
    [
        ({}, 400, "prompt", "Missing required parameter: 'prompt'"),
        ({"prompt": "a", "temperature": 1e9}, 400, "temperature", "must be 0, or a number"),
        ({"prompt": "a", "top_p": "1"}, 400, "top_p", "should be a valid number"),
        ({"prompt": "a", "tools": []}, 400, "tools", "Unrecognized request argument"),
        ({"prompt": "a", "n": 2}, 400, "n", "should be 1"),
        ({"prompt": "\ud800"}, 400, None, "valid Unicode"),
        ({"prompt": "a", "\ud800": 1}, 400, "?", "Unrecognized"),
        ({"prompt": "a", "logit_bias": {"a": 1}}, 400, "logit_bias", "must be token ids"),
        ({"prompt": "a", "logit_bias": {"999": 1}}, 400, "logit_bias", "vocabulary"),
        ({"prompt": "a" * 2001}, 400, "prompt", "2000 tokens"),
        ({"prompt": "a" * 10_000}, 413, None, "the maximum is 10000"),
        ({"prompt": "a", "model": "gpt"}, 404, "model", "does not exist"),
        ({"prompt": "fail"}, 500, None, "had an error"),
    ],
)
def test_errors_have_the_form_of_openai(server, fields, status, param, message):
    response = post(server, **fields)
    assert response.status_code == status
    error = response.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert message in error["message"]
    assert error["param"] == param


@pytest.mark.parametrize("body", [b"", b"{", b"[1]", b'{"n": 1' + b"0" * 5000, b"[" * 9000])
def test_malformed_bodies(server, body):
    response = post_bytes(server, body)
    assert response.status_code == 400
    assert response.json()["error"]["message"]


def test_the_client_raises_errors(client):
    with pytest.raises(openai.BadRequestError, match="Unrecognized"):
        client.completions.create(**MODEL, prompt="a", extra_body={"tool": 1})
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        client.completions.create(model="gpt", prompt="a")
    with pytest.raises(openai.APIError, match="had an error"):
        list(client.completions.create(**MODEL, prompt="fail", stream=True))


def test_limits_and_key():
    """A full queue, a request that takes too long and a wrong key have their own statuses."""
    engine = FakeEngine(num_slots=1, max_queued=1)
    with running(engine, timeout=0.3, api_key="secret") as server:
        assert post(server, prompt="a").status_code == 401
        assert httpx.get(f"{server.url}/health").json() == {"status": "ok"}
        client = client_of(server).with_options(api_key="secret")
        streams = []
        for _ in range(2):
            options = {"max_tokens": 10_000, "stream": True}
            streams.append(client.completions.create(**MODEL, prompt="a", **options))
            while engine.stats()["active"] == 0:
                time.sleep(0.01)
        with pytest.raises(openai.RateLimitError) as caught:
            client.completions.create(**MODEL, prompt="a")
        assert caught.value.response.headers["retry-after"] == "1"
        with pytest.raises(openai.APIError, match=r"more than 0\.3 s"):
            list(streams[0])
        with pytest.raises(openai.InternalServerError, match=r"more than 0\.3 s"):
            client.completions.create(**MODEL, prompt="a", max_tokens=10_000)
        text = httpx.get(f"{server.url}/metrics").text
        assert 'keras_recurrent_requests_total{finish_reason="timeout"}' in text
        assert "keras_recurrent_slots 1.0" in text
        assert "keras_recurrent_inter_token_seconds_bucket" in text
        assert 'keras_recurrent_responses_total{status="429"} 1.0' in text


def test_shutdown_finishes_or_cancels(caplog):
    """An answer that would finish in the grace period is lost, or another one is not reported."""
    engine, found = FakeEngine(step_time=0.01), {}
    with running(engine, grace_period=0.6) as server:

        def ask(number):
            response = post(server, prompt="a", max_tokens=number)
            found[number] = response.status_code, response.json()

        threads = [threading.Thread(target=ask, args=[n]) for n in (20, 5000)]
        for thread in threads:
            thread.start()
        while engine.stats()["active"] < 2:
            time.sleep(0.01)
        server.should_exit = True
        while httpx.get(f"{server.url}/health").status_code == 200:
            time.sleep(0.01)
        assert post(server, prompt="a").json()["error"]["code"] == "shutting_down"
        for thread in threads:
            thread.join()
    assert found[20][0] == 200
    assert found[20][1]["choices"][0]["text"] == TEXT[:20]
    assert found[5000][0] == 503
    (line,) = [r.getMessage() for r in caplog.records if "Shutdown" in r.getMessage()]
    assert line.startswith("Shutdown: 1 requests finished; 1 cancelled: cmpl-")


def test_curl_streams(server):
    body = json.dumps({**MODEL, "prompt": "a", "max_tokens": 40, "stream": True})
    command = ["curl", "-sN", "--json", body, f"{server.url}/v1/completions"]
    lines = subprocess.run(command, capture_output=True, check=True).stdout.decode().splitlines()
    assert [line for line in lines if line][-1] == "data: [DONE]"
    chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == TEXT[:40]


def test_the_page_makes_no_external_request(server):
    response = httpx.get(server.url)
    assert response.headers["content-security-policy"].startswith("default-src 'none'")
    assert "://" not in response.text
    assert len(response.text.splitlines()) <= 150
