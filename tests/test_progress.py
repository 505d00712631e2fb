"""Long work shows that it moves, to those who look."""

import sys

import keras
import pytest

from keras_recurrent import conversion, models, progress
from keras_recurrent.tokenizers import ByteTokenizer
from tests.models.tiny import tiny_causal_lm


def watch(monkeypatch, large=1):
    """Tiny work is large, and the output a terminal."""
    monkeypatch.setattr(progress, "LARGE", {"weights": large, "text": large})
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)


def work(folder):
    """Exports, reads, converts and packs; yields the title and size of each progress bar."""
    model = tiny_causal_lm(family="hgrn2", vocabulary_size=259)
    path = str(folder / "checkpoint")
    model.export_to_transformers(path)
    yield f"Writing {path}", 4 * model.count_params()
    models.HGRN2CausalLM.from_preset(path)
    yield f"Reading {path}", 4 * model.count_params()
    inputs = keras.Input((None, 8))
    attention = keras.layers.MultiHeadAttention(4, 2)(inputs, inputs, use_causal_mask=True)
    multi_head = keras.Model(inputs, attention, name="attention")
    conversion.convert_to_gqa(multi_head, 2)
    yield "Converting attention", 4 * multi_head.count_params()
    preprocessor = models.HGRN2CausalLMPreprocessor(ByteTokenizer(), 8, packed=True)
    preprocessor(["tick", "tock tock"])
    yield "Packing text", 13


@pytest.mark.once
def test_progress_of_large_work_ends_at_its_size(monkeypatch, tmp_path, capsys):
    watch(monkeypatch)
    for what, size in work(tmp_path):
        printed = capsys.readouterr().out
        assert printed.startswith(f"{what}\n")
        assert f"{size}/{size}" in printed
        assert "/byte" in printed
        assert printed.endswith("\n")


@pytest.mark.once
def test_progress_of_small_work_prints_nothing(monkeypatch, tmp_path, capsys):
    watch(monkeypatch, large=10**6)
    for _ in work(tmp_path):
        assert capsys.readouterr().out == ""


@pytest.mark.once
@pytest.mark.parametrize("reason", [None, "a file", "asked for"])
def test_announce_and_progress_print_in_interactive_sessions_only(monkeypatch, capsys, reason):
    """Logs are full of progress bars, or the first `generate` prints nothing for half a minute."""
    watch(monkeypatch)
    if reason == "a file":
        monkeypatch.setattr(sys.stdout, "isatty", lambda: False)
    elif reason == "asked for":
        monkeypatch.setattr(keras.config, "is_interactive_logging_enabled", lambda: False)
    progress.announce("Compiling generation")
    with progress.progress("Packing text", "text", 13) as done:
        done(13)
    printed = capsys.readouterr().out
    assert ("Compiling" in printed, "Packing text\n" in printed) == (reason is None,) * 2
    assert reason is None or not printed
