"""Numbers that every implementation uses."""

# The values of `token_kind`. `backends/__init__.py` says what each does to a state.
GOES_ON, STARTS, PADDING = 0, 1, 2

# c of RG-LRU and CG-LRU: the decay is a = σ(a_logit)^(c r), with r the recurrence gate.
DECAY_EXPONENT = 8.0

# The axis of a mesh of devices that splits the tokens of rows (JAX).
SEQUENCE = "sequence"

# The compute capability that the kernels for NVIDIA GPUs need, for products of bfloat16.
LOWEST_CAPABILITY = (8, 0)

# The input of RG-LRU and CG-LRU is multiplied by sqrt(1 - a^2). The derivative of this root,
# 1 / (2 sqrt(1 - a^2)), grows without bound as the decay a goes to 1. It is held below this number,
# as in DeepMind's released code.
MAX_SQRT_GRADIENT = 1000.0

# σ is 0 or 1 for gelu's gates beyond this on either side, which are taken for this in the argument
# of σ: their third power may leave the dtype.
LARGEST_GELU_GATE = 100.0

# RMSNorm makes the mean of x² from x² 2^-32: a sum of up to 2^32 of these has room wherever the
# mean has, and powers of 2 round nothing. What leaves the range of float32 then, x² < 2^-94, is
# nothing beside an ε of at least this. Beside a smaller one, small means are made from x² 2^32.
SQUARES_SCALE = 2.0**-32
SMALLEST_SCALED_EPSILON = 2.0**-70

# How many tokens `linear_crossentropy` takes through the vocabulary at a time, but on torch, which
# counts logits. Each time, the gradient of the embedding is read and written in float32, which few
# tokens would not be worth.
TOKENS_OF_A_PIECE = 4096

# How many rows the kernels of a step's maps take at once: as many as tensor cores do.
MOST_ROWS_OF_MAPS = 16

# A row is quantized by 127 over its largest magnitude and this, as Keras does it.
ROW_EPSILON = 1e-7
# Where blocks of channels have scales of their own, they are a power of 2, and at least so many.
SMALLEST_BLOCK_OF_SCALES = 16
