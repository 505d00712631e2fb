"""The part of a preprocessor that makes prompts from messages."""

from typing import Any

from keras_recurrent.chat.templates import (
    apply_template,
    check_chat_template,
    check_messages,
    end_of_turn,
)
from keras_recurrent.chat.tools import check_tools, read_calls, written_calls
from keras_recurrent.checks.arguments import check_boolean, is_integer


class ChatPreprocessing:
    """Adds a chat template to a preprocessor of a causal language model."""

    tokenizer: Any
    add_start_token: bool
    # Name of the format of tool calls, in `chat.tools.FORMATS`. If None, the chat template or the
    # special tokens determine the format.
    tool_format: str | None = None

    def _set_template(self, chat_template, extra_stop_token_ids):
        check_chat_template(chat_template)
        ids = extra_stop_token_ids
        if not isinstance(ids, (list, tuple)) or not all(is_integer(id) and id >= 0 for id in ids):
            wanted = "a tuple of integers of at least 0"
            raise ValueError(f"`extra_stop_token_ids` must be {wanted}; got {ids!r}.")
        self.chat_template, self.extra_stop_token_ids = chat_template, tuple(map(int, ids))
        self._end_of_turn: Any = (None, None)  # a template, and the id of its token

    def apply_chat_template(self, messages, add_generation_prompt=True, tools=None):
        """Renders messages as a prompt, with the chat template, as transformers does.

        Templates are not trusted: they run in a sandbox of jinja2 in a separate process, which is
        ended if a template takes more than 2 seconds. Requires the extra `chat` of this package.

        Args:
            messages: a list of dictionaries with the strings `"role"`, which is `"system"`,
                `"developer"`, `"user"`, `"assistant"` or `"tool"`, and `"content"`. Further keys
                are for the template.
            add_generation_prompt: boolean, ends the prompt with the beginning of an answer.
            tools: a list of functions that the model may call, as in `chat`, or None.

        Returns:
            A string. `generate`, `stream` and `prefill` of the models tokenize it with its special
            tokens, and add no second start token. Special tokens in messages are plain text. This
            holds for the returned object and its slices, not for other strings made from it.

        Raises:
            ValueError: the preprocessor has no chat template, or one that does not render `tools`;
                `messages` or `tools` have another form; the template rejects them, is invalid, or
                exceeds 2 seconds, 1 MB of text or (on Linux) 512 MB of memory.
            ImportError: jinja2 is not installed.

        Example:

        >>> from keras_recurrent.models import GriffinCausalLMPreprocessor
        >>> from keras_recurrent.tokenizers import ByteTokenizer
        >>> template = (
        ...     "{{ bos_token }}{% for message in messages %}{{ message.role }}: "
        ...     "{{ message.content }} {% endfor %}{% if add_generation_prompt %}assistant:"
        ...     "{% endif %}"
        ... )
        >>> preprocessor = GriffinCausalLMPreprocessor(ByteTokenizer(), chat_template=template)
        >>> preprocessor.apply_chat_template([{"role": "user", "content": "Hello"}])
        '<start>user: Hello assistant:'
        """
        check_boolean("add_generation_prompt", add_generation_prompt)
        (prompt,) = self._render(messages, [(None, add_generation_prompt)], tools)
        return prompt

    def _render(self, messages, ends, tools=None):
        if self.chat_template is None:
            raise ValueError(
                "The preprocessor has no chat template: its checkpoint may not be of a chat model. "
                "Pass one as `chat_template=` to `from_preset` or the preprocessor."
            )
        check_messages(messages)
        if tools is not None:
            check_tools(tools)
            if "tools" not in self.chat_template:
                raise ValueError("`tools` require a chat template with tools; this one has none.")
        messages = read_calls(messages)
        calls = written_calls(messages, self.chat_template, self)
        return apply_template(self.chat_template, self.tokenizer, messages, ends, tools, calls)

    @property
    def stop_token_ids(self):
        """Tuple of the token ids that end a generated text by default.

        The end token, `extra_stop_token_ids`, and the special token with which the chat template
        ends an answer.
        """
        template = self.chat_template
        if template != self._end_of_turn[0]:
            self._end_of_turn = (template, end_of_turn(template, self.tokenizer))
        ids = [self.tokenizer.end_token_id, *self.extra_stop_token_ids]
        if self._end_of_turn[1] is not None:
            ids.append(self._end_of_turn[1])
        return tuple(dict.fromkeys(ids))


class PlainPreprocessor(ChatPreprocessing):
    """Prompts and texts of a preprocessor of this package, without Keras.

    Args:
        tokenizer: a `PlainTokenizer`.
        add_start_token, chat_template, extra_stop_token_ids: as in the preprocessor.
    """

    def __init__(self, tokenizer, add_start_token, chat_template, extra_stop_token_ids):
        self.tokenizer, self.add_start_token = tokenizer, add_start_token
        self._set_template(chat_template, extra_stop_token_ids)

    def generate_postprocess(self, x):
        special, rows = self.tokenizer.special_token_ids, []
        for ids, is_token in zip(x["token_ids"], x["padding_mask"], strict=True):
            rows.append([id for id in ids[is_token].tolist() if id not in special])
        return self.tokenizer.detokenize(rows)


def plain_preprocessor(preprocessor):
    """Returns the `PlainPreprocessor` of a preprocessor.

    Returns None if its class or that of its tokenizer is not of this package, or the tokenizer has
    an option that only KerasHub implements.
    """
    tokenizer = preprocessor.tokenizer
    modules = (type(each).__module__.partition(".")[0] for each in (preprocessor, tokenizer))
    options = (getattr(tokenizer, name, None) for name in ("add_bos", "add_eos", "sequence_length"))
    if {*modules} != {__package__.partition(".")[0]} or any(options):
        return None
    template = preprocessor.chat_template, preprocessor.extra_stop_token_ids
    plain = PlainPreprocessor(tokenizer._core, preprocessor.add_start_token, *template)
    plain.tool_format = preprocessor.tool_format
    return plain
