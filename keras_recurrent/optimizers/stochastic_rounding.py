"""Stochastic rounding of float32 to 16 bits, which keeps small updates on average.

The random number of an element is a hash of the step, the index of its weight and its position.
So the optimizer needs no generator state, results do not depend on how a weight is sharded, and
XLA fuses the numbers into the update. `backends/triton/_optimizers/adam_kernel.py` computes the
same numbers.
"""

from keras import ops

SIXTEEN_BITS = ("bfloat16", "float16")
_DROPPED_BITS = {"bfloat16": 16, "float16": 13}  # of the significand of float32
_LEAST_NORMAL = 2.0**-14  # of float16; numbers below it are multiples of 2**-24

# The hash "lowbias32" of https://github.com/skeeto/hash-prospector: shifts and factors.
_FACTORS = (0x7FEB352D, 0x846CA68B - 2**32)
_SECOND_KEY = 0x9E3779B9 - 2**32


def stochastic_round(x, dtype, key):
    r"""Rounds each number to one of its two neighbors in a 16-bit type, without bias.

    The neighbors of x are a ≤ x ≤ b. The result is b with the probability (x - a) / (b - a), else
    a, so its expected value is x. Rounding to nearest leaves a weight unchanged if an update is
    below half of b - a, which is 0.4 % of the weight in bfloat16.

    Args:
        x: tensor, float32. Infinite numbers and NaN are only converted.
        dtype: `"bfloat16"` or `"float16"`.
        key: pair of int32 scalars, from `rounding_keys`.

    Returns:
        A tensor of x's shape, in `dtype`.
    """
    random = _random_bits(ops.shape(x), *key)
    dropped = _DROPPED_BITS[dtype]
    # A random number is added to the bits that the type does not have, and carries into the others
    # with the required probability. The bits that remain are a number of the type.
    bits = ops.view(x, "int32") + _shift_right(random, 32 - dropped)
    rounded = ops.view(ops.bitwise_and(bits, -(2**dropped)), "float32")
    if dtype == "float16":
        uniform = ops.cast(_shift_right(random, 8), "float32") * 2.0**-24
        multiples = ops.floor(x * 2.0**24 + uniform) * 2.0**-24
        rounded = ops.where(ops.abs(x) < _LEAST_NORMAL, multiples, rounded)
    return ops.cast(ops.where(ops.isfinite(x), rounded, x), dtype)


def rounding_keys(step, index):
    """Returns the two keys of a weight's random numbers in one step, int32.

    Args:
        step: integer tensor, the number of the step.
        index: integer or int32 tensor, the index of the weight. The keys have its shape.
    """
    key = _hash(ops.bitwise_xor(_hash(ops.cast(step, "int32")), index))
    return key, _hash(ops.bitwise_xor(key, _SECOND_KEY))


def _random_bits(shape, first_key, second_key):
    """Returns 32 random bits for each element, as int32."""
    position = ops.zeros((), "int32")
    for size in shape:
        position = position[..., None] * size + ops.arange(size, dtype="int32")
    return _hash(position + first_key, second_key)


def _hash(x, key=0):
    """Returns a hash of int32 numbers: equal inputs have equal results, which look random."""
    x = ops.bitwise_xor(x, _shift_right(x, 16)) * _FACTORS[0]
    x = ops.bitwise_xor(x, key)
    x = ops.bitwise_xor(x, _shift_right(x, 15)) * _FACTORS[1]
    return ops.bitwise_xor(x, _shift_right(x, 16))


def _shift_right(x, count):
    """Shifts in zeros, where `>>` shifts in the sign."""
    return ops.bitwise_and(ops.right_shift(x, count), 2 ** (32 - count) - 1)
