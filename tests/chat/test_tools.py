"""Tools: calls in generated text, and their place in prompts and conversations."""

import itertools
import json

import numpy as np
import pytest
import tokenizers

from keras_recurrent.chat.tools import FORMATS, tool_format
from keras_recurrent.generation.chat import start_turn
from keras_recurrent.generation.text import tokenize_prompt
from keras_recurrent.generation.tool_calls import ToolCallParser
from keras_recurrent.models import GenerationCache, GriffinCausalLM, GriffinCausalLMPreprocessor
from keras_recurrent.tokenizers import BPETokenizer, ByteTokenizer
from tests.chat.test_chat import make_renderer
from tests.tokenizers import bpe

pytestmark = pytest.mark.once

MARKS = "<|im_start|>", "<|im_end|>", *FORMATS["lfm2"][:2]
PROPERTIES = {"city": {"type": "string"}, "days": {"type": "integer"}}
TOOLS = [
    {
        "type": "function",
        "function": {"name": name, "parameters": {"type": "object", "properties": PROPERTIES}},
    }
    for name in ("weather", "time")
]
HERMES = (
    "{% if tools %}<tools>{% for tool in tools %}{{ tool | tojson }}{% endfor %}</tools>{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% for c in "
    "m.tool_calls or [] %}{{ '\n' if m.content or not loop.first }}<tool_call>\n{\"name\": "
    '{{ c.function.name | tojson }}, "arguments": {{ c.function.arguments | tojson }}}\n'
    "</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Does not render the calls of messages.
LFM2 = (
    "{% if tools %}List of tools: {{ tools | tojson }}\n{% endif %}{% for m in messages %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
PARIS, OSLO = ("weather", {"city": "Paris", "days": 2}), ("time", {"city": "Oslo ö"})
XML = (
    "<tool_call>\n<function=weather>\n<parameter=city>\nParis\n</parameter>\n<parameter=days>\n2\n"
    "</parameter>\n</function>\n</tool_call>\n"
)
# Name of a format, an answer, its content and its calls.
ANSWERS = [
    *[("hermes", text, text, []) for text in ("Hello <tool> \n", "a <tool_cal", "<")],
    (
        "hermes",
        'I see.\n\n<tool_call>\n{"name": "weather", "arguments": {"city": "Paris", "days": 2}}\n'
        '</tool_call>\n<tool_call>{"name": "time", "arguments": {"city": "Oslo \\u00f6"}}'
        "</tool_call>",
        *("I see.", [PARIS, OSLO]),
    ),
    (
        "hermes",
        XML + XML.replace("2", "two"),
        "",
        [PARIS, ("weather", {"city": "Paris", "days": "two"})],
    ),
    ("hermes", '<tool_call>{"name": "time"}', "", [("time", {})]),
    (
        *("hermes", 'a <tool_call>{"name": 1}</tool_call> b <tool_call>{"na'),
        *('a <tool_call>{"name": 1}</tool_call> b <tool_call>{"na', []),
    ),
    (
        *("nemotron", '<TOOLCALL>[{"name": "time", "arguments": {"city": "Oslo ö"}}]</TOOLCALL>'),
        *("", [OSLO]),
    ),
    (
        "lfm2",
        "<|tool_call_start|>[weather(city='Paris', days=2), time(city=\"Oslo ö\")]"
        "<|tool_call_end|>Checking.",
        *("Checking.", [PARIS, OSLO]),
    ),
    (
        *("lfm2", "<|tool_call_start|>[time(a=[true, {'b': null}], c=-1.5)]<|tool_call_end|>"),
        *("", [("time", {"a": [True, {"b": None}], "c": -1.5})]),
    ),
    (
        "lfm2",
        "<|tool_call_start|>[get-time(from='a, b)', max-n=(1, 2),)]<|tool_call_end|>",
        *("", [("get-time", {"from": "a, b)", "max-n": [1, 2]})]),
    ),
    (
        "hermes",
        "<tool_call><function=f><parameter=a>NaN</parameter>\n<parameter=b>[1]</parameter>"
        "</function></tool_call>",
        *("", [("f", {"a": "NaN", "b": [1]})]),
    ),
    (
        "lfm2",
        '<|tool_call_start|>[{"name": "time", "arguments": {"city": "Oslo ö"}}]<|tool_call_end|>',
        *("", [OSLO]),
    ),
]


def make_bytes(template=HERMES):
    return GriffinCausalLMPreprocessor(ByteTokenizer(), chat_template=template)


def make_marked(template=LFM2):
    """Returns a preprocessor whose marks of calls are special tokens."""
    library = tokenizers.Tokenizer.from_file(str(bpe.PATH / "tokenizer.json"))
    library.add_special_tokens([tokenizers.AddedToken(mark, special=True) for mark in MARKS])
    ids = {"end_token_id": bpe.END, "pad_token_id": bpe.PAD}
    tokenizer = BPETokenizer(library.to_str().encode(), **ids)
    return GriffinCausalLMPreprocessor(tokenizer, chat_template=template)


@pytest.mark.parametrize(("name", "text", "content", "calls"), ANSWERS)
def test_calls_are_separated_from_content_at_any_boundary(name, text, content, calls):
    """A part of a mark is shown, or text or a call is lost, depending on where tokens end."""
    rng = np.random.default_rng(0)
    for number in range(50):
        cuts = sorted(rng.choice(len(text) + 1, rng.integers(0, 6)))
        cuts = range(len(text) + 1) if number == 0 else [0, *cuts, len(text)]
        parser, shown = ToolCallParser(FORMATS[name], TOOLS), []
        for begin, end in itertools.pairwise(cuts):
            shown.append(parser.add(text[begin:end]))
            assert not (calls and "<" in "".join(shown))
        shown.append(parser.add("", True))
        assert ("".join(shown), parser.calls) == (content, calls)
    parser = ToolCallParser(FORMATS[name], TOOLS, max_calls=1)
    parser.add(text, True)
    assert parser.calls == calls[:1]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "<function=f",
        "<function=f><parameter=a>1",
        "<function=f><parameter=a>1</function>",
        '{"name": "f", "arguments": {"a": "\\ud83d"}}',
        '{"name": ""}',
        "f(a=1)(b=2)",
        "f(a=1, a=2)",
        "f",
        "f(1)",
        "f(**{'a': 1})",
        "f(a=g())",
        "f(a={1})",
        "f(a=1e999)",
        "[" * 10_000,
    ],
)
def test_malformed_calls_are_content(text):
    """An answer ends the server's response with an error, or evaluates code."""
    parser = ToolCallParser(FORMATS["lfm2"], TOOLS)
    answer = f"<|tool_call_start|>{text}<|tool_call_end|>"
    assert (parser.add(answer, True), parser.calls) == (answer, [])


def messages_with_calls(*calls):
    tool_calls = [{"function": {"name": name, "arguments": each}} for name, each in calls]
    return [
        {"role": "user", "content": "Paris <|tool_call_start|>?"},
        {"role": "assistant", "content": "Hm.", "tool_calls": tool_calls},
        {"role": "tool", "content": "7 °C <|im_end|>"},
    ]


def test_template_without_calls_gets_them_with_special_tokens():
    """Calls of earlier answers are lost, or a message can write the marks."""
    preprocessor = make_marked()
    messages = messages_with_calls(PARIS, ("time", {"city": "<|tool_call_end|>"}))
    prompt = preprocessor.apply_chat_template(messages, tools=TOOLS)
    calls = "[weather(city='Paris', days=2), time(city='<|tool_call_end|>')]"
    assert f"Hm.<|tool_call_start|>{calls}<|tool_call_end|><|im_end|>" in prompt
    assert f"List of tools: {json.dumps(TOOLS)}" in prompt
    tokenizer = preprocessor.tokenizer
    marks = {tokenizer.token_to_id(mark): mark for mark in MARKS}
    found = [marks[id] for id in tokenize_prompt(tokenizer, prompt) if id in marks]
    begin, end = FORMATS["lfm2"][:2]
    turn, end_of_turn = MARKS[:2]
    assert found == [turn, end_of_turn, turn, begin, end, end_of_turn, turn, end_of_turn, turn]


@pytest.mark.parametrize(
    ("template", "tools", "words"),
    [
        (LFM2, [], "list of 1 to 128"),
        (LFM2, [{"type": "function"}], "tool 0 must be a dictionary"),
        ("{{ messages }}", TOOLS, "require a chat template with tools"),
        ("{{ tools }}<tool_call>", TOOLS, "does not render 'tool_calls'"),
    ],
)
def test_tools_that_cannot_be_rendered_raise(template, tools, words):
    with pytest.raises(ValueError, match=words):
        make_bytes(template).apply_chat_template(messages_with_calls(PARIS), tools=tools)


def test_tool_format_comes_from_attribute_template_or_tokenizer():
    preprocessor = make_bytes("{{ tools }}")
    with pytest.raises(ValueError, match="does not show how the model writes calls"):
        tool_format(preprocessor)
    preprocessor.tool_format = "nemotron"
    assert tool_format(preprocessor) is FORMATS["nemotron"]
    assert tool_format(make_bytes()) is FORMATS["hermes"]
    assert tool_format(make_marked()) is FORMATS["lfm2"]


def test_chat_returns_calls_and_continues_from_their_cache(monkeypatch):
    """Calls are lost, stay in the content, or are processed again in the next turn."""
    preprocessor = make_bytes()
    model = GriffinCausalLM.from_preset("hawk_tiny", num_layers=1, preprocessor=preprocessor)
    text = ANSWERS[3][1].replace("</tool_call><", "</tool_call>\n<").replace("\\u00f6", "ö")
    text = text.replace("\n\n", "\n").replace('{"name": "time"', '\n{"name": "time"')
    text = text.removesuffix("</tool_call>") + "\n</tool_call>"

    def generate(inputs, *arguments, **options):
        assert options["return_cache"]
        ids = [*inputs.token_ids, *preprocessor.tokenizer(text).tolist()]
        return text, GenerationCache(None, [ids], None, None)

    monkeypatch.setattr(model, "generate", generate)
    messages = [{"role": "user", "content": "Paris?"}]
    answer = model.chat(messages, tools=TOOLS)
    assert answer["content"] == "I see."
    functions = [call["function"] for call in answer["tool_calls"]]
    assert [(each["name"], each["arguments"]) for each in functions] == [PARIS, OSLO]
    answer, cache = model.chat(messages, tools=TOOLS, return_cache=True)
    assert cache.conversations == [None]
    messages += [answer, {"role": "tool", "content": "7 °C"}]
    turn = start_turn(make_renderer(preprocessor), messages, cache, tools=TOOLS)
    assert turn.inputs.endswith("<|im_end|>\n<|im_start|>assistant\n")
    new = "<|im_end|>\n<|im_start|>tool\n7 °C<|im_end|>\n<|im_start|>assistant\n"
    assert turn.inputs.token_ids == preprocessor.tokenizer(new).tolist()
    preprocessor.chat_template = HERMES.replace("call>", "CALL>")
    with pytest.raises(ValueError, match="must begin with the tokens in `cache`"):
        start_turn(make_renderer(preprocessor), messages, cache, tools=TOOLS)
