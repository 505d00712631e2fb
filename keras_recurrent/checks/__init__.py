"""Checks of arguments, dtypes, shapes, states and token ids, used by all other folders."""
