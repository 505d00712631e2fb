"""Signatures of the operations: their tensors and results, each with its dimensions.

Dimensions are written with the letters of this folder's `__init__.py`: "B T D". A letter may carry
a factor or an offset, "2D" or "W-1"; "..." at the front is any number of axes; a number is itself.

Argument checks, results of symbolic calls, sharding rules, custom operators and the manual's table
read them here.
"""

from typing import Any, NamedTuple

SUMS = "sums"
TOKENS = "B T"


class Result(NamedTuple):
    """A result of an operation.

    Attributes:
        dimensions: string.
        dtype: the name of the tensor whose dtype it has; `SUMS`, float32, or float64 if any tensor
            is; or a dtype.
    """

    dimensions: str
    dtype: str = SUMS


class Signature(NamedTuple):
    """The tensors and results of an operation.

    Attributes:
        tensors: `{name: dimensions}`, in the order of an implementation's parameters. The initial
            state and the token kinds of an operation over time follow.
        results: a `Result` each. The second one of an operation over time is its state, a dict
            where it has several arrays.
        channels: dimensions other than `B` whose members are independent, so that devices may
            split them; dimensions after the first one are split together with it.
        optional: names of the tensors that may be None.
        is_over_time: boolean, whether it takes an initial state and token kinds.
    """

    tensors: dict[str, str]
    results: tuple[Any, ...]
    channels: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()
    is_over_time: bool = False

    @property
    def output(self):
        """The dimensions of the first result."""
        return self.results[0].dimensions

    @property
    def state(self):
        """The dimensions of the state, or a dict of those of its arrays; None if there is none."""
        if not self.is_over_time:
            return None
        state = self.results[1]
        if isinstance(state, dict):
            return {name: part.dimensions for name, part in state.items()}
        return state.dimensions

    @property
    def layout(self):
        """Dimensions of the tensors that an implementation takes and returns, and the channels.

        Arrays of a state are counted one by one.
        """
        found = []
        for result in self.results:
            parts = result.values() if isinstance(result, dict) else [result]
            found += [part.dimensions for part in parts]
        context = (*found[1:], TOKENS) if self.is_over_time else ()
        return (*self.tensors.values(), *context), tuple(found), self.channels


def _named(text):
    """`{name: dimensions}` of text such as "x: B T D, a_logit: D"."""
    pairs = (pair.split(":") for pair in text.split(","))
    return {name.strip(): dimensions.strip() for name, dimensions in pairs}


def _over_time(tensors, output, state, channels=("D",), optional=()):
    return Signature(_named(tensors), (output, state), channels, optional, is_over_time=True)


_HEADS = "q: B T H K, k: B T H K, v: B T H V"
_LINEAR_ATTENTION = Result("B T H V", "v"), Result("B H K V"), ("H",)


SIGNATURES = {
    "causal_conv1d": _over_time(
        "x: B T D, kernel: W D, bias: D",
        Result("B T D", "x"),
        Result("B W-1 D"),
        optional=("bias",),
    ),
    # Real parts of all channels come before the imaginary ones, so no device can have a part.
    "complex_linear_scan": _over_time(
        "x: B T 2D, log_a: B T D, phase: B T D", Result("B T 2D", "x"), Result("B 2D"), ()
    ),
    "gated_linear_attention": _over_time(
        f"{_HEADS}, log_f: B T H K", *_LINEAR_ATTENTION, optional=("k",)
    ),
    "gated_linear_unit": Signature(_named("gate: ..., x: ..."), (Result("...", "x"),)),
    "lightning_attention": _over_time(f"{_HEADS}, log_decay: H", *_LINEAR_ATTENTION),
    "linear_crossentropy": Signature(
        _named("x: ... D, embedding: V D, tokens: ..., sample_weight: ..."),
        (Result("..."), Result("...", "int32")),
        optional=("sample_weight",),
    ),
    "linear_scan": _over_time("x: B T D, log_a: B T D", Result("B T D", "x"), Result("B D")),
    "log_forget_gate": Signature(
        _named("logits: ... D, lower_bound: 2 D"), (Result("... D"),), ("D",), ("lower_bound",)
    ),
    "rg_lru": _over_time(
        "x: B T D, gate_a: B T D, gate_x: B T D, a_logit: D", Result("B T D", "x"), Result("B D")
    ),
    "rms_norm": Signature(
        _named("x: ... D, scale: D"), (Result("... D", "x"),), optional=("scale",)
    ),
    "scalar_decay_attention": _over_time(
        "q: B T G K, k: B T G K, v: B T H V, log_decay: B T H",
        *(Result("B T H V", "v"), Result("B H K V"), ("H", "G")),
    ),
    "sliding_window_attention": _over_time(
        "q: B T H K, k: B T G K, v: B T G V",
        Result("B T H V", "q"),
        {
            "key": Result("B C G K", "k"),
            "value": Result("B C G V", "v"),
            "position": Result("B", "int32"),
        },
        channels=("H", "G"),
    ),
    "token_crossentropy": Signature(_named("logits: ... V, tokens: ..."), (Result("..."),)),
}

# Operations that take one token of each sequence, [B, D]; `reference/` defines their arguments.
DECODING_STEPS = (
    *("norm_linear", "norm_quantized_linear", "hgrn2_step", "hgrn2_delayed_step", "lightning_step"),
    *("mamba2_step", "rg_lru_step", "local_attention_step", "embedding_step", "soft_cap", "argmax"),
    "top_logits",
)
