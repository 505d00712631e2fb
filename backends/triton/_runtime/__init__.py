"""Launches and operations, and the code that runs them on torch, on JAX and in the interpreter."""
