"""Checks of generation with a cache, for any `keras_hub.models.CausalLM`.

An error in a recurrent state, or in a cache of keys and values, is easily overlooked: texts stay
fluent. These functions compare generated tokens with plain forward passes of the model, which use
no cache. Each raises an `AssertionError` with the position of the first difference.

They take tokens, work with random weights, and support every dtype. If the two largest logits are
closer than rounding errors, either token is accepted, and the rest of the sequence is skipped. A
check raises an error if no token could have failed it.
"""

import contextlib
from typing import NamedTuple

import keras
import keras_hub
import numpy as np

from keras_recurrent.checks.arguments import check_positive_integer
from keras_recurrent.evaluation.position_loss import no_gradients

# {compute dtype: rounding error of a logit, relative to the range of the token's logits}
TOLERANCE = {"float32": 1e-4, "float64": 1e-8, "float16": 1e-2, "bfloat16": 3e-2}


class Checked(NamedTuple):
    """Numbers of tokens that a check compared.

    Attributes:
        decisions: integer, number of new tokens compared.
        clear: integer, number of these for which only one token was accepted.
    """

    decisions: int
    clear: int


def assert_cached_equals_plain(model, rows, new_tokens=8, tolerance=None):
    """Asserts that each token generated with a cache has the best logit of a plain forward pass.

    Args:
        model: a `keras_hub.models.CausalLM` that takes `token_ids` and `padding_mask`, and
            optionally `position_ids`, counted from the first token of each prompt.
        rows: a list of lists of token ids, prompts of any lengths.
        new_tokens: integer, number of tokens generated for the longest prompt; shorter ones are
            continued to the same length.
        tolerance: float, rounding error of a logit, relative to the range of the token's logits.
            None: 1e-4 in float32, 1e-8 in float64, 0.01 in float16, 0.03 in bfloat16 and for
            quantized models.

    Returns:
        A `Checked`.

    Raises:
        AssertionError: another token was generated.
        ValueError: `model` is not such a model, `rows` are not prompts, or all logits are so close
            that no token could have failed.
    """
    checked = _Checker(model, rows, new_tokens, tolerance)
    with checked.greedy() as generate:
        generated = generate(rows)
    return checked.compare(rows, generated)


def assert_padding_changes_nothing(model, rows, new_tokens=8, tolerance=None):
    """Asserts that padding and other prompts in the batch do not change a prompt's results.

    Compares the logits of plain forward passes with and without padding after the prompt, and the
    tokens generated for each prompt alone and in a batch, with different ids at padding.

    Args, returns and errors are those of `assert_cached_equals_plain`.
    """
    checked = _Checker(model, rows, new_tokens, tolerance)
    batched = checked.logits(rows)
    for i, row in enumerate(rows):
        (alone,) = checked.logits([row])
        difference = np.abs(batched[i] - alone).max(axis=1) / np.ptp(alone, axis=1)
        token = int(difference.argmax())
        if difference[token] > checked.tolerance:
            raise AssertionError(
                f"Padding changes a plain forward pass: after token {token} of row {i} a logit is "
                f"off by {difference[token]:.2g} of their range when other rows are longer; "
                f"{checked.tolerance:.2g} is allowed."
            )
    with checked.greedy() as generate:
        alone = [generate([row])[0] for row in rows]
        found = Checked(0, 0)
        for fill in (0, 1):
            generated = generate(rows, fill)
            found = checked.compare(rows, generated, alone, f" in a batch, padded with {fill},")
    return found


def assert_cuts_change_nothing(model, rows, new_tokens=8, tolerance=None):
    """Asserts that the position at which a prompt is split does not change the continuation.

    The prompt and each number of its generated tokens are passed as a longer prompt. Models of this
    package also continue from a cache of the prompt's first tokens, for every split.

    Args, returns and errors are those of `assert_cached_equals_plain`.
    """
    checked = _Checker(model, rows, new_tokens, tolerance)
    with checked.greedy() as generate:
        whole = generate(rows)
        for count in range(1, new_tokens):
            longer = [row[: len(given) + count] for row, given in zip(whole, rows, strict=True)]
            checked.compare(longer, generate(longer), whole, f" after {count} generated tokens")
        for cut in range(1, max(map(len, rows))) if hasattr(model, "prefill") else ():
            first = [row[:cut] for row in rows]
            cache = model.prefill(**checked.prefill_arguments(first))
            rest = [row[cut:] for row in rows]
            continued = generate(rest, cache=cache)
            generated = [a + b for a, b in zip(first, continued, strict=True)]
            checked.compare(rows, generated, whole, f" from a cache of the first {cut} tokens")
    return checked.compare(rows, whole)


class _Checker:
    """Comparison of a language model's generated tokens with its plain forward passes."""

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
        """Returns logits of plain forward passes, float32 [length, vocabulary_size] per row."""
        logits_of_rows = zip(rows, self._forward(self._inputs(rows)), strict=True)
        found = [logits[: len(row)] for row, logits in logits_of_rows]
        for number, logits in enumerate(found):
            if not (finite := np.isfinite(logits).all(axis=1)).all():
                raise AssertionError(
                    f"A plain forward pass of {len(rows)} rows has logits that are not finite, "
                    f"after token {int(finite.argmin())} of row {number}."
                )
        return found

    def _forward(self, inputs):
        with no_gradients():
            logits = self._model(inputs, training=False)
        return keras.ops.convert_to_numpy(keras.ops.cast(logits, "float32"))

    def _inputs(self, rows, length=None, fill=0):
        length = length or max(map(len, rows))
        token_ids = np.full((len(rows), length), fill, "int32")
        for ids, row in zip(token_ids, rows, strict=True):
            ids[: len(row)] = row
        positions = np.arange(length, dtype="int32")
        mask = positions < np.array([len(row) for row in rows])[:, None]
        inputs = {"token_ids": token_ids, "padding_mask": mask.astype("int32")}
        if "position_ids" in self._model.input:
            inputs["position_ids"] = np.tile(positions, (len(rows), 1))
        return inputs

    @contextlib.contextmanager
    def greedy(self):
        """Context manager that yields a function for greedy generation."""
        model = self._model
        before = model.sampler, model.generate_function
        preprocessor = model.preprocessor

        def generate(rows, fill=0, cache=None):
            if cache is None:
                inputs = self._inputs(rows, self._length, fill)
                inputs = keras.tree.map_structure(keras.ops.convert_to_tensor, inputs)
                try:
                    generated = model.generate(inputs, stop_token_ids=None)["token_ids"]
                except KeyError as error:
                    raise ValueError(
                        f"`model` must generate from {sorted(inputs)}; its `generate_step` also "
                        f"needs {error}."
                    ) from error
                return generated.tolist()
            seen = int(cache.num_tokens.max())
            inputs = self._inputs(rows, self._length - seen)
            generated = model.generate(inputs, stop_token_ids=None, cache=cache)["token_ids"]
            return generated.tolist()

        try:
            model.sampler, model.generate_function = keras_hub.samplers.GreedySampler(), None
            model.preprocessor = None
            yield generate
        finally:
            model.preprocessor = preprocessor
            model.sampler, model.generate_function = before

    def prefill_arguments(self, rows):
        return {"inputs": self._inputs(rows), "max_length": self._length + 1}

    def compare(self, rows, generated, expected=None, where=""):
        """Raises an error if a new token is clearly not the best, or not the expected one."""
        decisions = clear = 0
        for i, (logits, tokens, given) in enumerate(
            zip(self.logits(generated), generated, rows, strict=True)
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
                            f"Token {t} of row {i}{where} is {token}, as in a plain forward pass, "
                            f"but otherwise {expected[i][t]}, whose logit is lower by "
                            f"{best - before[expected[i][t]]:.3g}, where {allowed:.3g} may be "
                            "rounding."
                        )
                    break  # both are accepted, and the continuations differ
        if not clear:
            raise ValueError(
                f"`model`: at none of {decisions} new tokens do the two largest logits differ by "
                "more than rounding errors, so the check could not fail. Use larger weights, or "
                "other `rows`."
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
