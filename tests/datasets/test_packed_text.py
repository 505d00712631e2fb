"""`PackedText`: text of files, shuffled and packed, which resumes after any batch."""

import itertools
import pathlib
import warnings

import grain
import keras
import numpy as np
import pytest

from keras_recurrent.datasets import PackedText, text_files
from keras_recurrent.models import GriffinCausalLMPreprocessor
from keras_recurrent.tokenizers import ByteTokenizer
from tests.models.tiny import FAMILIES, tiny_causal_lm
from tests.resumed import packed_text, write_text

pytestmark = pytest.mark.once


def documents_in(batches):
    """Returns the texts of batches whose documents are all shorter than a sequence."""
    found = []
    for x, _, _ in batches:
        for tokens, segments in zip(x["token_ids"], x["segment_ids"], strict=True):
            for segment in range(1, segments.max() + 1):
                found.append(ByteTokenizer().detokenize(tokens[segments == segment]))
    return found


def shapes(batch):
    return [(array.shape, array.dtype) for array in keras.tree.flatten(batch)]


def lines(path):
    text = pathlib.Path(path).read_text(encoding="utf-8")
    return [line for line in text.split("\n") if line.strip()]


@pytest.mark.parametrize("chunk", [1, 7, 64, 10**6])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_split_files_with_any_chunk_size_reads_each_line_once(monkeypatch, tmp_path, chunk, end):
    monkeypatch.setattr(text_files, "CHUNK_BYTES", chunk)
    path = tmp_path / "text.txt"
    texts = ["first", "", "é" * 20, "  ", "x", "last without an end"]
    path.write_bytes(end.join(texts).encode())
    found = [text_files.read_documents(chunk) for chunk in text_files.split_files([str(path)])]
    assert [text for texts in found for text in texts] == [text for text in texts if text.strip()]


def test_read_documents_of_json_lines_reads_their_text(tmp_path):
    path = tmp_path / "text.jsonl"
    path.write_text('{"text": "one\\ntwo", "id": 3}\n{"text": "é"}\n', encoding="utf-8")
    (chunk,) = text_files.split_files([str(path)])
    assert text_files.read_documents(chunk) == ["one\ntwo", "é"]
    for line, match in [
        ('{"txt": "a"}', 'begins at byte 0 must be an object with a string "text"'),
        ('["text"]', 'must be an object with a string "text"'),
        ("text", "begins at byte 0 is not JSON"),
    ]:
        path.write_text(line)
        with pytest.raises(ValueError, match=match):
            text_files.read_documents(*text_files.split_files([str(path)]))


def make_preprocessor():
    return GriffinCausalLMPreprocessor(ByteTokenizer(), sequence_length=64, packed=True)


def long_packed_text(documents, **arguments):
    return PackedText(documents, make_preprocessor(), 4, **arguments)


def test_packed_text_pass_has_each_document_once_in_a_new_order(tmp_path, monkeypatch):
    monkeypatch.setattr(text_files, "CHUNK_BYTES", 64)
    paths = write_text(tmp_path, lines=200)
    expected = [text for path in paths for text in lines(path)]
    in_order = documents_in(long_packed_text(paths, passes=1))
    assert sorted(in_order) == sorted(expected)
    first, second = (documents_in(long_packed_text(paths, passes=1, seed=seed)) for seed in (1, 2))
    assert sorted(first) == sorted(second) == sorted(expected)
    assert len({tuple(order) for order in (in_order, first, second)}) == 3
    assert documents_in(long_packed_text(paths, passes=1, seed=1)) == first
    twice = documents_in(long_packed_text(paths, passes=2, seed=1))
    assert sorted(twice) == sorted(expected * 2)
    assert twice[: len(first)] != twice[len(first) :]
    # Neighbors in a file are far from each other after shuffling.
    positions = [first.index(text) for text in lines(paths[0])[:40]]
    assert np.median(np.abs(np.diff(positions))) > 20


def test_packed_text_state_after_a_batch_ignores_batches_read_ahead(tmp_path):
    rows = packed_text(write_text(tmp_path))
    plain = list(itertools.islice(iter(rows), 12))
    rows.start_at()
    assert rows.state_after(0) == iter(packed_text(write_text(tmp_path))).get_state()
    ahead = iter(rows)
    list(itertools.islice(ahead, 9))
    states = [rows.state_after(number) for number in (0, 4, 7)]
    for number, state in zip((0, 4, 7), states, strict=True):
        rows.start_at(state, skip=2)
        resumed = iter(rows)
        for skipped in (next(resumed), next(resumed)):
            assert not skipped[0]["padding_mask"].any()
            assert shapes(skipped) == shapes(plain[0])
        assert rows.state_after(1) == state
        keras.tree.map_structure(np.testing.assert_array_equal, next(resumed), plain[number])


def test_packed_text_of_a_grain_dataset_has_its_documents(tmp_path):
    texts = ["tick", "tock tock", "tick tick tick"] * 5
    known = grain.MapDataset.source(texts)
    in_order = documents_in([make_preprocessor().pack(texts)])
    assert documents_in(long_packed_text(known, passes=1)) == in_order
    shuffled = documents_in(long_packed_text(known, passes=1, seed=0))
    assert shuffled != texts
    assert sorted(shuffled) == sorted(texts)
    stream = long_packed_text(known.to_iter_dataset())
    assert not stream.is_endless
    assert documents_in(stream) == in_order
    with pytest.raises(ValueError, match=r"`seed` and `passes`: a `grain.IterDataset` has an ord"):
        long_packed_text(known.to_iter_dataset(), seed=1)


def test_packed_text_trains_and_evaluates_like_texts_in_memory(tmp_path):
    paths = write_text(tmp_path)
    endless, held_out = packed_text(paths), packed_text(paths[:1], seed=None, passes=1)
    family = FAMILIES["hgrn2"]
    preprocessor = family.preprocessor(family.tokenizer(), sequence_length=16, packed=True)
    model = tiny_causal_lm(
        preprocessor=preprocessor, family="hgrn2", vocabulary_size=259, num_layers=1
    )
    # XLA on TensorFlow takes longer than the training.
    jit_compile = "auto" if keras.backend.backend() == "jax" else False
    model.compile(keras.optimizers.SGD(0.1), jit_compile=jit_compile)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        history = model.fit(
            endless, validation_data=held_out, steps_per_epoch=5, epochs=2, verbose=0
        ).history
    assert history["loss"][1] < history["loss"][0]
    expected = model.evaluate(lines(paths[0]), batch_size=4, verbose=0)
    np.testing.assert_allclose(float(history["val_loss"][1]), float(expected[0]), rtol=1e-4)
    np.testing.assert_allclose(model.evaluate(held_out, verbose=0), expected, rtol=1e-4)
    for use in (model.fit, model.evaluate, model.predict):
        with pytest.raises(
            ValueError,
            match=r"The `PackedText` has no end\. Pass .*`steps_per_epoch`",
        ):
            use(endless, verbose=0)


def test_packed_text_wrong_files_and_arguments_raise(tmp_path):
    paths = write_text(tmp_path)
    preprocessor = GriffinCausalLMPreprocessor(ByteTokenizer(), sequence_length=16)
    with pytest.raises(ValueError, match=r"`preprocessor` must be one that packs.*packed=True"):
        PackedText(paths, preprocessor, 4)
    (tmp_path / "empty.txt").touch()
    (tmp_path / "lines.txt").write_text("\n  \n\n")
    for documents, arguments, error, match in [
        (str(tmp_path / "none.txt"), {}, FileNotFoundError, "there is no file '.*none.txt'"),
        (str(tmp_path / "empty.txt"), {}, ValueError, "`documents` holds no text: '.*empty.txt'"),
        (str(tmp_path / "lines.txt"), {}, ValueError, "`documents` holds no text: '.*lines.txt'"),
        ([], {}, ValueError, "`documents` holds no text"),
        (paths, {"passes": 0}, ValueError, "`passes` must be an integer, at least 1"),
        (paths, {"batch_size": 0}, ValueError, "`batch_size` must be an integer, at least 1"),
        (paths, {"seed": "a"}, ValueError, "`seed` must be an integer from 0 on; got 'a'"),
        (paths, {"seed": -1}, ValueError, "`seed` must be an integer from 0 on; got -1"),
    ]:
        with pytest.raises(error, match=match):
            packed_text(documents, **arguments)
    for name in ("text.txt.gz", "text.PARQUET", "text.json"):
        (tmp_path / name).write_bytes(b"x")
        with pytest.raises(ValueError, match=r"must be files of text, .*grain.MapDataset"):
            packed_text(str(tmp_path / name))
    (tmp_path / "latin.txt").write_bytes(b"one\ntw\xe9\n")
    with pytest.raises(ValueError, match=r"is not UTF-8 in the line that begins at byte 4"):
        list(packed_text(str(tmp_path / "latin.txt"), passes=1))
