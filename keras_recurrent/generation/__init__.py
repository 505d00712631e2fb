"""Text generation: prompt processing, decoding and caches of the language models.

A decoding step processes one token of each sequence and updates the cache.

- `causal_lm.py` has `generate`, `prefill` and `stream`.
- `decoding_loop.py` is the loop of these and of the engine, whose `scheduler.py` also processes
  prompts between steps. A `Sequence` decides on the host when it ends, `device_state.py` on the
  device.
- A `Batch` launches steps of the `Programs` of a model: `torch_batch.py` and `torch/programs.py`,
  which runs steps as CUDA graphs, compiled or as traced, or `xla_batch.py` and `xla_programs.py`.
- `lengths.py` defines which lengths share a program, and `modes.py` records the mode of the last
  call for `which_generation`.
"""
