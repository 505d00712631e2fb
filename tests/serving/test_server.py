"""HTTP server, as the `openai` package and httpx see it."""

import asyncio
import concurrent.futures
import contextlib
import functools
import json
import multiprocessing
import pickle
import socket
import threading
import time

import httpx
import pytest

pytest.importorskip("fastapi")
pytest.importorskip("openai")

import openai

from keras_recurrent.chat.preprocessing import plain_preprocessor
from keras_recurrent.generation import grammar, sequence
from keras_recurrent.generation.batch import Batch
from keras_recurrent.generation.grammar import GrammarError
from keras_recurrent.models import GriffinCausalLM, SamplingParams
from keras_recurrent.serving import Engine, protocol
from keras_recurrent.serving import server as server_module
from keras_recurrent.serving.client import EngineClient, Limits
from keras_recurrent.serving.options import bind
from keras_recurrent.serving.processes import RemoteLink, run_scheduler, run_server
from keras_recurrent.serving.responses import CompletionFormat
from keras_recurrent.serving.server import Server, create_app
from tests.serving.soak import metrics

pytestmark = pytest.mark.once

TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"
MODEL = {"model": "tiny"}
GREEDY = {"temperature": 0, "logit_bias": {"2": -100}}  # without the end token
LONG = {**GREEDY, "max_tokens": 900}
LIMITS = Limits(1, 0, max_length=9, vocabulary_size=9, state_interval=None)
DEEP = functools.reduce(lambda value, _: [value], range(300), 1)
NUMBERED = {str(number): {} for number in range(20_000)}


@pytest.fixture(scope="module")
def model():
    return GriffinCausalLM.from_preset("griffin_tiny_text", chat_template=TEMPLATE)


@pytest.fixture(scope="module")
def small_model():
    return GriffinCausalLM.from_preset("hawk_tiny", num_layers=1)


@contextlib.contextmanager
def running(engine, grace_period=5, max_connections=1024, **options):
    """Serves an engine on a free port; yields the server, with its address as `url`."""
    app = create_app(engine, "tiny", **options)
    server = Server(app, bind("127.0.0.1", 0), max_connections, grace_period)
    link, run = engine._link, server.run
    if isinstance(link, RemoteLink):
        run = functools.partial(run_server, server, link)
    thread = threading.Thread(target=run)
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


@contextlib.contextmanager
def remote(engine):
    """Yields a client of an engine, as the HTTP process has it, over a connection."""
    ours, theirs = multiprocessing.Pipe()
    scheduler = engine._scheduler
    thread = threading.Thread(target=run_scheduler, args=(scheduler, theirs))
    thread.start()
    preprocessor = pickle.loads(pickle.dumps(plain_preprocessor(engine.preprocessor)))
    try:
        yield EngineClient(RemoteLink(ours, scheduler.stats()), preprocessor, engine.limits)
    finally:
        ours.close()
        thread.join(20)
        assert not thread.is_alive()
        theirs.close()
        engine.close()


@pytest.fixture(scope="module")
def server(model):
    """Server whose engine is reached as from another process, without Keras."""
    with (
        remote(Engine(model, num_slots=4, max_length=1000)) as engine,
        running(engine, max_body=10_000) as server,
    ):
        yield server


@pytest.fixture(scope="module")
def engine(server):
    return server.config.app.state.service.engine


@pytest.fixture
def submitted(engine, monkeypatch):
    """Returns a list of the keyword arguments and the request of each call of `submit`."""
    found, submit = [], engine.submit

    def record(*arguments, **options):
        found.append((options, submit(*arguments, **options)))
        return found[-1][1]

    monkeypatch.setattr(engine, "submit", record)
    return found


def submit_greedy(engine, prompt="Hello", max_new_tokens=60):
    """Submits a request with the options of `GREEDY`."""
    sampling = SamplingParams(temperature=0, logit_bias={2: -100})
    return engine.submit(prompt, sampling, max_new_tokens)


@pytest.fixture(scope="module")
def text(engine):
    """Answer to "Hello" with `GREEDY`."""
    return submit_greedy(engine).result().text


def make_client(server, **options):
    options = {"api_key": "none", "max_retries": 0, **options}
    return openai.OpenAI(base_url=f"{server.url}/v1", **options)


@pytest.fixture(scope="module")
def client(server):
    return make_client(server)


def chat(content="Hello", role="user"):
    """Returns the fields of a chat request with one message."""
    return {"messages": [{"role": role, "content": content}]}


def json_format(schema):
    """Returns a `response_format`."""
    return {"type": "json_schema", "json_schema": {"name": "a", "schema": schema, "strict": True}}


def post(server, path="completions", **fields):
    return post_bytes(server, json.dumps({**MODEL, **fields}).encode(), path)


def post_bytes(server, body, path="completions"):
    headers = {"content-type": "application/json"}
    return httpx.post(f"{server.url}/v1/{path}", content=body, headers=headers)


def wait_for(condition):
    """Waits until `condition()` is true."""
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end, condition
        time.sleep(0.005)


def connect(server, text=""):
    """Returns a connection, over which a part of a request was sent."""
    url = httpx.URL(server.url)
    connection = socket.create_connection((url.host, url.port))
    connection.sendall(text.encode())
    return connection


def count_cancelled(server):
    return metrics(server.url).get('requests_total{finish_reason="cancelled"}', 0)


def test_models_lists_the_model(client):
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").object == "model"


def test_chat_returns_answer_log_probabilities_and_usage(client, text):
    options = {"max_completion_tokens": 9, "logprobs": True, "top_logprobs": 2, "seed": -1}
    answer = client.chat.completions.create(**MODEL, **chat(), **options, **GREEDY)
    (choice,) = answer.choices
    assert (choice.message.role, choice.message.content) == ("assistant", text[:9])
    assert choice.finish_reason == "length"
    assert [len(each.top_logprobs) for each in choice.logprobs.content] == [2] * 9
    assert choice.logprobs.content[0].token == text[0]
    assert choice.logprobs.content[0].bytes == [ord(text[0])]
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (6, 9)


def test_chat_streams_answer_and_usage(client, text):
    """Text is lost, or the role, the finish reason or the usage is missing."""
    options = {"max_tokens": 60, "stream_options": {"include_usage": True}, "logprobs": True}
    options |= {**MODEL, **GREEDY, **chat([{"type": "text", "text": "Hello"}])}
    chunks = list(client.chat.completions.create(**options, stream=True))
    choices = [chunk.choices[0] for chunk in chunks[:-1]]
    assert choices[0].delta.role == "assistant"
    assert "".join(choice.delta.content or "" for choice in choices) == text
    assert [c.finish_reason for c in choices] == [None] * (len(choices) - 1) + ["length"]
    assert sum(len(c.logprobs.content) for c in choices if c.logprobs) == 60
    assert chunks[-1].choices == []
    assert chunks[-1].usage.total_tokens == 66


def test_response_format_gives_json(client):
    """The grammar of a request is lost between the two processes, or in one kind of response."""
    item = {"enum": ["a", 1, None]}
    schema = {"type": "array", "items": item, "minItems": 3, "maxItems": 9}
    options = {**MODEL, "max_tokens": 99, "seed": 0, "temperature": 2}
    form = {"response_format": json_format(schema)}
    answer = client.chat.completions.create(**options, **chat(), **form).choices[0]
    stream = client.chat.completions.create(**options, **chat(), **form, stream=True)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
    completion = client.completions.create(**options, prompt="Hello", extra_body=form).choices[0]
    assert text == answer.message.content == completion.text
    assert set(json.loads(text)) <= set(item["enum"])
    assert answer.finish_reason == "stop"
    form = {"type": "json_object"}
    answer = client.chat.completions.create(**options, **chat(), response_format=form).choices[0]
    assert answer.message.content.startswith("{")


@pytest.mark.parametrize(("owner", "name"), [(sequence, "consume"), (Batch, "make_matchers")])
def test_grammar_that_exceeds_a_limit_ends_its_request_alone(server, monkeypatch, owner, name):
    """The error is one of the server, or it ends the engine."""
    function, form = getattr(owner, name), {"type": "json_object"}

    def fail(*arguments):
        raise GrammarError("`grammar` cannot be continued")

    monkeypatch.setattr(owner, name, fail)
    fields = {"prompt": "a", "response_format": form, "n": 2}
    words = "`response_format` cannot be continued"
    assert_error(post(server, **fields), 400, "response_format", words)
    assert words in post(server, **fields, stream=True).text
    monkeypatch.setattr(owner, name, function)
    assert post(server, **fields).status_code == 200


def test_hostile_schemas_do_not_delay_requests_without_a_grammar(server, monkeypatch):
    """Requests whose grammars compile for long take all threads, and every other client waits."""
    compiles, waiting = threading.Event(), threading.Semaphore(0)
    compile_grammar = grammar._compile

    def wait(*arguments):
        waiting.release()
        assert compiles.wait(20)
        return compile_grammar(*arguments)

    monkeypatch.setattr(grammar, "_compile", wait)
    monkeypatch.setattr(httpx, "post", functools.partial(httpx.post, timeout=20))
    schemas = [json_format({"const": number}) for number in range(45)]  # anyio has 40 threads
    with concurrent.futures.ThreadPoolExecutor(len(schemas)) as pool:
        send = functools.partial(post, server, prompt="a")
        answers = [pool.submit(send, response_format=schema) for schema in schemas]
        assert waiting.acquire(timeout=20)
        wait_for(lambda: len(server.config.app.state.service.groups) == len(schemas))
        assert post(server, prompt="a", max_tokens=1).status_code == 200
        compiles.set()
        assert {answer.result().status_code for answer in answers} == {200}


def test_completions_of_several_prompts_have_indices(client, text):
    """An answer to several prompts lacks a text, an index or log probabilities."""
    stop = text[20:24]
    options = {**MODEL, **GREEDY, "max_tokens": 60}
    answer = client.completions.create(**options, prompt=["Hello"] * 2, stop=[stop], logprobs=1)
    assert [choice.index for choice in answer.choices] == [0, 1]
    for choice in answer.choices:
        assert (choice.text, choice.finish_reason) == (text[: text.index(stop)], "stop")
        assert len(choice.logprobs.tokens) == text.index(stop) + 4
        assert choice.logprobs.text_offset[:3] == [0, 1, 2]
    assert answer.usage.prompt_tokens == 12
    tokens = [1, *(byte + 3 for byte in b"Hello")]
    stream = client.completions.create(**options, prompt=[tokens, [1, 70]], logprobs=0, stream=True)
    choices = [chunk.choices[0] for chunk in stream]
    other = client.completions.create(**options, prompt=[[1, 70]], logprobs=0).choices[0]
    assert len(other.logprobs.token_logprobs) == 60  # 0 counts as true
    assert {*map(len, other.logprobs.top_logprobs)} == {0}
    for index, expected in enumerate((text, other.text)):
        chunks = [choice for choice in choices if choice.index == index]
        assert "".join(chunk.text for chunk in chunks) == expected
        assert [chunk.finish_reason for chunk in chunks if chunk.finish_reason] == ["length"]
        assert sum(len(chunk.logprobs.tokens) for chunk in chunks if chunk.logprobs) == 60
    assert other.text != text


def test_n_answers_are_choices_of_one_prompt(client, submitted):
    """A choice is missing, has a wrong index or no role, or its prompt is counted again."""
    options = {**MODEL, "max_tokens": 9, "n": 3, "seed": 5, "logit_bias": GREEDY["logit_bias"]}
    answer = client.completions.create(**options, prompt=["Hello", "Hi"])
    assert [choice.index for choice in answer.choices] == [*range(6)]
    assert len({choice.text for choice in answer.choices}) == 6
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (6 + 3, 6 * 9)
    assert len(submitted) == 2
    stream_options = {"include_usage": True}
    stream = client.chat.completions.create(
        **options, **chat(), stream=True, stream_options=stream_options
    )
    *chunks, last = stream
    choices = [chunk.choices[0] for chunk in chunks]
    for index in range(3):
        own = [choice for choice in choices if choice.index == index]
        assert own[0].delta.role == "assistant"
        assert "".join(c.delta.content or "" for c in own) == answer.choices[index].text
        assert own[-1].finish_reason == "length"
    assert last.usage.prompt_tokens == 6


def test_messages_that_the_python_client_returns_are_accepted(server):
    """A conversation with an answer of the client's `parse` or `stream`, or a refusal, fails."""
    answer = {"role": "assistant", "content": None, "refusal": "no", "parsed": None, "audio": None}
    (user,) = chat()["messages"]
    options = {"stream": True, "stream_options": {"include_obfuscation": False}, "max_tokens": 1}
    found = post(server, "chat/completions", messages=[user, answer, user], **options)
    assert found.status_code == 200, found.text


@pytest.mark.parametrize("max_tokens", [0, 1])
def test_echo_begins_choices_with_prompt_and_its_log_probabilities(client, max_tokens):
    """A prompt, its first token or its offset is missing, or a stream differs."""
    tokens = [[1, *(byte + 3 for byte in text)] for text in (b"Hello", "é…".encode())]
    options = {**MODEL, **GREEDY, "max_tokens": max_tokens, "echo": True, "logprobs": 1}
    found = client.completions.create(**options, prompt=tokens, n=2)
    assert [c.text[: len(c.text) - max_tokens] for c in found.choices] == ["Hello"] * 2 + ["é…"] * 2
    first = found.choices[0].logprobs
    assert first.tokens[:6] == ["<start>", *"Hello"]
    assert first.text_offset[:6] == [0, 0, 1, 2, 3, 4]
    assert first.token_logprobs[0] is first.top_logprobs[0] is None
    for choice in found.choices[:2]:
        assert len(choice.logprobs.token_logprobs) == 6 + max_tokens
        for value, top in zip(first.token_logprobs[1:], first.top_logprobs[1:], strict=True):
            assert value <= max(top.values())
    stream = client.completions.create(**options, prompt="Hello", stream=True)
    chunks = [chunk.choices[0] for chunk in stream]
    assert "".join(chunk.text for chunk in chunks) == found.choices[0].text
    assert [x for c in chunks if c.logprobs for x in c.logprobs.tokens] == first.tokens
    options["logprobs"] = None
    assert client.completions.create(**options, prompt="Hello").choices[0].text[:5] == "Hello"


@pytest.mark.parametrize("stream", [True, False])
def test_client_that_disconnects_frees_its_slot(server, stream):
    """A request without a client keeps its slot, or is not in the metrics."""
    before = count_cancelled(server)
    body = {**MODEL, **LONG, "prompt": "Hello", "stream": stream}
    with (
        httpx.Client(timeout=0.2) as connection,
        contextlib.suppress(httpx.TimeoutException),
        connection.stream("POST", f"{server.url}/v1/completions", json=body) as response,
    ):
        next(response.iter_lines())
    wait_for(lambda: count_cancelled(server) > before)
    found = metrics(server.url)
    assert (found["slots_active"], found["requests_queued"]) == (0, 0)


def assert_error(response, status, param, words):
    """Asserts that a response has the form of OpenAI's errors."""
    assert response.status_code == status
    error = response.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert words in error["message"]
    assert error["param"] == param


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"temperature": 1e9}, "temperature", "must be 0, or a number"),
        ({"top_p": "1"}, "top_p", "should be a valid number"),
        ({"tools": []}, "tools", "Unrecognized request argument"),
        ({"n": 129}, "n", "an integer from 1 to 128"),
        ({"prompt": "\ud800"}, None, "hex escape at line 1"),
        ({"\ud800": 1}, None, "hex escape at line 1"),
        ({"user": DEEP}, None, "recursion limit exceeded"),
        ({"stop": ["b"] * 17}, "stop", "at most 16 items"),
        ({"stop": "b" * 1025}, "stop", "at most 1024 characters"),
        ({"prompt": [""] * 2049}, "prompt", "at most 2048 items"),
        ({"cache_salt": ""}, "cache_salt", "at least 1 character"),
        ({"stream_options": {"x": 1}}, "x", "Unrecognized request"),
        ({"stream_options": {}}, "stream_options", "is only allowed when 'stream' is enabled"),
        ({"logit_bias": {"065": 1}}, "logit_bias", "should match pattern"),
        ({"logit_bias": {"999": 1}}, "logit_bias", "vocabulary"),
        ({"prompt": "a" * 1001}, "prompt", "leaves no tokens for the answer within 1000 tokens"),
        ({"prompt": []}, "prompt", "at least one token"),
        ({"max_tokens": 0}, "max_tokens", "`max_tokens` must be"),
        ({"echo": True, "max_tokens": -1}, "max_tokens", "greater than or equal to 0"),
        ({"best_of": 2}, "best_of", "not supported by this server"),
    ],
)
def test_error_of_completions_names_the_parameter(server, fields, param, words):
    """An error names an argument of Python, or the wrong parameter."""
    assert_error(post(server, **{"prompt": "a", **fields}), 400, param, words)


LIMIT = (
    "(6 tokens) and `max_completion_tokens` (995) exceed 1000 tokens, the `--max-length` of the "
)
TWO_TYPES = [*chat()["messages"], *chat([{"type": "image_url"}])["messages"]]


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"max_completion_tokens": 0}, "max_completion_tokens", "`max_completion_tokens` must be"),
        ({"max_completion_tokens": 995}, "messages", LIMIT),
        (chat("a" * 1000), "messages", "(1001 tokens) leaves no tokens for the answer within"),
        (
            {"messages": TWO_TYPES},
            "messages[1]",
            ": Input should be 'text'; got 'image_url'.",
        ),
        ({"functions": [{"name": "f"}]}, "functions", "not supported by this server"),
        ({"response_format": {"type": "json_schema"}}, "response_format", "must have the schema"),
        ({"response_format": {"type": "xml"}}, "response_format", "'text', 'json_object' or"),
        ({"response_format": json_format({"type": "objekt"})}, "response_format", "type: objekt"),
        ({"audio": {"voice": "a"}}, "audio", "not supported by this server"),
        (
            {"messages": [{**TWO_TYPES[0], "mood": 1}]},
            "messages[0].mood",
            "Unknown parameter: 'messages[0].mood'.",
        ),
        ({"messages": []}, "messages", "'messages': List should have at least 1"),
        (chat(role="wizard"), "messages[0]", "'assistant' or 'tool'"),
        (chat([{"type": "text"}]), "messages[0]", "'text'"),
        ({"max_tokens": 1, "max_completion_tokens": 2}, "max_tokens", "differ. Send one of"),
        ({"top_logprobs": 1}, "top_logprobs", "requires `logprobs` to be true; got none."),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}},
            *("response_format", "must have the schema"),
        ),
    ],
)
def test_error_of_chat_names_the_parameter(server, fields, param, words):
    """An error lists alternatives of the types of messages, or names the wrong parameter."""
    assert_error(post(server, "chat/completions", **{**chat(), **fields}), 400, param, words)


def test_missing_prompt_large_body_and_other_model_are_errors(server):
    assert_error(post(server), 400, "prompt", "Missing required parameter: 'prompt'")
    assert_error(post(server, prompt="a" * 10_000), 413, None, "the maximum is 10000")
    assert_error(post(server, prompt="a", model="gpt"), 404, "model", "does not exist")


def test_request_with_a_rejected_prompt_cancels_the_others(server, submitted):
    """Prompts before a rejected one are answered, although the client gets an error."""
    response = post(server, prompt=["a", "a" * 999], max_tokens=500, **GREEDY)
    assert response.status_code == 400
    assert [request.result().finish_reason for _, request in submitted] == ["cancelled"]


def test_chat_without_a_template_is_an_error_that_names_the_option(server, engine, monkeypatch):
    """The error asks a client of HTTP to pass an argument of Python."""
    monkeypatch.setattr(engine.preprocessor, "chat_template", None)
    response = post(server, "chat/completions", **chat())
    assert response.status_code == 400
    assert "`--chat-template`" in response.json()["error"]["message"]


def test_neutral_values_of_unsupported_options_have_no_effect(client, text):
    """A client that sends all options with their defaults gets status 400, or another answer."""
    shared = {**MODEL, **GREEDY, "max_tokens": 5, "n": 1, "user": "a"}
    options = {"prompt": "Hello", "echo": False, "best_of": 1, "suffix": None}
    assert client.completions.create(**shared, **options).choices[0].text == text[:5]
    neutral = {"tools": [], "tool_choice": "none", "metadata": {"a": "b"}, "store": False}
    text_format = {"type": "text"}
    options = {**shared, **chat(), **neutral, "response_format": text_format}
    assert client.chat.completions.create(**options).choices[0].message.content == text[:5]


@pytest.mark.parametrize("body", [b"", b"{", b"[1]", b'{"n": 1' + b"0" * 5000, b"[" * 9000])
def test_malformed_body_is_an_error(server, body):
    response = post_bytes(server, body)
    assert response.status_code == 400
    assert response.json()["error"]["message"]


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt": [{}] * 20_000},
        {"prompt": ["a", *[0] * 20_000]},
        {"prompt": [[-1] * 20_000] * 2},
        {"prompt": "a", "stop": [0] * 20_000},
        {"prompt": "a", "logit_bias": NUMBERED},
        {"prompt": "a", "stream_options": NUMBERED},
        {"prompt": "a", **NUMBERED},
        {"messages": [{}] * 20_000},
        chat([{}] * 20_000),
        chat([{"type": "text", "text": "a", **NUMBERED}]),
    ],
)
def test_parse_many_errors_ends_at_the_first(fields, monkeypatch):
    """One body costs the server seconds and gigabytes, because each error in it is recorded."""
    counts = []

    def validation_error(errors):
        counts.append(len(errors))
        return protocol.ApiError(400, "invalid")

    monkeypatch.setattr(protocol, "validation_error", validation_error)
    body_type = protocol.ChatBody if "messages" in fields else protocol.CompletionBody
    with pytest.raises(protocol.ApiError):
        body_type.parse(json.dumps({**MODEL, **fields}).encode())
    assert sum(counts) <= 8


def test_parse_large_body_runs_in_another_thread(server, monkeypatch):
    """A large body stops all connections while it is parsed."""
    threads, parse = [], protocol.CompletionBody.parse
    monkeypatch.setattr(server_module, "SMALL_BODY", 100)

    def record(data):
        threads.append(threading.current_thread().name)
        return parse(data)

    monkeypatch.setattr(protocol.CompletionBody, "parse", record)
    for size in (1, 200):
        post(server, prompt="a", max_tokens=1, user="b" * size)
    assert threads[0].startswith("Thread-")
    assert threads[1].startswith("AnyIO")


def test_cache_salt_is_passed_to_the_engine(server, submitted):
    """Clients with different salts share prefix states."""
    assert post(server, prompt="a", max_tokens=1, cache_salt="b").status_code == 200
    assert [options["cache_salt"] for options, _ in submitted] == ["b"]


def test_descriptions_of_fastapi_are_not_served(server):
    """A client without the key gets a description of the API."""
    for path in ("/openapi.json", "/docs", "/redoc"):
        assert httpx.get(server.url + path).status_code == 404


def test_wrong_method_or_content_type_is_an_error_and_head_is_served(server):
    """A method or content type has no clear error, or a probe of the health fails."""
    url = f"{server.url}/v1/completions"
    response = httpx.get(url)
    assert (response.status_code, response.headers["allow"]) == (405, "POST")
    assert response.json()["error"]["message"] == "Method Not Allowed: GET /v1/completions"
    body = json.dumps({**MODEL, "prompt": "a"})
    for kind in ("application/x-www-form-urlencoded", "text/plain"):
        response = httpx.post(url, content=body, headers={"content-type": kind})
        assert response.status_code == 415
        assert "'application/json'" in response.json()["error"]["message"]
    assert httpx.post(url, content=body).status_code == 415
    for path in ("/", "/health"):
        assert httpx.head(server.url + path).status_code == 200


def test_full_queue_timeout_and_wrong_key_are_errors(small_model):
    """A client cannot distinguish a full queue, a timeout and a wrong key."""
    engine = Engine(small_model, num_slots=1, max_queued=1, max_length=100_000)
    options = {**MODEL, **GREEDY, "prompt": "a", "max_tokens": 90_000}
    # On JAX, the first tokens take longer than the timeout.
    submit_greedy(engine, "a", 2).result()
    with running(engine, timeout=0.5, api_key="secret") as server:
        assert post(server, prompt="a").status_code == 401
        headers = {"authorization": "bearer secret"}  # the scheme has no case
        assert httpx.get(f"{server.url}/v1/models", headers=headers).status_code == 200
        assert httpx.get(f"{server.url}/health").json() == {"status": "ok"}
        client = make_client(server, api_key="secret")
        with pytest.raises(openai.BadRequestError, match=r"prompts times `n`, must .*; got 3"):
            client.completions.create(**options, n=3)
        stream = client.completions.create(**options, stream=True)
        next(iter(stream))
        waiting = client.completions.create(**options, stream=True)
        with pytest.raises(openai.RateLimitError) as caught:
            client.completions.create(**options)
        assert caught.value.response.headers["retry-after"] == "1"
        with pytest.raises(openai.APIError, match=r"more than 0\.5 s"):
            list(stream)
        waiting.close()
        while engine.stats()["queued"]:
            time.sleep(0.01)
        with pytest.raises(openai.InternalServerError, match=r"more than 0\.5 s"):
            client.completions.create(**options)
        text = httpx.get(f"{server.url}/metrics").text
    assert 'keras_recurrent_requests_total{finish_reason="timeout"}' in text
    assert "keras_recurrent_slots 1.0" in text
    assert "keras_recurrent_inter_token_seconds_bucket" in text
    assert 'keras_recurrent_responses_total{status="429"} 1.0' in text


def test_too_many_connections_are_an_error(small_model):
    """The error is not JSON, or a probe of the health fails."""
    with running(Engine(small_model, num_slots=1), max_connections=1) as server:
        with connect(server):
            response = post(server, prompt="a")
            assert response.status_code == 503
            assert response.json()["error"]["code"] == "too_many_connections"
            assert response.headers["connection"] == "close"
            assert httpx.get(f"{server.url}/health").status_code == 200
        wait_for(lambda: not server.server_state.connections)
        assert post(server, prompt="a", max_tokens=1).status_code == 200


def test_stalled_connections_are_closed(small_model, monkeypatch):
    """Clients that send no request, or do not read the answer, use all connections forever."""
    monkeypatch.setattr(server_module, "STALL_SECONDS", 0.1)
    engine = Engine(small_model, num_slots=1, max_length=100_000)
    body = json.dumps({**MODEL, **GREEDY, "prompt": "a", "max_tokens": 90_000, "stream": True})
    head = f"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: {len(body)}\r\n"
    with running(engine) as server, contextlib.ExitStack() as stack:
        service = server.config.app.state.service

        async def send_forever(self):
            _, group, *_ = self._arguments
            while group._error is None:
                yield "a" * 2**16
                await asyncio.sleep(0)

        monkeypatch.setattr(server_module.EventStream, "_stream_events", send_forever)
        unread = f"{head}Content-Type: application/json\r\n\r\n{body}"
        for text in ("", head, unread):
            stack.enter_context(connect(server, text))
        wait_for(lambda: service.groups)
        wait_for(lambda: not server.server_state.connections)
        wait_for(lambda: not service.groups)


def test_shutdown_while_a_body_arrives_is_an_error(small_model, caplog):
    """The connection is cut, with a traceback in the log, or the shutdown takes 30 s."""
    with running(Engine(small_model, num_slots=1)) as server:
        head = "POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 9\r\n\r\n{"
        with connect(server, head) as connection:
            wait_for(lambda: server.config.app.state.service.body_deadlines)
            server.should_exit = True
            connection.settimeout(20)
            answer = b"".join(iter(lambda: connection.recv(2**16), b""))
    assert answer.startswith(b"HTTP/1.1 503")
    assert b'"shutting_down"' in answer
    assert not [record for record in caplog.records if record.exc_info]


def test_shutdown_finishes_or_cancels_requests(small_model, caplog, monkeypatch):
    """An answer that ends in the grace period is lost, or a cancelled one is not reported."""
    engine, found = Engine(small_model, num_slots=2, max_length=100_000), {}
    expected = submit_greedy(engine).result()
    # No step ends before the shutdown has begun, and the grace period ends on a signal.
    may_step, is_over, batch = threading.Event(), threading.Event(), engine._scheduler.batch
    step = batch.step
    monkeypatch.setattr(batch, "step", lambda: may_step.wait() and step())
    with running(engine) as server:
        service = server.config.app.state.service
        drain = service.drain
        monkeypatch.setattr(service, "drain", lambda *_: drain(600, is_over.is_set))

        def request(number):
            found[number] = post(server, prompt="Hello", **GREEDY, max_tokens=number)

        threads = [threading.Thread(target=request, args=[n]) for n in (60, 90_000)]
        for thread in threads:
            thread.start()
        wait_for(lambda: len(list(filter(None, service.groups.values()))) == 2)
        server.should_exit = True
        wait_for(lambda: httpx.get(f"{server.url}/health").status_code == 503)
        assert post(server, prompt="a").json()["error"]["code"] == "shutting_down"
        may_step.set()
        threads[0].join()
        is_over.set()
        threads[1].join()
    assert found[60].status_code == 200
    assert found[60].json()["choices"][0]["text"] == expected.text
    assert found[90_000].status_code == 503
    assert found[90_000].json()["error"]["code"] == "shutting_down"
    (line,) = [r.getMessage() for r in caplog.records if "Shutdown" in r.getMessage()]
    cancelled = found[90_000].headers["x-request-id"]
    assert line == f"Shutdown: requests finished: 1; cancelled: 1 ({cancelled})"
    assert engine.is_closed


def test_failure_while_text_is_sent_ends_its_stream(server, monkeypatch):
    """A stream whose event cannot be made never ends, or hides the error."""
    chunk, ids = CompletionFormat.chunk, []

    def fail(form, *arguments):
        ids.append(form.id)
        if ids.count(form.id) == 3:
            raise TypeError
        return chunk(form, *arguments)

    monkeypatch.setattr(CompletionFormat, "chunk", fail)
    text = post(server, prompt="Hello", **LONG, stream=True).text
    assert "The server had an error" in text
    assert "[DONE]" not in text
    wait_for(lambda: not server.config.app.state.service.groups)


def test_stream_over_http_1_0_is_not_in_chunks(server):
    """A client without support for chunked encoding gets the lengths of chunks as text."""
    body = json.dumps({**MODEL, **GREEDY, "prompt": "Hello", "stream": True})
    head = f"Content-Type: application/json\r\nContent-Length: {len(body)}"
    connection = connect(server, f"POST /v1/completions HTTP/1.0\r\n{head}\r\n\r\n{body}")
    received = b"".join(iter(functools.partial(connection.recv, 2**16), b""))
    connection.close()
    events = received.partition(b"\r\n\r\n")[2].strip().split(b"\n\n")
    assert len(events) > 2
    assert all(event.startswith(b"data: ") for event in events)


def test_failed_engine_is_an_error_and_unhealthy(small_model, monkeypatch):
    """The server reports health, or hangs, after the engine's thread has failed."""
    engine = Engine(small_model, num_slots=1)
    monkeypatch.setattr(engine._scheduler, "_process_chunks", lambda: 1 / 0)
    with running(engine) as server:
        response = post(server, prompt="a")
        assert (response.status_code, response.json()["error"]["code"]) == (503, "engine_failed")
        assert httpx.get(f"{server.url}/health").status_code == 503
        assert post(server, prompt="a").status_code == 503


def test_messages_that_have_arrived_are_read_together():
    """Tokens pile up in the connection, and stop the engine, if the event loop is slower."""
    ours, theirs = multiprocessing.Pipe()
    link, found, counts = RemoteLink(ours, {}), [], []
    engine = EngineClient(link, None, LIMITS)
    request = engine.submit([1], SamplingParams(temperature=0), stop_token_ids=None)
    for token in (5, 6):
        theirs.send(({}, [(1, [token], [], None, 0, None)]))
    loop = asyncio.new_event_loop()

    def record(delta):
        found.extend(delta.token_ids)
        loop.call_soon(lambda: counts.append(len(found)))

    request.set_listener(record)
    loop.add_reader(ours, lambda: link.read() or loop.call_soon(loop.stop))
    loop.call_later(20, loop.stop)
    theirs.close()
    loop.run_forever()
    loop.close()
    ours.close()
    assert (found, counts[0], engine.is_closed) == ([5, 6], 2, True)


def test_page_makes_no_external_request(server):
    """The page loads a resource from another server."""
    response = httpx.get(server.url)
    assert response.headers["content-security-policy"].startswith("default-src 'none'")
    assert "://" not in response.text
    assert len(response.text.splitlines()) <= 200
