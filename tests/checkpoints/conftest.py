"""A SentencePiece file, as checkpoints bring one."""

import pytest

from tests.tokenizers.sentence_piece import train


@pytest.fixture(scope="session")
def sentence_piece():
    return train(pad_id=0, eos_id=1, bos_id=2, unk_id=3)
