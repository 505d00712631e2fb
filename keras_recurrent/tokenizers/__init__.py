"""Tokenizers: bytes, which need no file, and SentencePiece, which checkpoints bring."""

from keras_recurrent.tokenizers.byte_tokenizer import ByteTokenizer
from keras_recurrent.tokenizers.sentence_piece_tokenizer import SentencePieceTokenizer

__all__ = ["ByteTokenizer", "SentencePieceTokenizer"]
