"""Checks that generation with a cache is right, for any `keras_hub.models.CausalLM`.

A recurrent state, or a cache of keys and values, can be wrong without anybody seeing it: texts stay
fluent. These functions compare what a model writes with its own plain forward passes, which have no
cache. Each raises an `AssertionError` that says where the two differ.

They read tokens, not text, need no weights but random ones, and hold for every dtype: where the two
best logits are closer than rounding may move them, either token is right, and a row is not followed
further. That a check could have failed is checked as well.
"""

import contextlib
from typing import NamedTuple

import keras
import keras_hub
import numpy as np

from keras_recurrent.checks.arguments import check_positive_integer
from keras_recurrent.evaluation import no_gradients

__all__ = [
    "Checked",
    "assert_cached_equals_plain",
    "assert_cuts_change_nothing",
    "assert_padding_changes_nothing",
]

# Of the range of a token's logits: how far rounding may move one, by the model's compute dtype.
TOLERANCE = {"float32": 1e-4, "float64": 1e-8, "float16": 1e-2, "bfloat16": 3e-2}


class Checked(NamedTuple):
    """What a check compared.

    Attributes:
        decisions: integer, new tokens that were compared.
        clear: integer, those of them where only one token was right.
    """

    decisions: int
    clear: int


def assert_cached_equals_plain(model, rows, new_tokens=8, tolerance=None):
    """Asserts that each token written with a cache has the best logit of a plain forward pass.

    Args:
        model: a `keras_hub.models.CausalLM` that takes `token_ids` and `padding_mask`, and
            `position_ids` or not, which are then counted from each row's first token.
        rows: a list of lists of token ids, prompts of any lengths.
        new_tokens: integer, how many tokens the longest row gets; shorter ones are filled to the
            same length.
        tolerance: float, how far rounding may move a logit, of the range of all logits of the
            token; None: 1e-4 in float32, 1e-8 in float64, 0.01 in float16, 0.03 in bfloat16 and of
            quantized models.

    Returns:
        A `Checked`.

    Raises:
        AssertionError: another token was written.
        ValueError: the model is none of these, the rows are no prompts, or logits are so even that
            no token would have been wrong.

    Example:

    >>> import keras_recurrent
    >>> from keras_recurrent.testing import assert_cached_equals_plain
    >>> model = keras_recurrent.models.GriffinCausalLM.from_preset("griffin_tiny", num_layers=3)
    >>> assert_cached_equals_plain(model, [[1, 70, 71, 72], [1, 80]], new_tokens=3).decisions
    8
    """
    checked = _Model(model, rows, new_tokens, tolerance)
    with checked.greedy() as generate:
        written = generate(rows)
    return checked.compare(rows, written)


def assert_padding_changes_nothing(model, rows, new_tokens=8, tolerance=None):
    """Asserts that a row alone, and in a batch with others, behind any padding, is the same.

    Logits of plain forward passes are compared with and without padding behind the row, and what is
    written to each row alone with what is written to all at once, whatever ids stand at padding.

    Args, returns and errors are those of `assert_cached_equals_plain`.

    Example:

    >>> import keras_recurrent
    >>> from keras_recurrent.testing import assert_padding_changes_nothing
    >>> model = keras_recurrent.models.HGRN2CausalLM.from_preset("hgrn2_tiny", num_layers=1)
    >>> assert_padding_changes_nothing(model, [[1, 70, 71, 72], [1, 80]], new_tokens=3).decisions
    8
    """
    checked = _Model(model, rows, new_tokens, tolerance)
    together = checked.logits(rows)
    for i, row in enumerate(rows):
        (alone,) = checked.logits([row])
        difference = np.abs(together[i] - alone).max(axis=1) / np.ptp(alone, axis=1)
        token = int(difference.argmax())
        if difference[token] > checked.tolerance:
            raise AssertionError(
                f"Padding changes a plain forward pass: behind token {token} of row {i} a logit is "
                f"off by {difference[token]:.2g} of their range when other rows are longer; "
                f"{checked.tolerance:.2g} is allowed."
            )
    with checked.greedy() as generate:
        alone = [generate([row])[0] for row in rows]
        found = Checked(0, 0)
        for fill in (0, 1):
            written = generate(rows, fill)
            found = checked.compare(rows, written, alone, f" in a batch, padded with {fill},")
    return found


def assert_cuts_change_nothing(model, rows, new_tokens=8, tolerance=None):
    """Asserts that a row is gone on with in the same way wherever its prompt is cut.

    What the model wrote after a prompt is given to it again, up to each of its tokens, as a longer
    prompt. A model of this package is also asked to go on from a cache of the prompt's first
    tokens, cut at every place.

    Args, returns and errors are those of `assert_cached_equals_plain`.

    Example:

    >>> import keras_recurrent
    >>> from keras_recurrent.testing import assert_cuts_change_nothing
    >>> model = keras_recurrent.models.HGRN2CausalLM.from_preset("hgrn2_tiny", num_layers=1)
    >>> assert_cuts_change_nothing(model, [[1, 70, 71, 72]], new_tokens=3).decisions
    3
    """
    checked = _Model(model, rows, new_tokens, tolerance)
    with checked.greedy() as generate:
        whole = generate(rows)
        for count in range(1, new_tokens):
            longer = [row[: len(given) + count] for row, given in zip(whole, rows, strict=True)]
            checked.compare(longer, generate(longer), whole, f" behind {count} tokens of its own")
        for cut in range(1, max(map(len, rows))) if hasattr(model, "prefill") else ():
            first = [row[:cut] for row in rows]
            cache = model.prefill(**checked.prefill_arguments(first))
            rest = [row[cut:] for row in rows]
            found = generate(rest, cache=cache)
            written = [a + b for a, b in zip(first, found, strict=True)]
            checked.compare(rows, written, whole, f" from a cache of the first {cut} tokens")
    return checked.compare(rows, whole)


class _Model:
    """A language model by tokens, and the rule by which its rows are compared."""

    def __init__(self, model, rows, new_tokens, tolerance):
        _check(model, rows, new_tokens)
        self._model, self._length = model, max(map(len, rows)) + new_tokens
        backbone = model.backbone
        dtype = keras.backend.standardize_dtype(backbone.compute_dtype)
        layers = backbone._flatten_layers(include_self=False)
        if any(getattr(layer, "quantization_mode", None) for layer in layers):
            dtype = "bfloat16"
        self.tolerance = TOLERANCE[dtype] if tolerance is None else tolerance

    def logits(self, rows):
        """Logits by plain forward passes: for each row [its length, vocabulary_size], float32."""
        logits_of_rows = zip(rows, self._forward(self._inputs(rows)), strict=True)
        found = [logits[: len(row)] for row, logits in logits_of_rows]
        for number, logits in enumerate(found):
            if not (finite := np.isfinite(logits).all(axis=1)).all():
                raise AssertionError(
                    f"A plain forward pass of {len(rows)} rows has logits that are not finite, "
                    f"behind token {int(finite.argmin())} of row {number}."
                )
        return found

    def _forward(self, inputs):
        with no_gradients():
            logits = self._model(inputs, training=False)
        return keras.ops.convert_to_numpy(keras.ops.cast(logits, "float32"))

    def _inputs(self, rows, length=None, fill=0):
        length = length or max(map(len, rows))
        token_ids = np.full((len(rows), length), fill, "int32")
        for place, row in zip(token_ids, rows, strict=True):
            place[: len(row)] = row
        positions = np.arange(length, dtype="int32")
        mask = positions < np.array([len(row) for row in rows])[:, None]
        inputs = {"token_ids": token_ids, "padding_mask": mask.astype("int32")}
        if "position_ids" in self._model.input:
            inputs["position_ids"] = np.tile(positions, (len(rows), 1))
        return inputs

    @contextlib.contextmanager
    def greedy(self):
        """A function that fills rows with the best tokens."""
        model = self._model
        before = model.sampler, model.generate_function
        preprocessor = model.preprocessor

        def generate(rows, fill=0, cache=None):
            if cache is None:
                inputs = self._inputs(rows, self._length, fill)
                inputs = keras.tree.map_structure(keras.ops.convert_to_tensor, inputs)
                try:
                    written = write(inputs, stop_token_ids=None)["token_ids"]
                except KeyError as error:
                    raise ValueError(
                        f"`model` must generate from {sorted(inputs)}; its `generate_step` asks "
                        f"for {error} as well."
                    ) from error
                return keras.ops.convert_to_numpy(written).tolist()
            seen = int(cache.num_tokens.max())
            inputs = self._inputs(rows, self._length - seen)
            written = model.generate(inputs, stop_token_ids=None, cache=cache)["token_ids"]
            return written.tolist()

        try:
            model.sampler, model.generate_function = keras_hub.samplers.GreedySampler(), None
            write = model.make_generate_function()
            model.preprocessor = None
            yield generate
        finally:
            model.preprocessor = preprocessor
            model.sampler, model.generate_function = before

    def prefill_arguments(self, rows):
        return {"inputs": self._inputs(rows), "max_length": self._length + 1}

    def compare(self, rows, written, expected=None, where=""):
        """Raises where a new token is clearly not the best, or not the expected one."""
        decisions = clear = 0
        for i, (logits, tokens, given) in enumerate(
            zip(self.logits(written), written, rows, strict=True)
        ):
            for t in range(len(given), len(tokens)):
                before, token = logits[t - 1], tokens[t]
                allowed = 2 * self.tolerance * np.ptp(before)
                second, best = np.sort(before)[-2:]
                decisions, clear = decisions + 1, clear + bool(best - second > allowed)
                wrong = best - before[token] > allowed
                if wrong:
                    raise AssertionError(
                        f"Token {t} of row {i}{where} is {token}, and must be "
                        f"{int(before.argmax())}: a plain forward pass prefers it by "
                        f"{best - before[token]:.3g}, where {allowed:.3g} may be rounding."
                    )
                if expected and expected[i][t] != token:
                    if best - second > allowed:
                        raise AssertionError(
                            f"Token {t} of row {i}{where} is {token}, as a plain forward pass has "
                            f"it, but otherwise {expected[i][t]}, whose logit is lower by "
                            f"{best - before[expected[i][t]]:.3g}, where {allowed:.3g} may be "
                            "rounding."
                        )
                    break  # both were right, and what follows differs
        if not clear:
            raise ValueError(
                f"`model`: at none of {decisions} new tokens do its best two logits differ by more "
                "than rounding may move them, so that nothing would be found. Give it larger "
                "weights, or other `rows`."
            )
        return Checked(decisions, clear)


def _check(model, rows, new_tokens):
    check_positive_integer("new_tokens", new_tokens)
    if not isinstance(model, keras_hub.models.CausalLM):
        raise ValueError(
            f"`model` must be a `keras_hub.models.CausalLM`; got a `{type(model).__name__}`."
        )
    inputs = set(model.input) if isinstance(model.input, dict) else set()
    if not {"token_ids", "padding_mask"} <= inputs:
        raise ValueError(
            f"`model` must take `token_ids` and `padding_mask`; it takes {sorted(inputs)}."
        )
    lists = isinstance(rows, (list, tuple)) and all(isinstance(r, (list, tuple)) for r in rows)
    if not lists or not rows or not all(rows):
        raise ValueError("`rows` must be a list of lists of token ids, none of them empty.")
