"""Products with quantized weights, for `norm_quantized_linear.py`, which lists these files."""
