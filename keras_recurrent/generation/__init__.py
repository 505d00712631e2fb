"""Text generation: prompt processing, decoding loops and caches of the language models.

A decoding step processes one token of each sequence and updates the cache.

- `causal_lm.py` has `generate`, `prefill` and `stream`; `loops.py` has the function for one batch.
- `loop.py` is the loop for JAX and TensorFlow, which `xla_programs.py` compiles; `xla_steps.py`
  runs programs of a few tokens for `stream`.
- `torch/loop.py` is the loop for torch, in Python, over a step that `torch/step.py` traces.
  `torch/runner.py` runs the step as a CUDA graph (`torch/cuda_graph.py`), compiled or as traced;
  `torch/sampling.py` chooses tokens without waiting for the device.
- `lengths.py` defines which lengths share a program, and `modes.py` records the mode of the last
  call for `which_generation`.
"""
