"""Checkpoints in the layout of the Hugging Face Hub, in and out, and presets.

The machinery is the same for all families. A family says in a `Layout` what its `config.json`
means and which tensor makes which weight; see `models/griffin/checkpoint.py`.
"""
