"""How the language models write: `CausalLM.generate` by the way that suits the backend.

A step is one token through the network, from a cache to the next. `loop.py` walks step by step
inside a program of JAX or TensorFlow; on torch `torch_loop.py` walks in Python, over a step that
`torch_step.py` has traced. `lengths.py` says which lengths share a program.
"""
