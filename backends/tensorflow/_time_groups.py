"""Operations over time, computed for one group of tokens after another."""

import tensorflow as tf

from ..constants import CONTINUES, PADDING
from ..kernel import Kernel
from ..signatures import SIGNATURES
from ._common import (
    accumulation_dtype,
    as_tensors,
    dense_gradient,
    differentiate,
    filled,
    kind_masks,
    length_of,
)

GROUP = 128


def group_tokens(operation, function):
    """Returns the `Kernel` of an operation for any length, from a function of static length.

    Linear attention is computed in groups of tokens, which bound the memory of its intermediate
    tensors; other operations only if their length is unknown. The gradient computes each group once
    more and differentiates it, from the last to the first. Residuals are the arguments, and the
    state before each group.
    """

    is_linear_attention = "v" in SIGNATURES[operation].tensors

    def call(initial_state=None, token_kind=None, **arguments):
        names = [name for name, x in arguments.items() if x is not None]
        *tensors, state = as_tensors(*(arguments[name] for name in names), initial_state)
        like = arguments.get("v", tensors[0])
        if like.shape[1] is not None and not is_linear_attention:
            return function(**arguments, initial_state=initial_state, token_kind=token_kind)
        dtype = accumulation_dtype(*tensors, state)
        if state is None:
            key_size = [arguments["q"].shape[3]] if is_linear_attention else []
            widths = [like.shape[2], *key_size, *like.shape[3:]]
            state = tf.zeros([tf.shape(like)[0], *widths], dtype)

        def compute(state, kind, tensors):
            named = dict(zip(names, tensors, strict=True))
            absent = dict.fromkeys(arguments.keys() - named.keys())
            return function(**named, **absent, initial_state=state, token_kind=kind)

        return _compute(compute, tf.cast(state, dtype), token_kind, tensors, like)

    return Kernel(call)


def _compute(function, state, token_kind, tensors, like):
    """Returns the output, with the shape and dtype of `like`, and the final state.

    function: differentiable, `(state, token_kind, tensors) -> (output, state)` of a group.
    """
    dtype = state.dtype
    has_time = [len(x.shape) > 2 for x in tensors]
    plan = _Plan(like)

    def select(tensors, is_selected):
        return [x for x, of_time in zip(tensors, has_time, strict=True) if of_time == is_selected]

    def merge(over_time, constants):
        pairs = {True: iter(over_time), False: iter(constants)}
        return [next(pairs[of_time]) for of_time in has_time]

    @tf.custom_gradient
    def run(state, *tensors):
        kinds, constants = plan.kinds(token_kind), select(tensors, False)
        groups = [plan.split(x) for x in select(tensors, True)]

        def forward(state, kind, *of_group):
            output, next_state = function(state, kind, merge(of_group, constants))
            return next_state, [output, state]

        def backward(carry, kind, state, d_output, *of_group):
            d_state, d_constants = carry
            with tf.GradientTape() as tape:
                sources = state, of_group, constants
                tape.watch(sources)
                results = function(state, kind, merge(of_group, constants))
            d_output = filled(tf.cast(d_output, like.dtype), kind_masks(kind)[1], 0)
            d_state, found, more = differentiate(tape, results, sources, (d_output, d_state))
            return (d_state, [d + m for d, m in zip(d_constants, more, strict=True)]), found

        dtypes = [like.dtype, dtype]
        final_state, (output, before) = plan.scan(forward, state, [kinds, *groups], dtypes)
        output, before = plan.join(output, like), _swap_first_axes(before)

        def gradient(d_output, d_final):
            d_output = plan.split(dense_gradient(d_output, output, like.dtype))
            carry = (
                dense_gradient(d_final, final_state, dtype),
                [tf.zeros_like(x) for x in constants],
            )
            over_time = select(tensors, True)
            inputs, dtypes = [kinds, before, d_output, *groups], [x.dtype for x in over_time]
            (d_state, more), found = plan.scan(backward, carry, inputs, dtypes, reverse=True)
            found = [plan.join(d, x) for d, x in zip(found, over_time, strict=True)]
            return d_state, *merge(found, more)

        return (output, final_state), gradient

    return run(state, *tensors)


class _Plan:
    """Partition of time into groups of one static size; x: [B, T, ...], T may be unknown."""

    def __init__(self, x):
        self.batch, self.length, self.is_static = (
            tf.shape(x)[0],
            length_of(x),
            x.shape[1] is not None,
        )
        self.size = min(GROUP, self.length) if self.is_static else GROUP
        self.count = -(-self.length // self.size)
        self.missing = self.count * self.size - self.length

    def kinds(self, token_kind):
        """The token kinds of each group; None if nothing is padded and all tokens continue."""
        if self.is_static and not self.missing:
            return None if token_kind is None else self.split(token_kind)
        if token_kind is None:
            token_kind = tf.fill([self.batch, self.length], tf.constant(CONTINUES, tf.int8))
        return self.split(token_kind, PADDING)

    def split(self, x, filler=0):
        """[B, T, ...] as [B, groups, tokens of a group, ...]; the last group is padded."""
        if not self.is_static or self.missing:
            paddings = [[0, 0], [0, self.missing], *[[0, 0]] * (len(x.shape) - 2)]
            x = tf.pad(x, paddings, constant_values=tf.constant(filler, x.dtype))
        return tf.reshape(x, [self.batch, self.count, self.size, *x.shape[2:]])

    def join(self, y, like):
        """[groups, B, tokens, ...] as [B, T, ...], in the shape of `like`."""
        y = tf.reshape(_swap_first_axes(y), [self.batch, -1, *like.shape[2:]])[:, : self.length]
        y.set_shape(like.shape)
        return y

    def scan(self, step, carry, inputs, dtypes, reverse=False):
        """Calls `step(carry, *inputs of a group) -> (carry, outputs)` for one group after another.

        Returns the last carry and the outputs of all groups, [groups, ...].
        """
        if isinstance(self.count, int) and self.count == 1:
            carry, found = step(carry, *(None if x is None else x[:, 0] for x in inputs))
            return carry, [x[None] for x in found]

        def body(i, carry, outputs):
            group = self.count - 1 - i if reverse else i
            carry, found = step(carry, *(None if x is None else x[:, group] for x in inputs))
            written = [array.write(group, x) for array, x in zip(outputs, found, strict=True)]
            return i + 1, carry, written

        arrays = [tf.TensorArray(dtype, self.count) for dtype in dtypes]
        start = (tf.constant(0), carry, arrays)
        # Parallel iterations would need the memory of several groups.
        _, carry, arrays = tf.while_loop(
            lambda i, *_: i < self.count, body, start, parallel_iterations=1
        )
        return carry, [array.stack() for array in arrays]


def _swap_first_axes(x):
    return tf.transpose(x, [1, 0, *range(2, len(x.shape))])
