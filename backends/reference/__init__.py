"""The definition of every operation: NumPy, one loop over time if any, nothing clever.

Each file holds the operation and its gradient, written out by hand. They are the oracle of the
tests and the place to read what an operation computes. `dtype` is the precision of every step:
float64 gives the truth, float32 the error that a careful loop in float32 makes.
"""
