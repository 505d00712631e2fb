"""Tokenizers: bytes, without a vocabulary file, and SentencePiece and BPE files of checkpoints."""

from keras_recurrent.tokenizers.bpe_tokenizer import BPETokenizer
from keras_recurrent.tokenizers.byte_tokenizer import ByteTokenizer
from keras_recurrent.tokenizers.sentence_piece_tokenizer import SentencePieceTokenizer

__all__ = ["BPETokenizer", "ByteTokenizer", "SentencePieceTokenizer"]
