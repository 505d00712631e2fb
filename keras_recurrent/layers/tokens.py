"""Kinds and positions of tokens, computed once and passed to all sublayers."""

from typing import Any, NamedTuple

import keras
from keras import ops

from keras_recurrent import dispatch
from keras_recurrent.backends.constants import PADDING, STARTS
from keras_recurrent.devices.jax_layouts import apply_layout
from keras_recurrent.ops.linear_scan import linear_scan
from keras_recurrent.ops.operation import symbolic
from keras_recurrent.ops.token_kind import kinds_of_tokens


class Tokens(NamedTuple):
    """Kinds and positions of the tokens of a sequence.

    The outermost layer or the network computes them from mask, segments and state, and each layer
    passes them to its sublayers.

    Attributes:
        kind: int8 `[B, T]`, the result of `keras_recurrent.ops.token_kind`. None: there is no mask,
            no segments and no state, so each sequence is one document that starts at its first
            token.
        position: int32 `[B, T]`, the index of each token in its document, not counting padding. At
            padding: the number of real tokens so far in the most recent document. None: no layer
            uses positions.
        slots: int8 `[0, C]`, where C is the capacity of KV caches that a call without a state
            returns. It has no elements: Keras passes only tensors from layer to layer. None: the
            capacity is the `max_length` of each layer.

    Example: a custom layer that sums the tokens of each document.

    ```python
    import keras
    import numpy as np
    from keras_recurrent.layers import StreamingLayer
    from keras_recurrent.ops import linear_scan

    class DocumentSum(StreamingLayer):
        def own_state_spec(self, batch_size=None):
            return {"total": self.array_spec(batch_size, self.width)}

        def stream(self, inputs, tokens, state):
            sums, total = linear_scan(
                inputs,
                keras.ops.zeros_like(inputs),
                initial_state=state.get("total"),
                token_kind=tokens.kind,
            )
            return sums, {"total": total}

    x = np.ones((1, 5, 1), "float32")
    y = DocumentSum()(x, segment_ids=np.array([[0, 0, 0, 1, 1]]))
    assert keras.ops.convert_to_numpy(y).ravel().tolist() == [1, 2, 3, 1, 2]
    ```
    """

    kind: Any = None
    position: Any = None
    slots: Any = None


def compute_tokens(
    inputs, mask=None, segment_ids=None, state=None, uses_position=False, return_state=False
):
    """Computes the `Tokens` of a sequence, and `segment` and `position` of the state after it.

    Args:
        inputs: `[B, T, ...]`; only the shape is used.
        mask, segment_ids: as in `StreamingLayer`, or None.
        state: a state with `segment` and, if positions are used, `position`. None: the initial
            state.
        uses_position: boolean, whether to compute positions.
        return_state: boolean, whether to compute the entries of the next state.

    Returns:
        `(tokens, token_state)`: a `Tokens` and, with `return_state`, a dict of `segment` and, if
        positions are used, `position` of the state after the sequence; else an empty dict.
    """
    state = state or {}
    given = {
        "mask": mask,
        "segment_ids": segment_ids,
        "segment": state.get("segment"),
        "position": state.get("position"),
    }
    if symbolic({"inputs": inputs}, given):
        found = ComputeTokens(uses_position, return_state).symbolic_call(inputs, **given)
    else:
        found = _compute(inputs, **given, uses_position=uses_position, return_state=return_state)
    tokens = Tokens(found.pop("kind", None), found.pop("position", None))
    return tokens, {name.removeprefix("next_"): array for name, array in found.items()}


# Saved models have the name "FindTokens".
@keras.saving.register_keras_serializable(package="keras_recurrent", name="FindTokens")
class ComputeTokens(keras.Operation):
    """Node of a Keras graph for `compute_tokens`."""

    def __init__(self, uses_position=False, return_state=False, name=None):
        super().__init__(name=name)
        self.uses_position = uses_position
        self.return_state = return_state

    def call(self, inputs, **given):
        return _compute(inputs, **given, **self._options())

    def compute_output_spec(self, inputs, **given):
        batch, length = inputs.shape[:2]
        spec = {}
        if any(tensor is not None for tensor in given.values()):
            spec["kind"] = keras.KerasTensor((batch, length), "int8")
        if self.uses_position:
            spec["position"] = keras.KerasTensor((batch, length), "int32")
        if self.return_state:
            token_state = token_state_spec(batch, self.uses_position)
            spec |= {f"next_{name}": entry for name, entry in token_state.items()}
        return spec

    def rematerialized_call(self, call, *args, **kwargs):
        return call  # it has no gradient

    def _options(self):
        return {"uses_position": self.uses_position, "return_state": self.return_state}

    def get_config(self):
        return {"name": self.name, **self._options()}


def _compute(inputs, mask, segment_ids, segment, position, uses_position, return_state):
    """Returns a dict of `kind` and `position`, and `next_segment` and `next_position`.

    Entries that are not needed are missing. Layers and networks have checked the tensors.
    """
    found = {}
    if return_state or segment is not None:
        dispatch.check_not_split("A state of a layer or network")
    # Each device computes this for whole sequences, so shards need no communication.
    if mask is not None:
        mask = apply_layout(ops.cast(mask, "bool"), "tokens")
    if segment_ids is not None:
        segment_ids = apply_layout(segment_ids, "tokens")
    if segment is not None:
        segment = ops.cast(segment, "int32")
    if not (mask is None and segment_ids is None and segment is None):
        kind = kinds_of_tokens(inputs, mask, segment_ids, segment)
        found["kind"] = apply_layout(kind, "tokens")
    if uses_position:
        kind = None if segment_ids is None else found["kind"]
        shards = dispatch.active_shards()
        if shards is not None:
            found["position"] = shards.run_whole(token_position, inputs, mask, kind)
        else:
            positions = token_position(inputs, mask, kind, position)
            found["position"] = apply_layout(positions, "tokens")
    if return_state:
        if uses_position:
            last = found["position"][:, -1]
            real = 1 if mask is None else ops.cast(mask[:, -1], "int32")
            found["next_position"] = last + real
        found["next_segment"] = last_segment(inputs, mask, segment_ids, segment)
    return found


# Entries that only the state of the outermost layer has: segment and position of each sequence.
TOKEN_STATE = ("position", "segment")


def drop_token_state(state):
    """Returns the state of a layer without the entries in `TOKEN_STATE`. None stays None."""
    return state and {name: part for name, part in state.items() if name not in TOKEN_STATE}


def token_state_spec(batch_size, uses_position):
    """Returns the entries `TOKEN_STATE` of a state, as `KerasTensor`s."""
    names = TOKEN_STATE if uses_position else ("segment",)
    return {name: keras.KerasTensor((batch_size,), "int32") for name in names}


def initial_token_state(batch_size, uses_position):
    """Returns the entries `TOKEN_STATE` of an initial state."""
    token_state = {"position": ops.zeros((batch_size,), "int32")} if uses_position else {}
    return {**token_state, "segment": ops.full((batch_size,), -1, "int32")}


def check_handed_down(layer, tokens, mask, segment_ids, own_state):
    """Raises an error if call arguments of an inner layer contradict the tokens passed to it.

    Positions are checked only in layers without sublayers, which are the ones that read them.
    """
    name = type(layer).__name__
    if not isinstance(tokens, Tokens):
        raise ValueError(
            f"`{name}`: `tokens` must be the `Tokens` that the outer layer's `stream` got; got "
            f"a {type(tokens).__name__}. Outside another layer, pass `mask` and `segment_ids`."
        )
    if tokens.position is None and not layer.streaming_sublayers() and layer.uses_position:
        raise ValueError(
            f"`{name}`: `tokens` have no `position`, which this layer uses. Return the layer from "
            "the outer layer's `streaming_sublayers`, so that positions are computed."
        )
    if layer.go_backwards or not layer.return_sequences:
        argument = "go_backwards=True" if layer.go_backwards else "return_sequences=False"
        raise ValueError(
            f"`{name}` has `{argument}`, which is for the outermost layer. Leave it out: a layer "
            "inside another one processes tokens in their order and returns all of them."
        )
    for argument, tensor in (("mask", mask), ("segment_ids", segment_ids)):
        if tensor is not None:
            raise ValueError(
                f"`{name}`: `tokens` replace masks and segments; got `tokens` and `{argument}`. "
                "Leave one of them out."
            )
    if own_state and "segment" in own_state:
        raise ValueError(
            f"`{name}`: with `tokens`, `initial_state` must be the layer's part of a state; got "
            "one with `segment`. Pass `state[name]` of the outer layer's state."
        )


def token_position(inputs, mask=None, kind=None, first=None):
    """Returns the index of each token in its document, int32 `[B, T]`; see `Tokens.position`.

    Args:
        inputs: `[B, T, ...]`; only the shape is used.
        mask: boolean `[B, T]`, read if `kind` is None. None: all tokens are real.
        kind: int8 `[B, T]`, for packed documents. None: each sequence continues one document.
        first: int32 `[B]`, the position of a first token that continues a document. None: 0.
    """
    batch, length = ops.shape(inputs)[:2]
    first = ops.zeros((batch,), "int32") if first is None else ops.cast(first, "int32")
    if inputs.shape[1] == 1:  # a step of decoding
        first = first[:, None]
        return first if kind is None else ops.where(kind == STARTS, ops.zeros_like(first), first)
    if kind is None and mask is None:
        return first[:, None] + ops.arange(0, length, dtype="int32")
    if kind is None:
        # `linear_scan` is not used here, because Triton takes 4 seconds to compile its kernel.
        real = ops.cast(mask, "int32")
        return first[:, None] + ops.cumsum(real, axis=1) - real
    # Operators, not `ops`, for numbers and tensors: see `keras_recurrent/ops/token_kind.py`.
    real = ops.cast(kind != PADDING, "float32")[:, :, None]
    # Number of real tokens of the document up to and including each token, exact up to 2^24.
    count, _ = linear_scan(real, ops.zeros_like(real), token_kind=kind)
    continued = ops.cumsum(ops.cast(kind == STARTS, "int32"), axis=1) == 0
    first = ops.where(continued, first[:, None], ops.zeros_like(kind, "int32"))
    return first + ops.cast((count - real)[:, :, 0], "int32")


def last_segment(inputs, mask, segment_ids, previous):
    """Returns the segment of the last real token of each sequence, int32 `[B]`.

    Without `segment_ids`, the previous segment continues, or document 0 starts. A sequence without
    a real token keeps its `previous` segment, -1 if that is None.

    Args:
        inputs: `[B, T, ...]`; only the shape is used.
        mask, segment_ids: as in `StreamingLayer`, or None.
        previous: the `segment` `[B]` of the state before, or None.
    """
    batch, length = ops.shape(inputs)[:2]
    if previous is None:
        # Not `ops.full`: on torch it reads the value back from the device, which synchronizes.
        previous = -ops.ones((batch,), "int32")
    if segment_ids is None:
        seen = ops.relu(previous)
        return seen if mask is None else ops.where(ops.any(mask, axis=1), seen, previous)
    segment_ids = ops.cast(segment_ids, "int32")
    if mask is None:
        return segment_ids[:, -1]
    last = ops.argmax(ops.arange(0, length, dtype="int32")[None] * ops.cast(mask, "int32"), axis=1)
    segment = ops.take_along_axis(segment_ids, last[:, None], axis=1)[:, 0]
    return ops.where(ops.any(mask, axis=1), segment, previous)
