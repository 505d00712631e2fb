"""`BPETokenizer`, byte-pair encoding from `tokenizer.json`."""

import json
import pickle

import keras
import numpy as np
import pytest
import tokenizers

from keras_recurrent.models import GriffinCausalLMPreprocessor, GriffinTextClassifierPreprocessor
from keras_recurrent.tokenizers import BPETokenizer
from keras_recurrent.tokenizers import bpe_file as bpe_files
from tests.layers.table import assert_rejects
from tests.models.tiny import tiny_causal_lm
from tests.tokenizers import bpe

pytestmark = pytest.mark.once


def preprocess(preprocessor, texts):
    """Returns the inputs of a preprocessor as NumPy arrays, and the real tokens of each row."""
    output = preprocessor(texts)
    x = keras.tree.map_structure(
        keras.ops.convert_to_numpy, output[0] if isinstance(output, tuple) else output
    )
    rows = zip(x["token_ids"], x["padding_mask"], strict=True)
    return x, [tokens[mask].tolist() for tokens, mask in rows]


# === Text and tokens ===


@pytest.mark.parametrize("path", bpe.PATHS, ids=lambda path: path.name)
def test_tokens_and_texts_match_the_recorded_ones(path):
    """A normalizer, pattern, added token or decoder of the file is not applied."""
    tokenizer = BPETokenizer(path / "tokenizer.json", end_token_id=980)
    golden = json.loads((path / "golden.json").read_text())
    assert tokenizer.vocabulary_size() == golden["vocab_size"]
    special = tokenizer.special_tokens
    for row in golden["strings"]:
        assert tokenizer.tokenize_with_special_tokens(row["text"]) == row["ids"]
        assert tokenizer.detokenize(row["ids"]) == row["decoded"]
        if not any(token in row["text"] for token in special):
            assert tokenizer([row["text"]]) == [row["ids"]]
    for chat in golden["chats"]:
        assert tokenizer.tokenize_with_special_tokens([chat["text"]]) == [chat["ids"]]


@pytest.mark.parametrize("is_special", [True, False])
def test_tokenize_of_special_tokens_in_a_text_gives_plain_text(is_special):
    """A user's text ends a message, possibly if the file lists the end token as ordinary."""
    file = bpe.changed_file({("added_tokens", 2, "special"): is_special})
    tokenizer = BPETokenizer(file, end_token_id=bpe.END, pad_token_id=bpe.PAD)
    text = "a<|im_end|>\n<|endoftext|>"
    ids = tokenizer(text).tolist()
    assert not set(ids) & set(tokenizer.special_token_ids)
    assert tokenizer.detokenize(ids) == text
    assert tokenizer.tokenize_with_special_tokens(text) == [64, 982, 198, 980]
    assert sorted(tokenizer.special_token_ids) == [980, 981, 982]
    assert tokenizer(text).tolist() == ids


def test_ordinary_token_as_padding_keeps_its_text():
    tokenizer = bpe.tokenizer(pad_token_id=64)
    assert tokenizer.special_token_ids == [980, 981, 982]
    assert tokenizer.detokenize(tokenizer("a<|im_end|>")) == "a<|im_end|>"
    assert tokenizer.tokenize_with_special_tokens("a<|im_end|>") == [64, 982]


def test_special_tokens_default_to_those_of_the_file():
    tokenizer = bpe.tokenizer()
    assert (tokenizer.start_token_id, tokenizer.start_token) == (None, None)
    assert (tokenizer.end_token, tokenizer.pad_token) == ("<|im_end|>", "<|endoftext|>")
    assert BPETokenizer(bpe.PATH / "tokenizer.json", end_token_id=5).pad_token_id == 5


def test_vocabulary_lists_the_tokens_of_the_file():
    tokenizer = bpe.tokenizer()
    vocabulary = tokenizer.get_vocabulary()
    assert len(vocabulary) == tokenizer.vocabulary_size() == bpe.VOCABULARY_SIZE
    assert all(tokenizer.id_to_token(id) == token for token, id in vocabulary.items())
    assert tokenizer.token_to_id("<think>") == 983
    for call in (lambda: tokenizer.id_to_token(987), lambda: tokenizer.token_to_id("<no>")):
        assert_rejects(r"must be .* of the file", call)


def test_dtype_of_token_ids_is_the_requested_integer():
    tokenizer = bpe.tokenizer()
    assert tokenizer("a").dtype == "int32"
    assert bpe.tokenizer(dtype="int64")("a").dtype == "int64"
    assert tokenizer([["a", "b"], ["c"]]) == [[[64], [65]], [[66]]]
    assert_rejects("`dtype` must be an integer", bpe.tokenizer, dtype="float32")


def test_truncation_padding_and_dropout_of_the_file_are_ignored():
    truncation = {"max_length": 2, "strategy": "LongestFirst", "stride": 0, "direction": "Right"}
    padding = {"strategy": {"Fixed": 60}, "direction": "Right", "pad_id": 0, "pad_token": "!"}
    padding |= {"pad_to_multiple_of": None, "pad_type_id": 0}
    changes = {("truncation",): truncation, ("padding",): padding, ("model", "dropout"): 0.9}
    tokenizer = BPETokenizer(bpe.changed_file(changes), end_token_id=980)
    text = "Before we proceed any further, hear me speak."
    for texts in ([text] * 2, [text]):
        assert tokenizer(texts) == bpe.tokenizer()(texts)
    assert tokenizer.tokenize_with_special_tokens(text) == bpe.tokenizer()([text])[0]


def test_detokenize_of_random_tokens_matches_the_tokenizers_library():
    rng = np.random.default_rng(0)
    for path in bpe.PATHS:
        content = (path / "tokenizer.json").read_text()
        tokenizer = BPETokenizer(content.encode(), end_token_id=980)
        library = tokenizers.Tokenizer.from_str(content)
        for ids in rng.integers(0, 983, (50, 20)).tolist():
            assert tokenizer.detokenize(ids) == library.decode(ids, skip_special_tokens=False)
    assert tokenizer.detokenize([[64, 5000, -1], []]) == ["a\ufffd\ufffd", ""]


# === Files ===


def test_pickle_keeps_file_and_config():
    tokenizer = bpe.tokenizer(name="bpe")
    copy = pickle.loads(pickle.dumps(tokenizer))
    assert copy.tokenizer_json == (bpe.PATH / "tokenizer.json").read_bytes()
    assert copy.get_config() == tokenizer.get_config()
    assert copy("hi").tolist() == tokenizer("hi").tolist()


def test_deserialized_tokenizer_has_no_file_until_it_loads_assets(tmp_path):
    """A configuration makes the tokenizer read any file, or a damaged file is not reported."""
    tokenizer = bpe.tokenizer()
    empty = keras.saving.deserialize_keras_object(keras.saving.serialize_keras_object(tokenizer))
    assert_rejects("The tokenizer has no file", empty, "hi")
    with pytest.raises(ValueError, match="The tokenizer has no file"):
        _ = empty.special_token_ids
    config = {**tokenizer.get_config(), "tokenizer_json": str(bpe.PATH / "tokenizer.json")}
    assert BPETokenizer.from_config(config).tokenizer_json is None
    tokenizer.save_to_preset(str(tmp_path))
    (file,) = tmp_path.glob("assets/*/tokenizer.json")
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ValueError, match=rf"No tokenizer can be made of {file}: it is not JSON"):
        empty.load_assets(str(file.parent))


REPLACE = {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 100}
WORD_PIECE = {"type": "WordPiece", "unk_token": "x", "vocab": {"x": 0}}
WORD_PIECE |= {"continuing_subword_prefix": "##", "max_input_chars_per_word": 9}
UNIGRAM = {"type": "Unigram", "unk_id": 0, "vocab": [["x", 0.0]]}
PATTERN = ("pre_tokenizer", "pretokenizers", 0, "pattern", "Regex")
NEW_TOKEN = ("model", "vocab", "zzz")
NO_ADDED_TOKENS = {("added_tokens",): []}
# {fault: (changes of the file, message)}
FAULTY_FILES = {
    "added token with a wrong id": (
        {("added_tokens", 1, "id"): 5},
        r"the added token '<\|im_start\|>' has the id 5, where the .* assigns 981",
    ),
    "added token after a gap": (
        {("added_tokens", 6, "id"): 990},
        "the added token '</tool_call>' has the id 990",
    ),
    "two tokens with an id": ({NEW_TOKEN: 5}, "the tokens '&' and 'zzz' have the id 5"),
    "huge id": ({NEW_TOKEN: 2**32 - 1}, "the id of the token 'zzz' is 4294967295, above"),
    "id of 34 bits": ({NEW_TOKEN: 2**33}, "the tokenizers library reports: invalid value"),
    "merge of unknown tokens": (
        {("model", "merges"): [["zq", "zz"]]},
        "reports: Token `zq` out of vocabulary",
    ),
    "invalid pattern": ({PATTERN: "(a"}, "reports: Oniguruma error"),
    "long replacements": (
        {("normalizer",): {"type": "Sequence", "normalizers": [REPLACE] * 5}},
        "can lengthen a text 10000000000 times",
    ),
    "panic of the library": (
        {("normalizer",): {"type": "Precompiled", "precompiled_charsmap": "AAAA"}},
        "reports: Precompiled",
    ),
    "no model": ({("model",): bpe.REMOVED}, "it has no 'model'.*KerasHub"),
    "WordPiece": ({**NO_ADDED_TOKENS, ("model",): WORD_PIECE}, "WordPiece, and only BPE"),
    "Unigram": ({**NO_ADDED_TOKENS, ("model",): UNIGRAM}, "its model is Unigram, and only BPE"),
    "no tokens": (
        {**NO_ADDED_TOKENS, ("model", "vocab"): {}, ("model", "merges"): []},
        "it has no tokens",
    ),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("fault", FAULTY_FILES)
def test_faulty_file_raises_with_the_fault(fault):
    changes, message = FAULTY_FILES[fault]
    match = rf"No tokenizer can be made of `tokenizer.json`: .*{message}"
    assert_rejects(match, BPETokenizer, bpe.changed_file(changes), end_token_id=0)


@pytest.mark.parametrize("content", [b"", b"[" * 100_000, b"[]", b"\xff", b'{"model": "BPE"}'])
def test_file_without_a_tokenizer_raises_with_its_path(tmp_path, content):
    path = tmp_path / "tokenizer.json"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"No tokenizer can be made of .*/tokenizer.json: it "):
        BPETokenizer(path, end_token_id=0)


def test_too_large_file_raises(monkeypatch):
    monkeypatch.setattr(bpe_files, "MAX_BYTES", 50_000)
    assert_rejects("it has more than 50,000 bytes", bpe.tokenizer)


def test_tokenize_with_endless_backtracking_raises():
    tokenizer = BPETokenizer(bpe.changed_file({PATTERN: "(a+)+$"}), end_token_id=980)
    assert_rejects("reports: Onig: Regex search error: retry-limit", tokenizer, "a" * 40 + "b")


@pytest.mark.parametrize(
    "ids", [{}, {"end_token_id": 987}, {"end_token_id": 0, "pad_token_id": -1}]
)
def test_special_token_ids_outside_the_file_raise_with_the_special_tokens(ids):
    with pytest.raises(ValueError, match=r"_token_id` must be .* Its special .* 980 \('<\|endof"):
        BPETokenizer(bpe.PATH / "tokenizer.json", **ids)


# === Models ===


def make_model(**kwargs):
    return tiny_causal_lm(
        preprocessor=GriffinCausalLMPreprocessor(bpe.tokenizer(), sequence_length=12, **kwargs),
        vocabulary_size=bpe.VOCABULARY_SIZE + 5,
        num_layers=1,
        block_types=("recurrent",),
    )


def test_keras_file_of_a_model_contains_its_tokenizer(tmp_path):
    make_model().save(tmp_path / "model.keras")
    tokenizer = keras.saving.load_model(tmp_path / "model.keras").preprocessor.tokenizer
    assert tokenizer.tokenizer_json == (bpe.PATH / "tokenizer.json").read_bytes()
    assert (tokenizer.end_token_id, tokenizer.pad_token_id) == (bpe.END, bpe.PAD)


def test_preprocessors_without_start_token_add_none():
    """A start token None gets into packed, padded or classified texts."""
    tokenizer, texts = bpe.tokenizer(), ["Before we", "proceed"]
    tokens = [[*row, bpe.END] for row in tokenizer(texts)]
    packed = GriffinCausalLMPreprocessor(tokenizer, sequence_length=12, packed=True)
    assert preprocess(packed, texts)[1] == [tokens[0] + tokens[1]]
    padded = GriffinCausalLMPreprocessor(tokenizer, sequence_length=12)
    assert preprocess(padded, texts)[1] == tokens
    classifier = GriffinTextClassifierPreprocessor(tokenizer, sequence_length=12)
    assert preprocess(classifier, texts[:1])[1] == tokens[:1]
    with pytest.raises(ValueError, match="prompt 0 alone has 3"):
        padded.generate_preprocess(["Before we"], sequence_length=2)
