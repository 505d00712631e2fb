"""Checks of generation with a cache, for any `keras_hub.models.CausalLM`."""

from keras_recurrent.evaluation.cached_generation import (
    Checked,
    assert_cached_equals_plain,
    assert_cuts_change_nothing,
    assert_padding_changes_nothing,
)

__all__ = [
    "Checked",
    "assert_cached_equals_plain",
    "assert_cuts_change_nothing",
    "assert_padding_changes_nothing",
]
