"""Softmax attention: kernels, their launches, and the preparation of tensors in each framework."""
