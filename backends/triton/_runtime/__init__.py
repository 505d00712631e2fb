"""Launches and operations, and what runs them in torch, in JAX and in the interpreter."""
