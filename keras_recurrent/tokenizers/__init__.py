"""Tokenizers: bytes, without a vocabulary file, and the SentencePiece files of checkpoints."""

from keras_recurrent.tokenizers.byte_tokenizer import ByteTokenizer
from keras_recurrent.tokenizers.sentence_piece_tokenizer import SentencePieceTokenizer

__all__ = ["ByteTokenizer", "SentencePieceTokenizer"]
