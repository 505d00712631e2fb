"""Compile every Triton kernel, in every configuration a search may launch, for a Hopper GPU.

No GPU is needed. Prints JSON: for each kernel, the resources that its configurations take.

This file runs in a separate process: where Triton's interpreter is on, Triton compiles nothing.
"""

import itertools
import json
import multiprocessing
import re
import subprocess
import tempfile

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from keras_recurrent.backends.constants import STATE_WRITE_INTERVAL
from keras_recurrent.backends.triton import (
    argmax,
    causal_conv1d,
    embedding_step,
    gated_linear_attention,
    gated_linear_unit,
    hgrn2_step,
    lightning_attention,
    lightning_step,
    linear_scan,
    local_attention_step,
    log_forget_gate,
    norm_linear,
    norm_quantized_linear,
    rg_lru,
    rg_lru_step,
    rms_norm,
    soft_cap,
    token_crossentropy,
    top_logits,
)
from keras_recurrent.backends.triton._attention import (
    attention_kernels,
    banded_attention,
    circular_buffer,
)
from keras_recurrent.backends.triton._convolution import convolution_positions
from keras_recurrent.backends.triton._crossentropy import crossentropy_kernel
from keras_recurrent.backends.triton._decoding.norm_linear_tiles import (
    Product,
    tile_options,
    tile_starts,
)
from keras_recurrent.backends.triton._decoding.rg_lru_step_batch import batch_kernel
from keras_recurrent.backends.triton._decoding.rg_lru_step_batch import (
    tile_options as rg_lru_tile_options,
)
from keras_recurrent.backends.triton._device.common import Constants, Tiling
from keras_recurrent.backends.triton._linear_attention import (
    gated_chunks,
    gated_gradients,
    gated_operands,
    gated_output,
    gated_states,
    linear_attention_step,
)

HOPPER = GPUTarget("cuda", 90, 32)
SIZES = ("B", "T", "D", "H", "K", "V", "tiles", "chunks", "segment_chunks", "state_k", "state_v")
SIZES += ("subsegments", "S", "G", "C", "window", "parts", "rows", "n")
MULTIPLES_OF_16 = ("T", "D", "n", "K", "V", "state_k", "state_v")
# Arguments in float32, whatever the dtype of the others, and arguments in int32.
FLOATS = ("initial", "final", "d_initial", "d_final", "d_logit", "d_parameters", "a_logit")
FLOATS += ("scale", "d_scale", "lower_bound", "d_bound", "d_log_f", "losses", "d_losses", "largest")
FLOATS += ("total", "sums", "peaks", "frequencies", "q_scale", "k_scale", "norm_scale", "totals")
FLOATS += ("decays", "log_decay", "log_f", "origin", "delta", "d_keys", "d_values", "scales")
FLOATS += ("squares", "next_squares", "next_scale", "given_d_log_f", "memory", "next_memory")
FLOATS += ("recent", "next_recent", "next_hidden", "last_inputs", "next_inputs", "hidden")
FLOATS += ("conv_kernel", "conv_bias")
INTEGERS = ("carry", "token_at", "document_at", "real_counts", "start_counts", "tokens")
INTEGERS += ("first_key", "last_key", "first_query", "query_end", "position", "end", "count")
INTEGERS += ("next_count",)

OPTIONS = ("num_warps", "num_stages", "maxnreg")

CONV = {"W": 4, "SILU": False, "STEPS": causal_conv1d._STEPS}
SILU = {**CONV, "SILU": True}
ALL_REAL = dict.fromkeys(("token_at", "document_at", "real_counts", "start_counts"))
# Heads of 128 channels, as in hgrn2_1b and tnl_1b: bfloat16, and log f in float32.
CHUNKS = {"CHUNK": 64, "SHORT": True, "REVERSE": False}
ONE_SEGMENT = {"token_kind": None, "totals": None, "decays": None}
WALK = {**CHUNKS, **ONE_SEGMENT, "PARTS": 2, "ALL": True}
LEVELS = {"LEVELS": 6, "PARTS": 2}
SHORTER = {"CHUNK": 32, "LEVELS": 5}
TIED = {**CHUNKS, **LEVELS, **SHORTER, "k": None}
PREPARED = {**CHUNKS, "PARTS": 2, "TILES": 2}
SHORT_DECAYS = {"PARTS": 1, "token_kind": None}
STREAMED = {**PREPARED, "totals": None, "decays": None, "states": None}
STREAMED_BACK = {**STREAMED, "REVERSE": True}
STREAMED_STATES = {**STREAMED, "queries": None, "pairs": None, "output": None, "final": None}
del STREAMED_BACK["states"], STREAMED_STATES["states"]
HALVES = {**LEVELS, "HALF": gated_gradients.HALF, "LEVELS": 5}
GRADIENT = {**CHUNKS, **LEVELS, **SHORTER, "GAIN_PARTS": 1}
EXACT = {**SHORTER, "SHORT": False, "PARTS": 3, "GAIN_PARTS": 3}
STREAM = {**CHUNKS, **ONE_SEGMENT}
STEP = {"BLOCK_K": 128, "BLOCK_V": 32}

walk = gated_states._walk_kernel
prepare = gated_operands.prepare_kernel
pairs = gated_operands.pairs_kernel
gated = gated_output.stream_kernel
attend = gated_chunks.attend_kernel
gradient = gated_chunks.gradient_kernel
chunk_gradients = gated_gradients.chunk_kernel
pair_gradients = gated_gradients.flagged_kernel
lightning = lightning_attention._walk_kernel
step = linear_attention_step._step_kernel


def every(*candidates):
    """The configurations of several tuples of candidates, each once."""
    candidates = dict.fromkeys(itertools.chain(*candidates))
    return [c.options if isinstance(c, Tiling) else c._asdict() for c in candidates]


ATTENTION = {
    "output": attention_kernels.forward_kernel,
    "d_q": attention_kernels.queries_kernel,
}


def attention(result, size, dtype=tl.bfloat16, kinds=False):
    """Ten heads of queries share one of keys, as in recurrentgemma_2b, whose heads are of 256."""
    kernel = ATTENTION.get(result, attention_kernels.keys_kernel)
    visible, queries = ("token_kind", "first_key", "last_key"), ("first_query", "query_end")
    constants = {
        **{"G": 1, "parts": 1, "rest" if dtype == tl.float32 else "total": None},
        "visible": visible if kinds else (None,) * 3,
        "queries": queries if kinds else (None,) * 2,
        "d_buffers": ("d_key_buffer", "d_value_buffer", "position", "end"),
        **dict.fromkeys({"d_k": ("d_values",), "d_v": ("d_keys",)}.get(result, ())),
    }
    configurations = [
        {
            "TILE": Constants(banded_attention.attention_tile(tiles, 10, size, size, dtype)),
            **{"num_warps": tiles.num_warps, "num_stages": tiles.num_stages},
        }
        for tiles in dict.fromkeys(banded_attention.candidates(result, size, size, dtype))
    ]
    return kernel, constants, configurations[:1] if kinds else configurations


# {name: (kernel, configurations)}
SCANS = {
    "linear_scan forward": (linear_scan._forward_kernel, every(*linear_scan.TILINGS)),
    "linear_scan backward": (linear_scan._backward_kernel, every(*linear_scan.BACKWARD_TILINGS)),
    "rg_lru forward": (rg_lru._forward_kernel, every(*rg_lru.TILINGS)),
    "rg_lru backward": (rg_lru._backward_kernel, every(*rg_lru.TILINGS)),
}
CONVS = every(causal_conv1d.TILINGS), every(causal_conv1d.BACKWARD_TILINGS)
WALKS, EXACT_WALKS = (every(gated_states.BLOCKS[short]) for short in (True, False))
PREPARE = {plain: every(blocks) for plain, blocks in gated_operands.PREPARE_BLOCKS.items()}
PAIRS = every(gated_operands.PAIRS_BLOCKS)
GATED = {of: every(blocks) for of, blocks in gated_output.BLOCKS.items()}
CHUNK_GRADIENTS = every(gated_gradients.BLOCKS)
PAIR_GRADIENTS = every([gated_gradients.FLAGGED_BLOCKS])
ATTEND = {of: every(blocks) for of, blocks in gated_linear_attention.ATTEND_BLOCKS.items()}
GRADIENTS = {of: every(blocks) for of, blocks in gated_linear_attention.GRADIENT_BLOCKS.items()}
LIGHTNING = {of: every(blocks) for of, blocks in lightning_attention.BLOCKS.items()}


def token_wise_kernel(module, direction, width, **constants):
    """The kernel of an operation without a state, on rows of this width."""
    kernel = getattr(module, f"_{direction}_kernel")
    tile = module._tile(width)
    sizes = {"D": width, "STAGES": rms_norm._stages(tile), "PDL": False}
    return kernel, tile._asdict() | sizes | constants, [{"num_warps": tile.num_warps}]


def token_crossentropy_kernel(direction, vocabulary):
    prefix = {"forward": "", "backward": "_BACKWARD"}[direction]
    tile_size = getattr(token_crossentropy, f"{prefix}_TILE_SIZE")
    constants = {"V": vocabulary, "STAGES": token_crossentropy._STAGES}
    constants["LANE_SIZE"] = token_crossentropy._LANE_SIZE
    kernel = getattr(token_crossentropy, f"_{direction}_kernel")
    return kernel, constants, [token_crossentropy._tile(vocabulary, tile_size)]


def linear_crossentropy_kernel(vocabulary, fine=False, capped=True, **constants):
    """The kernel of `linear_crossentropy`, whose logits are float32."""
    options = crossentropy_kernel.options(vocabulary, capped, fine)
    return crossentropy_kernel.chunk_kernel, options | constants, [{}]


DIRECTIONS = ("forward", "backward")
TOKEN_WISE = {
    f"{name}, {dtype}": kernel
    for dtype in ("bfloat16", "float32")
    for name, kernel in {
        **{
            f"{module.__name__.rpartition('.')[2]} {direction}{of}": token_wise_kernel(
                module, direction, width, **constants
            )
            for module, direction, of, width, constants in (
                (rms_norm, "forward", "", 2048, {}),
                (rms_norm, "forward", " of few rows", 2048, {"PDL": True}),
                (rms_norm, "forward", " of 16384", 16384, {}),
                (rms_norm, "backward", "", 2048, {}),
                *((rms_norm, "backward", f" of {n}", n, {}) for n in (2560, 8192, 16384)),
                (rms_norm, "backward", ", no scale", 2048, {"scale": None}),
                (log_forget_gate, "forward", "", 2048, {}),
                (log_forget_gate, "backward", "", 2048, {}),
                (log_forget_gate, "backward", " of 1", 1, {}),
                (log_forget_gate, "backward", ", no bound", 2048, {"lower_bound": None}),
            )
        },
        **{
            f"gated_linear_unit {direction}, {activation}": (
                getattr(gated_linear_unit, f"_{direction}_kernel"),
                {"GELU": activation == "gelu"},
                [gated_linear_unit._TILE],
            )
            for direction in DIRECTIONS
            for activation in ("silu", "gelu")
        },
        **{
            f"token_crossentropy {direction}{of}": token_crossentropy_kernel(direction, vocabulary)
            for direction in DIRECTIONS
            for of, vocabulary in (("", 50304), (" of 50257", 50257), (" of 7", 7))
        },
    }.items()
} | {
    "linear_crossentropy, bfloat16": linear_crossentropy_kernel(256_000),
    "linear_crossentropy, no cap, bfloat16": linear_crossentropy_kernel(256_000, capped=False),
    "linear_crossentropy of 50257, bfloat16": linear_crossentropy_kernel(50257, capped=False),
    "linear_crossentropy, float32": linear_crossentropy_kernel(256_000, fine=True),
    "linear_crossentropy without gradients": linear_crossentropy_kernel(256_000, d_logits=None),
}


SQUARES = 64  # sums of squares of 2,048 channels


def columns_kernel(
    rows,
    channels,
    count=1,
    dtype="bfloat16",
    *,
    given=(),
    width=2048,
    norm=None,
    gate=0,
    squares=0,
    output_scale=1.0,
):
    """The kernel of `count` projections to `width` columns; `given`: names of optional tensors."""
    norm = rows == 1 if norm is None else norm
    sizes = rows, channels, width * count, dtype, gate, count == 1 and not norm
    product = Product(
        **{"K": channels, "NORM": norm, "GATE": gate, "NUM_SQUARES": squares},
        **{"SHORT": dtype == "bfloat16", **tile_options(*sizes, (9, 0))},
    )
    outputs = 1 if gate else count
    present = {"scale": norm, "squares": squares, "x_2": False, "residual": False}
    present |= dict.fromkeys(given, True)
    constants = {name: None for name, is_present in present.items() if not is_present} | {
        "kernels": ("kernel",) * count,
        "biases": ("bias" if "bias" in given else None, *[None] * (count - 1)),
        "outputs": ("y",) * outputs,
        "WIDTHS": (width,) * count,
        "TILE_STARTS": tile_starts((width,) * outputs, product.BLOCK_N),
        "PRODUCT": Constants(product),
        "OUTPUT_SCALE": output_scale,
        "PDL": True,
    }
    return norm_linear.columns_kernel, constants, [product.launch_options]


def attention_step(tile, short=True, **sizes):
    """The kernel of a token's attention; with a single part, it stores the output."""
    heads = {"SHARE": 10, "K": 256, "V": 256, "R": 64, "EPSILON": 0.0, "PARTS": 16}
    heads |= {"LOGIT_SCALING": 0.0, "LOG_SCALING": 1.0, "BLOCK_H": 16, "SHORT": short, **sizes}
    heads |= {"BLOCK_K": heads["K"], "BLOCK_V": heads["V"], "SLOTS": tile["SLOTS"]}
    is_single = heads["PARTS"] == 1
    absent = ["q_scale", "k_scale"] + ["frequencies"] * (not heads["R"])
    absent += ["partial"] if is_single else ["output", "output_gate"]
    constants = {"partial": ("sums", "peaks", "totals"), **dict.fromkeys(absent), "PDL": True}
    constants["HEADS"] = Constants(local_attention_step.AttentionHeads(**heads))
    options = {name: tile[name] for name in ("num_warps", "num_stages")}
    return local_attention_step._partial_kernel, constants, [options]


# Heads of HypeNet 2B: lightning attention, and softmax attention without positions.
HEADS = {"SHARE": 2, "K": 128, "V": 128, "EPSILON": 1e-6}
NO_POSITIONS = {**HEADS, "R": 0, "LOGIT_SCALING": 500.0, "LOG_SCALING": 6.2}
LIGHTNING_HEADS = {**HEADS, "R": 64, "BLOCK_K": 128, "BLOCK_V": lightning_step._BLOCK_V}
HGRN2_STEP = {"K": 128, "V": 128, "BLOCK_K": 128, "BLOCK_V": hgrn2_step._BLOCK_V}
GATE_KERNEL = {"BLOCK": norm_linear._BLOCK, "OUTPUT_SCALE": 1.0, "PDL": True}


def step_kernel(module, kernel="_kernel", **constants):
    """A kernel of a decoding step, with the warps of its module and dependent launches."""
    options = {"num_warps": module._WARPS}
    return getattr(module, kernel), constants | {"PDL": True}, [options]


TOP = {"PARTS": 125, "COUNT": 16}
NOT_DELAYED = dict.fromkeys(("recent", "count", "next_count", "next_recent"))
STEP_KERNELS = {
    "embedding": step_kernel(embedding_step, D=2560, SCALED=True, BLOCK=embedding_step._BLOCK),
    "soft cap": step_kernel(soft_cap, BLOCK=soft_cap._BLOCK),
    "argmax, partial": step_kernel(argmax, "_partial_kernel", PARTS=125, BLOCK=argmax._BLOCK),
    "argmax, combine": (
        argmax._combine_kernel,
        {"PARTS": 125, "BLOCK": 128, "RECENT": 16, "PDL": True},
        [{}],
    ),
    "top logits, partial": step_kernel(
        top_logits, "_partial_kernel", **TOP, BLOCK=top_logits._BLOCK
    ),
    "top logits, combine": step_kernel(
        top_logits, "_combine_kernel", **TOP, BLOCK=2048, BLOCK_PARTS=128
    ),
    "hgrn2 step": step_kernel(hgrn2_step, **HGRN2_STEP, **NOT_DELAYED, N=0),
    "hgrn2 delayed step": (
        hgrn2_step._kernel,
        HGRN2_STEP | {"N": STATE_WRITE_INTERVAL - 1, "PDL": True},
        [{"num_warps": hgrn2_step.delayed_warps(128, hgrn2_step._BLOCK_V)}],
    ),
    "lightning step of heads": step_kernel(
        lightning_step, HEADS=Constants(lightning_step.Heads(**LIGHTNING_HEADS))
    ),
    "rg_lru step": step_kernel(
        rg_lru_step, W=4, C=256, BLOCK_W=4, BLOCK_C=256, BLOCK_N=rg_lru_step._BLOCK_N
    ),
    **{
        f"rg_lru step of {rows} rows": (
            batch_kernel,
            {"W": 4, "C": 256, "PDL": True, "SHORT": True},
            [rg_lru_tile_options(rows, 256)],
        )
        for rows in (16, 64)
    },
    "local_attention step, partial": attention_step(local_attention_step._TILE),
    "local_attention step, partial, float32": attention_step(
        local_attention_step._FLOAT32_TILE, False, SHARE=4
    ),
    "local_attention step, scaled logits": attention_step(
        local_attention_step._TILE, **NO_POSITIONS, PARTS=32
    ),
    "local_attention step, one part": attention_step(
        local_attention_step._TILE, **NO_POSITIONS, PARTS=1
    ),
    "local_attention step, combine": (
        local_attention_step._combine_kernel,
        {"V": 256, "BLOCK_V": 256, "PARTS": 32, "BLOCK_P": 32, "PDL": True},
        [{}],
    ),
    "norm_linear of three": columns_kernel(1, 2048, 3),
    "norm_linear of two": columns_kernel(1, 2560, 2),
    "norm_linear of 12,288 columns": columns_kernel(1, 2048, 2, width=6144),
    "norm_linear of two, float32": columns_kernel(1, 2560, 2, "float32", given=["bias"]),
    "norm_linear, silu": (
        norm_linear.gate_kernel,
        GATE_KERNEL
        | {"K": 1, "N": 5632, "GATE": 1, "NUM_SQUARES": 0}
        | dict.fromkeys(("squares", "gate_bias", "up_bias", "residual")),
        [{}],
    ),
    "norm_linear of many rows, gelu": (
        norm_linear.gate_kernel,
        GATE_KERNEL | {"K": 2560, "N": 7680, "GATE": 2, "NUM_SQUARES": 5, "PDL": False},
        [{}],
    ),
    "norm_linear, sum of parts": (
        norm_linear.sum_kernel,
        GATE_KERNEL
        | {"K": 5632, "N": 2048, "PARTS": 11, "NUM_SQUARES": 0, "bias": None, "squares": None}
        | dict.fromkeys(("next_scale", "scaled", "next_squares")),
        [{}],
    ),
    "norm_linear, sum of parts, squares": (
        norm_linear.sum_kernel,
        GATE_KERNEL | {"K": 2048, "N": 2048, "PARTS": 8, "NUM_SQUARES": SQUARES},
        [{}],
    ),
    "norm_linear of 16 rows, silu": columns_kernel(16, 2048, 2, gate=1),
    "norm_linear of 16 rows of three": columns_kernel(16, 2048, 3, given=["bias"]),
    "norm_linear of 16 rows, in parts": columns_kernel(16, 5632),
    "norm_linear of 128 rows, silu": columns_kernel(128, 2048, 2, gate=1, squares=SQUARES),
    "norm_linear of 128 rows of three": columns_kernel(128, 2048, 3, squares=SQUARES),
    "norm_linear of 128 rows, in parts": columns_kernel(128, 5632),
    "norm_linear of 16 rows, gelu, float32": columns_kernel(16, 2560, 2, "float32", gate=2),
    "norm_linear of four": columns_kernel(1, 2048, 4),
    "norm_linear of squares": columns_kernel(
        1, 2048, given=["residual"], norm=False, squares=SQUARES, output_scale=0.25
    ),
    "norm_linear of squares of 16 rows, silu": columns_kernel(16, 2048, 2, gate=1, squares=SQUARES),
    "norm_linear, in parts": columns_kernel(1, 5632, norm=False),
    "norm_linear, in parts, of what is gated": columns_kernel(
        1, 5632, given=["x_2"], gate=1, norm=False
    ),
}


def quantized_kernel(
    channels,
    widths,
    bits,
    block_size=0,
    limbs=None,
    *,
    given=(),
    norm=True,
    gate=0,
    squares=0,
    output_scale=1.0,
    vectors=True,
):
    """The kernel of one row and quantized linear layers; int8 quantizes the row, too."""
    limbs = limbs or (1 if bits == 8 else 2)
    product = norm_quantized_linear.choose_tile(
        *(channels, widths, bits, gate, limbs, block_size, vectors),
        **{"NORM": norm, "NUM_SQUARES": squares, "QUANTIZED": limbs == 1, "WHOLE": vectors},
    )
    outputs = widths[:1] if gate else widths
    present = {"scale": norm and not squares, "squares": squares, "residual": "residual" in given}
    constants = {name: None for name, is_present in present.items() if not is_present} | {
        "kernels": ("kernel",) * len(widths),
        "kernel_scales": ("kernel_scale",) * len(widths),
        "kernel_zeros": ("kernel_zero" if block_size else None,) * len(widths),
        "biases": ("bias" if "bias" in given else None, *[None] * (len(widths) - 1)),
        "outputs": ("y",) * len(outputs),
        "WIDTHS": widths,
        "TILE_STARTS": tile_starts(outputs, product.COLUMNS),
        "PRODUCT": Constants(product),
        **{"GATE": gate, "OUTPUT_SCALE": output_scale, "PDL": True},
    }
    return norm_quantized_linear._kernel, constants, [product.launch_options]


# The linear layers of hgrn2_1b.
DOWN = {"given": ["residual"], "norm": False}
QUANTIZED_KERNELS = {
    "norm_quantized_linear of three": quantized_kernel(2048, (2048,) * 3, 8),
    "norm_quantized_linear, silu": quantized_kernel(2048, (5632,) * 2, 8, gate=1),
    "norm_quantized_linear, out": quantized_kernel(2048, (2048,), 8, given=["residual"]),
    "norm_quantized_linear, down": quantized_kernel(5632, (2048,), 8, **DOWN),
    "norm_quantized_linear of three widths, 2 limbs": quantized_kernel(
        2048, (2048, 1024, 512), 8, limbs=2, given=["bias"]
    ),
    "norm_quantized_linear, silu, 2 limbs": quantized_kernel(2048, (5632,) * 2, 8, limbs=2, gate=1),
    "norm_quantized_linear, down, 2 limbs": quantized_kernel(5632, (2048,), 8, limbs=2, **DOWN),
    "norm_quantized_linear of three, 4 bits": quantized_kernel(2048, (2048,) * 3, 4, 128),
    "norm_quantized_linear, silu, 4 bits": quantized_kernel(2048, (5632,) * 2, 4, 128, gate=1),
    "norm_quantized_linear, down, 4 bits": quantized_kernel(5632, (2048,), 4, 128, **DOWN),
    "norm_quantized_linear of 4 bits, 1 limb": quantized_kernel(2048, (2048,), 4, limbs=1),
    "norm_quantized_linear of four": quantized_kernel(2048, (2048, 1024, 1024, 2048), 8),
    "norm_quantized_linear of squares": quantized_kernel(
        2048, (2048,), 8, given=["residual"], output_scale=0.25, squares=SQUARES
    ),
    "norm_quantized_linear of squares, 4 bits": quantized_kernel(
        2048, (2048,), 4, 128, given=["residual"], output_scale=0.25, squares=SQUARES
    ),
    "norm_quantized_linear of 4 bits, blocks of 16": quantized_kernel(2048, (2048,), 4, 16),
    "norm_quantized_linear, float32": quantized_kernel(
        2048, (2048,), 4, 32, limbs=3, vectors=False
    ),
}

# {channels of a head: results of the kernels of attention}
HEAD_RESULTS = {256: ("output", "d_q", "d_k", "d_v"), 128: ("output", "d_q", "d_k, d_v")}
# {name: (kernel, constants, configurations)}, the default first. Where a kernel differs little from
# another one that is compiled in all configurations, the default is the only one.
KERNELS = {
    **TOKEN_WISE,
    **STEP_KERNELS,
    **QUANTIZED_KERNELS,
    # Triton makes a size of 1 a constant, which lacks what a number in a register has.
    **{f"{name}, one row": (of, {"B": 1}, tiles[:1]) for name, (of, tiles) in SCANS.items()},
    **{name: (of, {}, tiles) for name, (of, tiles) in SCANS.items()},
    "causal_conv1d positions": (convolution_positions.positions_kernel, {"BLOCK": 1024}, [{}]),
    "causal_conv1d forward": (causal_conv1d.forward_kernel, CONV, CONVS[0][:1]),
    "causal_conv1d backward": (causal_conv1d.backward_kernel, CONV, CONVS[1][:1]),
    "causal_conv1d forward, silu": (causal_conv1d.forward_kernel, SILU, CONVS[0]),
    "causal_conv1d backward, silu": (causal_conv1d.backward_kernel, SILU, CONVS[1]),
    "causal_conv1d backward, silu, no kinds": (
        causal_conv1d.backward_kernel,
        {**SILU, **ALL_REAL, "initial": None, "d_final": None},
        CONVS[1],
    ),
    "gated walk": (walk, {**WALK, "k": None}, WALKS),
    "gated walk back": (walk, {**WALK, **SHORTER, "REVERSE": True}, WALKS),
    "gated segments": (walk, {**CHUNKS, "states": None, "PARTS": 2, "ALL": False}, WALKS),
    "gated walk, float32": (walk, {**WALK, **EXACT}, EXACT_WALKS),
    "gated preparation": (prepare, {**PREPARED, **SHORT_DECAYS}, PREPARE[True]),
    "gated preparation, k = 1 - f": (
        prepare,
        {**PREPARED, **SHORT_DECAYS, "k": None},
        PREPARE[True],
    ),
    "gated preparation, kinds": (prepare, {**PREPARED, "k": None}, PREPARE[False]),
    "gated pairs": (pairs, {**PREPARED, **LEVELS}, PAIRS),
    "gated stream": (gated, {**STREAMED, "token_kind": None}, GATED["output"]),
    "gated stream, kinds": (gated, STREAMED, GATED["output"][:1]),
    "gated stream, segments": (
        gated,
        {**PREPARED, "output": None, "states": None},
        GATED["output"][:1],
    ),
    "gated stream back": (
        gated,
        {**STREAMED_BACK, "token_kind": None},
        GATED["gradient of v"],
    ),
    "gated stream back, kinds": (gated, STREAMED_BACK, GATED["gradient of v"][:1]),
    "gated stream of states": (gated, STREAMED_STATES, GATED["states"]),
    "gated chunk gradients": (
        chunk_gradients,
        {**PREPARED, "token_kind": None},
        CHUNK_GRADIENTS,
    ),
    "gated chunk gradients, kinds": (
        chunk_gradients,
        {**PREPARED, "d_k": None},
        CHUNK_GRADIENTS,
    ),
    "gated pair gradients": (pair_gradients, {**HALVES, "token_kind": None}, PAIR_GRADIENTS),
    "gated pair gradients, kinds": (
        pair_gradients,
        {**HALVES, "k": None, "given_d_k": None, "d_k": None},
        PAIR_GRADIENTS,
    ),
    "gated d_v": (attend, {**TIED, "REVERSE": True}, ATTEND[True]),
    "gated output, 256 channels": (attend, TIED, ATTEND[True][:1]),
    "gated output, float32": (attend, {**TIED, **EXACT}, ATTEND[False]),
    "gated gradients": (gradient, {**GRADIENT, "k": None}, GRADIENTS[True]),
    "gated gradients, float32": (gradient, {**GRADIENT, **EXACT}, GRADIENTS[False]),
    "gated step": (step, {**STEP, "k": None, "log_decay": None}, [{}]),
    "lightning output": (lightning, {**STREAM, "state_v": 1}, LIGHTNING[True, False]),
    "lightning d_k": (
        lightning,
        {**STREAM, "state_k": 1, "REVERSE": True},
        LIGHTNING[True, False],
    ),
    "lightning output, 256 channels": (
        lightning,
        {**STREAM, "CHUNK": 32, "state_v": 1},
        LIGHTNING[True, True],
    ),
    "lightning segments": (
        lightning,
        {**CHUNKS, "output": None, "state_v": 1},
        LIGHTNING[True, False][:1],
    ),
    "lightning output, segments": (
        lightning,
        {**CHUNKS, "token_kind": None, "state_v": 1},
        LIGHTNING[True, False],
    ),
    "lightning output, float32": (
        lightning,
        {**STREAM, "CHUNK": 16, "SHORT": False, "state_v": 1},
        LIGHTNING[False, False],
    ),
    "lightning step": (step, {**STEP, "log_f": None}, [{}]),
    "attention ring": (
        circular_buffer.fill_buffers_kernel,
        {
            "G": 1,
            "K": 256,
            "V": 256,
            "BLOCK_K": 256,
            "BLOCK_V": 256,
            "SLOTS": circular_buffer.SLOTS,
        },
        [{}],
    ),
    **{
        f"attention of {size}{'' if result == 'output' else ' ' + result}{suffix}": attention(
            result, size, **options
        )
        for size, results in HEAD_RESULTS.items()
        for result in results
        for suffix, options in (("", {}), (", float32", {"dtype": tl.float32}))
    },
    **{
        f"attention of 256{' ' * bool(result) + result}, kinds": attention(
            result or "output", 256, kinds=True
        )
        for result in ("", "d_k", "d_v")
    },
}


def dtype(argument, name):
    if argument in SIZES:
        return "i32"
    if argument in ("epsilon", "root", "multiplier", "query_scale") or (name, argument) == (
        "soft cap",
        "cap",
    ):
        return "fp32"
    if name.startswith("linear_crossentropy"):
        special = {"tokens": "*i64", "best": "*i32", "cap": "fp32", "d_logits": "*bf16"}
        special["d_logits"] = "*fp32" if "float32" in name else "*bf16"
        return special.get(argument, "*fp32")
    if name == "embedding" and argument not in ("table", "y", "V", "multiplier"):
        return "*i8" if argument == "kind" else "*i32"
    if name.startswith("argmax") and argument != "x":
        return "*i64" if argument == "best" else "*i32"
    if name.startswith("top logits") and argument != "x":
        return {"best": "*i64", "indices": "*i32"}.get(argument, "*fp32")
    if name in QUANTIZED_KERNELS and argument in ("kernel", "kernel_zero"):
        return "*i8"
    if name.endswith("gated") and argument in ("x", "x_2"):
        return "*fp32"
    if name in ("gated preparation", "gated preparation, k = 1 - f") and argument == "log_f":
        return "*bf16"  # the candidates with 96 registers are used for nothing else
    if argument in INTEGERS:
        return "*i32"
    if argument in ("token_kind", "rest", "flags"):
        return "*i8"
    return "*fp32" if argument in FLOATS or "float32" in name else "*bf16"


def compile_for_hopper(name, number):
    """Compiles a kernel of `KERNELS` in one of its configurations."""
    kernel, constants, configurations = KERNELS[name]
    constants = {**constants, **configurations[number]}
    options = {n: constants[n] for n in OPTIONS if constants.get(n)}
    signature, values, aligned = {}, {}, {}

    def type_of(value, path):
        """The type of an argument, whose name is a string; all others are constants."""
        if type(value) is tuple:
            return tuple(type_of(x, (*path, i)) for i, x in enumerate(value))
        if not isinstance(value, str):
            values[path] = value
            return "constexpr"
        kind = dtype(value, name)
        if kind.startswith("*") or value in MULTIPLES_OF_16:
            aligned[path] = [["tt.divisibility", 16]]
        return kind

    for i, parameter in enumerate(kernel.params):
        argument = parameter.name
        value = constants.get(argument, argument)
        if parameter.is_constexpr:
            signature[argument], values[i,] = "constexpr", value
        else:
            signature[argument] = type_of(value, (i,))
    source = ASTSource(kernel, signature, values, aligned)
    return triton.compile(source, target=HOPPER, options=options)


def resources(compiled):
    """The resources of a program: registers and spilled bytes of a thread, shared memory."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
        report = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    registers, stack = re.search(r"REG:(\d+) STACK:(\d+)", report).groups()
    return {
        "registers": int(registers),
        "spilled": int(stack),
        "shared": compiled.metadata.shared,
        "transposed": compiled.asm["ttgir"].count("tt.trans "),
        "tensor cores": compiled.asm["ptx"].count("mma."),
        "asynchronous": compiled.asm["ptx"].count("wgmma.mma_async"),
    }


def report(name, number):
    return resources(compile_for_hopper(name, number))


if __name__ == "__main__":
    compiled = [(name, i) for name, row in KERNELS.items() for i in range(len(row[2]))]
    with multiprocessing.Pool() as pool:
        reports = iter(pool.starmap(report, compiled, chunksize=1))
    print(json.dumps({name: [next(reports) for _ in row[2]] for name, row in KERNELS.items()}))
