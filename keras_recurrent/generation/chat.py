"""`chat` of the language models, and its turns."""

import dataclasses
import json
from typing import Any, NamedTuple

from keras_recurrent.chat.templates import ChatPrompt, check_renders_messages, is_list
from keras_recurrent.chat.tools import marker_tokens, tool_format
from keras_recurrent.generation.conversation import Conversation, text_after, tokens_after
from keras_recurrent.generation.prompts import check_batch_size, check_cache
from keras_recurrent.generation.sampling_params import explains_options
from keras_recurrent.generation.sequence import GenerationOutput
from keras_recurrent.generation.text import (
    StreamedText,
    check_stop_strings,
    hidden_stop_tokens,
    tokenize_prompt,
    tokenize_prompts,
)
from keras_recurrent.generation.tool_calls import ToolCallParser, tool_call
from keras_recurrent.tokenizers.detokenizer import text_of


class Turn(NamedTuple):
    """Inputs of `generate` for the next answers in several conversations.

    Attributes:
        inputs: a `ChatPrompt`, or a list of them: text after the cache, with its tokens.
        cache: the `GenerationCache` to continue from, or None.
        messages: a list of the messages of each conversation.
        prompts: a list of the rendered prompts.
        lengths: a list of the numbers of tokens of each prompt, including those in the cache.
    """

    inputs: Any
    cache: Any
    messages: list[list[dict[str, Any]]]
    prompts: list[str]
    lengths: list[int]

    def conversations(self, preprocessor, token_ids, answers):
        """Returns the `Conversation` of each sequence, None for no answer or one with calls.

        token_ids, answers: lists of all tokens, and of the message of the answer, of each sequence.
        """
        hidden = hidden_stop_tokens(preprocessor)
        rows = zip(self.messages, self.prompts, self.lengths, token_ids, answers, strict=True)
        found: list[Conversation | None] = []
        for messages, prompt, length, ids, message in rows:
            new, content = list(ids[length:]), message["content"]
            if not new or "tool_calls" in message:
                found.append(None)
                continue
            text = text_of(preprocessor, new[:-1] if new[-1] in hidden else new)
            content_end = text.find(content.lstrip()) + len(content.lstrip())
            found.append(Conversation([*messages, message], str(prompt), text[content_end:]))
        return found


def answer(content):
    """Returns the message of an answer."""
    return {"role": "assistant", "content": content}


def answer_with_calls(preprocessor, tools, last_token, token_ids, strings):
    """Returns the message of an answer to a prompt with tools.

    last_token, token_ids: the last token of the prompt, and the list of tokens of the answer.
    strings: a tuple of stop strings.
    """
    hidden, shown = hidden_stop_tokens(preprocessor), marker_tokens(preprocessor)
    text = StreamedText(preprocessor, last_token, strings, hidden, shown)
    text.read(token_ids, True)
    parser = ToolCallParser(tool_format(preprocessor), tools)
    message = answer(parser.add(text.shown, True))
    if parser.calls:
        message["tool_calls"] = [tool_call(*call) for call in parser.calls]
    return message


def start_turn(model, messages, cache, sampling=None, tools=None):
    """Returns the `Turn` of messages; arguments and errors as in `chat`."""
    preprocessor = model.preprocessor
    check_renders_messages(preprocessor)
    for params in sampling if is_list(sampling) else [sampling]:
        if getattr(params, "n", 1) > 1:
            raise ValueError(
                f"`sampling` must have n=1 for messages; got n={params.n}. Pass `generate` the "
                "result of `preprocessor.apply_chat_template`."
            )
    is_batch = is_list(messages) and is_list(messages[0])
    conversations = list(messages) if is_batch else [messages]
    prompts = [preprocessor.apply_chat_template(each, tools=tools) for each in conversations]
    conversations = [json.loads(json.dumps(each)) for each in conversations]  # as from a file
    if cache is not None:
        check_cache(cache)
        check_batch_size(cache, len(prompts), "messages", "conversation")
    inputs, kept, lengths = [], [], []
    for number, (each, prompt) in enumerate(zip(conversations, prompts, strict=True)):
        name = f"`messages[{number}]`" if is_batch else "`messages`"
        known = None if cache is None else cache.conversations[number]
        ids = [] if cache is None else cache.token_ids[number].tolist()
        if known is None:
            text, add_start_token = prompt, preprocessor.add_start_token
            (tokens,) = tokenize_prompts(preprocessor.tokenizer, [prompt], add_start_token)
            new = tokens_after(preprocessor, ids, tokens, name)
        else:
            text = text_after(known, each, prompt, name)
            new = tokenize_prompt(preprocessor.tokenizer, text)
            special = getattr(preprocessor.tokenizer, "special_token_ids", ())
            if new and ids[-1] in (*hidden_stop_tokens(preprocessor), *special):
                # The state precedes the last token, which the template replaces.
                ids, new = [*ids[:-1], new[0]], new[1:]
        kept.append(ids)
        inputs.append(ChatPrompt([text], new))
        lengths.append(len(ids) + len(new))
    if cache is not None:
        cache = cache._replace(cache.state, kept)
    return Turn(inputs if is_batch else inputs[0], cache, conversations, prompts, lengths)


class ChatGeneration:
    """Adds `chat` to a language model with `generate`."""

    preprocessor: Any
    generate: Any

    @explains_options
    def chat(
        self,
        messages,
        cache=None,
        return_cache=False,
        *,
        max_length=None,
        stop_token_ids="auto",
        max_new_tokens=None,
        stop=None,
        sampling=None,
        tools=None,
    ):
        """Generates the answer to messages, with the chat template of the preprocessor.

        With `cache`, only the text after the last answer is processed. The cache records its
        messages, and the model keeps no state. The cache contains an answer as the generated
        tokens, which may differ from the tokenized text. It also contains a stop string that ended
        the answer, even if the template does not render that string.

        Args:
            messages: a list of dictionaries with the strings `"role"`, such as `"user"`, and
                `"content"`: the whole conversation, with earlier answers as `chat` returned them.
                A list of such lists: several conversations.
            cache: the `GenerationCache` of an earlier turn, from `chat` or `stream`, or of a prompt
                with which the conversation begins, from `prefill`. None: processes all messages.
            return_cache: boolean, True also returns the cache after the answer.
            max_length: integer, as in `generate`: maximum number of tokens in this call, with those
                of the messages that are not in the cache.
            stop_token_ids, max_new_tokens, stop, sampling: as in `generate`.
            tools: a list of functions that the model may call. Each is a dictionary
                `{"type": "function", "function": {"name": ..., "description": ..., "parameters": a
                JSON schema}}`. The chat template must support tools. None: no tools.

        Returns:
            `{"role": "assistant", "content": ...}`, or a list of these. The content is the
            generated text without the token that ends the turn or the stop string. If the answer
            calls tools, the message has `"tool_calls"`, a list of `{"id": ..., "type": "function",
            "function": {"name": ..., "arguments": a dictionary}}`; calls are not in the content.
            With `return_cache`, a pair of this and the new `GenerationCache`. With
            `SamplingParams(logprobs=...)` or `BeamSampler(return_all_beams=True)`, a
            `GenerationOutput` whose `texts` are the contents.

        Raises:
            ValueError: as in `generate` and `apply_chat_template`; the model has no preprocessor
                with a chat template; `cache` has other messages than those with which `messages`
                begin, or has the last answer already; or the template is not prefix-preserving:
                with more messages, it renders earlier ones differently.

        Example:

        >>> import keras_recurrent
        >>> template = (
        ...     "{% for message in messages %}{{ message.role }}: {{ message.content }}"
        ...     "{{ eos_token }}{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
        ... )
        >>> model = keras_recurrent.models.GriffinCausalLM.from_preset(
        ...     "hawk_tiny", num_layers=1, chat_template=template
        ... )
        >>> messages = [{"role": "user", "content": "How are you?"}]
        >>> answer, cache = model.chat(messages, return_cache=True, max_new_tokens=8)
        >>> messages += [answer, {"role": "user", "content": "And now?"}]
        >>> answer, cache = model.chat(messages, cache, return_cache=True, max_new_tokens=8)
        >>> answer["role"]
        'assistant'
        """
        turn = start_turn(self, messages, cache, sampling, tools)
        # The tokens of the cache have the marks of calls, which texts may lack.
        keeps_cache = return_cache or tools is not None
        result = self.generate(
            turn.inputs,
            max_length,
            stop_token_ids,
            strip_prompt=True,
            cache=turn.cache,
            return_cache=keeps_cache,
            max_new_tokens=max_new_tokens,
            stop=stop,
            sampling=sampling,
        )
        has_output = isinstance(result, GenerationOutput)
        if has_output:
            texts, new_cache = result.texts, result.cache
        else:
            texts, new_cache = result if keeps_cache else (result, None)
        contents = texts if isinstance(turn.inputs, list) else [texts]
        if has_output and result.scores is not None:  # several beams
            contents = [beams[0] for beams in contents]
        answers = [answer(content) for content in contents]
        if tools is not None:
            strings = check_stop_strings(stop, self.preprocessor)
            answers = [
                answer_with_calls(self.preprocessor, tools, ids[n - 1], ids[n:].tolist(), strings)
                for ids, n in zip(new_cache.token_ids, turn.lengths, strict=True)
            ]
        if return_cache:
            token_ids = new_cache.token_ids
            conversations = turn.conversations(self.preprocessor, token_ids, answers)
            new_cache = new_cache._replace(new_cache.state, token_ids, conversations)
        if has_output:
            return dataclasses.replace(result, cache=new_cache if return_cache else None)
        found = answers if isinstance(turn.inputs, list) else answers[0]
        return (found, new_cache) if return_cache else found
