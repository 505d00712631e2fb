"""Steps, loops and CUDA graphs of generation on torch."""
