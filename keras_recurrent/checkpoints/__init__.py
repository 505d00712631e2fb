"""Presets, and import and export of checkpoints in the layout of the Hugging Face Hub.

All families share this code. The `Layout` of a family defines how its `config.json` is read and
which tensor becomes which weight; see `models/griffin/checkpoint.py`.
"""
