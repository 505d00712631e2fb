"""Updates of optimizers, on torch; XLA fuses them on JAX."""
