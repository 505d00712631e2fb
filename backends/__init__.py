'''Kernels on native tensors: a folder is an implementation, a file an operation.

`ls backends/*/linear_scan.py` shows who implements `linear_scan`. Nothing here imports Keras, and
no kernel knows which layer called it; `keras_recurrent/dispatch.py` chooses. `reference/` is
NumPy, one loop over time: the definition of every operation, by which the others are judged.

The letters, also those of shapes: B batch, T time (tokens), D channels of an element-wise
recurrence, H heads, G heads of keys and values that heads of queries share, K and V the size of a
key and of a value in a head, W the width of a causal convolution, C the tokens that attention's
state has room for. Where there are no heads, V is the size of a vocabulary.

A kernel is a function, named as its file, that takes tensors of its framework and returns
`(output, final_state)`. One that does not take all arguments says so in `unsupported`, beside it:

    def unsupported(x, log_a, initial_state=None, token_kind=None) -> str | None:
        """Why this kernel refuses these arguments; None if it accepts them."""

    def linear_scan(x, log_a, initial_state=None, token_kind=None):
        """x, log_a: [B, T, D]. Returns ([B, T, D] in x's dtype, [B, D] in float32)."""

`rms_norm`, `gated_linear_unit`, `log_forget_gate` and `token_crossentropy` see one token at a time:
they take neither `initial_state` nor `token_kind`, have any number of axes before the last, and
return their output alone. That of the last two has the dtype of the arithmetic, the others' that
of x.

What every kernel keeps to:

- `token_kind`, int8 [B, T] or None, says what a token does: 0 goes on; 1 starts afresh, as if
  nothing came before; 2 is padding, the identity: it leaves the state as it is, its output is
  finite but means nothing, and its inputs, even NaN, get gradients of exactly 0. Where outputs are
  states, the gradient of a padded one is that state's; elsewhere nothing takes it.
- `initial_state` None means zeros. The states and all arithmetic are float32, or float64 if one
  of the tensors is; the output has x's dtype, a gradient the dtype of its tensor. The keys and
  values that attention keeps have the dtypes in which they came.
- Decays come as logarithms; -inf is one of 0. There are products of decays, never quotients.
- Gradients reach every tensor and both states. The backward keeps the inputs and the output, and
  recomputes the rest. Memory and time are linear in T.

To add a kernel, write that one file. The tests find it by its name and hold it to the reference.
To add an implementation, make its folder, name it in `PREFERENCE` of
`keras_recurrent/dispatch.py` and list the package in pyproject.toml. Import kernels by the full
name `keras_recurrent.backends.…`: `import backends` would load them a second time.
'''
