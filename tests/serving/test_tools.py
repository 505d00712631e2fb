"""Tools of chat completions, as the `openai` package sees them, with scripted answers."""

import json
import queue
import sys
import threading

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("openai")

import openai

from keras_recurrent.chat.tools import FORMATS
from keras_recurrent.serving.client import EngineClient, Limits
from tests.chat.test_tools import LFM2, TOOLS, make_bytes, make_marked
from tests.serving.test_server import assert_error, make_client, post, running
from tests.tokenizers import bpe

pytestmark = pytest.mark.once

CALLS = (
    'Wait.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "time", "arguments": {}}\n</tool_call>'
)
MESSAGES = [
    {"role": "user", "content": "Paris?"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {
                "id": "call_1",
                "type": "function",
                "function": {"name": "weather", "arguments": '{"city": "Paris"}'},
            }
        ],
    },
    {"role": "tool", "tool_call_id": "call_1", "content": "7 °C"},
]


class Script:
    """Link of an `EngineClient` to a scheduler that answers each request with the same tokens.

    Attributes:
        prompts: a list of the token ids of the prompts.
        grammars: a list of the grammars of the requests.
    """

    is_closed, error, emit = False, None, None

    def __init__(self, token_ids):
        self._token_ids, self._results, self.prompts = token_ids, queue.SimpleQueue(), []
        self.grammars = []
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self):
        for results in iter(self._results.get, None):
            self.emit(results)
        self.emit(None)

    def send(self, name, number=None, tokens=None, params=None, *arguments, **options):
        if name == "close":
            self.is_closed = True
            self._results.put(None)
        if name == "submit":
            self.prompts.append(tokens.tolist())
            self.grammars.append(params.grammar)
            ids = self._token_ids
            for index in range(params.n):
                for token in ids[:-1]:
                    self._results.put([(number + index, [token], [], None, 0, None)])
                self._results.put([(number + index, ids[-1:], [], "stop", 0, None)])

    def stats(self):
        return dict.fromkeys(("tokens", "prompt_tokens", "prefix_hits", "prefix_tokens"), 0)


def serve(preprocessor, token_ids):
    """Returns a context manager of a server with scripted answers, and the `Script`."""
    script = Script([*map(int, token_ids)])
    limits = Limits(4, 100, 4000, 2000, state_interval=None)
    return running(EngineClient(script, preprocessor, limits)), script


def simplify(tool_calls):
    assert all(call.id.startswith("call_") and call.type == "function" for call in tool_calls)
    return [(call.function.name, json.loads(call.function.arguments)) for call in tool_calls]


@pytest.fixture(scope="module")
def server():
    preprocessor = make_bytes()
    context, _ = serve(preprocessor, preprocessor.tokenizer(CALLS))
    with context as server:
        yield server


EXPECTED = [("weather", {"city": "Paris"}), ("time", {})]


def test_chat_completions_return_and_stream_parallel_calls():
    """The client gets calls as text, only some of them, or no finish reason."""
    preprocessor = make_bytes()
    context, script = serve(preprocessor, preprocessor.tokenizer(CALLS))
    with context as server:
        create = make_client(server).chat.completions.create
        options = {"model": "tiny", "messages": MESSAGES, "tools": TOOLS}
        for choice in create(**options, n=2).choices:
            assert (choice.message.content, choice.finish_reason) == ("Wait.", "tool_calls")
            assert simplify(choice.message.tool_calls) == EXPECTED
        prompt = bytes(id - 3 for id in script.prompts[0] if id >= 3).decode()
        assert f"<tools>{json.dumps(TOOLS[0])}" in prompt
        assert '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}' in prompt
        assert "tool\n7 °C" in prompt
        chunks = [chunk.choices[0] for chunk in create(**options, stream=True)]
        assert "".join(c.delta.content or "" for c in chunks) == "Wait."
        calls = [call for c in chunks for call in c.delta.tool_calls or []]
        assert simplify(calls) == EXPECTED
        assert [call.index for call in calls] == [0, 1]
        assert [c.finish_reason for c in chunks if c.finish_reason] == ["tool_calls"]
        first = next(n for n, c in enumerate(chunks) if c.delta.tool_calls)
        assert first < len(chunks) - 1  # before the end of the answer
        (call,) = create(**options, parallel_tool_calls=False).choices[0].message.tool_calls
        assert call.function.name == "weather"
        create(**options, tool_choice="required")
        create(**options, tool_choice={"type": "function", "function": {"name": "time"}})
        both, named = script.grammars[-2:]
        assert both.startswith("start: call+\n")
        assert "weather" in both
        assert named.startswith("start: call\n")
        assert "weather" not in named
        assert script.grammars[0] is None
        answer = create(**options, tool_choice="none").choices[0]
        assert (answer.message.content, answer.finish_reason) == (CALLS, "stop")
        assert "<tools>" not in bytes(id - 3 for id in script.prompts[-1] if id >= 3).decode()


@pytest.mark.parametrize("stream", [False, True])
def test_marks_that_are_special_tokens_are_parsed(stream):
    """The text of an answer lacks the marks, so that the calls of LFM2 are its content."""
    preprocessor = make_marked()
    begin, end = map(preprocessor.tokenizer.token_to_id, FORMATS["lfm2"][:2])
    call = preprocessor.tokenizer("[time(city='Oslo')]")
    context, _ = serve(preprocessor, [begin, *call, end, bpe.END])
    with context as server:
        create = make_client(server).chat.completions.create
        found = create(model="tiny", messages=MESSAGES, tools=TOOLS, stream=stream)
        choices = [c.choices[0] for c in found] if stream else found.choices
        messages = [c.delta if stream else c.message for c in choices]
        calls = [call for message in messages for call in message.tool_calls or []]
        assert simplify(calls) == [("time", {"city": "Oslo"})]
        assert not any(message.content for message in messages)


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"tools": [{"type": "function"}]}, "tools", "tool 0 must be a dictionary"),
        ({"tools": TOOLS * 65}, "tools", "list of 1 to 128"),
        ({"tools": TOOLS * 2}, "tools", "different names; tool 2 is 'weather' again"),
        # An error of the template or the grammar would come first.
        ({"tools": [{"type": "function"}], "tool_choice": "required"}, "tools", "tool 0 must be"),
        ({"tool_choice": "required", "tools": None}, "tool_choice", 'with `tools`, "required" or'),
        ({"tool_choice": "maybe"}, "tool_choice", "got 'maybe'"),
        (
            {"tool_choice": {"type": "function", "function": {"name": "no"}}},
            *("tool_choice", "here 'weather', 'time'}}; got {'function': {'name': 'no'}"),
        ),
        (
            {
                "tool_choice": "required",
                "tools": [
                    {"type": "function", "function": {"name": "f", "parameters": {"not": {}}}}
                ],
            },
            *("tools", "`tools` is invalid: "),
        ),
        ({"messages": [{"role": "user", "content": None}]}, "messages", "must be a string"),
        ({"messages": [{"role": "user"}]}, "messages", "'content' of message 0 must be a string"),
        (
            {"messages": [{**MESSAGES[1], "tool_calls": [{"function": {"name": "f"}}]}]},
            *("messages", "'tool_calls' of message 0 must be a list"),
        ),
        (
            {
                "messages": [
                    {**MESSAGES[1], "tool_calls": [{"function": {"name": "f", "arguments": "[1]"}}]}
                ]
            },
            *("messages", "'tool_calls' of message 0 must be a list"),
        ),
    ],
)
def test_invalid_tools_are_errors(server, fields, param, words):
    fields = {"messages": MESSAGES, "tools": TOOLS, **fields}
    assert_error(post(server, "chat/completions", **fields), 400, param, words)


def test_tools_with_a_template_without_tools_are_an_error():
    preprocessor = make_bytes(LFM2.replace("tools", "x"))
    context, _ = serve(preprocessor, preprocessor.tokenizer("a"))
    with context as server, pytest.raises(openai.BadRequestError, match="with tools") as caught:
        make_client(server).chat.completions.create(
            model="tiny", messages=MESSAGES[:1], tools=TOOLS
        )
    assert caught.value.param == "tools"


def test_server_without_llguidance_names_the_package(monkeypatch):
    """A client gets status 500, whose cause is only in the server's log."""
    monkeypatch.setitem(sys.modules, "llguidance", None)
    preprocessor = make_bytes()
    context, _ = serve(preprocessor, preprocessor.tokenizer("a"))
    fields = {"messages": MESSAGES, "tools": TOOLS}
    with context as server:
        assert post(server, "chat/completions", **fields).status_code == 200
        for name, field in (
            ("tool_choice", "required"),
            ("response_format", {"type": "json_object"}),
        ):
            response = post(server, "chat/completions", **fields, **{name: field})
            error = response.json()["error"]
            assert (response.status_code, error["type"]) == (501, "server_error")
            assert "pip install llguidance" in error["message"]
