"""Chat templates: prompts from messages, and the token that ends a turn."""

import itertools
import json
import re

from keras_recurrent.chat import ROLES
from keras_recurrent.chat.rendering import render
from keras_recurrent.tokenizers.checkpoint_files import template_pattern

# {variable of a template: attribute of a tokenizer}
TOKEN_VARIABLES = {"bos_token": "start_token", "eos_token": "end_token", "pad_token": "pad_token"}
QUESTION, ANSWER = "question", "answer"


class ChatPrompt(str):
    """Prompt that a chat template made from messages.

    A string with the text that transformers renders. The models tokenize it with the special tokens
    that the template wrote, and add no start token if it begins with one. All text from messages is
    plain text. Slices are such prompts, too; other operations, such as `prompt + "…"`, return a
    `str`, which is plain text throughout.

    Attributes:
        parts: strings that make up the text: plain text, which may be empty, and special tokens
            alternately, beginning and ending with plain text.
        token_ids: a list of token ids, if the prompt was tokenized before, or None.
    """

    parts: tuple[str, ...]
    token_ids: list[int] | None

    def __new__(cls, parts, token_ids=None):
        parts = tuple(parts)
        prompt = super().__new__(cls, "".join(parts))
        prompt.parts, prompt.token_ids = parts, token_ids
        return prompt

    def __getitem__(self, key):
        if not isinstance(key, slice) or key.step not in (None, 1):
            return super().__getitem__(key)
        begin, end, _ = key.indices(len(self))
        parts = [""]
        for number, part in enumerate(self.parts):
            piece = part[max(begin, 0) : max(end, 0)]
            begin, end = begin - len(part), end - len(part)
            if number % 2 and piece == part:
                parts += [piece, ""]
            else:
                parts[-1] += piece
        return ChatPrompt(parts)


def check_chat_template(template):
    """Raises a `ValueError` unless `template` is None or a string that is not empty."""
    if template is not None and (not isinstance(template, str) or not template):
        raise ValueError(
            "`chat_template` must be a string, the source of a jinja2 template, or None; got "
            f"{template!r}."
        )


def is_list(value):
    """Returns True for a list or tuple with elements."""
    return isinstance(value, (list, tuple)) and len(value) > 0


def is_messages(inputs):
    """Returns True for messages of one or several conversations."""
    if is_list(inputs) and is_list(inputs[0]):
        inputs = inputs[0]
    return is_list(inputs) and isinstance(inputs[0], dict)


def check_renders_messages(preprocessor):
    """Raises a `ValueError` unless the preprocessor supports chat templates."""
    if not hasattr(preprocessor, "apply_chat_template"):
        kind = type(preprocessor).__name__
        got = "no preprocessor" if preprocessor is None else f"a `{kind}`"
        raise ValueError(
            f"Messages need a preprocessor with a chat template; the model has {got}. Pass "
            "`preprocessor=`, one of this package with `chat_template=...`, to `from_preset` or "
            "the model."
        )


def check_messages(messages):
    """Raises a `ValueError` unless `messages` is a list of dictionaries of role and content."""
    wanted = 'a dictionary such as {"role": "user", "content": "Hello"}'
    if not isinstance(messages, (list, tuple)) or not messages:
        got = f"a {type(messages).__name__}" if messages or messages is None else "none"
        raise ValueError(f"`messages` must be a list, each message {wanted}; got {got}.")
    for number, message in enumerate(messages):
        if not isinstance(message, dict):
            raise ValueError(
                f"`messages`: message {number} must be {wanted}; got a {type(message).__name__}."
            )
        may_lack_content = bool(message.get("tool_calls")) and message.get("content") is None
        for key in ("role",) if may_lack_content else ("role", "content"):
            if key not in message:
                raise ValueError(
                    f"`messages`: message {number} must have {key!r}, as {wanted}; got the keys "
                    f"{sorted(map(str, message))}."
                )
            if not isinstance(message[key], str):
                raise ValueError(
                    f"`messages`: {key!r} of message {number} must be a string; got "
                    f"{message[key]!r}."
                )
        if message["role"] not in ROLES:
            raise ValueError(
                f"`messages`: 'role' of message {number} must be one of {', '.join(ROLES)}; got "
                f"{message['role']!r}."
            )
        try:
            json.dumps(message, ensure_ascii=False).encode()  # fails for surrogates
        except (TypeError, ValueError, RecursionError) as error:
            raise ValueError(
                f"`messages`: message {number} must have values that JSON can represent: {error}."
            ) from error


def apply_template(template, tokenizer, messages, ends, tools=None, calls=()):
    """Renders the beginnings of a conversation.

    Args:
        template: string, the source of the template.
        tokenizer: a tokenizer with start, end and padding tokens, which the template gets by name.
        messages: a list that `check_messages` accepts.
        ends, calls: as in `rendering.render`.
        tools: a list that `check_tools` accepts, or None.

    Returns:
        A list of strings, the last of which is a `ChatPrompt`.

    Raises:
        ValueError, ImportError, RuntimeError: as in `rendering.render`.
    """
    variables = {"messages": messages, "tools": tools, "documents": None}
    for name, attribute in TOKEN_VARIABLES.items():
        # A variable that is missing renders as nothing, None as "None".
        if getattr(tokenizer, attribute, None) is not None:
            variables[name] = getattr(tokenizer, attribute)
    (*texts, text), template_text = render(template, variables, ends, calls)
    # Special tokens may be in `template_text` only, which has the length of `text`.
    pieces = re.split(f"({template_pattern(tokenizer)})", template_text)
    lengths = list(map(len, pieces))
    parts = [
        text[end - n : end] for n, end in zip(lengths, itertools.accumulate(lengths), strict=True)
    ]
    return [*texts, ChatPrompt(parts)]


def end_of_turn(template, tokenizer):
    """Returns the id of the special token after an answer, or None.

    None also if jinja2 is missing, or the template fails.
    """
    messages = [{"role": "user", "content": QUESTION}, {"role": "assistant", "content": ANSWER}]
    try:
        (text,) = apply_template(template, tokenizer, messages, [(2, False)])
    except (ImportError, OSError, RuntimeError, ValueError):
        return None
    at = text.rfind(ANSWER)
    names = text[at:].parts[1::2] if at >= 0 else ()
    return tokenizer.token_to_id(names[0]) if names else None
