"""Conversations in a generation cache, and where a prompt continues them."""

from typing import Any, NamedTuple

from keras_recurrent.tokenizers.detokenizer import text_of

RESTART_HINT = "Call without `cache` to process the whole conversation."
EXCERPT = 60  # characters of a text in an error


class Conversation(NamedTuple):
    """Conversation that the tokens of a cache represent.

    The tokens are those of the prompt and the generated ones. Tokens of the same text may differ.

    Attributes:
        messages: a list of dictionaries, up to the answer that the model generated last.
        prompt: string, the rendered prompt of this answer.
        ending: string, text in the cache that follows the content of the answer, such as a stop
            string.
    """

    messages: list[dict[str, Any]]
    prompt: str
    ending: str


def tokens_after(preprocessor, cached, tokens, name):
    """Returns the tokens of a prompt after those in a cache that has no `Conversation`."""
    if tokens[: len(cached)] == cached:
        return tokens[len(cached) :]
    same = _common_length(cached, tokens)
    texts = [text_of(preprocessor, ids[same : same + 20]) for ids in (cached, tokens)]
    raise ValueError(
        f"{name} must begin with the tokens in `cache`. They differ from token {same} on: the "
        f"cache has {texts[0]!r}, the prompt has {texts[1]!r}. {RESTART_HINT}"
    )


def text_after(known, messages, prompt, name):
    """Returns the part of a prompt that follows a `Conversation`, a `ChatPrompt`."""
    _check_continues(known.messages, messages, name)
    if not prompt.startswith(known.prompt):
        same = _common_length(known.prompt, prompt)
        raise _not_prefix_preserving("the messages before the answer", known.prompt, prompt, same)
    rest = prompt[len(known.prompt) :]
    content = known.messages[-1]["content"]
    length = _answer_length(rest, content)
    if length is None:
        raise _not_prefix_preserving("the answer", content, rest, 0)
    rest = rest[length:]
    return rest[len(known.ending) :] if rest.startswith(known.ending) else rest


def _common_length(first, second):
    pairs = enumerate(zip(first, second, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(first), len(second)))


def _check_continues(cached, messages, name):
    for number, (before, message) in enumerate(zip(cached, messages, strict=False)):
        if before != message:
            missing = object()
            keys = {**before, **message}
            key = next(k for k in keys if before.get(k, missing) != message.get(k, missing))
            raise ValueError(
                f"{name} must begin with the messages in `cache`; message {number} differs: its "
                f"{key!r} is {_excerpt(message.get(key))}, and {_excerpt(before.get(key))} in "
                f"`cache`. {RESTART_HINT}"
            )
    if len(messages) <= len(cached):
        raise ValueError(
            f"{name} must continue the {len(cached)} messages in `cache`, the last of which is the "
            f"answer; got {len(messages)} messages. Append the answer and a new message. To answer "
            "the same messages again, call with the cache from before the answer, or without one."
        )


def _answer_length(rest, content):
    """Returns the number of characters of an answer in a prompt, or None if it does not begin so.

    Templates may strip an answer, and put a space in front of it.
    """
    if rest.startswith(content):
        return len(content)
    stripped = content.strip()
    start = len(rest) - len(rest.lstrip()) if stripped else 0
    if not rest.startswith(stripped, start):
        return None
    end = start + len(stripped)
    space = content[len(content.rstrip()) :]
    return end + len(space) if rest.startswith(space, end) else end


def _not_prefix_preserving(part, before, after, start):
    begin = max(0, start - EXCERPT // 2)
    return ValueError(
        "`cache` cannot be continued, because the chat template is not prefix-preserving: together "
        f"with the new messages, it renders {part} as {_excerpt(after[begin:])} instead of "
        f"{_excerpt(before[begin:])}. {RESTART_HINT}"
    )


def _excerpt(value):
    text = str(value) if isinstance(value, str) else repr(value)
    text = text if len(text) <= EXCERPT else f"{text[:EXCERPT]}…"
    return repr(text) if isinstance(value, str) else text
