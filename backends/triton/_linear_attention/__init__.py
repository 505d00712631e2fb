"""Chunked linear attention: code that gated linear attention and Lightning Attention share."""
