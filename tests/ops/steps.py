"""Random inputs of decoding steps: `CASES` has situations, `draw` makes the inputs."""

import functools
from typing import NamedTuple

import numpy as np

from keras_recurrent.backends.constants import CONTINUES
from keras_recurrent.backends.reference.norm_linear import normalize
from keras_recurrent.backends.reference.norm_quantized_linear import quantized_row, rounded_row
from tests.ops.cases import Drawn, map_tensors, round_to
from tests.ops.token_wise import log_bounds, scaled_normal


class Case(NamedTuple):
    rows: int  # sequences
    dtype: str = "float32"
    channels: int = 24
    widths: tuple = (16,)  # of the linear layers; other operations derive sizes from their number
    scale: str = "normal"  # of the numbers, or "extreme"
    parameters: bool = True  # with optional biases, scales and bounds
    norm: bool = True
    gate: str | None = None
    activation: str | None = None  # of the outputs of `norm_linear`
    residual: bool = False  # or, in `lightning_step`, shared queries and decays by sequence
    delayed_norm: bool = False  # The sums of squares of `x` are given, or a step begins a norm.
    next_norm: bool = False  # `norm_linear` also begins the norm of its only output.
    output_scale: float | None = None  # of linear layers, or of queries
    head_norm: bool = False
    logit_scaling: float | None = None
    kinds: bool = False  # with sequences that continue or start a document, and padding
    first_kind: int = CONTINUES  # of the first sequence
    bits: int = 8  # of a quantized weight
    block_size: int | None = None  # channels that share the scale of a quantized weight
    quantize_row: bool = True
    values: int | None = None  # channels of a head's values; if None, five more than `widths`
    slots: int | None = None  # of the circular buffer; if None, half of `channels`
    recent: int = 3  # tokens that delayed steps keep

    @property
    def value_size(self):
        return len(self.widths) + 5 if self.values is None else self.values


EXTRAS = {"delayed_norm": True, "output_scale": 0.3, "head_norm": True, "logit_scaling": 500.5}
CASES = {
    "one layer": Case(1, residual=True),
    "three layers": Case(1, widths=(16, 33, 7), channels=70),
    "several rows": Case(3, widths=(16, 33, 7), kinds=True),
    "silu": Case(1, widths=(18, 18), gate="silu", channels=300),
    "gelu": Case(1, widths=(18, 18), gate="gelu", residual=True, scale="extreme"),
    "bare": Case(1, parameters=False, norm=False),
    "bfloat16": Case(1, "bfloat16", widths=(16, 33, 7), channels=70, kinds=True),
    "bfloat16, gelu": Case(1, "bfloat16", widths=(40, 40), gate="gelu", residual=True),
    "bfloat16, rows": Case(5, "bfloat16", widths=(16, 33, 7), channels=300, kinds=True),
    "bfloat16, 16 rows, silu": Case(16, "bfloat16", widths=(40, 40), gate="silu", residual=True),
    "many channels": Case(1, "bfloat16", channels=2060, widths=(16,), residual=True),
    "many columns": Case(1, "bfloat16", channels=1100, widths=(3090,)),
    "most columns": Case(1, "bfloat16", channels=600, widths=(3090, 3090), gate="silu"),
    "perceptron": Case(1, widths=(18, 18, 7), gate="gelu", residual=True),
    "perceptron, split channels": Case(
        1, "bfloat16", 90, widths=(4104, 4104, 70), gate="silu", residual=True, **EXTRAS
    ),
    "perceptron, rows": Case(5, "bfloat16", 70, (1040, 1040, 33), gate="gelu", parameters=False),
    "split channels": Case(1, "bfloat16", 4104, (70,), residual=True, norm=False),
    "rows, split channels": Case(5, "bfloat16", 1200, (70,), residual=True),
    "float32 rows, split channels": Case(3, "float32", 1100, (40,), parameters=False),
    "delayed norm": Case(1, channels=70, widths=(16, 33, 7, 20), **EXTRAS),
    "delayed norm, bfloat16": Case(1, "bfloat16", channels=300, widths=(40, 40, 9), **EXTRAS),
    "delayed norm, bare": Case(1, "bfloat16", parameters=False, residual=True, **EXTRAS),
    "delayed norm, rows": Case(5, "bfloat16", 70, (16, 33, 9, 17), kinds=True, **EXTRAS),
    "delayed norm, split channels": Case(1, "bfloat16", 4104, (40,), norm=False, **EXTRAS),
    "delayed norm, perceptron": Case(1, channels=70, widths=(18, 18, 7), gate="silu", **EXTRAS),
    "delayed norm, gelu": Case(1, channels=30, widths=(18, 18), gate="gelu", **EXTRAS),
    "next norm": Case(3, "bfloat16", 1200, (300,), residual=True, next_norm=True, **EXTRAS),
    "next norm, one row": Case(1, channels=70, widths=(300,), next_norm=True),
    "next norm, perceptron": Case(
        *(2, "float32", 30, (1040, 1040, 300)), gate="silu", residual=True, next_norm=True
    ),
    "many rows": Case(35, "bfloat16", 300, kinds=True),
    "70 rows": Case(70, "bfloat16", 70, (16, 33, 9), kinds=True, **EXTRAS),
    "many rows, delayed norm": Case(17, "float32", 70, (16, 33, 9, 17), kinds=True, **EXTRAS),
    "many rows, perceptron": Case(
        *(18, "float32", 70, (540, 540, 33)),
        **{"gate": "gelu", "residual": True, "next_norm": True, **EXTRAS},
    ),
    "many rows, gelu": Case(17, "bfloat16", 70, (18, 18, 7), gate="gelu", **EXTRAS),
    "many rows, next norm": Case(
        *(17, "float32", 70, (600,)), residual=True, next_norm=True, parameters=False
    ),
    "many rows, silu": Case(40, "float32", 70, (18, 18), gate="silu", residual=True),
    "float16": Case(2, "float16", kinds=True),
    "float64": Case(2, "float64", widths=(16, 33), kinds=True, scale="extreme"),
    "extreme": Case(1, widths=(16, 17), scale="extreme"),
    "squared ReLU": Case(1, channels=70, widths=(300,), activation="squared_relu"),
    "squared ReLU, rows, split channels": Case(
        *(5, "bfloat16", 1200, (70,)), norm=False, activation="squared_relu"
    ),
    "many rows, squared ReLU": Case(17, "float32", 70, (60,), activation="squared_relu"),
}


FOUR_BITS = {"bits": 4, "quantize_row": False}
QUANTIZED = {
    "4 bits, blocks": Case(1, widths=(16, 40, 8), channels=70, block_size=32, **FOUR_BITS),
    "4 bits, gelu": Case(1, "bfloat16", 300, (48, 48), gate="gelu", block_size=64, **FOUR_BITS),
    "4 bits, columns": Case(1, channels=300, widths=(64,), residual=True, bits=4),
    "4 bits, odd": Case(3, widths=(17, 6), block_size=12, **FOUR_BITS),
    "weights alone": Case(1, "bfloat16", 1100, (64, 32), quantize_row=False),
    "three widths": Case(1, widths=(48, 16, 32), channels=70),
    "four widths": Case(1, widths=(48, 16, 32, 80), channels=70),
    "four widths, 4 bits": Case(1, "bfloat16", 70, (48, 16, 32, 80), block_size=32, **FOUR_BITS),
    "several programs a layer": Case(1, "bfloat16", 260, (272, 272), parameters=False),
    "gated row": Case(1, "bfloat16", 70, (72, 72), gate="silu", **EXTRAS),
    "gated row, float32": Case(1, "float32", 300, (64,), residual=True, **EXTRAS),
    "gated row, 4 bits": Case(
        *(1, "bfloat16", 260, (64,)), norm=False, block_size=64, **FOUR_BITS, **EXTRAS
    ),
    "4 bits, several programs": Case(1, "bfloat16", 1040, (288, 96), block_size=128, **FOUR_BITS),
    "4 bits, many channels": Case(
        *(1, "bfloat16", 4200, (32,)), residual=True, block_size=128, **FOUR_BITS
    ),
}


def token_kinds(case):
    """The token kind of each sequence, in turn from `first_kind` on, or None."""
    return (case.first_kind + np.arange(case.rows)) % 3 if case.kinds else None


def norm_linear(rng, case):
    tensors = {"x": scaled_normal(rng, (case.rows, case.channels), case.scale), "scale": None}
    if case.norm and case.parameters and not case.delayed_norm:
        tensors["scale"] = rng.normal(size=case.channels)
    tensors |= {"kernels": [], "biases": []}
    for i, width in enumerate(case.widths):
        channels = case.widths[0] if i == 2 and case.gate is not None else case.channels
        tensors["kernels"].append(rng.normal(size=(channels, width)) / channels**0.5)
        has_bias = case.parameters and i != 1
        tensors["biases"].append(rng.normal(size=width) if has_bias else None)
    if case.residual:
        width = case.widths[-1 if case.gate else 0]
        tensors["residual"] = rng.normal(size=(case.rows, width))
    if case.norm and case.delayed_norm:
        tensors["squares"] = rng.uniform(0.5, 2, size=(case.rows, 9)) * case.channels / 9
    if case.next_norm:
        tensors["next_scale"] = rng.uniform(0.5, 2, size=case.widths[-1])
    options = {"epsilon": 1e-5 if case.norm else None, "gate": case.gate}
    options |= {"activation": case.activation} if case.activation else {}
    return tensors, options | {"output_scale": case.output_scale}


def is_rounded_alike(tensors, epsilon, dtype):
    """Returns True if slightly larger or smaller rows are quantized to the same integers."""
    y = x = round_to(dtype, tensors["x"])
    if epsilon is not None:
        y = normalize(x, tensors["scale"], epsilon, tensors.get("squares"), "float64")
    rows = [quantized_row(rounded_row(y * (1 + e), dtype)) for e in (-(2**-20), 0, 2**-20)]
    (low, scale_below), _, (high, scale_above) = rows
    same_scale = dtype not in ("bfloat16", "float16") or (scale_below == scale_above).all()
    return (low == high).all() and same_scale


def norm_quantized_linear(rng, case):
    widths = case.widths[:2] if case.gate else case.widths  # No third layer follows a gate.
    case = case._replace(widths=widths, next_norm=False, activation=None)
    tensors, options = norm_linear(rng, case)
    # Numbers close to a rounding boundary may become different integers in float32 and float64.
    while case.quantize_row and not is_rounded_alike(tensors, options["epsilon"], case.dtype):
        tensors["x"] = scaled_normal(rng, (case.rows, case.channels), case.scale)
    blocks = case.block_size and -(-case.channels // case.block_size)
    tensors |= {"kernels": [], "kernel_scales": [], "kernel_zeros": []}
    for width in case.widths:
        columns = width if case.bits == 8 else (width + 1) // 2
        scales = (blocks, width) if blocks else (width,)
        tensors["kernels"].append(rng.integers(-128, 128, size=(case.channels, columns)))
        divisors = rng.uniform(0.01, 0.1, size=scales)
        tensors["kernel_scales"].append(divisors if blocks else divisors * 2**case.bits)
        tensors["kernel_zeros"].append(rng.integers(-128, 128, size=scales) if blocks else None)
    row_dtype = case.dtype if case.quantize_row else None
    options |= {"bits": case.bits, "block_size": case.block_size, "row_dtype": row_dtype}
    return tensors, options


def hgrn2_step(rng, case):
    heads, keys, values = 3, case.channels // 4, case.value_size
    tensors = {
        "q": rng.normal(size=(case.rows, heads * keys)),
        "f": scaled_normal(rng, (case.rows, heads * keys), case.scale),
        "v": rng.normal(size=(case.rows, heads * values)),
        "memory": rng.normal(size=(case.rows, heads, keys, values)),
        "lower_bound": log_bounds(rng, heads * keys, case.scale) if case.parameters else None,
        "norm_scale": rng.uniform(0.5, 2, size=heads * values) if case.parameters else None,
        "token_kind": token_kinds(case),
    }
    return tensors, {}


def hgrn2_delayed_step(rng, case):
    tensors, options = hgrn2_step(rng, case)
    _, heads, keys, values = tensors["memory"].shape
    decays_and_keys = rng.uniform(size=(case.rows, case.recent, 2 * heads * keys))
    stored_values = rng.normal(size=(case.rows, case.recent, heads * values))
    tensors["recent"] = np.concatenate([decays_and_keys, stored_values], axis=2)
    tensors["count"] = rng.integers(0, case.recent + 1, case.rows)
    return tensors, options


def head_scales(rng, case, keys):
    """The scales of the heads' norms, and ε, or Nones."""
    if not case.head_norm:
        return {"q_scale": None, "k_scale": None}, None
    return {name: rng.uniform(0.5, 2, size=keys) for name in ("q_scale", "k_scale")}, 1e-5


def norm_parameters(rng, case, heads, values):
    """Weight and gate of the norm that a step begins, or Nones.

    They have similar sizes: if few elements decide the largest error, the definition in float32
    may happen to be exact there.
    """
    shapes = {"norm_scale": (heads * values,), "output_gate": (case.rows, heads, values)}
    return {
        n: rng.uniform(0.5, 2, size=s) if case.delayed_norm else None for n, s in shapes.items()
    }


def lightning_step(rng, case):
    share, groups = len(case.widths), 1 + case.channels % 2
    keys, values = min(case.channels, 128), case.value_size  # No model has wider heads.
    scales, epsilon = head_scales(rng, case, keys)
    heads, log_decay = share * groups, -(2.0 ** -np.arange(share * groups))
    query_heads, value_heads = heads, groups
    if case.residual:  # as in Mamba-2
        query_heads, value_heads = groups, heads
        log_decay = log_decay * rng.uniform(size=(case.rows, heads))
    tensors = {
        "q": scaled_normal(rng, (case.rows, query_heads, keys), case.scale),
        "k": scaled_normal(rng, (case.rows, groups, keys), case.scale),
        "v": rng.normal(size=(case.rows, value_heads, values)),
        "memory": rng.normal(size=(case.rows, heads, keys, values)),
        "log_decay": log_decay,
        "position": rng.integers(0, 100, case.rows) if case.parameters else None,
        **scales,
        "frequencies": 10.0 ** -np.arange(keys // 2) if case.parameters else None,
        **norm_parameters(rng, case, heads, values),
        "token_kind": token_kinds(case),
    }
    return tensors, {"epsilon": epsilon, "query_scale": case.output_scale}


def mamba2_step(rng, case):
    share, groups = len(case.widths), 1 + case.channels % 2
    taps, keys, values = 1 + min(share, 3), min(case.channels, 128), case.value_size
    heads, rows = share * groups, case.rows
    width, shared = heads * values, 2 * groups * keys
    tensors = {
        "z": scaled_normal(rng, (rows, width), case.scale),
        "x": rng.normal(size=(rows, width)),
        "bc": rng.normal(size=(rows, shared)),
        "dt": scaled_normal(rng, (rows, heads), case.scale),
        "x_window": rng.normal(size=(rows, taps - 1, width)),
        "bc_window": rng.normal(size=(rows, taps - 1, shared)),
        "memory": rng.normal(size=(rows, heads, keys, values)),
        "x_kernel": rng.normal(size=(taps, width)),
        "bc_kernel": rng.normal(size=(taps, shared)),
        "a_log": rng.uniform(0, 2.8, size=heads),
        "dt_bias": rng.uniform(-7, -2, size=heads),
        "skip": rng.normal(size=heads),
    }
    if case.parameters:
        tensors |= {"x_bias": rng.normal(size=width), "bc_bias": rng.normal(size=shared)}
    if case.norm:
        tensors["norm_scale"] = rng.uniform(0.5, 2, size=width)
    options = {"epsilon": 1e-5 if case.norm else None, "norm_after_gate": not case.kinds}
    return tensors | {"token_kind": token_kinds(case)}, options


def rg_lru_step(rng, case):
    width, blocks, channels = 2 + len(case.widths), 3, case.channels // 4
    rows = case.rows, blocks * channels
    tensors = {
        "x": scaled_normal(rng, rows, case.scale),
        "gate": scaled_normal(rng, rows, case.scale),
        "window": rng.normal(size=(case.rows, width - 1, rows[1])),
        "hidden": rng.normal(size=rows),
        "conv_kernel": rng.normal(size=(width, rows[1])),
        "conv_bias": rng.normal(size=rows[1]),
    }
    for gate in "ax":
        kernel = rng.normal(size=(blocks, channels, channels)) / channels**0.5
        tensors |= {f"kernel_{gate}": kernel, f"bias_{gate}": rng.normal(size=(blocks, channels))}
    tensors["a_logit"] = rng.uniform(-2, 7, size=rows[1])
    return tensors | {"token_kind": token_kinds(case)}, {}


def local_attention_step(rng, case):
    # No model has wider heads. With 1,100 channels, the order of the sums in float32 alone makes
    # logits differ by more than the judge allows.
    case = case._replace(channels=min(case.channels, 300))
    share, groups, slots = len(case.widths), 1 + case.channels % 2, case.slots or case.channels // 2
    width, values = case.channels, case.value_size
    position = rng.integers(0, 3 * slots, case.rows)
    filled = (np.arange(slots) < position[:, None])[:, :, None, None]
    scales, epsilon = head_scales(rng, case, width)
    tensors = {
        "q": scaled_normal(rng, (case.rows, share * groups, width), case.scale),
        "k": scaled_normal(rng, (case.rows, groups, width), case.scale),
        # All values are positive: no output is a small difference of large sums.
        "v": rng.uniform(0.5, 2, size=(case.rows, groups, values)),
        "key": rng.normal(size=(case.rows, slots, groups, width)) * filled,
        "value": rng.uniform(0.5, 2, size=(case.rows, slots, groups, values)) * filled,
        "position": position,
        "frequencies": None,
        **scales,
        "output_gate": norm_parameters(rng, case, share * groups, values)["output_gate"],
        "token_kind": token_kinds(case),
    }
    if case.parameters:
        tensors["frequencies"] = 10.0 ** -np.arange(width // 4)
    options = {"sliding_window": slots + 1 if case.norm else None, "epsilon": epsilon}
    query_scale = case.output_scale and case.output_scale / width**0.5
    return tensors, options | {"query_scale": query_scale, "logit_scaling": case.logit_scaling}


DRAW = {
    operation.__name__: operation
    for operation in (
        *(norm_linear, norm_quantized_linear, hgrn2_step, hgrn2_delayed_step, lightning_step),
        *(rg_lru_step, local_attention_step, mamba2_step),
    )
}
# Weights and states that are float32 although other tensors have 16 bits.
IN_FLOAT32 = (
    *("scale", "lower_bound", "memory", "window", "hidden", "conv_kernel", "conv_bias", "recent"),
    *("a_logit", "frequencies", "log_decay", "q_scale", "k_scale", "norm_scale", "squares"),
    *("next_scale", "x_window", "bc_window", "x_kernel", "bc_kernel", "x_bias", "bc_bias", "a_log"),
    *("dt_bias", "skip"),
)
INTEGERS = {"token_kind": "int8", "position": "int32", "count": "int32"}
# {operation: the states that it returns, after the outputs}
STATES = {
    "norm_linear": (),
    "norm_quantized_linear": (),
    "hgrn2_step": ("memory",),
    "hgrn2_delayed_step": ("count", "memory", "recent"),
    "lightning_step": ("memory",),
    "mamba2_step": ("x_window", "bc_window", "memory"),
    "rg_lru_step": ("window", "hidden"),
    "local_attention_step": ("key", "value"),
}
# Operations that return sums of squares of the output, for the norm that follows.
WITH_SQUARES = ("hgrn2_step", "hgrn2_delayed_step", "lightning_step")
# {operation: the states that Triton kernels on torch update in place, if they may}
UPDATED_IN_PLACE = {
    "hgrn2_step": ("memory",),
    "hgrn2_delayed_step": ("memory", "recent"),
    "lightning_step": ("memory",),
    "mamba2_step": ("x_window", "bc_window", "memory"),
    "rg_lru_step": ("hidden",),
    "local_attention_step": ("key", "value"),
}


def dtype_of(operation, name, case):
    if operation == "norm_quantized_linear" and name in ("kernels", "kernel_zeros"):
        return "int8"
    dtype = "float32" if name in IN_FLOAT32 and case.dtype != "float64" else case.dtype
    return INTEGERS.get(name, dtype)


def draw(operation, case, seed=0):
    rng = np.random.default_rng([seed, *operation.encode()])
    tensors, options = DRAW[operation](rng, case)
    dtypes = {n: dtype_of(operation, n, case) for n, t in tensors.items() if t is not None}
    tensors = {
        name: map_tensors(functools.partial(round_to, dtypes.get(name)), t)
        for name, t in tensors.items()
    }
    squares = "squares" if operation in WITH_SQUARES or "next_scale" in tensors else None
    last = [name for name in (squares, *STATES[operation]) if name]

    def name_results(results):
        outputs = [f"output {i}" for i in range(len(results) - len(last))]
        return dict(zip([*outputs, *last], results, strict=True))

    result_dtypes = {"output": case.dtype, "squares": dtype_of(operation, "squares", case)}
    return Drawn(tensors, options, dtypes, result_dtypes, name_results)
