"""Checkpoints in the layout of the Hugging Face Hub, in and out, and presets.

The machinery is the same for all families. A family says in a `Layout` what its `config.json`
means and which tensor makes which weight; see `recurrent_gemma.py`. Importing `keras_recurrent`
loads `names.py` alone: the rest loads when a model is read or written.
"""
