"""Checks of generation with a cache, for any `keras_hub.models.CausalLM`.

An error in a recurrent state, or in a cache of keys and values, is easily overlooked: texts stay
fluent. These functions compare generated tokens with plain forward passes of the model, which use
no cache. Each raises an `AssertionError` with the position of the first difference.

`rows` are prompts, lists of token ids of any lengths. The longest one is continued by `new_tokens`,
shorter ones to the same length. Models take `token_ids` and `padding_mask`, and optionally
`position_ids`. If the two largest logits are closer than rounding errors, either token is accepted,
and the rest of the sequence is skipped. A check raises a `ValueError` if no token could fail.
"""

import contextlib

import keras
import keras_hub
import numpy as np

from keras_recurrent.evaluation.position_loss import no_gradients

# {compute dtype: rounding error of a logit, relative to the range of the token's logits}
TOLERANCE = {"float32": 1e-4, "float64": 1e-8, "float16": 1e-2, "bfloat16": 3e-2}


def assert_cached_equals_plain(model, rows, new_tokens=8):
    """Asserts that each token generated with a cache has the best logit of a plain forward pass."""
    checker = Checker(model, rows, new_tokens)
    with checker.greedy() as generate:
        generated = generate(rows)
    checker.compare(rows, generated)


def assert_padding_changes_nothing(model, rows, new_tokens=8):
    """Asserts that padding and other prompts in the batch do not change a prompt's results.

    Compares the logits of plain forward passes with and without padding after the prompt, and the
    tokens generated for each prompt alone and in a batch, with different ids at padding.
    """
    checker = Checker(model, rows, new_tokens)
    batched = checker.logits(rows)
    for i, row in enumerate(rows):
        (alone,) = checker.logits([row])
        difference = np.abs(batched[i] - alone).max(axis=1) / np.ptp(alone, axis=1)
        token = int(difference.argmax())
        if difference[token] > checker.tolerance:
            raise AssertionError(
                f"Padding changes a plain forward pass: after token {token} of row {i} a logit is "
                f"off by {difference[token]:.2g} of their range when other rows are longer; "
                f"{checker.tolerance:.2g} is allowed."
            )
    with checker.greedy() as generate:
        alone = [generate([row])[0] for row in rows]
        for fill in (0, 1):
            generated = generate(rows, fill)
            checker.compare(rows, generated, alone, f" in a batch, padded with {fill},")


def assert_cuts_change_nothing(model, rows, new_tokens=8):
    """Asserts that the position at which a prompt is split does not change the continuation.

    The prompt and each number of its generated tokens are passed as a longer prompt. Models of this
    package also continue from a cache of the prompt's first tokens, for every split.
    """
    checker = Checker(model, rows, new_tokens)
    with checker.greedy() as generate:
        whole = generate(rows)
        for count in range(1, new_tokens):
            longer = [row[: len(given) + count] for row, given in zip(whole, rows, strict=True)]
            checker.compare(longer, generate(longer), whole, f" after {count} generated tokens")
        for cut in range(1, max(map(len, rows))) if hasattr(model, "prefill") else ():
            first = [row[:cut] for row in rows]
            cache = model.prefill(**checker.prefill_arguments(first))
            rest = [row[cut:] for row in rows]
            continued = generate(rest, cache=cache)
            generated = [a + b for a, b in zip(first, continued, strict=True)]
            checker.compare(rows, generated, whole, f" from a cache of the first {cut} tokens")
    checker.compare(rows, whole)


class Checker:
    """Comparison of a language model's generated tokens with its plain forward passes."""

    def __init__(self, model, rows, new_tokens):
        self._model, self._length = model, max(map(len, rows)) + new_tokens
        backbone = model.backbone
        dtype = keras.backend.standardize_dtype(backbone.compute_dtype)
        layers = backbone._flatten_layers(include_self=False)
        if any(getattr(layer, "quantization_mode", None) for layer in layers):
            dtype = "bfloat16"
        self.tolerance = TOLERANCE[dtype]

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
                return model.generate(inputs, stop_token_ids=None)["token_ids"].tolist()
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
        clear = 0
        for i, (logits, tokens, given) in enumerate(
            zip(self.logits(generated), generated, rows, strict=True)
        ):
            for t in range(len(given), len(tokens)):
                before, token = logits[t - 1], tokens[t]
                allowed = 2 * self.tolerance * np.ptp(before)
                second, best = np.sort(before)[-2:]
                clear += bool(best - second > allowed)
                if best - before[token] > allowed:
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
                "`model`: at none of the new tokens do the two largest logits differ by more than "
                "rounding errors, so the check could not fail. Use larger weights, or other `rows`."
            )
