"""Ends of messages in a prompt, at which the engine saves states."""

import time

from keras_recurrent.chat.templates import tokenize_prompt, tokenize_prompts
from keras_recurrent.generation.prompt_tokens import MIN_TOKENS

# A rendering longer than SLOW seconds pauses further ones for PAUSE seconds.
SLOW, PAUSE = 0.5, 60.0


class MessageEnds:
    """Finds the ends of the messages that other prompts are likely to begin with.

    There are two: the end of the messages that precede the first user message, such as the system
    message, and the end of the message before the last. An end within `MIN_TOKENS` of the previous
    end is omitted.
    """

    def __init__(self, preprocessor):
        self._preprocessor = preprocessor
        self._resume = 0.0  # time before which nothing is rendered

    def find(self, messages, prompt, tokens, tools=None):
        """Returns the numbers of tokens up to these ends, a tuple.

        Args:
            messages, tools: as in `Engine.submit`.
            prompt: the `ChatPrompt` of the messages and tools.
            tokens: a list of the token ids of the prompt.
        """
        roles = [message["role"] for message in messages]
        num_leading = roles.index("user") if "user" in roles else 0
        ends = [0]
        for count in sorted({num_leading, len(messages) - 1}):
            text = self._render(messages[:count], tools) if count else None
            end = 0 if text is None else self._find_end(text, prompt, tokens)
            if end - ends[-1] >= MIN_TOKENS:
                ends.append(end)
        return tuple(ends[1:])

    def _render(self, messages, tools):
        """Returns the text of the first messages, or None if the template rejects or delays them.

        The whole prompt was rendered within the limits of a template. Rendering only the first
        messages must not fail the request, or slow every request down.
        """
        begin = time.monotonic()
        if begin < self._resume:
            return None
        try:
            return self._preprocessor.apply_chat_template(messages, False, tools)
        except (ValueError, RuntimeError):
            return None
        finally:
            if time.monotonic() - begin > SLOW:
                self._resume = time.monotonic() + PAUSE

    def _find_end(self, text, prompt, tokens):
        """Returns the number of tokens of `text`, 0 if the prompt or its tokens begin differently.

        The text may be a long conversation. If the text after it is shorter, that text is tokenized
        instead. Its tokens differ from those in the prompt if the tokenizer begins each text with a
        space; then `text` is tokenized.
        """
        if not prompt.startswith(text):
            return 0
        tokenizer, rest = self._preprocessor.tokenizer, prompt[len(text) :]
        if 0 < len(rest) < len(text):
            ids = tokenize_prompt(tokenizer, rest)
            if tokens[-len(ids) :] == ids:
                return len(tokens) - len(ids)
        (ids,) = tokenize_prompts(tokenizer, [text], self._preprocessor.add_start_token)
        return len(ids) if tokens[: len(ids)] == ids else 0
