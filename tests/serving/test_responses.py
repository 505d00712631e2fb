"""Log probabilities in the bodies of responses, whole and streamed."""

import numpy as np
import pytest

from keras_recurrent.generation.sampling_params import TokenLogprobs
from keras_recurrent.generation.text import StreamedText
from keras_recurrent.models import GriffinCausalLMPreprocessor
from keras_recurrent.serving.responses import ChatFormat, CompletionFormat, LogprobTexts
from keras_recurrent.tokenizers.detokenizer import TokenBytes
from tests.generation.test_text import TOKENIZERS
from tests.tokenizers import bpe

pytestmark = pytest.mark.once


def make_logprobs(token_ids, top=()):
    return [TokenLogprobs(int(token), -1.0, dict(top)) for token in token_ids]


def make_format(tokenizer, form=CompletionFormat):
    return form("tiny", LogprobTexts(GriffinCausalLMPreprocessor(tokenizer)), True)


@pytest.mark.parametrize("name", ["bytes", "sentence_piece", "bpe", "suffix"])
def test_streamed_log_probabilities_match_the_whole_answer(name):
    """An offset is wrong after a character of several tokens, or while text is withheld."""
    tokenizer, rng = TOKENIZERS[name](), np.random.default_rng(0)
    form = make_format(tokenizer)
    preprocessor = GriffinCausalLMPreprocessor(tokenizer)
    known = TokenBytes(preprocessor)
    alphabet = [*map(int, tokenizer("é€😀 all happy")), *tokenizer.special_token_ids]
    for index in range(40):
        token_ids = rng.choice(alphabet, size=12).tolist()
        last = int(rng.choice(alphabet))
        text = StreamedText(preprocessor, last, ("lXb", "€p", "zz"))
        chunks = [text.add(token, n == 11) for n, token in enumerate(token_ids)]
        streamed, withheld = [], []
        for n, (chunk, token) in enumerate(zip(chunks, token_ids, strict=True)):
            withheld += make_logprobs([token], [(token, -1.0)])
            if chunk or streamed or n == 11:  # as `RequestGroup.events`
                streamed.append(form.chunk(2 * index, chunk, withheld))
                withheld = []
        parts = [body["choices"][0]["logprobs"] for body in streamed]
        joined = {key: [x for part in parts for x in part[key]] for key in parts[0]}
        logprobs = [each for t in token_ids for each in make_logprobs([t], [(t, -1.0)])]
        (choice,) = form.chunk(2 * index + 1, "".join(chunks), logprobs)["choices"]
        assert joined == choice["logprobs"]
        if known.errors is not None and not text.is_stopped:
            for token, offset in zip(token_ids, joined["text_offset"], strict=True):
                added = known[token].decode(errors="replace")
                if "\ufffd" not in added and "\ufffd" not in choice["text"] and offset:
                    assert choice["text"][offset:].startswith(added)


def test_top_log_probabilities_contain_tokens_of_equal_texts():
    """Tokens that are parts of characters, or have the same text, overwrite each other."""
    form = make_format(bpe.llama(bpe.DECODERS["fallback"]))
    a, byte = 3 + ord("a"), 3 + 0xF0
    letter = form._tokens.known.tokenizer.token_to_id("a")
    top = {letter: -0.1, a: -1.0, byte: -2.0, 3 + 0x9F: -np.inf}
    (choice,) = form.chunk(0, "a", make_logprobs([letter], top.items()))["choices"]
    expected = {"a": -0.1, f"token_id:{a}": -1.0, "bytes:\\xf0": -2.0, "bytes:\\x9f": -9999.0}
    assert choice["logprobs"]["top_logprobs"] == [expected]
    assert choice["logprobs"]["text_offset"] == [0]


@pytest.mark.parametrize("name", ["bytes", "sentence_piece", "bpe", "fallback"])
def test_bytes_of_chat_tokens_are_the_bytes_of_the_text(name):
    """A client cannot join the parts of a character, because they have no bytes."""
    tokenizer = TOKENIZERS[name]()
    form, text = make_format(tokenizer, ChatFormat), "é€😀 all"
    (choice,) = form.chunk(0, text, make_logprobs(tokenizer(text)))["choices"]
    found = [bytes(each["bytes"]) for each in choice["logprobs"]["content"]]
    assert b"".join(found).strip() == text.encode()
