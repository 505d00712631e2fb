"""What layers with a state share: their call, the state's structure and checks, its segment."""

from typing import Any, NamedTuple

import keras
from keras import ops, tree

from keras_recurrent.layers.checks import check_tensor
from keras_recurrent.layers.remat import RecomputableLayer
from keras_recurrent.ops.operation import check_dtype
from keras_recurrent.ops.shapes import fits
from keras_recurrent.ops.token_kind import token_kind


class Tokens(NamedTuple):
    """What a layer knows of its tokens beside their values: each `[B, T]`, or None.

    `kind` says all that operations need; the others are for the segment of the state after.
    """

    mask: Any
    segment_ids: Any
    kind: Any

    def of_sublayer(self):
        """As call arguments of a layer inside."""
        return {
            "segment_ids": self.segment_ids,
            "token_kind": self.kind,
            "inputs_mask": self.mask,
        }


class StreamingLayer(RecomputableLayer):
    """Base class of layers that carry a state along a sequence.

    A sequence may be cut anywhere, also between two packed documents or inside padding, and
    carried on from the state of the part before: the numbers are those of the whole sequence.

    A state is a dict of tensors, batch first: float32 arrays (float64 under a float64 policy,
    whatever the compute dtype; only keys and values that attention keeps are in the compute
    dtype) and int32 `segment [B]`, the segment of the last real token, -1 where nothing was seen.
    A composite layer's state is a dict of its sublayers' states. No state
    and that of `get_initial_state` mean the same.

    A subclass with a `build` of its own calls `super().build` first, and defines `state_spec` and
    `stream`; its output has the shape of its input. A composite one calls its sublayers with
    `**tokens.of_sublayer()`, their part of the state as `initial_state`, and `return_state`.

    Args:
        return_state: boolean, whether a call returns `(output, state)` or the output alone.
        **kwargs: `name`, `dtype`, `trainable`, as in `keras.layers.Layer`.

    Call arguments:
        inputs: `[B, T, D]`, cast to the compute dtype.
        mask: boolean `[B, T]`, False at padding, which may stand anywhere in a row: padding leaves
            the state as it was, and the output there does not matter. Keras passes on the mask of
            a layer before, such as `Embedding(mask_zero=True)`.
        segment_ids: integers `[B, T]`, at least 0, one number a document: nothing passes from one
            to the next. None: as the document before.
        initial_state: the state to go on from; None: nothing was seen.
        return_state: boolean; None: as in the constructor.
        token_kind: int8 `[B, T]`: what `keras_recurrent.ops.token_kind` makes of this mask, these
            segments and this state, beside which it is given, not in place of them, where several
            layers share it. None: the layer finds it.
        inputs_mask: filled by Keras, with the mask that comes with `inputs` when other tensors are
            passed beside them. `mask` has precedence. A layer inside another gets its mask here:
            Keras attaches a `mask` to the outputs, which breaks the graphs of torch.compile.

    Returns:
        `[B, T, D]` in the compute dtype, or with `return_state` a pair of it and the state after
        the last token.

    Raises:
        ValueError: inputs that are not `[B, T, D]` or have no token, a mask, segments or token
            kinds that are not `[B, T]` or of another dtype, a state of another structure or shape.
    """

    def __init__(self, return_state=False, **kwargs):
        # Keras would cast a float32 state to the compute dtype of a mixed policy.
        super().__init__(autocast=False, **kwargs)
        self.return_state = return_state
        self.supports_masking = True

    def build(self, input_shape):
        if len(input_shape) != 3 or input_shape[-1] is None:
            raise ValueError(
                f"`{type(self).__name__}` needs inputs of shape [batch, time, width] with a known "
                f"width; got the shape {tuple(input_shape)}."
            )
        self.width = input_shape[-1]
        self.input_spec = keras.layers.InputSpec(ndim=3, axes={-1: self.width})

    def state_spec(self, batch_size=None):
        """The state's structure, as `KerasTensor`s."""
        raise NotImplementedError

    def stream(self, inputs, tokens, state, return_state):
        """`(output, new state)` from checked arguments, the state without a `segment` of its own.

        `tokens` has the `mask`, the `segment_ids` and their `kind`; these and `state` may be None.
        Nobody looks at the new state unless `return_state`.
        """
        raise NotImplementedError

    def call(
        self,
        inputs,
        mask=None,
        segment_ids=None,
        initial_state=None,
        return_state=None,
        token_kind=None,
        inputs_mask=None,
    ):
        tokens = Tokens(inputs_mask if mask is None else mask, segment_ids, token_kind)
        return self._call(inputs, tokens, initial_state, return_state)

    def _call(self, inputs, tokens, state, return_state, **further):
        """`call`, with the further arguments of a subclass, which `stream` gets as they are."""
        self._check(inputs, tokens, state, return_state)
        return_state = self._returns_state(return_state)
        spec = self.state_spec() if return_state or state is not None else {}
        segment = None
        if state is not None:
            state = _cast(state, spec)
            segment = segment_of(state)
        mask, segment_ids, kind = tokens
        if mask is not None:
            mask = ops.cast(mask, "bool")
        if kind is None and any(t is not None for t in (mask, segment_ids, state)):
            kind = token_kind(inputs, mask, segment_ids, segment, initial_state=state)
        inputs = ops.cast(inputs, self.compute_dtype)
        tokens = Tokens(mask, segment_ids, kind)
        output, after = self.stream(inputs, tokens, state, return_state, **further)
        if not return_state:
            return output
        if "segment" in spec and "segment" not in after:
            after["segment"] = last_segment(inputs, mask, segment_ids, segment)
        # `keras.tree` goes through a dict by its keys on one backend, by its order on another.
        return output, {name: after[name] for name in spec}

    def get_initial_state(self, batch_size, max_length=None):
        """The state in which nothing was seen, for `batch_size` rows.

        `max_length` is the number of tokens that a row will have at most, for layers that keep
        all they have seen; where the state has one size it makes no difference.
        """
        return _initial(self.state_spec(), batch_size)

    def compute_output_spec(
        self,
        inputs,
        mask=None,
        segment_ids=None,
        initial_state=None,
        return_state=None,
        token_kind=None,
        inputs_mask=None,
    ):
        tokens = Tokens(inputs_mask if mask is None else mask, segment_ids, token_kind)
        self._check(inputs, tokens, initial_state, return_state)
        output = keras.KerasTensor(inputs.shape, dtype=self.compute_dtype)
        if self._returns_state(return_state):
            return output, self.state_spec(inputs.shape[0])
        return output

    def compute_output_shape(self, input_shape):
        if self.return_state:
            specs = self.state_spec(input_shape[0])
            return tuple(input_shape), tree.map_structure(lambda spec: spec.shape, specs)
        return tuple(input_shape)

    def compute_mask(self, inputs, previous_mask):
        return previous_mask

    def get_config(self):
        return {**super().get_config(), "return_state": self.return_state}

    @property
    def state_dtype(self):
        """The dtype of states and of the weights that make decays: never below float32."""
        return "float64" if self.compute_dtype == "float64" else "float32"

    def array_spec(self, batch_size, *shape):
        """An array of the state."""
        return keras.KerasTensor((batch_size, *shape), dtype=self.state_dtype)

    def segment_spec(self, batch_size):
        """The `segment` of the state."""
        return keras.KerasTensor((batch_size,), dtype="int32")

    def check_state(self, state, batch_size=None):
        """Raise for a state of another structure or shape."""
        _check_state(state, self.state_spec(batch_size), "initial_state")

    def _returns_state(self, return_state):
        return self.return_state if return_state is None else return_state

    def _check_built(self):
        if not self.built:
            raise ValueError(
                f"The state of `{type(self).__name__}` is as wide as its inputs, which are not "
                "known yet. Call the layer first, or `layer.build((None, None, width))`."
            )

    @property
    def keeps_state(self):
        """Whether a state can be returned where none was given; if not, the size must be told."""
        return True

    def no_bound(self):
        """The error where a state is asked for whose size is not known."""
        return ValueError(
            f"The state of `{type(self).__name__}` keeps all of a document, and needs to know how "
            "much room to make. Give the layer a `max_length`, in tokens, or start from "
            "`get_initial_state(batch_size, max_length=...)`."
        )

    def _check(self, inputs, tokens, state, return_state):
        batch, length = inputs.shape[:2]
        if state is None and self._returns_state(return_state) and not self.keeps_state:
            raise self.no_bound()
        names = ("mask", "segment_ids", "token_kind")
        for name, tensor in zip(names, tokens, strict=True):
            if tensor is None:
                continue
            check_tensor(name, tensor)
            if not fits(tensor.shape, (batch, length)):
                raise ValueError(
                    f"`{name}` must have the shape [batch, time] of the inputs, "
                    f"{(batch, length)}; got {tuple(tensor.shape)}."
                )
            # A mask of numbers to add, 0 and -inf, would mean the contrary as a boolean.
            dtype = keras.backend.standardize_dtype(tensor.dtype)
            check_dtype(type(self).__name__, name, dtype)
        if state is not None:
            self.check_state(state, batch)


def segment_of(state):
    """The segment before the tokens to come, which is one for all parts of a state."""
    if "segment" in state:
        return state["segment"]
    return segment_of(next(part for part in state.values() if isinstance(part, dict)))


def last_segment(inputs, mask, segment_ids, previous):
    """The `segment` of the state after a block of tokens.

    Args:
        inputs: `[B, T, ...]`.
        mask, segment_ids: as in `StreamingLayer`, or None.
        previous: the `segment [B]` of the state before, or None.

    Returns:
        int32 `[B]`: the segment of each row's last real token; without `segment_ids` the previous
        one goes on, or document 0 begins. `previous` (-1 if None) in a row without a real token.
    """
    batch, length = ops.shape(inputs)[:2]
    if previous is None:
        # Not `ops.full`: on torch it reads the value back from the device, and waits for that.
        previous = -ops.ones((batch,), "int32")
    if segment_ids is None:
        seen = ops.relu(previous)
        return seen if mask is None else ops.where(ops.any(mask, axis=1), seen, previous)
    segment_ids = ops.cast(segment_ids, "int32")
    if mask is None:
        return segment_ids[:, -1]
    last = ops.argmax(ops.arange(length, dtype="int32")[None] * ops.cast(mask, "int32"), axis=1)
    segment = ops.take_along_axis(segment_ids, last[:, None], axis=1)[:, 0]
    return ops.where(ops.any(mask, axis=1), segment, previous)


def _initial(spec, batch_size, name=None):
    if isinstance(spec, dict):
        return {name: _initial(part, batch_size, name) for name, part in spec.items()}
    value = -1 if name == "segment" else 0
    return ops.full((batch_size, *spec.shape[1:]), value, dtype=spec.dtype)


def _cast(state, spec):
    # Not `tree.map_structure`: a state kept as a layer's attribute is no plain dict any more.
    if isinstance(spec, dict):
        return {name: _cast(state[name], part) for name, part in spec.items()}
    return ops.cast(state, spec.dtype)


def _check_state(state, spec, path):
    if isinstance(spec, dict):
        if not isinstance(state, dict) or set(state) != set(spec):
            got = f"a dict of {sorted(state)}" if isinstance(state, dict) else type(state).__name__
            raise ValueError(
                f"`{path}` must be a dict of {sorted(spec)}, as `return_state=True` and "
                f"`get_initial_state(batch_size)` give it; got {got}."
            )
        for name, part in spec.items():
            _check_state(state[name], part, f"{path}[{name!r}]")
        return
    check_tensor(path, state)
    if not fits(state.shape, spec.shape):
        raise ValueError(
            f"`{path}` must have the shape {tuple(spec.shape)}; got {tuple(state.shape)}. A state "
            "belongs to the layer and the batch size that it came from."
        )
