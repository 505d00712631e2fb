"""The real-gated linear recurrent unit, with the equations of `backends/reference/rg_lru.py`."""

import jax
import jax.numpy as jnp

from ..constants import DECAY_EXPONENT, MAX_SQRT_GRADIENT
from ._common import filled, scaled, sigmoid
from ._scan import recurrence


def _elements(starts, x, gate_a, gate_x, a_logit):
    log_a = scaled(-DECAY_EXPONENT * jax.nn.softplus(-a_logit), sigmoid(gate_a))
    return log_a, filled(_root(log_a), starts, 1) * sigmoid(gate_x) * x


@jax.custom_jvp
def _root(log_a):
    """sqrt(1 - a²); its derivative is bounded by `MAX_SQRT_GRADIENT`."""
    return jnp.sqrt(-jnp.expm1(2 * log_a))


@_root.defjvp
def _(primals, tangents):
    root, a = _root(*primals), jnp.exp(*primals)
    return root, -tangents[0] * a * a / jnp.maximum(root, 1 / (2 * MAX_SQRT_GRADIENT))


rg_lru = recurrence("rg_lru", _elements)
