"""Chat templates: prompts from messages, their tokens, and the token that ends a turn."""

import json
import re

import numpy as np

from keras_recurrent.chat.rendering import render
from keras_recurrent.tokenizers.checkpoint_files import tokenize_around

# Names of special tokens in the source of a template.
TOKEN_NAME = re.compile(r"<[^<>\s'\"{}]+>|\[[^\[\]\s'\"{}]+\]")
# {variable of a template: attribute of a tokenizer}
TOKEN_VARIABLES = {"bos_token": "start_token", "eos_token": "end_token", "pad_token": "pad_token"}
QUESTION, ANSWER = "question", "answer"


class ChatPrompt(str):
    """Prompt that a chat template made from messages.

    A string with the text that transformers renders. The models tokenize it with its special
    tokens, and add no start token if it begins with one. Special tokens in the content of messages
    are plain text. Slices are such prompts, too; other operations, such as `prompt + "…"`, return a
    `str`, which is plain text throughout.

    Attributes:
        parts: strings, which are the text together. A special token in the content of a message is
            cut into two parts, so that no part has one that the template did not write.
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
        parts = []
        for part in self.parts:
            parts.append(part[max(begin, 0) : max(end, 0)])
            begin, end = begin - len(part), end - len(part)
        return ChatPrompt(filter(None, parts))


def check_chat_template(template):
    """Raises a `ValueError` unless `template` is None or a string that is not empty."""
    if template is not None and (not isinstance(template, str) or not template):
        raise ValueError(
            "`chat_template` must be a string, the source of a jinja2 template, or None; got "
            f"{template!r}."
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
        for key in ("role", "content"):
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
        try:
            json.dumps(message, ensure_ascii=False).encode()  # fails for surrogates
        except (TypeError, ValueError, RecursionError) as error:
            raise ValueError(
                f"`messages`: message {number} must have values that JSON can represent: {error}."
            ) from error


def apply_template(template, tokenizer, messages, add_generation_prompt):
    """Returns the `ChatPrompt` of messages.

    Args:
        template: string, the source of the template.
        tokenizer: a tokenizer with start, end and padding tokens, which the template gets by name.
        messages: a list that `check_messages` accepts.
        add_generation_prompt: boolean, variable of the template.

    Raises:
        ValueError, ImportError, RuntimeError: as in `rendering.render`.
    """
    found = re.compile("|".join(map(re.escape, special_tokens(template, tokenizer))))
    cut = None
    if any(found.search(text) for text in _strings(messages)):
        # A character that is in no message marks the cuts: after the first one of the token.
        given = set(json.dumps(messages, ensure_ascii=False))
        cut = next(c for c in map(chr, range(0xE000, 0x110000)) if c not in given)

        def insert(match):
            return match[0][0] + cut + match[0][1:]

        messages = _map_strings(lambda text: found.sub(insert, text), messages)
    variables = {
        "messages": messages,
        "add_generation_prompt": bool(add_generation_prompt),
        "tools": None,
        "documents": None,
    }
    for name, attribute in TOKEN_VARIABLES.items():
        # A variable that is missing renders as nothing, None as "None".
        if getattr(tokenizer, attribute, None) is not None:
            variables[name] = getattr(tokenizer, attribute)
    text = render(template, variables)
    return ChatPrompt(text.split(cut) if cut else [text])


def special_tokens(template, tokenizer):
    """Returns the special tokens that the content of messages must not have, longest first."""
    tokens = set(filter(None, tokenizer.special_tokens))
    if getattr(tokenizer, "proto", None) is not None:
        # The file of a SentencePiece tokenizer has more, but does not tell which they are.
        for name in TOKEN_NAME.findall(template):
            if tokenizer.id_to_token(tokenizer.token_to_id(name)) == name:
                tokens.add(name)
    return sorted(tokens, key=len, reverse=True)


def tokenize_prompt(tokenizer, prompt):
    """Returns the token ids of a `ChatPrompt`, a list."""
    if prompt.token_ids is not None:
        return prompt.token_ids
    return [id for part in prompt.parts for id in _tokenize_with_special_tokens(tokenizer, part)]


def tokenize_prompts(tokenizer, texts, add_start_token):
    """Returns a list of token ids for each text.

    Args:
        tokenizer: the tokenizer.
        texts: a list of strings, some of which may be a `ChatPrompt`.
        add_start_token: boolean, begins texts with the start token, if there is one. A `ChatPrompt`
            that begins with it gets no second one.
    """
    has_start = add_start_token and tokenizer.start_token_id is not None
    start = [tokenizer.start_token_id] if has_start else []
    plain = [text for text in texts if not isinstance(text, ChatPrompt)]
    tokens = iter(tokenizer(plain) if plain else ())
    rows = []
    for text in texts:
        if isinstance(text, ChatPrompt):
            ids = tokenize_prompt(tokenizer, text)
            rows.append(ids if ids[:1] == start else [*start, *ids])
        else:
            rows.append([*start, *np.asarray(next(tokens)).tolist()])
    return rows


def _tokenize_with_special_tokens(tokenizer, text):
    if hasattr(tokenizer, "tokenize_with_special_tokens"):
        return [int(id) for id in tokenizer.tokenize_with_special_tokens(text)]
    ids = {tokenizer.id_to_token(id): int(id) for id in tokenizer.special_token_ids}
    return [int(id) for id in tokenize_around(tokenizer, text, ids)]


def end_of_turn(template, tokenizer):
    """Returns the id of the special token after an answer, or None.

    None also if jinja2 is missing, or the template fails.
    """
    messages = [{"role": "user", "content": QUESTION}, {"role": "assistant", "content": ANSWER}]
    try:
        text = apply_template(template, tokenizer, messages, False)
    except (ImportError, OSError, RuntimeError, ValueError):
        return None
    _, answer, rest = text.rpartition(ANSWER)
    names = "|".join(map(re.escape, special_tokens(template, tokenizer)))
    found = re.search(names, rest) if answer else None
    return tokenizer.token_to_id(found[0]) if found else None


def _strings(value):
    """Yields the strings in nested lists and dictionaries, other than keys."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, (list, tuple, dict)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _strings(item)


def _map_strings(function, value):
    """Applies a function to the strings in nested lists and dictionaries, other than keys."""
    if isinstance(value, str):
        return function(value)
    if isinstance(value, dict):
        return {key: _map_strings(function, item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_map_strings(function, item) for item in value]
    return value
