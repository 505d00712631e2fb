"""The definition of every operation in NumPy, with one loop over time, if any.

Each file has an operation and its gradient, derived by hand. It specifies what the operation
computes; the tests compare every implementation with it. `dtype` is the precision of every step:
float64 gives the expected results, float32 the error of a token-by-token loop in float32.
"""
