"""Constants shared by all implementations."""

# The values of `token_kind`. `backends/__init__.py` defines their effect on a state.
CONTINUES, STARTS, PADDING = 0, 1, 2

# c of RG-LRU and CG-LRU: the decay is a = σ(a_logit)^(c r), with r the recurrence gate.
DECAY_EXPONENT = 8.0

# The mesh axis that splits the time axis of sequences (JAX).
SEQUENCE_AXIS = "sequence"

# The compute capability that the kernels for NVIDIA GPUs require, for bfloat16 products.
LOWEST_CAPABILITY = (8, 0)

# The input of RG-LRU and CG-LRU is multiplied by sqrt(1 - a^2). The derivative of this root,
# 1 / (2 sqrt(1 - a^2)), grows without bound as the decay a goes to 1. It is clipped to this number,
# as in DeepMind's released code.
MAX_SQRT_GRADIENT = 1000.0

# Gates of gelu are clipped to ± this in the argument of σ: beyond it σ is 0 or 1, and the third
# power of a gate may overflow the dtype.
GELU_CLIP = 100.0

# RMSNorm computes the mean of x² from x² 2^-32: a sum of up to 2^32 of these fits wherever the mean
# does, and powers of 2 round nothing. Values that then underflow float32, x² < 2^-94, are
# negligible compared with an ε of at least SMALLEST_SCALED_EPSILON. With a smaller ε, small means
# are computed from x² 2^32.
SQUARES_SCALE = 2.0**-32
SMALLEST_SCALED_EPSILON = 2.0**-70

# Tokens in a chunk of `linear_crossentropy` on JAX and TensorFlow; torch limits the number of
# logits instead. Each chunk reads and writes the gradient of the embedding in float32, a cost that
# small chunks would not amortize.
CROSSENTROPY_CHUNK = 4096

ATTENTION_BLOCK = 64  # queries in a block of attention on JAX and TensorFlow


def span_edges(count):
    """Edges of four spans of `count` blocks of attention without a window.

    All blocks of a span are multiplied with the keys up to its end. With four spans, a fifth of
    the products are with keys after the query; with one span, half of them.
    """
    return sorted({-(-count * i // 4) for i in range(5)})


# In decoding steps of many sequences, HGRN2 writes each state every STATE_WRITE_INTERVAL tokens.
STATE_WRITE_INTERVAL = 8
# Smallest batch size of such steps. With 8 sequences, they are not faster (H200).
MIN_DELAYED_ROWS = 16
# Maximum number of key channels of a head in the Triton kernel of HGRN2's step.
MAX_STEP_KEYS = 256

# Channels in a group whose squares a decoding step adds, for a norm that the next launch applies.
SQUARES_GROUP = 32
# Columns in a group whose squares `norm_linear` adds, for the norm that follows it.
ROW_SQUARES_GROUP = 256


# Batch rows of every dtype that the fused linear layers of a decoding step take at once.
MAX_FUSED_ROWS = 16


def max_fused_rows(dtype):
    """Batch rows of a dtype that the fused linear layers of a step take: a tile of tensor cores."""
    return 128 if dtype == "bfloat16" else MAX_FUSED_ROWS


# Activations are quantized by 127 / (max |x| + ROW_EPSILON), as in Keras.
ROW_EPSILON = 1e-7
# Smallest number of channels that share a quantization scale in block-wise quantization, where it
# must be a power of 2.
MIN_SCALE_BLOCK = 16
