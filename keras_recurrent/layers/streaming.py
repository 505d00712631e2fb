"""The base class of layers over time: their call and its checks."""

import keras
import numpy as np
from keras import ops, tree

from keras_recurrent.checks.arguments import check_boolean
from keras_recurrent.checks.states import check_per_token, check_state, one_state
from keras_recurrent.devices import split_time
from keras_recurrent.dispatch import BACKEND
from keras_recurrent.layers.gru_arguments import without_gru_arguments
from keras_recurrent.layers.remat import is_called_directly
from keras_recurrent.layers.sequences import (
    last_real,
    repeat_over_padding,
    reverse,
    where_any_real,
    zero_padding,
)
from keras_recurrent.layers.states import StatefulLayer, in_order
from keras_recurrent.layers.tokens import check_handed_down, find_tokens, own_part

if BACKEND == "torch":
    from keras_recurrent.layers.torch_calls import weights_scope


class StreamingLayer(StatefulLayer):
    """Base class of layers that carry a state along a sequence.

    A sequence may be cut anywhere, also between two packed documents or inside padding, and
    carried on from the state of the part before: the numbers are those of the whole sequence.

    A state is a dict of arrays, batch first. Each layer has its own part: float32 arrays (float64
    under a float64 policy, whatever the compute dtype; only the keys and values of attention are in
    the compute dtype). That of a layer with streaming layers inside has a dict for each of these,
    by its name. Beside the own part of the outermost layer stand, once, int32 `segment` `[B]`, the
    segment of the last real token, -1 where nothing was seen, and, where a layer uses positions,
    int32 `position` `[B]`, that of the next token of the document. No state and that of
    `get_initial_state` mean the same.

    It stands where a `keras.layers.GRU` would, `keras.layers.Bidirectional` around it included,
    with the arguments below that it has from there; its output is as wide as its input. The
    arguments belong to the outermost layer: one that is called with `tokens` leaves padding as it
    is, and refuses the other two.

    A subclass with a `build` of its own calls `super().build` first, which sets `self.width`, D. It
    defines `stream`, whose output has the shape of its input, and `own_state_spec`; where it reads
    `tokens.position`, also `uses_position = True`. Work on each token by itself that comes last may
    be left to `finish`, and `last_output` may say what the state tells of the output. One with
    streaming layers inside names them in `streaming_sublayers`, from which its state follows, and
    calls each with `tokens=tokens`, its part of the state as `initial_state`, and
    `return_state=True`.

    Args:
        return_state: boolean, whether a call returns `(output, state)` or the output alone.
        return_sequences: boolean, whether the output has all tokens, `[B, T, D]`, or the last real
            one of each row, `[B, D]`, and no mask: gates, norms and linear maps behind the
            recurrence are then made for these alone. For a row without a real token it is 0, or
            what `initial_state` implies where the output is the state, as in `RGLRU` and `CGLRU`.
        zero_output_for_mask: what stands at padding where the output has all tokens. None:
            anything. False: the last real output again, as in a GRU, and in front of the first
            what `return_sequences=False` gives for a row without one. True: 0.
        go_backwards: boolean, whether to read from the last token to the first, and return outputs
            in that order. Mask and segments are turned around with the inputs, so that a document
            starts at its last token; so is the mask that is passed on. The state is that after the
            first token, and `initial_state` what comes after the last.
        **kwargs: `name`, `dtype`, `trainable`, as in `keras.layers.Layer`. Other arguments of a GRU
            are refused unless they ask for nothing, as `dropout=0` does.

    Call arguments:
        inputs: `[B, T, D]`, cast to the compute dtype.
        mask: boolean `[B, T]`, or integers, False or 0 at padding, which may stand anywhere in a
            row: padding leaves the state as it was, and the output there does not matter. Keras
            passes on the mask of a layer before, such as `Embedding(mask_zero=True)`.
        segment_ids: integers `[B, T]`, at least 0, one number a document: nothing passes from one
            to the next. None: the document before goes on, or, where nothing was seen, document 0
            begins. Values are not looked at, and negative ones mean that nothing was seen: where
            that is so, tokens of -1 do not start a document, but go on from the initial state; and
            a state after a token of a negative segment is taken by a call without segments for one
            that has seen nothing. At padding any number may stand.
        initial_state: the state to go on from, or a list of it alone; None: nothing was seen.
        return_state: boolean; None: as in the constructor.
        tokens: for a layer inside another one: the `keras_recurrent.layers.Tokens` that the
            outermost layer has made of the mask, the segments and the state, and which stand in
            place of these. `initial_state` and the state returned are then the layer's own part.
        inputs_mask: filled in by Keras, with the mask that comes with `inputs` when other tensors
            are passed beside them. `mask` has precedence.

    Returns:
        `[B, T, D]` in the compute dtype, `[B, D]` without `return_sequences`, or with
        `return_state` a pair of it and the state after the last token.

    Raises:
        ValueError: inputs that are not `[B, T, D]` or have no token, a mask or segments that are
            not `[B, T]` or of another dtype, a state of another structure or shape, an argument
            that is no boolean, arguments of a GRU that are not there, `go_backwards` or
            `return_sequences=False` inside another layer.

    Example: both directions of a padded batch. Keras hands states through `Bidirectional` in its
    compute dtype; give it `dtype="float32"` where the layer has a policy of 16 bits.

    ```python
    import keras
    import numpy as np
    from keras_recurrent.layers import RGLRU

    both = keras.layers.Bidirectional(RGLRU(num_blocks=4, return_sequences=False))
    mask = np.array([[True] * 5, [True] * 3 + [False] * 2])
    assert both(np.ones((2, 5, 8), "float32"), mask=mask).shape == (2, 16)
    ```

    Example: a layer of one's own around another.

    ```python
    import keras
    import numpy as np
    from keras_recurrent.layers import RGLRU, StreamingLayer

    class ResidualRGLRU(StreamingLayer):
        def __init__(self, num_blocks=4, **kwargs):
            super().__init__(**kwargs)
            self.num_blocks = num_blocks
            self.rg_lru = RGLRU(num_blocks)

        def build(self, input_shape):
            super().build(input_shape)
            self.rg_lru.build(input_shape)

        def streaming_sublayers(self):
            return {"rg_lru": self.rg_lru}

        def stream(self, inputs, tokens, state):
            x, after = self.rg_lru(
                inputs, tokens=tokens, initial_state=state.get("rg_lru"), return_state=True
            )
            return inputs + x, {"rg_lru": after}

        def get_config(self):
            return {**super().get_config(), "num_blocks": self.num_blocks}

    layer = ResidualRGLRU()
    y, state = layer(np.ones((2, 5, 8), "float32"), return_state=True)
    y, state = layer(np.ones((2, 5, 8), "float32"), initial_state=state, return_state=True)
    assert list(state) == ["rg_lru", "segment"]
    ```
    """

    def __init__(
        self,
        return_state=False,
        return_sequences=True,
        zero_output_for_mask=None,
        go_backwards=False,
        **kwargs,
    ):
        kwargs = without_gru_arguments(type(self).__name__, kwargs)
        # Keras would cast a float32 state to the compute dtype of a mixed policy.
        super().__init__(autocast=False, **kwargs)
        check_boolean("return_state", return_state)
        check_boolean("return_sequences", return_sequences)
        check_boolean("go_backwards", go_backwards)
        if zero_output_for_mask is not None:
            check_boolean("zero_output_for_mask", zero_output_for_mask)
        self.return_state = return_state
        self.return_sequences = return_sequences
        self.zero_output_for_mask = zero_output_for_mask
        self.go_backwards = go_backwards
        self.supports_masking = True

    # === What a subclass defines ===

    def build(self, input_shape):
        if len(input_shape) != 3 or input_shape[-1] is None:
            raise ValueError(
                f"`{type(self).__name__}` needs inputs of shape [batch, time, width] with a known "
                f"width; got the shape {tuple(input_shape)}."
            )
        self.width = input_shape[-1]
        self.input_spec = keras.layers.InputSpec(ndim=3, axes={-1: self.width})

    def stream(self, inputs, tokens, state):
        """The output and the layer's own part of the state after the last token.

        Args:
            inputs: `[B, T, D]` in the compute dtype, turned around with `go_backwards`.
            tokens: the `Tokens`, in the same order.
            state: the layer's own part of the state, an empty dict where nothing was seen.
        """
        raise NotImplementedError(
            f"`{type(self).__name__}` must define `stream(inputs, tokens, state)`, which returns "
            "the output and the new state."
        )

    def finish(self, output, inputs):
        """The layer's output from what `stream` returned and the inputs, token by token.

        Without `return_sequences` it is called on the last real token of each row alone.

        Args:
            output: `[B, N, ...]`, as `stream` returns it, at all tokens or some.
            inputs: `[B, N, D]`, at the same tokens.

        Returns:
            `[B, N, D]` in the compute dtype.
        """
        return output

    def unfused_reason(self):
        """Reason why a decoding step calls the layer instead of `fused_step`, or None.

        A layer with a fused step defines `fused_step(x, norm, tokens, state, **kwargs)`, which
        returns `(x + layer(norm(x)), next state)` for x `[B, D]`, one token of each sequence.
        """
        return f"there is no fused step for a {type(self).__name__}"

    def last_output(self, state):
        """The output of the last real token, `[B, D]`, from the layer's own part of a state.

        None: the state does not tell it, or is the empty dict of nothing seen.
        """
        return None

    def check_arguments(self, inputs, **kwargs):
        """Raise for call arguments that a subclass takes beside those of `StreamingLayer`.

        A subclass with an argument `scale` defines `check_arguments(self, inputs, scale=1.0,
        **kwargs)`, hands `**kwargs` to this method, and gets `scale` in its `stream`, too.
        """
        if kwargs:
            raise TypeError(
                f"`{type(self).__name__}` got the call argument {next(iter(kwargs))!r}, which it "
                "does not take. Every streaming layer takes `mask`, `segment_ids`, "
                "`initial_state`, `return_state` and, inside another one, `tokens`."
            )

    # === The call ===

    def prepare_call(self, args, kwargs):
        if isinstance(kwargs.get("return_state"), np.bool_):  # Keras would make a tensor of it
            kwargs = {**kwargs, "return_state": bool(kwargs["return_state"])}
        return super().prepare_call(args, kwargs)

    def call(
        self,
        inputs,
        mask=None,
        segment_ids=None,
        initial_state=None,
        return_state=None,
        tokens=None,
        inputs_mask=None,
        **kwargs,
    ):
        return_state, places = self._returns_state(return_state), {}
        mask = inputs_mask if mask is None and tokens is None else mask
        initial_state = one_state(initial_state)
        self._check(inputs, mask, segment_ids, initial_state, return_state, tokens, kwargs)
        outermost = tokens is None
        if outermost:
            if self.go_backwards:
                inputs, mask, segment_ids = reverse(inputs, mask, segment_ids)
            tokens, places = find_tokens(
                *(inputs, mask, segment_ids, initial_state),
                uses_position=self.uses_position,
                return_state=return_state,
            )
            initial_state = own_part(initial_state)
        inputs = ops.cast(inputs, self.compute_dtype)
        results = self.stream(inputs, tokens, initial_state or {}, **kwargs)
        if not isinstance(results, tuple) or len(results) != 2:
            raise TypeError(
                f"`stream` of `{type(self).__name__}` must return a pair, the output and a dict of "
                f"the layer's own part of the state; got a {type(results).__name__}."
            )
        output, after = results
        if outermost:
            output = self._returned(output, inputs, mask, initial_state or {}, after)
        else:
            output = self.finish(output, inputs)
        # A layer inside may have another dtype, and Keras on torch multiplies float64 as float32.
        output = ops.cast(output, self.compute_dtype)
        return (output, in_order({**after, **places})) if return_state else output

    def _returned(self, output, inputs, mask, before, after):
        """What the call returns of the outputs over time, from what `stream` returned."""
        mask = None if mask is None else ops.cast(mask, "bool")
        if not self.return_sequences:
            split_time.check_not_split("`return_sequences=False`")
            last = self.last_output(after)
            if last is not None:
                return last
            last = self.finish(*last_real((output, inputs), mask))[:, 0]
            return where_any_real(last, mask, self.last_output(before))
        output = self.finish(output, inputs)
        if mask is None or self.zero_output_for_mask is None:
            return output
        if self.zero_output_for_mask:
            return zero_padding(output, mask)
        return repeat_over_padding(output, mask, self.last_output(before))

    def compute_output_spec(
        self,
        inputs,
        mask=None,
        segment_ids=None,
        initial_state=None,
        return_state=None,
        tokens=None,
        inputs_mask=None,
        **kwargs,
    ):
        return_state = self._returns_state(return_state)
        mask = inputs_mask if mask is None and tokens is None else mask
        initial_state = one_state(initial_state)
        self._check(inputs, mask, segment_ids, initial_state, return_state, tokens, kwargs)
        output = keras.KerasTensor(self._output_shape(inputs.shape), dtype=self.compute_dtype)
        if not return_state:
            return output
        spec = self.state_spec if tokens is None else self.own_state_spec
        return output, spec(inputs.shape[0])

    def compute_output_shape(self, input_shape):
        output_shape = self._output_shape(input_shape)
        if self.return_state:
            specs = self.state_spec(input_shape[0])
            return output_shape, tree.map_structure(lambda spec: spec.shape, specs)
        return output_shape

    def _output_shape(self, input_shape):
        batch, length, width = input_shape
        return (batch, length, width) if self.return_sequences else (batch, width)

    def compute_mask(self, inputs, previous_mask):
        if not self.return_sequences:
            return None
        return reverse(previous_mask)[0] if self.go_backwards else previous_mask

    def get_config(self):
        return {
            **super().get_config(),
            "return_state": self.return_state,
            "return_sequences": self.return_sequences,
            "zero_output_for_mask": self.zero_output_for_mask,
            "go_backwards": self.go_backwards,
        }

    # === What `keras.layers.Bidirectional` and `keras.layers.RNN` read ===

    stateful = False  # nothing is kept from call to call
    states = None

    @property
    def state_size(self):
        name = type(self).__name__
        raise ValueError(
            f"`{name}` is no cell for `keras.layers.RNN`: it takes whole sequences. Call it in its "
            f"place, `{name}(...)(x)`, with `return_sequences`, `return_state`, `initial_state` "
            "and `go_backwards` as in a GRU."
        )

    def _returns_state(self, return_state):
        if return_state is None:
            return self.return_state
        check_boolean("return_state", return_state)
        return return_state

    def _check(self, inputs, mask, segment_ids, state, return_state, tokens, arguments):
        """Raise for call arguments that do not fit. Inside another layer, that one has checked."""
        if tokens is not None:
            check_handed_down(self, tokens, mask, segment_ids, state)
            return
        self.check_arguments(inputs, **arguments)
        batch, length = inputs.shape[:2]
        if length == 0:
            raise ValueError(
                f"`{type(self).__name__}`: `inputs` must have at least one token; got the shape "
                f"{tuple(inputs.shape)} for [batch, time, width]."
            )
        if state is None and return_state and not self.keeps_state:
            raise self.no_bound()
        for name, tensor in (("mask", mask), ("segment_ids", segment_ids)):
            check_per_token(type(self).__name__, name, tensor, (batch, length))
        if state is not None:
            check_state(state, self.state_spec(batch), "initial_state")


def stream_inner(outer, layer, inputs, tokens, state=None, return_state=True, **kwargs):
    """Calls a streaming layer inside another layer or a model.

    Args:
        outer: the layer or model that calls it.
        layer: a `StreamingLayer`.
        inputs: `[B, T, D]`.
        tokens: the `Tokens` of the outer layer.
        state: the layer's own part of the state, or None.
        return_state: boolean.
        **kwargs: further arguments of `layer.stream`.

    Returns:
        `(output, next state)`; without `return_state` the latter is None.
    """
    if not is_called_directly(outer, layer, inputs) or "call" in vars(layer):
        kwargs |= {"tokens": tokens, "initial_state": state, "return_state": return_state}
        found = layer(inputs, **kwargs)
        return found if return_state else (found, None)
    check_handed_down(layer, tokens, None, None, state)
    with weights_scope(layer):
        output, after = layer.stream(inputs, tokens, state or {}, **kwargs)
        output = ops.cast(layer.finish(output, inputs), layer.compute_dtype)
    return output, in_order(after) if return_state else None
