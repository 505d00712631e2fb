"""Response bodies of OpenAI's API: completions, chunks of a stream, and log probabilities."""

import collections
import json
import time
import uuid
from typing import Any

from keras_recurrent.generation.tool_calls import ToolCallParser, tool_call
from keras_recurrent.tokenizers.detokenizer import DECODER, REPLACEMENT, token_bytes

LEAST_LOGPROB = -9999.0  # for tokens of probability 0, as in OpenAI's API


class LogprobTexts:
    """Texts of single tokens, for log probabilities."""

    def __init__(self, preprocessor):
        self.known = preprocessor and token_bytes(preprocessor)

    def text(self, token):
        """Returns the text of a token, or `bytes:` and its bytes, as in OpenAI's API."""
        if self.known is None:
            return str(token)
        text = self.known[token].decode(errors="replace")
        if REPLACEMENT in text:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in self.known[token])
        return text or str(self.known.tokenizer.id_to_token(token))

    def entry(self, token, logprob):
        """Returns the log probability of a token, as chat completions have it."""
        text = self.text(token)
        data = list((self.known and self.known[token]) or text.encode())
        logprob = None if logprob is None else max(logprob, LEAST_LOGPROB)
        return {"token": text, "logprob": logprob, "bytes": data}

    def top(self, logprobs):
        """Returns `{text: log probability}` for `{token: log probability}`, as completions have it.

        Tokens with the text of a more probable one are `token_id:` and their id, as in vLLM.
        """
        found = {}
        for token, value in logprobs.items():
            text = self.text(token)
            text = f"token_id:{token}" if text in found else text
            found[text] = max(value, LEAST_LOGPROB)
        return found


class CompletionFormat:
    """Bodies of the response to one request to `/v1/completions`."""

    id_prefix, object, chunk_object = "cmpl-", "text_completion", "text_completion"

    def __init__(self, model, tokens, has_logprobs):
        self.id = self.id_prefix + uuid.uuid4().hex
        self._tokens, self._has_logprobs = tokens, has_logprobs
        self._common = {"created": int(time.time()), "model": model}
        # {index of a choice: its decoder, and the number of characters of its tokens so far}
        self._offsets = {}
        self.echoed = {}  # {index of a choice: the text of its prompt, until it is sent}

    def add_prompt(self, index, text, logprobs, prompt_logprobs):
        """Returns the text and log probabilities of a choice, with an echoed prompt before them."""
        if index not in self.echoed:
            return text, logprobs
        return self.echoed.pop(index) + text, [*(prompt_logprobs or ()), *logprobs]

    def _body(self, name, choices, usage):
        return {"id": self.id, "object": name, **self._common, "choices": choices, "usage": usage}

    def _finish_reason(self, index, reason):
        return reason

    def completion(self, completions, n=None):
        """Returns the body for a list of `Completion`s, `n` adjacent ones for each prompt."""
        choices = []
        for index, result in enumerate(completions):
            answer = result.text or "", result.logprobs
            content = self._content(index, *self.add_prompt(index, *answer, result.prompt_logprobs))
            reason = self._finish_reason(index, result.finish_reason)
            choices.append({"index": index, **content, "finish_reason": reason})
        return self._body(self.object, choices, usage(completions, n))

    def chunk(self, index, text, logprobs, finish_reason=None):
        """Returns the body of one event of a stream, or None if it would be empty."""
        content = self._delta(index, text, logprobs, finish_reason)
        if not finish_reason and content == {"delta": {}, "logprobs": None}:
            return None
        reason = self._finish_reason(index, finish_reason)
        choice = {"index": index, **content, "finish_reason": reason}
        return self._body(self.chunk_object, [choice], None)

    def usage_chunk(self, completions, n=None):
        return self._body(self.chunk_object, [], usage(completions, n))

    def _content(self, index, text, logprobs):
        return {"text": text, "logprobs": self._logprobs(index, text, logprobs)}

    def _delta(self, index, text, logprobs, finish_reason):
        return self._content(index, text, logprobs)

    def _logprobs(self, index, text, logprobs):
        if not self._has_logprobs:
            return None
        entries = [self._tokens.entry(each.token_id, each.logprob) for each in logprobs]
        return {
            "tokens": [entry["token"] for entry in entries],
            "token_logprobs": [entry["logprob"] for entry in entries],
            "top_logprobs": [
                None if each.logprob is None else self._tokens.top(each.top) for each in logprobs
            ],
            "text_offset": self._text_offsets(index, text, [each.token_id for each in logprobs]),
        }

    def _text_offsets(self, index, text, token_ids):
        """Returns the number of characters before each token, which may be withheld or cut off."""
        known, offsets = self._tokens.known, []
        if known is None or not token_ids:
            return [0] * len(token_ids)
        if index not in self._offsets:
            # A tokenizer may drop the first space.
            first = next(filter(None, map(known.__getitem__, token_ids)), b"")
            drops_space = first[:1] == b" " and text[:1] not in ("", " ")
            self._offsets[index] = DECODER(known.errors or "replace"), -drops_space
        decoder, count = self._offsets[index]
        for token in token_ids:
            offsets.append(max(count, 0))
            count += len(decoder.decode(known[token]))
        self._offsets[index] = decoder, count
        return offsets


class ChatFormat(CompletionFormat):
    """Bodies of the response to one request to `/v1/chat/completions`."""

    id_prefix, object, chunk_object = "chatcmpl-", "chat.completion", "chat.completion.chunk"
    _parsers: Any = None  # {index of a choice: its `ToolCallParser`}, or None without tools

    def parse_tools(self, *arguments):
        """Parses the calls in all choices; arguments as in `ToolCallParser`."""
        self._parsers = collections.defaultdict(lambda: ToolCallParser(*arguments))

    def _finish_reason(self, index, reason):
        has_calls = self._parsers is not None and self._parsers[index].calls
        return "tool_calls" if reason == "stop" and has_calls else reason

    def _add(self, index, text, is_last):
        """Adds text of an answer.

        Returns the new content, a list of new calls, and the number of calls before them.
        """
        if self._parsers is None:
            return text, [], 0
        parser = self._parsers[index]
        first, content = len(parser.calls), parser.add(text, is_last)
        new = [(name, json.dumps(x, ensure_ascii=False)) for name, x in parser.calls[first:]]
        return content, [tool_call(*each) for each in new], first

    def _content(self, index, text, logprobs):
        content, calls, _ = self._add(index, text, True)
        message = {"role": "assistant", "content": content, "refusal": None}
        if calls:
            message |= {"content": content or None, "tool_calls": calls}
        return {"message": message, "logprobs": self._logprobs(index, text, logprobs)}

    def _delta(self, index, text, logprobs, finish_reason):
        content, calls, first = self._add(index, text, finish_reason is not None)
        delta: dict = {"content": content} if content else {}
        if calls:
            delta["tool_calls"] = [{"index": n, **each} for n, each in enumerate(calls, first)]
        return {"delta": delta, "logprobs": self._logprobs(index, text, logprobs)}

    def first_chunk(self, index=0):
        """Returns the body of the first event of a choice, which has the role."""
        delta = {"role": "assistant", "content": "", "refusal": None}
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
        return self._body(self.chunk_object, [choice], None)

    def _logprobs(self, index, text, logprobs):
        if not self._has_logprobs or not logprobs:
            return None
        content = []
        for each in logprobs:
            top = [self._tokens.entry(*pair) for pair in each.top.items()]
            content.append({**self._tokens.entry(each.token_id, each.logprob), "top_logprobs": top})
        return {"content": content, "refusal": None}


def usage(completions, n=None):
    """Returns the token counts of a list of `Completion`s, `n` for each prompt."""
    firsts = completions[:: n or 1]
    prompt = sum(each.num_prompt_tokens for each in firsts)
    generated = sum(len(each.token_ids) for each in completions)
    cached = sum(each.num_cached_tokens for each in firsts)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": generated,
        "total_tokens": prompt + generated,
        "prompt_tokens_details": {"cached_tokens": cached},
    }
