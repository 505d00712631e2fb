"""`chat`: answers, the tokens that the next turn processes, and caches of other messages."""

from types import SimpleNamespace

import numpy as np
import pytest

from keras_recurrent.chat.templates import ChatPrompt
from keras_recurrent.generation.chat import start_turn
from keras_recurrent.models import (
    GenerationCache,
    GriffinCausalLM,
    GriffinCausalLMPreprocessor,
    SamplingParams,
)
from keras_recurrent.presets.griffin import RECURRENT_GEMMA_CHAT_TEMPLATE
from keras_recurrent.samplers import BeamSampler
from keras_recurrent.tokenizers import ByteTokenizer, SentencePieceTokenizer
from tests.layers.table import assert_rejects
from tests.models.tiny import nightly_on_tensorflow, tiny_causal_lm
from tests.tokenizers import bpe
from tests.tokenizers.sentence_piece import train

pytestmark = pytest.mark.once
LINES = (
    "{{ bos_token }}{% for message in messages %}{{ message.role }}: {{ message.content }}"
    "{{ eos_token }}\n{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)
PLAIN = LINES.replace("{{ eos_token }}", "")
SPACE = LINES.replace(": {% endif", ":{% endif")
STRIP = PLAIN.replace("content }}", "content | trim }}")
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
BRIEF = {"role": "system", "content": "Be brief."}
HELLO = {"role": "user", "content": "Hello"}
AND = {"role": "user", "content": "And?"}
# The new message in the format of each template.
LINES_AND = "user: And?<end>\nassistant: "
PLAIN_AND = "user: And?\nassistant: "
GEMMA_AND = "<end_of_turn>\n<start_of_turn>user\nAnd?<end_of_turn>\n<start_of_turn>model\n"
CHATML_AND = "<|im_end|>\n<|im_start|>user\nAnd?<|im_end|>\n<|im_start|>assistant\n"
SMALL = {"vocabulary_size": 259, "num_layers": 1, "block_types": ("recurrent",)}
# Letters only: the next turn would replace a special token at the end of an answer.
LETTERS = SamplingParams(temperature=0, logit_bias={3 + byte: 100.0 for byte in b"abcd"})
NEW = {"max_new_tokens": 6, "sampling": LETTERS}


def answer(content):
    return {"role": "assistant", "content": content}


def make_gemma(template=RECURRENT_GEMMA_CHAT_TEMPLATE, **kwargs):
    symbols = ["<start_of_turn>", "<end_of_turn>"]
    ids = {"pad_id": 0, "eos_id": 1, "bos_id": 2, "unk_id": 3, "add_dummy_prefix": False}
    tokenizer = SentencePieceTokenizer(train(**ids, user_defined_symbols=symbols))
    return GriffinCausalLMPreprocessor(tokenizer, chat_template=template, **kwargs)


def make_lines(template=LINES):
    return GriffinCausalLMPreprocessor(ByteTokenizer(), chat_template=template)


def make_chatml():
    return GriffinCausalLMPreprocessor(bpe.tokenizer(), chat_template=CHATML)


def make_added():
    """Returns a preprocessor with added special tokens."""
    added_tokens = {"<|im_end|>": 50, "<|im_start|>": 51}
    tokenizer = SentencePieceTokenizer(train(add_dummy_prefix=False), added_tokens=added_tokens)
    return GriffinCausalLMPreprocessor(tokenizer, chat_template=CHATML)


def make_renderer(preprocessor):
    """Returns a model that renders and tokenizes, and cannot generate."""
    return SimpleNamespace(preprocessor=preprocessor, preprocessor_cls=GriffinCausalLMPreprocessor)


def make_cache(preprocessor, content, ids):
    """Returns the cache after an answer of these tokens to `HELLO`."""
    turn = start_turn(make_renderer(preprocessor), [HELLO], None)
    tokens = [np.array([*turn.inputs.token_ids, *ids])]
    known = turn.conversations(preprocessor, tokens, [answer(content)])
    return GenerationCache(None, tokens, None, None, known)


@pytest.fixture(scope="module")
def model():
    model = GriffinCausalLM.from_preset("hawk_tiny", num_layers=1, chat_template=LINES)
    model.compile(sampler="greedy")
    return model


# === Turns ===


@pytest.mark.every_backend
@nightly_on_tensorflow
def test_chat_with_a_saved_cache_processes_only_the_new_message(tmp_path, model):
    """The second turn repeats or loses tokens, or `stream` answers differently."""
    messages = [HELLO]
    first, cache = model.chat(messages, return_cache=True, **NEW)
    assert first == {"role": "assistant", "content": first["content"]}
    cache.save(tmp_path / "chat")
    messages += [first, AND]
    second, after = model.chat(
        messages, GenerationCache.load(tmp_path / "chat", model), return_cache=True, **NEW
    )
    new = model.preprocessor.tokenizer.tokenize_with_special_tokens(
        "<end>\nuser: And?<end>\nassistant: "
    )
    size = int(cache.num_tokens[0])
    ids = after.token_ids[0][: size + len(new)]
    assert ids.tolist() == [*cache.token_ids[0], *new]
    prompt = ChatPrompt(["all tokens"], ids.tolist())
    assert model.generate(prompt, strip_prompt=True, **NEW) == second["content"]
    stream = model.stream(messages, cache=cache, **NEW)
    assert "".join(stream) == second["content"]
    assert stream.cache.conversations == after.conversations


def test_chat_with_several_conversations_matches_each_alone(model):
    """A conversation gets the answer of another one, or selected caches lose their messages."""
    pair = [[HELLO], [AND]]
    answers, cache = model.chat(pair, return_cache=True, **NEW)
    assert answers == [model.chat(each, **NEW) for each in pair]
    joined = GenerationCache.join([cache.select([1]), cache.select([0])])
    more = [[AND, answers[1], HELLO], [HELLO, answers[0], AND]]
    texts = model.chat(more, joined, **NEW)
    assert texts[1] == model.chat(more[1], cache.select([0]), **NEW)
    stream = model.stream(more, cache=joined, **NEW)
    assert ["".join(t) for t in zip(*stream, strict=True)] == [each["content"] for each in texts]
    with pytest.raises(ValueError, match="one conversation for each sequence of `cache`, 2; got 1"):
        model.chat(more[0], joined)
    with pytest.raises(ValueError, match=r"`messages\[1\]` must begin .* message 0 differs"):
        model.chat([more[0], more[0]], joined)


def test_chat_from_a_prefilled_cache_with_other_text_raises(model):
    """Messages follow text that is not part of their conversation."""
    whole, cache = model.chat([BRIEF, HELLO], return_cache=True, **NEW)
    assert cache.conversations[0].messages == [BRIEF, HELLO, whole]
    other = model.prefill(" by the way", cache=cache)
    assert other.conversations == [None]
    with pytest.raises(
        ValueError, match=r"must begin with the tokens in `cache`\. They differ from token \d+ on"
    ):
        model.chat([BRIEF, HELLO, answer(whole["content"] + "!"), AND], other)


def test_chat_from_the_cache_of_an_unread_stream_matches_a_fresh_chat(model):
    """A stream whose answer was not read leaves it in the cache."""
    unread = model.stream([HELLO], **NEW)
    assert unread.cache.conversations == [None]
    assert model.chat([HELLO], unread.cache, **NEW) == model.chat([HELLO], **NEW)


def test_chat_with_all_beams_returns_the_cache_of_the_best_answer():
    """The cache records the answers of all beams as if each were of one conversation."""
    model = GriffinCausalLM.from_preset("hawk_tiny", num_layers=1, chat_template=LINES)
    chats = {"return_cache": True, "max_new_tokens": 4}
    model.compile(sampler=BeamSampler(2))
    answers, cache = model.chat([[HELLO], [AND]], **chats)
    model.compile(sampler=BeamSampler(2, return_all_beams=True))
    found = model.chat([[HELLO], [AND]], **chats)
    assert found.cache.conversations == cache.conversations
    assert [beams[0] for beams in found.texts] == [each["content"] for each in answers]
    assert model.chat([HELLO], **chats).texts == found.texts[0]


@pytest.mark.parametrize(
    ("preprocessor", "content", "tokens", "num_dropped", "rest"),
    [
        (make_lines, " Hi\n", " Hi\n<end>", 1, f"<end>\n{LINES_AND}"),
        (make_lines, " Hi\n", " Hi\n", 0, f"<end>\n{LINES_AND}"),
        (lambda: make_lines(SPACE), " Hi", " Hi<end>", 1, f"<end>\n{LINES_AND[:-1]}"),
        (lambda: make_lines(PLAIN), "Hi", "Hi<end>", 1, f"\n{PLAIN_AND}"),
        (lambda: make_lines(PLAIN), "", "<end>", 1, f"\n{PLAIN_AND}"),
        (lambda: make_lines(PLAIN), "Hi", "Hi\nuser:", 0, PLAIN_AND[5:]),
        (lambda: make_lines(PLAIN), "Hi", "Hi. ", 0, f"\n{PLAIN_AND}"),
        (lambda: make_lines(STRIP), " Hi\n", " Hi\n", 0, PLAIN_AND),
        (make_gemma, " happy\n", " happy\n<end_of_turn>", 1, GEMMA_AND),
        (make_gemma, " happy\n", " happy\n</s>", 1, GEMMA_AND),
        (make_gemma, " happy\n", " happy\n", 0, GEMMA_AND),
        (make_chatml, "Hi <|im_end|>", ["Hi <|", "im_end|>"], 0, CHATML_AND),
        (make_added, "happy", ["hap", "py<|im_end|>"], 1, CHATML_AND),
        (make_chatml, "Hi there", ["H", "i th", "er", "e<|im_end|>"], 1, CHATML_AND),
    ],
    ids=[
        *("end", "cut", "space of template", "end not in template", "empty"),
        *("stop string in template", "stop string not in template", "strip with line break"),
        *("strip", "another end", "strip and cut", "special token as text", "added token"),
        "other merges",
    ],
)
def test_turn_after_an_answer_begins_with_the_end_of_the_template(
    preprocessor, content, tokens, num_dropped, rest
):
    """The cache repeats or lacks the token that ends an answer, or the text after it."""
    preprocessor = preprocessor()
    tokenize = preprocessor.tokenizer.tokenize_with_special_tokens
    ids = [i for part in ([tokens] if isinstance(tokens, str) else tokens) for i in tokenize(part)]
    cache = make_cache(preprocessor, content, ids)
    turn = start_turn(make_renderer(preprocessor), [HELLO, answer(content), AND], cache)
    (kept,) = cache.token_ids
    expected = [*kept[: len(kept) - num_dropped], *tokenize(rest)]
    assert [*turn.cache.token_ids[0], *turn.inputs.token_ids] == expected
    assert turn.cache.token_ids[0].shape == kept.shape  # the state is that before the last token


@pytest.mark.parametrize(
    ("messages", "match"),
    [
        ([{**HELLO, "content": "Hallo"}, answer("Hi"), AND],
         "message 0 differs: its 'content' is 'Hallo', and 'Hello' in `cache`"),
        ([HELLO, answer("Ho"), AND], "message 1 differs: .* 'Ho', and 'Hi' in"),
        ([{**HELLO, "name": "A"}, answer("Hi"), AND], "message 0 differs: its 'name' is 'A'"),
        ([HELLO], "must continue the 2 messages in `cache`, .* got 1 messages. Append the answer"),
        ([HELLO, answer("Hi")], "got 2 messages"),
    ],
)  # fmt: skip
def test_messages_that_differ_from_those_in_the_cache_raise(messages, match):
    cache = make_cache(make_lines(), "Hi", ByteTokenizer()("Hi"))
    assert_rejects(match, start_turn, make_renderer(make_lines()), messages, cache)


def test_template_that_renders_earlier_messages_differently_raises():
    """A cache continues with tokens that the template no longer renders."""
    thoughts = LINES.replace("message.content }}", "message.content.split('</think>')[-1] }}")
    count = "{{ messages | length }}" + LINES
    for template, content, match in [
        (
            thoughts,
            "<think>Who?</think>Hi",
            "it renders the answer as 'Hi<end>.*' instead of '<think.*'.",
        ),
        (count, "Hi", "renders the messages before the answer as '3<.*' instead of '1.*'."),
    ]:
        preprocessor = make_lines(template)
        cache = make_cache(preprocessor, content, ByteTokenizer()(content))
        with pytest.raises(
            ValueError, match=f"not prefix-preserving: .*{match} Call without `cache`"
        ):
            start_turn(make_renderer(preprocessor), [HELLO, answer(content), AND], cache)


def test_chat_without_a_template_or_messages_raises():
    model = tiny_causal_lm(preprocessor=None, **SMALL)
    for function in (model.chat, model.stream):
        assert_rejects("with a chat template; the model has no preprocessor", function, [HELLO])
    model = tiny_causal_lm(preprocessor=make_lines(None), **SMALL)
    assert_rejects("The preprocessor has no chat template", model.chat, [HELLO])
    for messages in ("Hello", [], [[]], [[HELLO], "a"]):
        assert_rejects("`messages`", start_turn, make_renderer(make_lines()), messages, None)
    with pytest.raises(ValueError, match="`cache` must be a `GenerationCache`"):
        start_turn(make_renderer(make_lines()), [HELLO], "cache")


# === Text ===


def test_texts_do_not_show_the_token_that_ends_a_turn():
    """A text ends with the text that SentencePiece has for an end token."""
    sizes = {**SMALL, "vocabulary_size": make_gemma().tokenizer.vocabulary_size()}
    model = tiny_causal_lm(preprocessor=make_gemma(), **sizes)
    model.compile(sampler="greedy")
    prompt = model.preprocessor.apply_chat_template([HELLO])
    sampling = {"sampling": SamplingParams(temperature=50, seed=1), "max_new_tokens": 6}
    options = {"strip_prompt": True, **sampling}
    shown, cache = model.generate(prompt, return_cache=True, stop_token_ids=None, **options)
    new = cache.token_ids[0][-6:].tolist()
    # A token of the answer that has text becomes an end token.
    end = next(i for i in new[1:] if i != new[0] and model.preprocessor.tokenizer.detokenize([i]))
    text = model.preprocessor.tokenizer.detokenize(new[: new.index(end)])
    model.preprocessor = make_gemma(extra_stop_token_ids=(end,))
    piece = model.preprocessor.tokenizer.detokenize([end])
    assert shown.startswith(text)
    assert model.generate(prompt, **options) == text
    assert model.generate(prompt, **sampling).endswith(text)
    assert "".join(model.stream(prompt, **sampling)) == text
    assert model.chat([HELLO], **sampling) == answer(text)
    assert model.generate(prompt, stop=piece, **options) == text
    assert model.generate(prompt, stop_token_ids=None, **options) == shown
