"""Base class of layers over time: their call and its checks."""

import keras
import numpy as np
from keras import ops, tree

from keras_recurrent import dispatch
from keras_recurrent.checks.arguments import check_boolean, check_booleans
from keras_recurrent.checks.shapes import check_per_token, check_state, one_state
from keras_recurrent.layers.base import StatefulLayer, cast, in_order
from keras_recurrent.layers.gru_arguments import ALTERNATIVES
from keras_recurrent.layers.sequences import (
    last_real,
    repeat_over_padding,
    reverse,
    where_any_real,
    zero_padding,
)
from keras_recurrent.layers.tokens import check_handed_down, compute_tokens, drop_token_state


class StreamingLayer(StatefulLayer):
    """Base class of layers that carry a state along a sequence.

    A sequence may be split at any token, including between packed documents and inside padding.
    Each chunk continues from the state of the previous chunk, and the results equal those of the
    whole sequence, except at padding: a chunk of padding alone has no last output to repeat.

    A state is a dict of arrays, batch first. Each layer has its part of it. The arrays are float32
    for any compute dtype (float64 under a float64 policy), except the keys and values of attention,
    which have the compute dtype. The part of a layer with streaming sublayers has a dict for each,
    by name. The state of the outermost layer also has `segment`, int32 `[B]`, the segment of the
    last real token, or -1 before any token, and, if a layer uses positions, `position`, int32
    `[B]`, the position of the next token of the document. Omitting the state is equivalent to
    passing `get_initial_state`.

    The layer can replace a `keras.layers.GRU`, also inside `keras.layers.Bidirectional`, with the
    arguments of a GRU listed below; its output is as wide as its input. These arguments are for the
    outermost layer: a layer called with `tokens` does not change outputs at padding and does not
    support `return_sequences=False` and `go_backwards=True`.

    A subclass that overrides `build` calls `super().build` first, which sets `self.width`, D. It
    defines `stream`, whose output has the shape of its input, and `own_state_spec`; if it reads
    `tokens.position`, also `uses_position = True`. Final token-wise computations can be in
    `finish`, and `last_output` can return the output from the state. A subclass with streaming
    sublayers returns them from `streaming_sublayers`, which defines its state, and calls each with
    `tokens=tokens`, its part of the state as `initial_state`, and `return_state=True`. Arguments
    of its constructor that are attributes of the same name are part of its configuration.

    Args:
        return_state: boolean, whether a call returns `(output, state)` or only the output.
        return_sequences: boolean. True: the output has all tokens, `[B, T, D]`. False: only the
            last real token of each sequence, `[B, D]`, without a mask; gates, norms and linear
            layers after the recurrence are computed only for these tokens. The output of a sequence
            without a real token is 0; in layers whose output is the state, such as `RGLRU` and
            `CGLRU`, it is the output of `initial_state`.
        zero_output_for_mask: boolean or None, the outputs at padding with `return_sequences=True`.
            None: arbitrary.
            False: the last real output, as in a GRU; before the first real token, the output of
            `return_sequences=False` for a sequence without real tokens. True: 0.
        go_backwards: boolean, whether to process the sequence from the last token to the first, and
            return outputs in that order. Mask and segments are reversed with the inputs, so a
            document starts at its last token; the returned mask is also reversed. `initial_state`
            precedes the last token, which is processed first. The returned state follows the first
            token, which is processed last.
        **kwargs: `name`, `dtype`, `trainable`, as in `keras.layers.Layer`. Other arguments of a GRU
            raise an error unless their values have no effect, such as `dropout=0`.

    Call arguments:
        inputs: `[B, T, D]`, cast to the compute dtype.
        mask: boolean `[B, T]`, or integers; False or 0 at padding, which may be at any position.
            Padding does not change the state. Its output is arbitrary unless
            `zero_output_for_mask` is set. Keras passes the mask of an earlier layer, such as
            `Embedding(mask_zero=True)`.
        segment_ids: integers `[B, T]`, at least 0, one number per document. Documents do not affect
            each other. None: the document of the previous call continues, or document 0 starts if
            there are no earlier tokens. Values at padding are arbitrary. Values are not checked.
            -1 means "no token yet": at the start of a sequence without earlier tokens, tokens
            of segment -1 continue from the initial state instead of starting a document. If the
            last segment of a state is negative, a call without segments starts a document.
        initial_state: the state to continue from, or a list of only this state. None: the initial
            state.
        return_state: boolean. None: as in the constructor.
        tokens: only for a layer inside another one: the `keras_recurrent.layers.Tokens` that the
            outermost layer computes from mask, segments and state. They replace these arguments.
            `initial_state` and the returned state are then the layer's part.
        inputs_mask: filled in by Keras with the mask of `inputs` if other tensors are passed, too.
            `mask` has precedence.

    Returns:
        `[B, T, D]` in the compute dtype, `[B, D]` without `return_sequences`, or with
        `return_state` a pair of it and the state after the last token.

    Raises:
        TypeError: a keyword-only argument is passed by position, such as the `units` of a GRU.
        ValueError: the inputs are not `[B, T, D]` or have no token; the mask or the segments have
            another shape than `[B, T]` or another dtype; the state has another structure or shape;
            an argument is not a boolean; an argument of a GRU is not supported; or a layer inside
            another one has `go_backwards=True` or `return_sequences=False`.

    Example: both directions of a padded batch. Keras casts states inside `Bidirectional` to its
    compute dtype; give it `dtype="float32"` if the layer has a 16-bit policy.

    ```python
    import keras
    import numpy as np
    from keras_recurrent.layers import RGLRU

    both = keras.layers.Bidirectional(RGLRU(num_blocks=4, return_sequences=False))
    mask = np.array([[True] * 5, [True] * 3 + [False] * 2])
    assert both(np.ones((2, 5, 8), "float32"), mask=mask).shape == (2, 16)
    ```

    Example: a custom layer around another layer.

    ```python
    import keras
    import numpy as np
    from keras_recurrent.layers import RGLRU, StreamingLayer

    class ResidualRGLRU(StreamingLayer):
        def __init__(self, num_blocks=4, **kwargs):
            super().__init__(**kwargs)
            self.num_blocks = num_blocks
            self.rg_lru = RGLRU(num_blocks=num_blocks)

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

    layer = ResidualRGLRU()
    y, state = layer(np.ones((2, 5, 8), "float32"), return_state=True)
    y, state = layer(np.ones((2, 5, 8), "float32"), initial_state=state, return_state=True)
    assert list(state) == ["rg_lru", "segment"]
    ```
    """

    gru_alternatives = ALTERNATIVES

    def __init__(
        self,
        *,
        return_state=False,
        return_sequences=True,
        zero_output_for_mask=None,
        go_backwards=False,
        **kwargs,
    ):
        # Keras would cast a float32 state to the compute dtype of a mixed policy.
        super().__init__(autocast=False, **kwargs)
        check_booleans(
            return_state=return_state,
            return_sequences=return_sequences,
            go_backwards=go_backwards,
        )
        if zero_output_for_mask is not None:
            check_boolean("zero_output_for_mask", zero_output_for_mask)
        self.return_state = return_state
        self.return_sequences = return_sequences
        self.zero_output_for_mask = zero_output_for_mask
        self.go_backwards = go_backwards
        self.supports_masking = True

    # === Methods for subclasses ===

    def build(self, input_shape):
        if len(input_shape) != 3 or input_shape[-1] is None:
            raise ValueError(
                f"`{type(self).__name__}` needs inputs of shape [batch, time, width] with a known "
                f"width; got the shape {tuple(input_shape)}."
            )
        self.width = input_shape[-1]
        self.input_spec = keras.layers.InputSpec(ndim=3, axes={-1: self.width})

    def stream(self, inputs, tokens, state):
        """Returns the output and the layer's part of the state after the last token.

        Args:
            inputs: `[B, T, D]` in the compute dtype, reversed with `go_backwards`.
            tokens: the `Tokens`, in the order of the inputs.
            state: the layer's part of the state, or an empty dict for the initial state.
        """
        raise NotImplementedError(
            f"`{type(self).__name__}` must define `stream(inputs, tokens, state)`, which returns "
            "the output and the new state."
        )

    def finish(self, output, inputs):
        """Computes the layer's output from the output of `stream` and the inputs, token-wise.

        Without `return_sequences`, it is called only on the last real token of each sequence.

        Args:
            output: `[B, N, ...]`, the output of `stream`, at all tokens or some.
            inputs: `[B, N, D]`, at the same tokens.

        Returns:
            `[B, N, D]` in the compute dtype.
        """
        return output

    def unfused_reason(self):
        """Reason why `fused_step` cannot compute a decoding step of this layer, or None.

        A layer with a fused step defines `fused_step(x, norm, tokens, state, output_scale=None,
        next_norm=None, **kwargs)`, which returns `(x + r layer(norm(x)), next state)` for one token
        of each sequence. x is a `decoding.Stream`, r is `output_scale` or 1, and `next_norm` is
        that of `decoding.linear`. A layer inside another layer may also get `residual`, which
        replaces x in the sum.
        """
        return f"there is no fused step for a {type(self).__name__}"

    def last_output(self, state):
        """Returns the output of the last real token, `[B, D]`, from the layer's part of a state.

        Returns None if the state does not determine it, or is the empty dict of the initial state.
        """
        return None

    def check_arguments(self, inputs, **kwargs):
        """Checks the call arguments that a subclass takes in addition to those of `StreamingLayer`.

        A subclass with an argument `scale` defines `check_arguments(self, inputs, scale=1.0,
        **kwargs)`, passes `**kwargs` to this method, and gets `scale` in its `stream`, too.
        """
        if kwargs:
            raise TypeError(
                f"`{type(self).__name__}` got the call argument {next(iter(kwargs))!r}, which it "
                "does not take. Every streaming layer takes `mask`, `segment_ids`, "
                "`initial_state`, `return_state` and, inside another one, `tokens`."
            )

    # === The call ===

    def prepare_call(self, args, kwargs):
        if isinstance(kwargs.get("return_state"), np.bool_):  # Keras would convert it to a tensor
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
        return_state = self.return_state if return_state is None else return_state
        outermost, token_state = tokens is None, {}
        if not outermost:
            check_handed_down(self, tokens, mask, segment_ids, initial_state)
        else:
            mask = inputs_mask if mask is None else mask
            initial_state = one_state(initial_state) if initial_state is not None else None
            self._check(inputs, mask, segment_ids, initial_state, return_state, kwargs)
            if self.go_backwards:
                inputs, mask, segment_ids = reverse(inputs, mask, segment_ids)
            tokens, token_state = compute_tokens(
                *(inputs, mask, segment_ids, initial_state),
                uses_position=self.uses_position,
                return_state=return_state,
            )
            initial_state = drop_token_state(initial_state)
        compute_dtype = self.compute_dtype
        inputs = cast(inputs, compute_dtype)
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
        # A sublayer may have another dtype, and Keras on torch multiplies float64 as float32.
        output = cast(output, compute_dtype)
        return (output, in_order({**after, **token_state})) if return_state else output

    def _returned(self, output, inputs, mask, before, after):
        """Returns the outputs over time that the call returns, from the output of `stream`."""
        mask = None if mask is None else ops.cast(mask, "bool")
        if not self.return_sequences:
            dispatch.check_not_split("`return_sequences=False`")
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
        return_state = self.return_state if return_state is None else return_state
        if tokens is not None:
            check_handed_down(self, tokens, mask, segment_ids, initial_state)
        else:
            mask = inputs_mask if mask is None else mask
            state = one_state(initial_state)
            self._check(inputs, mask, segment_ids, state, return_state, kwargs)
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

    # === Attributes that `keras.layers.Bidirectional` and `keras.layers.RNN` read ===

    stateful = False  # no state is stored between calls
    states = None

    @property
    def state_size(self):
        name = type(self).__name__
        raise ValueError(
            f"`keras.layers.RNN` requires a cell; `{name}` is a layer over whole sequences. "
            f"Replace `RNN({name}(...))` by `{name}(...)`, with `return_sequences`, "
            "`return_state`, `initial_state` and `go_backwards` as in a GRU."
        )

    def _check(self, inputs, mask, segment_ids, state, return_state, arguments):
        """Checks the call arguments of an outermost layer."""
        if return_state is not self.return_state:
            check_boolean("return_state", return_state)
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
            if tensor is not None:
                check_per_token(type(self).__name__, name, tensor, (batch, length))
        if state is not None:
            check_state(state, self.state_spec(batch), "initial_state")
