"""The definition of every operation in NumPy, with one loop over time where there is time.

Each file has the operation and its gradient, derived by hand. Read here what an operation
computes; the tests compare every implementation with it. `dtype` is the precision of every step:
float64 gives the expected results, float32 the error that a token-by-token loop in float32 makes.
"""
