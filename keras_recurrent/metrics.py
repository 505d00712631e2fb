"""Metrics of language models: the loss per token and the perplexity."""

from keras_recurrent.training.token_metrics import Perplexity, TokenLoss

__all__ = ["Perplexity", "TokenLoss"]
