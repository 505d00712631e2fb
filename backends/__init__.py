'''What computes the operations: a folder is an implementation, a file in it an operation.

`ls backends/*/linear_scan.py` shows which implementations there are of `linear_scan`:

- `reference/` is NumPy in float64, one loop over time: the definition of every operation, by which
  the tests judge all other folders;
- `jax/`, `torch/` and `tensorflow/` are written in the framework alone and run on any device;
- `pallas/` has kernels for TPU, on JAX; `triton/` has kernels for NVIDIA GPUs, on torch and JAX;
- `cudnn/` is softmax attention of NVIDIA's library, on torch, for rows that a window holds whole.

Functions here take and return tensors of their framework. Nothing here knows of layers or imports
Keras: `keras_recurrent/dispatch.py` chooses the folder that computes a call, and hands in the name
of the framework (`host.py`).

Shapes are written with these letters:

    B  batch
    T  time, in tokens
    D  channels of an element-wise recurrence
    H  heads
    G  heads of keys and values, each shared by H / G heads of queries
    K  size of a key in a head
    V  size of a value in a head; where there are no heads, size of the vocabulary
    W  width of a causal convolution
    C  tokens for which the state of attention has room

## What a file contains

A function of the file's name, which takes tensors and returns `(output, final_state)`, and, if it
cannot take all arguments, a function `unsupported` with the same parameters:

    def unsupported(x, log_a, initial_state=None, token_kind=None) -> str | None:
        """Why this implementation refuses these arguments; None if it accepts them."""

    def linear_scan(x, log_a, initial_state=None, token_kind=None):
        """x, log_a: [B, T, D]. Returns ([B, T, D] in x's dtype, [B, D] in float32)."""

`unsupported` looks at shapes, dtypes, devices and modes of the framework, never at values. A call
that it refuses goes to the next implementation; an exception in the function itself reaches the
user.

`rms_norm`, `gated_linear_unit`, `log_forget_gate` and `token_crossentropy` treat each token by
itself: they have neither `initial_state` nor `token_kind`, take any number of axes before the last
and return the output alone. `linear_crossentropy` makes the loss of hidden states, without the
logits of all tokens, and returns it with the best tokens.

`norm_linear`, `norm_quantized_linear`, `hgrn2_step`, `rg_lru_step` and `local_attention_step` are
for a step of generation: they take one token of each row, [B, D]. In Triton they have no gradient.

## What every implementation does

- `token_kind` is int8 [B, T], or None if all tokens go on. `constants.py` names its values:
  - GOES_ON: the token goes on from the state before it.
  - STARTS: the token begins a document, as if nothing had come before it.
  - PADDING: the token leaves the state as it is. Its inputs may be anything, NaN too, and get
    gradients of exactly 0. Its output is finite and otherwise arbitrary.
- The gradient that arrives at the output of a padded token is ignored. Only where outputs are
  states, as in `linear_scan`, is it added to the gradient of the state that padding repeats.
- `initial_state` None stands for zeros.
- Sums, products and states are float32, or float64 if one of the tensors is. The output has the
  dtype of x (of v or q in attention), but that of the sums in `log_forget_gate` and
  `token_crossentropy`; a gradient has the dtype of its tensor. The keys and values in the state of
  `sliding_window_attention` keep the dtypes in which they came.
- Decays are given as logarithms; -inf is a decay of 0. Decays are multiplied, never divided by
  one another, so that any of them is safe.
- Every floating-point tensor, the initial state included, gets a gradient, from the output and
  from the final state. For it, inputs and outputs are kept and everything else is computed again;
  only of each softmax are the largest logit and the sum kept, too, and in `triton/` of an output of
  attention in 16 bits the next 8, and of `gated_linear_attention` in bfloat16 the weights of pairs
  of tokens in chunks of 64. `cudnn/` leaves all of this to torch.
- Memory and time grow linearly with T.

## How to add one

Write the file: the tests find it by its name and compare it with the reference. On torch,

    KERAS_BACKEND=torch python -m pytest tests/ops -k "linear_scan and torch"

runs them for one operation and implementation. Gradients are given in the framework's own way:
`jax.custom_vjp`, `tf.custom_gradient`, or `register_gradient` of `torch/_common.py`. A file of
`triton/` serves two frameworks: its `forward` and `backward` are launches (`_runtime/launch.py`),
which name none, and an `Operation` (`_runtime/operation.py`) says what is needed to make an
operator of torch and a function of JAX of them.

A new folder also has to be named in `preference` of `keras_recurrent/dispatch.py` and among the
packages in pyproject.toml. Where it needs a package or a device that may be missing, its
`__init__.py` defines `unavailable()`, which returns the reason, or None. Imports between files here
are relative. From outside, import by the full name, `keras_recurrent.backends.…`: `import backends`
would load every module a second time and is an error.
'''

if __name__ != "keras_recurrent.backends":
    raise ImportError("import `keras_recurrent.backends`, not `backends`")
