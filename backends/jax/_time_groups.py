"""Linear attention, computed for one group of tokens after another.

The tokens of a group are computed together, in chunks. So the temporaries of a group fit the cache,
and do not grow with the sequence length. On CPUs, a loop over tokens computes small heads.
"""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from ..constants import CONTINUES, PADDING
from ..signatures import SIGNATURES
from . import _token_loop
from ._common import default_zero_state, default_zero_state_gradient, filled, kind_masks
from ._operation import kernel_over_time

# {operation: whether forward passes return residuals, see `kernel_over_time`}
HAS_RESIDUALS = {
    "gated_linear_attention": True,
    "lightning_attention": False,
    "scalar_decay_attention": False,
}
# Number of elements of an argument in one group.
GROUP_SIZE = 1 << 16
CHUNK = 64  # tokens, a multiple of those of `function` in `group_tokens`
# Largest K * V of the loop over tokens.
LARGEST_STATE_OF_TOKEN_LOOP = 256


def state_shape(q, k, v, _):
    return q.shape[0], v.shape[2], q.shape[3], v.shape[3]


def linear_attention_kernel(operation, forward, backward, unsupported=None):
    """Returns the `Kernel` with these passes; see `kernel_over_time`."""
    kernel = kernel_over_time(
        operation, forward, backward, keep_output=False, has_residuals=HAS_RESIDUALS[operation]
    )
    return kernel._replace(unsupported=unsupported)


def group_tokens(operation, function):
    """Returns the `Kernel` of linear attention that calls `function` for each group of tokens.

    function: an implementation that JAX can differentiate.
    """
    passes = _passes(operation, function, CHUNK)
    if operation == "gated_linear_attention":
        by_token = _passes(operation, _token_loop.gated_linear_attention, 1)
        passes = map(_choose_form, by_token, passes)
    forward, backward = passes
    forward = default_zero_state(state_shape)(forward)
    backward = default_zero_state_gradient(backward)
    if HAS_RESIDUALS[operation]:
        return linear_attention_kernel(operation, lambda *x: (forward(*x), None), backward)
    return linear_attention_kernel(operation, forward, backward)


def _choose_form(by_token, in_chunks):
    """Returns a pass with a loop over tokens or with chunks, by platform and head size."""

    def run(*arguments):
        q, _, v = arguments[:3]
        if q.shape[1] == 1 or q.shape[3] * v.shape[3] > LARGEST_STATE_OF_TOKEN_LOOP:
            return in_chunks(*arguments)
        return jax.lax.platform_dependent(*arguments, cpu=by_token, default=in_chunks)

    return run


class _Plan(NamedTuple):
    """Partition of time into groups of `size` tokens; the last one is padded."""

    groups: int
    size: int

    @property
    def tokens(self):
        return self.groups * self.size


def _plan(q, v, longest):
    """Returns the `_Plan` for chunks of up to `longest` tokens."""
    batch, length = q.shape[:2]
    chunk = min(longest, 1 << (length - 1).bit_length())
    chunks = -(-length // chunk)
    room = GROUP_SIZE // (batch * chunk * max(math.prod(x.shape[2:]) for x in (q, v)))
    groups = -(-chunks // max(1, room))
    return _Plan(groups, -(-chunks // groups) * chunk)


def _passes(operation, function, chunk):
    """Returns the forward and the backward pass for chunks of up to `chunk` tokens.

    The backward pass computes the groups once more, and differentiates them from the last to the
    first.
    """

    def prepare(q, k, v, decay, token_kind):
        """Returns the function of a group, all tensors with a time axis, and the `_Plan`."""
        plan, is_constant = _plan(q, v, chunk), decay.ndim == 1

        def group(state, q, k, v, varying, kind):
            tensors = q, k, v, decay if is_constant else varying
            named = dict(zip(SIGNATURES[operation].tensors, tensors, strict=True))
            with jax.default_matmul_precision("highest"):
                return function(**named, initial_state=state, token_kind=kind)

        missing = plan.tokens - q.shape[1]
        if missing and token_kind is None:
            token_kind = jnp.full(q.shape[:2], CONTINUES, jnp.int8)
        if missing:
            token_kind = jnp.pad(token_kind, [(0, 0), (0, missing)], constant_values=PADDING)
        return group, (q, k, v, None if is_constant else decay, token_kind), plan

    def forward(q, k, v, decay, state, token_kind):
        group, tensors, plan = prepare(q, k, v, decay, token_kind)

        def step(state, _, tokens, __):
            output, state = group(state, *tokens)
            return state, output

        state, output = _scan_groups(step, state, tensors, jnp.zeros_like(v), plan)
        return output, state

    def backward(q, k, v, decay, state, token_kind, _, d_output, d_state):
        group, tensors, plan = prepare(q, k, v, decay, token_kind)

        def state_after(carry, i, tokens, _):
            state, before = carry
            before = jax.lax.dynamic_update_index_in_dim(before, state, i, axis=0)
            return (group(state, *tokens)[1], before), ()

        before = jnp.zeros((plan.groups, *state.shape), state.dtype)
        (_, before), _ = _scan_groups(state_after, (state, before), tensors, (), plan)

        def step(d_state, i, tokens, old):
            *inputs, kind = tokens
            _, padding = kind_masks(kind)
            state = jax.lax.dynamic_index_in_dim(before, i, keepdims=False)
            _, pull_back = jax.vjp(lambda *given: group(*given, kind), state, *inputs)
            d_state, *found = pull_back((filled(old[2], padding, 0), d_state))
            return d_state, [None if d is None else filled(d, padding, 0) for d in found]

        # The gradient of v overwrites the output's gradient, which is not read again after its
        # group.
        d_q, d_k, d_decay = jax.tree.map(jnp.zeros_like, (q, k, tensors[3]))
        outputs = [d_q, d_k, d_output, d_decay]
        d_state, (d_q, d_k, d_v, d_decay) = _scan_groups(
            step, d_state, tensors, outputs, plan, reverse=True
        )
        d_decay = jnp.zeros_like(decay) if d_decay is None else d_decay
        return d_q, d_k, d_v, d_decay, d_state, None

    return forward, backward


def _scan_groups(step, carry, tensors, outputs, plan, reverse=False):
    """Calls `step` for one group after another, and writes its results into `outputs`.

    A group is sliced from the tensors and written into the outputs without a full copy: copying and
    allocating memory would be most of the cost of a long sequence on a CPU.

    Args:
        step: a function of `carry`, the index of the group, and the slices [B, N, ...] of the
            tensors and of the outputs that belong to the group. It returns the next carry and the
            new slices of the outputs.
        carry: the carry of the first step.
        tensors: a tree of tensors [B, T, ...]. They are padded with zeros to full groups.
        outputs: a tree of tensors [B, T, ...] of the results' dtypes, padded likewise and
            overwritten.
        reverse: boolean, scans from the last group to the first.

    Returns:
        `(carry, outputs)`.
    """
    length = jax.tree.leaves(tensors)[0].shape[1]
    tensors, outputs = jax.tree.map(lambda x: _padded(x, plan), (tensors, outputs))
    if plan.groups == 1:
        carry, outputs = step(carry, 0, tensors, outputs)
    else:

        def body(i, loop):
            carry, outputs = loop
            group = plan.groups - 1 - i if reverse else i
            tokens = functools.partial(
                jax.lax.dynamic_slice_in_dim,
                start_index=group * plan.size,
                slice_size=plan.size,
                axis=1,
            )
            put = functools.partial(
                jax.lax.dynamic_update_slice_in_dim, start_index=group * plan.size, axis=1
            )
            # The barrier makes XLA read the old values once, before they are overwritten. If
            # several fused loops read them, it would copy the whole output in every iteration.
            old = jax.tree.map(lambda y: jax.lax.optimization_barrier(tokens(y)), outputs)
            carry, new = step(carry, group, jax.tree.map(tokens, tensors), old)
            return carry, jax.tree.map(put, outputs, new)

        carry, outputs = jax.lax.fori_loop(0, plan.groups, body, (carry, outputs))
    return carry, jax.tree.map(lambda y: y[:, :length], outputs)


def _padded(x, plan):
    missing = plan.tokens - x.shape[1]
    return jnp.pad(x, [(0, 0), (0, missing)] + [(0, 0)] * (x.ndim - 2)) if missing else x
