"""SentencePiece files, as checkpoints have them."""

import io

import sentencepiece


def train(vocab_size=30, **ids):
    """Returns the bytes of a file; `ids` are ids of special tokens, such as `pad_id=0`."""
    file = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["all happy families are alike"] * 3),
        model_writer=file,
        vocab_size=vocab_size,
        hard_vocab_limit=False,
        minloglevel=2,
        **ids,
    )
    return file.getvalue()
