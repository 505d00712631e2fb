"""How the language models write: `CausalLM.generate` by the way that suits the backend.

A step is one token through the network, from a cache to the next. `causal_lm.py` has `generate`,
`prefill` and `stream`, and chooses the loop: `loop.py` walks step by step inside a program of JAX
or TensorFlow (`xla_programs.py`); on torch `torch/loop.py` walks in Python, over a step that
`torch/step.py` has traced. `torch/runner.py` says how that runs: as a CUDA graph
(`torch/cuda_graph.py`), compiled, or as it was traced. `torch/sampling.py` chooses tokens without
waiting for the device, `lengths.py` says which lengths share a program, and `ways.py` keeps by
which way the last call wrote.
"""
