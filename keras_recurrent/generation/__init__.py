"""Text generation: prompt processing, decoding and caches of the language models.

A decoding step processes one token of each sequence and updates the cache.

- `causal_lm.py` has `generate`, `prefill` and `stream`.
- `prompts.py` validates prompts and defines which lengths share a program.
- `sequence.py` decides when a sequence ends, on the host and on the device, and makes results.
- `batch.py` has the loop of `generate`, `stream` and the engine, whose `serving/scheduler.py` also
  processes prompts between steps. It launches steps of the `Programs` of a model: on torch with
  `torch_batch.py`, `torch_programs.py` and `torch_graphs.py`, else with `xla_batch.py` and
  `xla_programs.py`.
- `stream.py` has the iterator of `stream`.
- `modes.py` has `which_generation`, which reports the mode of the last call.
"""
