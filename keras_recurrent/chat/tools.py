"""Tools of a conversation: functions that a model may call, and the calls in its answers.

Models generate calls in different formats. To support a new one, add its `ToolFormat` to `FORMATS`.
"""

import ast
import contextlib
import json
import re
from collections.abc import Callable
from typing import Any, NamedTuple

MAX_TOOLS = 128  # as in OpenAI's API
# Of JSON that llguidance generates, as models write it.
SPACING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
FUNCTION = '{"type": "function", "function": {"name": ..., "parameters": ...}}'
FUNCTION_XML = re.compile(r"<function=([^>\s]+)>(.*?)</function>", re.DOTALL)
PARAMETER_XML = re.compile(
    r"<parameter=([^>\s]+)>\n?(.*?)\n?(?:</parameter>|(?=<parameter=))", re.DOTALL
)
# A call in the syntax of Python, whose names may also be keywords or contain hyphens.
CALL_PYTHON = re.compile(r"\s*([\w.$-]+)\((.*)\)\s*", re.DOTALL)
ARGUMENT_PYTHON = re.compile(r"\s*([\w.$-]+)\s*=(.*)", re.DOTALL)
STRING_OR_CHARACTER = re.compile(r"""'(?:\\.|[^'\\])*'|"(?:\\.|[^"\\])*"|.""", re.DOTALL)
CONSTANTS = {"true": True, "false": False, "null": None}
# Errors that `parse_calls` raises for text that is not a list of calls.
MALFORMED: tuple[type[Exception], ...] = LookupError, ValueError, TypeError, AttributeError
MALFORMED += SyntaxError, RecursionError, MemoryError  # of Python's parser


class ToolFormat(NamedTuple):
    """Marks of tool calls in the answers of a model.

    Attributes:
        begin, end: strings, the marks before and after calls.
        write: a function of a list of `tool_calls`, which returns the text between the marks. If
            None, the chat template must render `tool_calls`.
    """

    begin: str
    end: str
    write: Callable[[list[Any]], str] | None = None


def write_python(tool_calls):
    """Returns the text of calls, as a list of calls in Python."""
    calls = []
    for function in (call["function"] for call in tool_calls):
        arguments = ", ".join(f"{key}={value!r}" for key, value in function["arguments"].items())
        calls.append(f"{function['name']}({arguments})")
    return f"[{', '.join(calls)}]"


# {name: format}. The first format whose `begin` is in the template is used, or else the first whose
# `begin` is a special token.
FORMATS = {
    "hermes": ToolFormat("<tool_call>", "</tool_call>"),
    "nemotron": ToolFormat("<TOOLCALL>", "</TOOLCALL>"),
    "lfm2": ToolFormat("<|tool_call_start|>", "<|tool_call_end|>", write_python),
}


def check_tools(tools):
    """Raises a `ValueError` unless `tools` is a list of functions as in OpenAI's API."""
    if not isinstance(tools, (list, tuple)) or not 0 < len(tools) <= MAX_TOOLS:
        raise ValueError(f"`tools` must be a list of 1 to {MAX_TOOLS} dictionaries {FUNCTION}.")
    for number, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or tool.get("type") != "function":
            function = {}
        if not isinstance(function.get("name"), str) or not function["name"]:
            raise ValueError(f"`tools`: tool {number} must be a dictionary {FUNCTION}.")
        if not isinstance(function.get("parameters") or {}, dict):
            raise ValueError(f"`tools`: 'parameters' of tool {number} must be a JSON schema.")
    names = [tool["function"]["name"] for tool in tools]
    for number, name in enumerate(names):
        if name in names[:number]:
            raise ValueError(f"`tools` must have different names; tool {number} is {name!r} again.")


def tool_format(preprocessor):
    """Returns the `ToolFormat` of a preprocessor, or raises a `ValueError`."""
    name, template = getattr(preprocessor, "tool_format", None), preprocessor.chat_template or ""
    if name is not None:
        if name not in FORMATS:
            raise ValueError(f"`tool_format` must be one of {', '.join(FORMATS)}; got {name!r}.")
        return FORMATS[name]
    special = _special_tokens(preprocessor)
    for known in (template, special):
        for marks in FORMATS.values():
            if marks.begin in known:
                return marks
    raise ValueError(
        "`tools`: the chat template does not show how the model writes calls. Set `tool_format` of "
        f"the preprocessor, or `--tool-format` of the server, to one of {', '.join(FORMATS)}."
    )


def _special_tokens(preprocessor):
    tokenizer = preprocessor.tokenizer
    return set(getattr(getattr(tokenizer, "_core", tokenizer), "special_tokens", ()))


def marker_tokens(preprocessor):
    """Returns `{id: text}` of the marks of tool calls that are special tokens."""
    special = _special_tokens(preprocessor)
    marks = [mark for mark in tool_format(preprocessor)[:2] if mark in special]
    return {int(preprocessor.tokenizer.token_to_id(mark)): mark for mark in marks}


def calls_grammar(preprocessor, tools, max_calls=None):
    """Returns the grammar of answers that only call tools, for `SamplingParams(grammar=...)`."""
    special = _special_tokens(preprocessor)
    begin, end = (m if m in special else json.dumps(m) for m in tool_format(preprocessor)[:2])
    names = " | ".join(f"call_{n}" for n in range(len(tools)))
    rules = ["start: call" if max_calls == 1 else "start: call+"]
    rules.append(rf"call: {begin} /\n?/ ({names}) /\n?/ {end}")
    for number, function in enumerate(tool["function"] for tool in tools):
        name = json.dumps(function["name"], ensure_ascii=False)
        beginning = json.dumps(f'{{"name": {name}, "arguments": ', ensure_ascii=False)
        rules.append(f'call_{number}: {beginning} arguments_{number} "}}"')
        schema = {"x-guidance": SPACING, **(function.get("parameters") or {})}
        rules.append(f"arguments_{number}: %json {json.dumps({'type': 'object', **schema})}")
    return "\n".join(rules)


def read_calls(messages):
    """Returns messages in which arguments of calls are dictionaries.

    Messages with calls but without content get an empty content.
    """
    found = []
    for number, message in enumerate(messages):
        if message.get("tool_calls"):
            try:
                calls = [_read_call(**call) for call in message["tool_calls"]]
            except MALFORMED as error:
                raise ValueError(
                    f"`messages`: 'tool_calls' of message {number} must be a list of dictionaries "
                    'such as {"type": "function", "function": {"name": "f", "arguments": "{}"}}.'
                ) from error
            message = {**message, "content": message.get("content") or "", "tool_calls": calls}
        found.append(message)
    return found


def _read_call(function, **others):
    arguments = function["arguments"]
    arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
    return {**others, "function": {"name": str(function["name"]), "arguments": {**arguments}}}


def written_calls(messages, template, preprocessor):
    """Returns the text of calls that the template does not render.

    Args:
        messages: messages from `read_calls`.
        template: string, the chat template.
        preprocessor: the preprocessor, which determines the format.

    Returns:
        A list of `(index of a message, begin, text, end)`, empty if the template renders calls.

    Raises:
        ValueError: the template does not render calls, and the format has no `write`.
    """
    indices = [index for index, message in enumerate(messages) if message.get("tool_calls")]
    if not indices or "tool_calls" in template:
        return []
    begin, end, write = tool_format(preprocessor)
    if write is None:
        raise ValueError("`messages`: the chat template does not render 'tool_calls'.")
    return [(index, begin, write(messages[index]["tool_calls"]), end) for index in indices]


def parse_calls(text, parameters):
    """Parses calls in JSON, in Python, or in the form `<function=name>` with parameters.

    Args:
        text: string, the text between the marks.
        parameters: `{name: JSON schema}` of the tools. The value of `<parameter=key>` is a string
            if its schema allows strings, or if it is not valid JSON.

    Returns:
        A list of pairs of a name and a dictionary of arguments.

    Raises:
        One of `MALFORMED`: the text is not a list of calls.
    """
    text = text.strip()
    if text.startswith("<function="):
        found = _find_all(FUNCTION_XML, text)
        calls = [_parse_xml(name, body, parameters) for name, body in found]
    elif text.startswith("{") or re.match(r"\[\s*\{", text):
        found = json.loads(text)
        found = found if isinstance(found, list) else [found]
        calls = [(each["name"], each.get("arguments") or {}) for each in found]
    else:
        is_list = text.startswith("[") and text.endswith("]")
        calls = [_parse_python(each) for each in _split(text[1:-1] if is_list else text)]
    if not calls:
        raise ValueError("there must be a call")
    for name, arguments in calls:
        if not isinstance(name, str) or not name or not isinstance(arguments, dict):
            raise ValueError("a call must have a name and a dictionary of arguments")
    encoded = json.dumps(calls, ensure_ascii=False, allow_nan=False).encode()
    return [(name, arguments) for name, arguments in json.loads(encoded)]


def _find_all(pattern, text):
    """Returns the groups of all matches, or raises an error if there is other text."""
    if pattern.sub("", text).strip():
        raise ValueError("text is incomplete")
    return pattern.findall(text)


def _parse_xml(name, body, parameters):
    properties = (parameters.get(name) or {}).get("properties") or {}
    arguments: dict[str, Any] = {}
    for key, value in _find_all(PARAMETER_XML, body):
        arguments[key] = value
        if not _allows_string(properties.get(key), value):
            with contextlib.suppress(ValueError):
                found = json.loads(value)
                json.dumps(found, allow_nan=False)
                arguments[key] = found
    return name, arguments


def _allows_string(schema, value):
    """Returns True if a JSON schema, which may be a boolean, says that a value may be a string."""
    schema = schema if isinstance(schema, dict) else {}
    return "'string'" in str([schema.get("type"), schema.get("anyOf")]) or (
        value in (schema.get("enum") or ())
    )


def _split(text):
    """Returns the parts of a text between commas outside of brackets and strings."""
    parts, depth, begin = [], 0, 0
    for match in STRING_OR_CHARACTER.finditer(text):
        depth += (match[0] in "([{") - (match[0] in ")]}")
        if match[0] == "," and depth == 0:
            parts.append(text[begin : match.start()])
            begin = match.end()
    return [*parts, text[begin:]] if text[begin:].strip() else parts


def _parse_python(text):
    """Returns the name and the arguments of a call such as `f(x=1)`."""
    call, arguments = CALL_PYTHON.fullmatch(text), {}
    if call is None:
        raise ValueError("a call must have a name and arguments in parentheses")
    for part in _split(call[2]):
        argument = ARGUMENT_PYTHON.fullmatch(part)
        if argument is None or argument[1] in arguments:
            raise ValueError("arguments must have different names")
        value = ast.parse(argument[2].strip(), mode="eval").body
        arguments[argument[1]] = ast.literal_eval(Constants().visit(value))
    return call[1], arguments


class Constants(ast.NodeTransformer):
    """Replaces the names of JSON's constants with their values."""

    def visit_Name(self, node):
        return ast.Constant(CONSTANTS[node.id]) if node.id in CONSTANTS else node
