"""A SentencePiece file, as checkpoints bring one."""

import io

import pytest
import sentencepiece


@pytest.fixture(scope="session")
def sentence_piece():
    file = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["all happy families are alike"] * 3),
        model_writer=file,
        vocab_size=30,
        hard_vocab_limit=False,
        pad_id=0,
        eos_id=1,
        bos_id=2,
        unk_id=3,
        minloglevel=2,
    )
    return file.getvalue()
