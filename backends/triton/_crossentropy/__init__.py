"""Cross-entropy from hidden states: the kernel, and the loop over chunks in each framework."""
