"""Numbers that every implementation agrees on."""

# What `token_kind` says of a token: it goes on from the token before it, it starts a document, or
# it is padding. See `backends/__init__.py` for what each means to a state.
GOES_ON, STARTS, PADDING = 0, 1, 2

# The multiplier of RG-LRU and CG-LRU is sqrt(1 - a^2), whose derivative has no bound where a decay
# a is 1. 1 / (2 sqrt(z)) is held below this number, as in DeepMind's released code.
MAX_SQRT_GRADIENT = 1000.0
