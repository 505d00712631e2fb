"""Byte-pair encoding from `tokenizer.json`."""

import json
import pickle

import grain
import keras
import numpy as np
import pytest
import tokenizers

from keras_recurrent.datasets import PackedText
from keras_recurrent.generation.text import IncrementalDetokenizer, TokenBytes
from keras_recurrent.models import (
    GriffinCausalLMPreprocessor,
    GriffinTextClassifierPreprocessor,
)
from keras_recurrent.tokenizers import BPETokenizer, ByteTokenizer, SentencePieceTokenizer
from keras_recurrent.tokenizers import bpe_file as bpe_files
from tests.models.tiny import tiny_causal_lm
from tests.tokenizers import bpe
from tests.tokenizers.sentence_piece import train

once = pytest.mark.once


def as_numpy(x):
    return keras.tree.map_structure(keras.ops.convert_to_numpy, x)


# === Text and tokens ===


@once
@pytest.mark.parametrize("path", bpe.PATHS, ids=lambda path: path.name)
def test_recorded_strings(path):
    """A normalizer, pattern, added token or decoder of the file that is not applied."""
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


@once
@pytest.mark.parametrize("listed_as_special", [True, False])
def test_special_tokens_of_a_text_are_plain_text(listed_as_special):
    """A user's text that ends a message, also where the file lists its end token as ordinary."""

    def change(content):
        content["added_tokens"][2]["special"] = listed_as_special

    tokenizer = BPETokenizer(bpe.changed(change), end_token_id=bpe.END, pad_token_id=bpe.PAD)
    text = "a<|im_end|>\n<|endoftext|>"
    ids = tokenizer(text).tolist()
    assert not set(ids) & set(tokenizer.special_token_ids)
    assert tokenizer.detokenize(ids) == text
    assert tokenizer.tokenize_with_special_tokens(text) == [64, 982, 198, 980]
    assert sorted(tokenizer.special_token_ids) == [980, 981, 982]
    assert tokenizer(text).tolist() == ids


@once
def test_ordinary_tokens_as_padding_stay_ordinary():
    """The text of an ordinary token is lost if the token is also the padding token."""
    tokenizer = bpe.tokenizer(pad_token_id=64)
    assert tokenizer.special_token_ids == [980, 981, 982]
    assert tokenizer.detokenize(tokenizer("a<|im_end|>")) == "a<|im_end|>"
    assert tokenizer.tokenize_with_special_tokens("a<|im_end|>") == [64, 982]


@once
def test_other_tokenizers_parse_special_tokens_on_request():
    tokenizer = ByteTokenizer()
    ids = tokenizer.tokenize_with_special_tokens(["<start>a<end><pad>", "", "b"])
    assert ids == [[1, 100, 2, 0], [], [101]]
    assert tokenizer("<start>").tolist()[:1] != [1]
    tokenizer = SentencePieceTokenizer(train(control_symbols="<turn>", user_defined_symbols="<x>"))
    turn, x = map(tokenizer.token_to_id, ("<turn>", "<x>"))
    ids = tokenizer.tokenize_with_special_tokens("<s>happy<turn>are<x></s>")
    assert ids == [1, *tokenizer("happy"), turn, *tokenizer("are"), x, 2]
    assert turn not in tokenizer("<turn>")


@once
def test_vocabulary():
    tokenizer = bpe.tokenizer()
    assert (tokenizer.start_token_id, tokenizer.start_token) == (None, None)
    assert (tokenizer.end_token, tokenizer.pad_token) == ("<|im_end|>", "<|endoftext|>")
    assert BPETokenizer(bpe.PATH / "tokenizer.json", end_token_id=5).pad_token_id == 5
    vocabulary = tokenizer.get_vocabulary()
    assert len(vocabulary) == tokenizer.vocabulary_size() == bpe.VOCABULARY_SIZE
    assert all(tokenizer.id_to_token(id) == token for token, id in vocabulary.items())
    assert tokenizer.token_to_id("<think>") == 983
    for call in (lambda: tokenizer.id_to_token(987), lambda: tokenizer.token_to_id("<no>")):
        with pytest.raises(ValueError, match=r"must be .* of the file"):
            call()
    assert tokenizer("a").dtype == "int32"
    assert bpe.tokenizer(dtype="int64")("a").dtype == "int64"
    assert tokenizer([["a", "b"], ["c"]]) == [[[64], [65]], [[66]]]
    with pytest.raises(ValueError, match="`dtype` must be an integer"):
        bpe.tokenizer(dtype="float32")


@once
def test_settings_of_the_file_that_change_tokens_are_off():
    """Truncated, padded or random tokens."""

    def change(content):
        content["truncation"] = {"max_length": 2, "strategy": "LongestFirst", "stride": 0}
        content["truncation"]["direction"] = "Right"
        content["padding"] = {"strategy": {"Fixed": 60}, "direction": "Right", "pad_id": 0}
        content["padding"] |= {"pad_to_multiple_of": None, "pad_type_id": 0, "pad_token": "!"}
        content["model"]["dropout"] = 0.9

    text = "Before we proceed any further, hear me speak."
    tokenizer = BPETokenizer(bpe.changed(change), end_token_id=980)
    for special in ([text] * 2, [text]):
        assert tokenizer(special) == bpe.tokenizer()(special)
    assert tokenizer.tokenize_with_special_tokens(text) == bpe.tokenizer()([text])[0]


@once
@pytest.mark.parametrize("name", ["bytes", *bpe.DECODERS])
def test_any_tokens_are_streamed_as_their_whole_text(name):
    """Characters of several tokens, invalid bytes, unknown ids, spaces at the beginning."""
    rng = np.random.default_rng(0)
    if name == "bytes":
        tokenizer = bpe.tokenizer()
        byte_ids = tokenizer.tokenize("é€😀").tolist()
        alphabet = [0, 64, *byte_ids, 220, 378, 980, 981, 982, 983, 990, 5000]
    else:
        tokenizer = bpe.llama(bpe.DECODERS[name])
        byte_ids = [3 + byte for byte in "é€😀".encode()]
        alphabet = [*range(3), *byte_ids, *range(259, tokenizer.vocabulary_size()), 400]
    preprocessor = GriffinCausalLMPreprocessor(tokenizer, sequence_length=64)

    def text_of(tokens):
        rows = {"token_ids": np.array([tokens]), "padding_mask": np.ones((1, len(tokens)), bool)}
        return preprocessor.generate_postprocess(rows)[0]

    known = TokenBytes(preprocessor)
    for number in range(100):
        tokens = rng.choice(alphabet, size=16)
        shared = known if number % 2 else None
        detokenizer = IncrementalDetokenizer(preprocessor, tokenizer.end_token_id, shared)
        chunks = [detokenizer.add(token) for token in tokens]
        assert "".join([*chunks, detokenizer.end()]) == text_of(tokens)
    assert bool(known) == (name in ("bytes", "fallback", "metaspace"))
    detokenizer = IncrementalDetokenizer(preprocessor, tokenizer.end_token_id)
    chunks = [detokenizer.add(token) for token in byte_ids]
    if name in ("bytes", "fallback"):
        assert [chunk for chunk in chunks if chunk] == ["é", "€", "😀"]


@once
def test_text_is_that_of_the_library():
    rng = np.random.default_rng(0)
    for path in bpe.PATHS:
        content = (path / "tokenizer.json").read_text()
        tokenizer = BPETokenizer(content.encode(), end_token_id=980)
        library = tokenizers.Tokenizer.from_str(content)
        for ids in rng.integers(0, 983, (50, 20)).tolist():
            assert tokenizer.detokenize(ids) == library.decode(ids, skip_special_tokens=False)
    assert tokenizer.detokenize([[64, 5000, -1], []]) == ["a\ufffd\ufffd", ""]


# === Files ===


@once
def test_it_is_saved_and_loaded(tmp_path):
    tokenizer = bpe.tokenizer(name="bpe")
    again = pickle.loads(pickle.dumps(tokenizer))
    assert again.tokenizer_json == (bpe.PATH / "tokenizer.json").read_bytes()
    assert again.get_config() == tokenizer.get_config()
    assert again("hi").tolist() == tokenizer("hi").tolist()
    tokenizer.save_to_preset(str(tmp_path))
    empty = keras.saving.deserialize_keras_object(keras.saving.serialize_keras_object(tokenizer))
    with pytest.raises(ValueError, match="The tokenizer has no file"):
        empty("hi")
    with pytest.raises(ValueError, match="The tokenizer has no file"):
        _ = empty.special_token_ids
    # A saved configuration must not make a model read any other file.
    config = {**tokenizer.get_config(), "tokenizer_json": str(bpe.PATH / "tokenizer.json")}
    assert BPETokenizer.from_config(config).tokenizer_json is None
    (file,) = tmp_path.glob("assets/*/tokenizer.json")
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ValueError, match=rf"No tokenizer can be made of {file}: it is not JSON"):
        empty.load_assets(str(file.parent))


def collide(content):
    content["added_tokens"][1]["id"] = 5


def skip_ids(content):
    content["added_tokens"][6]["id"] = 990


def share_an_id(content):
    content["model"]["vocab"]["zzz"] = 5


def huge_id(content):
    content["model"]["vocab"]["zzz"] = 2**32 - 1


def too_huge_id(content):
    content["model"]["vocab"]["zzz"] = 2**33


def unknown_merge(content):
    content["model"]["merges"].append(["zq", "zz"])


def no_regex(content):
    content["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] = "(a"


def grow(content):
    replace = {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 100}
    content["normalizer"] = {"type": "Sequence", "normalizers": [replace] * 5}


def panic(content):
    content["normalizer"] = {"type": "Precompiled", "precompiled_charsmap": "AAAA"}


def no_model(content):
    del content["model"]


def other_model(content):
    content["added_tokens"] = []
    content["model"] = {"type": "WordPiece", "unk_token": "x", "vocab": {"x": 0}}
    content["model"] |= {"continuing_subword_prefix": "##", "max_input_chars_per_word": 9}


def unigram(content):
    content["added_tokens"] = []
    content["model"] = {"type": "Unigram", "unk_id": 0, "vocab": [["x", 0.0]]}


def empty(content):
    content["added_tokens"] = []
    content["model"] |= {"vocab": {}, "merges": []}


@once
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("change", "match"),
    [
        (collide, r"the added token '<\|im_start\|>' has the id 5, where the .* assigns 981"),
        (skip_ids, "the added token '</tool_call>' has the id 990"),
        (share_an_id, "the tokens '&' and 'zzz' have the id 5"),
        (huge_id, "the id of the token 'zzz' is 4294967295, above"),
        (too_huge_id, "the tokenizers library reports: invalid value"),
        (unknown_merge, "reports: Token `zq` out of vocabulary"),
        (no_regex, "reports: Oniguruma error"),
        (grow, "can lengthen a text 10000000000 times"),
        (panic, "reports: Precompiled"),
        (no_model, "it has no 'model'.*KerasHub"),
        (other_model, "its model is WordPiece, and only BPE"),
        (unigram, "its model is Unigram, and only BPE"),
        (empty, "it has no tokens"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_files_that_are_refused(change, match):
    with pytest.raises(
        ValueError, match=rf"No tokenizer can be made of `tokenizer.json`: .*{match}"
    ):
        BPETokenizer(bpe.changed(change), end_token_id=0)


@once
@pytest.mark.parametrize("content", [b"", b"[" * 100_000, b"[]", b"\xff", b'{"model": "BPE"}'])
def test_files_that_are_no_tokenizer(tmp_path, content):
    path = tmp_path / "tokenizer.json"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"No tokenizer can be made of .*/tokenizer.json: it "):
        BPETokenizer(path, end_token_id=0)


@once
def test_large_files_are_not_read(monkeypatch):
    monkeypatch.setattr(bpe_files, "MAX_BYTES", 50_000)
    with pytest.raises(ValueError, match="it has more than 50,000 bytes"):
        bpe.tokenizer()


@once
def test_a_pattern_that_backtracks_without_end_is_stopped():
    def change(content):
        content["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] = "(a+)+$"

    tokenizer = BPETokenizer(bpe.changed(change), end_token_id=980)
    with pytest.raises(ValueError, match="reports: Onig: Regex search error: retry-limit"):
        tokenizer("a" * 40 + "b")


@once
@pytest.mark.parametrize(
    "ids", [{}, {"end_token_id": 987}, {"end_token_id": 0, "pad_token_id": -1}]
)
def test_ids_must_be_in_the_file(ids):
    with pytest.raises(ValueError, match=r"_token_id` must be .* Its special .* 980 \('<\|endof"):
        BPETokenizer(bpe.PATH / "tokenizer.json", **ids)


# === Models ===


def model_of(**kwargs):
    preprocessor = GriffinCausalLMPreprocessor(bpe.tokenizer(), sequence_length=12, **kwargs)
    model = tiny_causal_lm(
        preprocessor=preprocessor,
        vocabulary_size=bpe.VOCABULARY_SIZE + 5,
        num_layers=1,
        block_types=("recurrent",),
    )
    return model


@once
def test_a_saved_model_has_its_tokenizer(tmp_path):
    model_of().save(tmp_path / "model.keras")
    again = keras.saving.load_model(tmp_path / "model.keras").preprocessor.tokenizer
    assert again.tokenizer_json == (bpe.PATH / "tokenizer.json").read_bytes()
    assert (again.end_token_id, again.pad_token_id) == (bpe.END, bpe.PAD)


@pytest.mark.nightly
def test_a_model_generates_and_streams():
    model = model_of()
    model.compile(sampler="greedy")
    prompts = ["First <|im_end|>", "naïve 🌍"]
    options = {"max_length": 20, "stop_token_ids": None}
    whole = model.generate(prompts, **options)
    chunks = list(zip(*model.stream(prompts, **options), strict=True))
    assert [a + "".join(b) for a, b in zip(prompts, chunks, strict=True)] == whole


@pytest.mark.nightly
def test_a_model_is_trained_on_strings(tmp_path):
    texts = ["Before we proceed", "any further", "", "hear me speak"]
    (tmp_path / "text.txt").write_text("\n\n".join(texts))
    model = model_of(packed=True)
    model.compile(optimizer="sgd", loss=model.loss, run_eagerly=True)
    model.fit(texts, batch_size=2, verbose=0)
    source = PackedText(tmp_path / "text.txt", model.preprocessor, batch_size=2, passes=1)
    model.fit(source, verbose=0)


@once
def test_texts_without_start_token():
    """A start token None in packed, padded or classified texts."""
    tokenizer = bpe.tokenizer()
    tokens = [[*row, bpe.END] for row in tokenizer(["Before we", "proceed"])]
    packed = GriffinCausalLMPreprocessor(tokenizer, sequence_length=12, packed=True)
    x, _, _ = as_numpy(packed(["Before we", "proceed"]))
    assert x["token_ids"][0][x["padding_mask"][0]].tolist() == tokens[0] + tokens[1]
    padded = GriffinCausalLMPreprocessor(tokenizer, sequence_length=12)
    x, _, _ = as_numpy(padded(["Before we", "proceed"]))
    assert [
        row[m].tolist() for row, m in zip(x["token_ids"], x["padding_mask"], strict=True)
    ] == tokens
    x = as_numpy(GriffinTextClassifierPreprocessor(tokenizer, sequence_length=12)(["Before we"]))
    assert x["token_ids"][0][x["padding_mask"][0]].tolist() == tokens[0]
    with pytest.raises(ValueError, match="prompt 0 alone has 3"):
        padded.generate_preprocess(["Before we"], sequence_length=2)


@once
def test_it_runs_in_pipelines(tmp_path):
    tokenizer = bpe.tokenizer()
    texts = ["hi you", "", "naïve 🌍"]
    wanted = tokenizer(texts)
    mapped = grain.MapDataset.source(texts).map(tokenizer)
    assert [row.tolist() for row in mapped] == wanted
    tf = pytest.importorskip("tensorflow")
    dataset = tf.data.Dataset.from_tensor_slices(texts)
    assert [row.tolist() for row in dataset.map(tokenizer).as_numpy_iterator()] == wanted
    (batch,) = dataset.batch(3).map(tokenizer)
    assert batch.to_list() == wanted
    (nested,) = dataset.batch(3).map(lambda x: tokenizer(x[:, None]))
    assert nested.to_list() == [[row] for row in wanted]
    for size in (dataset, dataset.batch(2)):
        found = size.map(lambda x: tokenizer.detokenize(tokenizer(x))).as_numpy_iterator()
        assert [text.decode() for texts in found for text in np.ravel(texts)] == texts
    preprocessor = GriffinCausalLMPreprocessor(tokenizer, sequence_length=12, packed=True)
    ((x, _, _),) = dataset.batch(3).map(preprocessor)
    np.testing.assert_array_equal(x["token_ids"], as_numpy(preprocessor(texts))[0]["token_ids"])
