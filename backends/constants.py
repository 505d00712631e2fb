"""Numbers that every implementation uses."""

# The values of `token_kind`. `backends/__init__.py` says what each does to a state.
GOES_ON, STARTS, PADDING = 0, 1, 2

# c of RG-LRU and CG-LRU: the decay is a = σ(a_logit)^(c r), with r the recurrence gate.
DECAY_EXPONENT = 8.0

# The input of RG-LRU and CG-LRU is multiplied by sqrt(1 - a^2). The derivative of this root,
# 1 / (2 sqrt(1 - a^2)), grows without bound as the decay a goes to 1. It is held below this number,
# as in DeepMind's released code.
MAX_SQRT_GRADIENT = 1000.0
