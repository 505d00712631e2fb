"""Streaming with log probabilities on JAX; test_server.py runs on one backend."""

import keras
import pytest

from tests.serving.test_server import client, model, server, test_chat_streams, text

__all__ = ["client", "model", "server", "test_chat_streams", "text"]
pytestmark = pytest.mark.skipif(keras.config.backend() != "jax", reason="test_server.py runs it")
