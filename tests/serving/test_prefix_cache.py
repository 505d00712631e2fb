"""Prefix states of an engine: their files, and the ends of messages at which they are saved."""

import contextlib
import itertools
import re
import time
import types

import keras
import numpy as np
import pytest

from keras_recurrent.checks.dtypes import bytes_of
from keras_recurrent.generation.cache import GenerationCache
from keras_recurrent.generation.text import tokenize_prompts
from keras_recurrent.models import GriffinCausalLMPreprocessor
from keras_recurrent.serving.client import message_ends
from keras_recurrent.serving.prefix_cache import PrefixCache
from keras_recurrent.tokenizers import ByteTokenizer
from tests.models.tiny import tiny_causal_lm
from tests.tokenizers import bpe

pytestmark = pytest.mark.once

MAX_LENGTH = 64


@pytest.fixture
def logs(caplog):
    """Returns a context manager that requires a message in the log which matches a pattern."""

    @contextlib.contextmanager
    def check(pattern):
        caplog.clear()
        yield
        assert re.search(pattern, caplog.text)

    return check


@pytest.fixture(scope="module")
def model():
    return tiny_causal_lm(family="hgrn2")


def add(cache, model, *names):
    """Saves the state after the two tokens of each name."""
    for name in names:
        state = model.backbone.get_initial_state(1, max_length=MAX_LENGTH)
        cache.add(np.array(name, "int32"), state)


def find_stored(cache, *names, salt=None):
    """Returns the names of which there is a state."""
    prompts = [np.array([*name, 0], "int32") for name in names]
    sequences = [types.SimpleNamespace(prompt=p, state=None, salt=salt) for p in prompts]
    for sequence in sequences:
        cache.restore(sequence)
    return [n for n, sequence in zip(names, sequences, strict=True) if sequence.state is not None]


def test_prefix_files_keep_the_most_recently_used_states(model, tmp_path, monkeypatch, logs):
    """The directory grows without limit, forgets the use of a state, or deletes other files."""
    a, b, c, d, e = ((number, number) for number in range(5))
    (tmp_path / "mine.safetensors").write_bytes(b"no state")
    with logs("Unused files in .*: 1"):
        cache = PrefixCache(model, 10**6, MAX_LENGTH, tmp_path)
    add(cache, model, a, b, c)
    assert find_stored(cache, a) == [a]
    cache.close()
    size = max(path.stat().st_size for path in tmp_path.iterdir())
    with logs("files in .*: 1"):
        cache = PrefixCache(model, 3 * size, MAX_LENGTH, tmp_path)
    assert find_stored(cache, a, b, c) == [a, b, c]
    assert find_stored(cache, c, a) == [c, a]

    save = GenerationCache.save

    def fail_once(cache, path):
        monkeypatch.setattr(GenerationCache, "save", save)
        raise OSError("the disk is full")

    monkeypatch.setattr(GenerationCache, "save", fail_once)
    add(cache, model, d, e)
    cache.close()
    with logs("files in .*: 1"):
        cache = PrefixCache(model, 3 * size, MAX_LENGTH, tmp_path)
    assert find_stored(cache, a, b, c, d, e) == [a, c, e]
    cache.close()
    assert len(list(tmp_path.iterdir())) == 4


def test_full_prefix_cache_drops_the_oldest_states(model):
    """Memory grows with the number of requests."""
    names = [(number, number) for number in range(5)]
    cache = PrefixCache(model, 10**6, MAX_LENGTH)
    add(cache, model, names[0])
    cache = PrefixCache(model, 3 * cache._nbytes, MAX_LENGTH)
    add(cache, model, *names)
    assert find_stored(cache, *names) == names[2:]


def test_prefix_cache_with_salt_shares_no_states(model, tmp_path):
    """A client finds out which prompts others have sent, or other users can read the files."""
    folder, a = tmp_path / "new", (1, 1)
    cache = PrefixCache(model, 10**6, MAX_LENGTH, folder)
    state = model.backbone.get_initial_state(1, max_length=MAX_LENGTH)
    cache.add(np.array(a, "int32"), state, "alice")
    for restarted in (False, True):
        if restarted:
            cache = PrefixCache(model, 10**6, MAX_LENGTH, folder)
        assert find_stored(cache, a, salt="alice") == [a]
        assert find_stored(cache, a, salt="bob") == find_stored(cache, a) == []
        cache.close()
    assert [path.stat().st_mode & 0o777 for path in (folder, *folder.iterdir())] == [0o700, 0o600]


def test_prefix_files_do_not_write_states_that_are_soon_dropped(model, tmp_path, monkeypatch):
    """States of requests that do not continue are written, which slows the engine down."""
    saved = []
    save = GenerationCache.save
    monkeypatch.setattr(GenerationCache, "save", lambda *args: saved.append(1) or save(*args))
    state = model.backbone.get_initial_state(1, max_length=MAX_LENGTH)
    nbytes = sum(map(bytes_of, keras.tree.flatten(state)))
    cache = PrefixCache(model, 2 * nbytes, MAX_LENGTH, tmp_path)
    for number in range(9):
        add(cache, model, (number, number))
        time.sleep(0.02)  # the thread could write it
    cache.close()
    assert len(saved) == 2


def test_prefix_files_that_are_damaged_or_of_other_models_are_not_used(model, tmp_path, logs):
    """A file ends the start of the server, or a model continues the state of other weights."""
    a, b = (1, 1), (2, 2)
    cache = PrefixCache(model, 10**6, MAX_LENGTH, tmp_path)
    add(cache, model, a, b)
    cache.close()
    first, second = sorted(tmp_path.iterdir(), key=lambda path: path.stat().st_mtime_ns)
    first.write_bytes(first.read_bytes()[:-1])
    with logs("is damaged"):
        cache = PrefixCache(model, 10**6, MAX_LENGTH, tmp_path)
    assert find_stored(cache, a, b) == [b]
    add(cache, model, a)  # replaces the file
    cache.close()
    other_model = tiny_causal_lm(1, family="hgrn2")
    for each, max_length in ((other_model, MAX_LENGTH), (model, 32)):
        with logs("files in .*: 2.*other weights"):
            cache = PrefixCache(each, 10**6, max_length, tmp_path)
        assert find_stored(cache, a, b) == []
        cache.close()
    # With the name of a file of the other model, but the weights of this one.
    other = PrefixCache(other_model, 10**6, MAX_LENGTH, tmp_path / "other")
    second.rename(tmp_path / "other" / (other._files._model + second.name[16:]))
    other.close()
    with logs("other weights"):
        other = PrefixCache(other_model, 10**6, MAX_LENGTH, tmp_path / "other")
    assert find_stored(other, b) == []
    other.close()
    cache = PrefixCache(model, 10**6, MAX_LENGTH, tmp_path)
    assert find_stored(cache, a) == [a]
    cache.close()


LINES = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
ANSWER = "{% if add_generation_prompt %}assistant:{% endif %}"
SYSTEM = {"role": "system", "content": "Answer in one sentence."}  # 33 tokens
TURNS = [
    {"role": role, "content": f"{number}, then {number + 1}, and so on"}
    for number, role in zip(range(40), itertools.cycle(["user", "assistant"]), strict=False)
]
LONG = [SYSTEM, *TURNS[:39]]


def count_tokens(messages):
    """Returns the number of tokens of messages that `LINES` renders, with the start token."""
    return 1 + sum(len(f"{each['role']}: {each['content']}\n") for each in messages)


def rendered(preprocessor, messages):
    """Returns the prompt of messages, and a list of its tokens."""
    prompt = preprocessor.apply_chat_template(messages)
    (tokens,) = tokenize_prompts(preprocessor.tokenizer, [prompt], preprocessor.add_start_token)
    return prompt, tokens


@pytest.mark.parametrize(
    ("template", "messages", "ends"),
    [
        (LINES + ANSWER, [SYSTEM, TURNS[0]], [1]),
        (LINES + ANSWER, LONG, [1, 39]),
        (LINES + ANSWER, TURNS[:3], [2]),
        (LINES + ANSWER, TURNS[:1], []),
        (LINES + ANSWER, [{"role": "system", "content": "Brief."}, *TURNS[:1]], []),
        # The template renders the system message last, or rejects the beginning.
        ("{{ messages[1:] }}{{ messages[0] }}", [SYSTEM, *TURNS[:3]], []),
        (LINES + "{{ raise_exception('') if messages|length < 3 }}", LONG[:4], [3]),
    ],
)
def test_message_ends_are_found_with_few_renderings(template, messages, ends):
    """A state is saved in the middle of a message, or each of many messages is rendered."""
    preprocessor = GriffinCausalLMPreprocessor(ByteTokenizer(), chat_template=template)
    prompt, tokens = rendered(preprocessor, messages)
    render, calls = preprocessor.apply_chat_template, []
    preprocessor.apply_chat_template = lambda *args, **kwargs: (
        calls.append(1) or render(*args, **kwargs)
    )
    expected = tuple(count_tokens(messages[:count]) for count in ends)
    assert message_ends(preprocessor, messages, prompt, tokens) == expected
    assert len(calls) <= 2


def test_message_end_with_a_tokenizer_that_begins_texts_with_a_space():
    """An end is lost because the text after a message has other tokens if tokenized alone."""
    preprocessor = GriffinCausalLMPreprocessor(bpe.llama(None), chat_template=LINES + ANSWER)
    messages = [SYSTEM, {"role": "user", "content": "happy"}]
    prompt, all_tokens = rendered(preprocessor, messages)
    prefix = preprocessor.apply_chat_template(messages[:1], add_generation_prompt=False)
    (tokens,) = tokenize_prompts(preprocessor.tokenizer, [prefix], preprocessor.add_start_token)
    assert message_ends(preprocessor, messages, prompt, all_tokens) == (len(tokens),)
