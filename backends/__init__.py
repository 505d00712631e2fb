'''Implementations of the operations: one folder per implementation, one file per operation.

`ls backends/*/linear_scan.py` lists the implementations of `linear_scan`:

- `reference/` is NumPy in float64, one loop over time: the definition of every operation, with
  which the tests compare all other folders;
- `jax/`, `torch/` and `tensorflow/` are written in the framework alone and run on any device;
- `pallas/` has kernels for TPU, on JAX; `triton/` has kernels for NVIDIA GPUs, on torch and JAX;
- `cudnn/` calls softmax attention of NVIDIA's cuDNN, on torch, for
  sequences no longer than the window.

`signatures.py` has the dimensions of the tensors and results of all operations but decoding steps.
Argument checks, sharding rules and custom operators are made from it.

Functions here take and return tensors of their framework. They do not depend on layers or Keras:
`keras_recurrent/dispatch.py` chooses the implementation of a call, and sets the name of the
framework (`host.py`).

Shapes are written with these letters:

    B  batch
    T  time, in tokens
    D  channels of an element-wise recurrence
    H  heads
    G  heads of keys and values, each shared by H / G heads of queries; in `scalar_decay_attention`,
       heads of queries and keys, each shared by H / G heads of values
    K  size of a key in a head
    V  size of a value in a head; where there are no heads, size of the vocabulary
    W  width of a causal convolution
    C  capacity of the KV cache, the state of attention, in tokens
    U  groups of channels whose squares are summed

## What a file contains

A function of the file's name, which takes tensors by keyword and returns `(output, final_state)`.
If some arguments are unsupported, it is a `Kernel` (`kernel.py`), which has a function
`unsupported` of the same parameters:

    def unsupported(x, log_a, initial_state=None, token_kind=None) -> str | None:
        """Reason these arguments are unsupported, or None."""

    @as_kernel(unsupported)
    def linear_scan(x, log_a, initial_state=None, token_kind=None):
        """x, log_a: [B, T, D]. Returns ([B, T, D] in x's dtype, [B, D] in float32)."""

`unsupported` checks shapes, dtypes, devices and modes of the framework, never values. If it returns
a reason, the call falls back to the next implementation; an exception in the function itself
reaches the user.

`rms_norm`, `gated_linear_unit`, `log_forget_gate` and `token_crossentropy` compute each token
independently: they have neither `initial_state` nor `token_kind`, take any number of axes before
the last and return only the output. `linear_crossentropy` computes the loss from hidden states,
without materializing the logits of all tokens, and returns it with the predicted tokens (argmax).

`norm_linear`, `norm_quantized_linear`, `hgrn2_step`, `hgrn2_delayed_step`, `lightning_step`,
`mamba2_step`, `rg_lru_step`, `local_attention_step`, `embedding_step`, `soft_cap`, `argmax` and
`top_logits` are parts of decoding steps: they take one token of each sequence, [B, D]. In Triton
they have no gradient. Their plain version, on all backends, is
`keras_recurrent/portable/<operation>.py`, which runs where a folder here has no file for them.

## What every implementation does

- `token_kind` is int8 [B, T], or None if all tokens continue a document. `constants.py` names its
  values:
  - CONTINUES: the token continues from the state before it.
  - STARTS: the token begins a document: the state before it is ignored.
  - PADDING: the token leaves the state unchanged. Its inputs may be anything, including NaN, and
    get gradients of exactly 0. Its output is finite and otherwise arbitrary.
- The gradient of the output of a padding token is ignored. Only where outputs are states, as in
  `linear_scan`, is it added to the gradient of the state that padding repeats.
- `initial_state` None means zeros.
- Sums, products and states are float32, or float64 if one of the tensors is. The output has the
  dtype of x (of v or q in attention), except in `log_forget_gate` and `token_crossentropy`, where
  it has the dtype of the sums; a gradient has the dtype of its tensor. The keys and values in the
  state of `sliding_window_attention` keep their dtypes.
- Decays are given as logarithms; -inf is a decay of 0. Decays are multiplied, never divided by
  one another, so that any of them is safe.
- Every floating-point tensor, the initial state included, gets a gradient, from the output and
  from the final state. Residuals are the inputs and outputs; everything else is recomputed in the
  backward pass. Exceptions: the largest logit and the sum of each softmax; in `triton/`, the next
  8 bits of a 16-bit output of attention, and the weights of pairs of tokens in chunks of 64 of
  `gated_linear_attention` in bfloat16. In `cudnn/`, torch chooses the residuals.
- Memory and time grow linearly with T.

## How to add one

Write the file: the tests find it by its name and compare it with the reference. (A new operation
also needs an entry in `signatures.py` and a file in `reference/`.) For example,

    KERAS_BACKEND=torch python -m pytest tests/ops -k "linear_scan and torch"

runs them for one operation and implementation. Gradients are defined with `kernel_over_time` of
`jax/_operation.py` or `torch/_common.py`, or with `tf.custom_gradient`; most on TensorFlow compute
a part of the operation once more and differentiate it (`_time_groups.py`, and `recompute` of
`_common.py`). On JAX, a `Kernel` also has
its passes, `forward` and `backward`; with others, the same operation is
`plain.linear_scan.replace_passes(forward, backward, unsupported)`. Each pass is chosen when a
program is lowered for a platform (`jax/_platforms.py`). A file of `triton/` serves two frameworks:
its `forward` and `backward` are framework-independent launches (`_runtime/launch.py`), from which
an `Operation` (`_runtime/operation.py`) builds a torch operator and the passes on JAX.

A new folder must also be listed in `preference` of `keras_recurrent/dispatch.py` and among the
packages in pyproject.toml. If it requires a package or a device that may be missing, its
`__init__.py` defines `unavailable()`, which returns the reason, or None.

`keras_recurrent/backends` is a symbolic link to this folder. Imports between files here are
relative. From outside, import by the full name, `keras_recurrent.backends.…`: `import backends`
would load every module a second time and is an error.
'''

if __name__ != "keras_recurrent.backends":
    raise ImportError("import `keras_recurrent.backends`, not `backends`")
