"""How the language models write: `CausalLM.generate` by the way that suits the backend.

A step is one token through the network, from a cache to the next. `generate.py` chooses the loop:
`loop.py` walks step by step inside a program of JAX or TensorFlow (`programs.py`); on torch
`torch_loop.py` walks in Python, over a step that `torch_step.py` has traced. `torch_ways.py` says
how that runs: as a CUDA graph (`torch_cuda_graph.py`), compiled, or as it was traced.
`torch_sampling.py` chooses tokens without waiting for the device, `lengths.py` says which lengths
share a program, and `ways.py` answers by which way the last call wrote.
"""
