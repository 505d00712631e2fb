"""The guides run, at tiny sizes."""

import importlib.util
import os
import pathlib
import re
import subprocess
import sys

import numpy as np
import pytest

ROOT = pathlib.Path(__file__).parents[1]
QUICKSTART = ROOT / "guides/quickstart.py"
BITS = r"Validation, bits per byte: Hawk ([\d.]+), bigrams ([\d.]+), unigrams ([\d.]+)"


def run(*arguments):
    done = subprocess.run(
        [sys.executable, QUICKSTART, *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def quickstart():
    pytest.importorskip("matplotlib")
    spec = importlib.util.spec_from_file_location("quickstart", QUICKSTART)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_quickstart(tmp_path):
    written = run("--epochs", 2, "--topics", 2, "--sample", 20, "--output", tmp_path)
    assert len(re.findall(BITS, written)) == 2
    assert "Before training it writes:\nThe statement" in written
    assert "After training it writes:\nThe statement" in written
    assert "the logits differ by 0.0\n" in written
    assert (tmp_path / "loss.png").stat().st_size > 0


@pytest.mark.once
def test_quickstart_shares_no_text_between_training_and_validation(quickstart):
    training, validation = (
        [paragraph for document in documents for paragraph in document.split("\n\n")]
        for documents in quickstart.load_documents(None)
    )
    paragraphs = training + validation
    assert len(set(paragraphs)) == len(paragraphs)
    assert 0.05 < len("".join(validation)) / len("".join(paragraphs)) < 0.2


@pytest.mark.once
def test_quickstart_counts_as_by_hand(quickstart):
    """After "ab" and "aa": a 3 times, b once; a begins twice, is followed by b and by a."""
    unigram, bigram = quickstart.unigram_and_bigram(["ab", "aa"], ["ab"])
    a, b = 4 / 260, 2 / 260
    assert unigram == pytest.approx(-(np.log2(a) + np.log2(b)) / 2)
    first, second = (2 + 1 * a) / (2 + 1), (1 + 2 * b) / (2 + 2)
    assert bigram == pytest.approx(-(np.log2(first) + np.log2(second)) / 2)
