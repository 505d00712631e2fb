"""Functions that kernels call on the device, and constants of the device."""
