"""Serving of language models: an engine for many requests, and an HTTP server.

The server requires the extra `serve`; `python -m keras_recurrent.serving` starts it.
"""
