"""Tokenizers that need no file."""

from keras_recurrent.tokenizers.byte_tokenizer import ByteTokenizer

__all__ = ["ByteTokenizer"]
