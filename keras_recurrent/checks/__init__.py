"""Checks of arguments, dtypes, shapes, states and token ids, for every other room."""
