"""Softmax attention: kernels, launches, and what each framework arranges around them."""
