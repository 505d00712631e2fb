"""Compiles Triton kernels, in every configuration a search may launch, for a Hopper GPU.

Arguments: the operations to compile, or `--except` and the operations to leave out. No GPU is
needed: operations of the sizes of models run on a CPU, whose tensors pretend to be on a GPU, and
their launches are compiled instead of started. Prints JSON: a list of `Program`s.

This file runs in a separate process: where Triton's interpreter is on, Triton compiles nothing.
"""

import contextlib
import json
import multiprocessing
import re
import subprocess
import sys
import tempfile
import types
from typing import NamedTuple

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import MockTensor

from keras_recurrent.backends.constants import STATE_WRITE_INTERVAL
from keras_recurrent.backends.torch import _common
from keras_recurrent.backends.triton import argmax, scalar_decay_attention
from keras_recurrent.backends.triton._attention import banded_attention
from keras_recurrent.backends.triton._linear_attention import linear_attention
from keras_recurrent.backends.triton._optimizers import adam_kernel
from keras_recurrent.backends.triton._runtime import search, torch_operators
from keras_recurrent.backends.triton._runtime.launch import map_arrays
from tests.ops import cases, judge, losses, steps, token_wise
from tests.ops.small import draw_case
from tests.ops.steps import EXTRAS

HOPPER = GPUTarget("cuda", 90, 32)
BF16, MIXED, F32 = ("bfloat16",), ("bfloat16", "float32"), ("float32",)  # of tensors and decays
PACKED = {"kinds": True, "state": True}


def over_time(length, channels, dtypes=BF16, batch=2, **fields):
    return cases.Case(batch, length, channels, *dtypes, **{"values": channels, **fields})


def step(rows, channels, *widths, dtype="bfloat16", **fields):
    return steps.Case(rows, dtype, channels, widths, **fields)


SCAN = {
    # Few chains of tiles, some, and many.
    **{f"{n} channels": over_time(656, n, **PACKED) for n in (64, 5120, 10_240)},
    # Triton makes a size of 1 a constant, which lacks what a number in a register has.
    "one sequence": over_time(656, 64, batch=1, **PACKED),
}
LINEAR = {
    "one document": over_time(208, 128, MIXED, state=True),
    "kinds": over_time(208, 128, MIXED, **PACKED),
    "256 channels": over_time(208, 256, MIXED, **PACKED, tied=True),
    "float32": over_time(208, 128, F32, **PACKED),
    "one token": over_time(1, 128, MIXED, **PACKED),
}
ROWS = 600  # of `rms_norm`, which launches fewer rows before their inputs are written


def dtype_cases(width, rows=ROWS, **fields):
    return {
        f"{width} channels, {dtype}": token_wise.Case((rows, width), dtype, "float32", **fields)
        for dtype in ("bfloat16", "float32")
    }


FOUR_BITS = steps.FOUR_BITS | {"block_size": 128}
# {operation: {variant: inputs}}
CASES: dict = {
    "linear_scan": SCAN,
    "rg_lru": SCAN,
    "causal_conv1d": {
        "silu": over_time(1104, 64, **PACKED),
        "silu, one document": over_time(1104, 128),
        "no activation": over_time(1104, 64, **PACKED, activation=None),
    },
    "gated_linear_attention": {
        **LINEAR,
        "segments, 256 channels": over_time(1200, 256, MIXED, batch=1),
        "tied, one document": over_time(208, 128, tied=True),
        "tied, kinds": over_time(208, 128, MIXED, **PACKED, tied=True),
    },
    "lightning_attention": {**LINEAR, "segments": over_time(1200, 128, MIXED, batch=1)},
    # Heads of Mamba-2.
    "scalar_decay_attention": {
        "one document": over_time(208, 128, MIXED, values=64, heads=(4, 1), state=True),
        "kinds": over_time(208, 128, MIXED, values=64, heads=(4, 1), **PACKED),
        "kinds, 128 channels": over_time(208, 128, MIXED, **PACKED),
        "256 channels": over_time(208, 256, MIXED, values=64, **PACKED),
        "float32": over_time(208, 128, F32, values=64, **PACKED),
        "one token": over_time(1, 128, MIXED, values=64, heads=(4, 1), **PACKED),
        "segments of Mamba-2": over_time(1200, 128, MIXED, values=64, heads=(4, 1), batch=1),
    },
    "sliding_window_attention": {
        f"{size} channels{', kinds' * kinds}, {dtype}": over_time(
            304, size, (dtype,), heads=(10, 1), window=200, kinds=kinds, state=True
        )
        for size in (256, 128)
        for dtype in ("bfloat16", "float32")
        for kinds in (False, True)
    },
    "rms_norm": {
        **{f"few rows of {name}": case for name, case in dtype_cases(2048, rows=2).items()},
        **dtype_cases(2048) | dtype_cases(2560) | dtype_cases(8192) | dtype_cases(16384),
        **{f"no scale, {n}": case for n, case in dtype_cases(2048, parameter=False).items()},
    },
    "log_forget_gate": {
        **dtype_cases(2048) | dtype_cases(1),
        **{f"no bound, {n}": case for n, case in dtype_cases(2048, parameter=False).items()},
    },
    "gated_linear_unit": {
        f"{activation}, {dtype}": token_wise.Case((9, 2048), dtype, activation=activation)
        for activation in ("silu", "gelu")
        for dtype in ("bfloat16", "float32")
    },
    "token_crossentropy": dtype_cases(50304, 3) | dtype_cases(50257, 3) | dtype_cases(7, 3),
    "linear_crossentropy": {
        "cap, bfloat16": losses.Case((5,), 16, 256_000, "bfloat16", soft_cap=30.0),
        "bfloat16": losses.Case((5,), 16, 256_000, "bfloat16"),
        "50257 words, bfloat16": losses.Case((5,), 16, 50257, "bfloat16"),
        "cap, float32": losses.Case((5,), 16, 256_000, soft_cap=30.0),
    },
    # Decoding steps of HGRN2 1.3B, RecurrentGemma 2B and HypeNet 2B.
    "norm_linear": {
        "two": step(1, 2560, 2048, 2048),
        "two, float32": step(1, 2560, 2048, 2048, dtype="float32"),
        "two, 12,288 columns": step(1, 2048, 6144, 6144),
        "three": step(1, 2048, 2048, 2048, 2048),
        "four": step(1, 2048, 2048, 2048, 2048, 2048),
        "squares": step(1, 2048, 2048, residual=True, **EXTRAS),
        "silu": step(1, 2048, 5632, 5632, gate="silu"),
        "perceptron": step(1, 2048, 5632, 5632, 2048, gate="silu", residual=True, next_norm=True),
        "parts": step(1, 5632, 2048, norm=False),
        "16 rows, silu": step(16, 2048, 2048, 2048, gate="silu"),
        "16 rows, silu, squares": step(16, 2048, 2048, 2048, gate="silu", **EXTRAS),
        "16 rows, gelu, float32": step(16, 2560, 2048, 2048, gate="gelu", dtype="float32"),
        "16 rows, three": step(16, 2048, 2048, 2048, 2048),
        "16 rows, parts": step(16, 5632, 2048, norm=False, residual=True, next_norm=True),
        "128 rows, silu": step(128, 2048, 2048, 2048, gate="silu", **EXTRAS),
        "128 rows, three": step(128, 2048, 2048, 2048, 2048, **EXTRAS),
        "128 rows, parts": step(128, 5632, 2048, norm=False),
        "squared ReLU": step(1, 2048, 6144, activation="squared_relu"),
        "16 rows, squared ReLU": step(16, 2048, 6144, activation="squared_relu"),
        "300 rows, gelu": step(300, 2560, 7680, 7680, 2560, gate="gelu", **EXTRAS),
    },
    "norm_quantized_linear": {
        "three": step(1, 2048, 2048, 2048, 2048),
        "four": step(1, 2048, 2048, 1024, 1024, 2048),
        "silu": step(1, 2048, 5632, 5632, gate="silu"),
        "out": step(1, 2048, 2048, residual=True),
        "squares": step(1, 2048, 2048, residual=True, **EXTRAS),
        "down": step(1, 5632, 2048, residual=True, norm=False),
        "three, 2 limbs": step(1, 2048, 2048, 1024, 512, quantize_row=False),
        "silu, 2 limbs": step(1, 2048, 5632, 5632, gate="silu", quantize_row=False),
        "down, 2 limbs": step(1, 5632, 2048, residual=True, norm=False, quantize_row=False),
        "three, 4 bits": step(1, 2048, 2048, 2048, 2048, **FOUR_BITS),
        "silu, 4 bits": step(1, 2048, 5632, 5632, gate="silu", **FOUR_BITS),
        "squares, 4 bits": step(1, 2048, 2048, residual=True, **EXTRAS, **FOUR_BITS),
        "down, 4 bits": step(1, 5632, 2048, residual=True, norm=False, **FOUR_BITS),
        "out, 4 bits, 1 limb": step(1, 2048, 2048, bits=4),
        "out, 4 bits, blocks of 16": step(1, 2048, 2048, **FOUR_BITS | {"block_size": 16}),
        "out, 4 bits, float32": step(1, 2048, 2048, dtype="float32", **FOUR_BITS),
    },
    "hgrn2_step": {"": step(1, 512, 1, values=128, delayed_norm=True)},
    "hgrn2_delayed_step": {
        "": step(16, 512, 1, values=128, delayed_norm=True, recent=STATE_WRITE_INTERVAL - 1)
    },
    "lightning_step": {
        "": step(1, 128, 1, 1, values=128, **EXTRAS),
        "Mamba-2": step(1, 128, 1, 1, values=64, parameters=False, residual=True),
    },
    "mamba2_step": {
        "Nemotron-3-Nano-4B": step(1, 128, *[1] * 12, values=80),
        "norm of 8,192 channels": step(1, 128, *[1] * 128, values=64, kinds=True),
        "no norm": step(1, 128, *[1] * 24, values=64, norm=False),
    },
    "rg_lru_step": {f"{rows} rows": step(rows, 1024, 1, 1) for rows in (1, 16, 64)},
    "local_attention_step": {
        "": step(1, 256, *[1] * 10, values=256, slots=512),
        "float32": step(1, 256, *[1] * 4, values=256, slots=512, dtype="float32"),
        "scaled logits": step(
            1, 128, 1, 1, values=128, slots=1024, parameters=False, logit_scaling=500.5
        ),
        "one part": step(1, 128, 1, 1, values=128, slots=64, **EXTRAS),
    },
}


def choose_tokens():
    """Runs the operations on logits and token ids of a decoding step."""
    logits, ids = torch.zeros(1, 256_000, dtype=torch.bfloat16), torch.zeros(1, dtype=torch.int32)
    argmax.write_argmax(logits, ids[:, None].long(), torch.zeros(1, 16, dtype=torch.int32))
    for operation, arguments in {
        "argmax": {"x": logits, "masks": torch.zeros(1, 32_000, dtype=torch.uint8)},
        "top_logits": {"x": logits, "count": 16},
        "soft_cap": {"x": logits, "cap": 30.0},
        "embedding_step": {
            **{"table": logits.reshape(100, 2560), "token_ids": ids, "segment": ids},
            **{"position": ids, "scale": 50.0, "dtype": "bfloat16"},
        },
    }.items():
        judge.function_of(operation, "triton")(**arguments)


def update_weights(dtype, gradient_dtype, size, divisor=None):
    """Updates a weight in 16 bits; the kernel stores several elements at once of some sizes."""
    tensors = [[torch.zeros(size, dtype=d)] for d in (dtype, gradient_dtype, *[torch.float32] * 2)]
    step, numbers = torch.zeros((), dtype=torch.int32), (0.1, 0.001, 1e-7)
    adam_kernel.update_weights(tensors, [0], step, torch.zeros(2), divisor, True, numbers)


class Program(NamedTuple):
    """A compiled launch. Candidates of one search have the same number, the default first."""

    operation: str
    variant: str  # in `CASES`
    kernel: str
    options: str  # constants, warps, stages and registers
    is_limited: bool  # in its registers
    search: int
    resources: dict | None = None


class Recorder:
    """Records launches, with all candidates of each search, and compiles them once each."""

    def __init__(self):
        self.operation, self.variant = "tokens", ""
        self.searches, self.searched = 0, set()
        self.launches = {}  # {specialization: (`Program`, kernel, arguments, options)}

    def start(self, launch, tensors):
        """Replaces `torch_operators.start`."""
        types_of = map_arrays(lambda t: None if t is None else str(t.dtype), tensors)
        sizes = [(type(n), n == 1, n % 16 == 0) for n in launch.numbers]
        key = str((launch.kernel.__module__, launch.kernel, types_of, sizes, launch.options))
        mocks = map_arrays(lambda t: None if t is None else MockTensor(t.dtype), tensors)
        options, is_limited = launch.options, launch.options.get("maxnreg") is not None
        name = self.operation, self.variant, launch.kernel.__name__
        program = Program(*name, str(options), is_limited, self.searches)
        arguments = *mocks, *launch.numbers
        self.launches.setdefault(key, (program, launch.kernel, arguments, options))

    def search(self, kernel, candidates, launch, tensors, sizes):
        """Replaces `search.run`."""
        self.searches += 1
        name, width = kernel.replace(" transposed", ""), tensors[0].shape[-1]
        key = name, candidates, tensors[0].dtype, width
        if key in self.searched:
            return launch(candidates[0])
        self.searched.add(key)
        results = [launch(candidate) for candidate in candidates]
        return results[0]

    def record_tokens_and_adam(self):
        choose_tokens()
        self.operation, self.variant = "adam", "vectors"
        update_weights(torch.bfloat16, torch.bfloat16, 4096, torch.ones(()))
        self.variant = "elements"
        update_weights(torch.float16, torch.float32, 1001)

    def record(self, operations):
        banded_attention._MANY_PROGRAMS = 1  # as with many sequences
        for operation in operations:
            self.operation = operation
            for self.variant, case in CASES[operation].items():
                is_cut = self.variant.startswith("segments")
                linear_attention._SHORTEST_SEGMENT = 1 if is_cut else 10**6
                scalar_decay_attention._SHORTEST_SUBSEGMENT = 1
                drawn = draw_case(self.operation, case)
                if self.variant == "one token":  # of a decoding step, which has no gradients
                    inputs = {"tensors": drawn.arguments, "d_output": None, "d_final_state": None}
                    drawn = drawn._replace(**inputs)
                judge.run(self.operation, "triton", drawn)


RECORDER = Recorder()  # which forked processes share


def pretend_to_have_a_gpu():
    driver = {"get_current_device": lambda: 0, "get_current_stream": lambda device: 0}
    driver["get_current_target"] = lambda: HOPPER
    triton.runtime.driver.set_active(types.SimpleNamespace(**driver))
    torch.Tensor.is_cuda = True
    torch.cuda.device = contextlib.nullcontext
    torch.mm = lambda a, b, out_dtype: a.to(out_dtype) @ b.to(out_dtype)
    _common._capabilities[torch.device("cpu")] = HOPPER.arch // 10, HOPPER.arch % 10
    torch_operators.start, search.run = RECORDER.start, RECORDER.search


def measure(compiled):
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
        "vectors": compiled.asm["ptx"].count("st.global.v4"),
        "transposed": compiled.asm["ttgir"].count("tt.trans "),
        "tensor cores": compiled.asm["ptx"].count("mma."),
        "asynchronous": compiled.asm["ptx"].count("wgmma.mma_async"),
    }


def compile_program(key):
    program, kernel, arguments, options = RECORDER.launches[key]
    compiled = kernel.warmup(*arguments, grid=(1,), **options)
    return program._replace(resources=measure(compiled))


def main(*names):
    pretend_to_have_a_gpu()
    if names[0] == "--except":
        RECORDER.record_tokens_and_adam()
        names = [name for name in CASES if name not in names]
    RECORDER.record(names)
    with multiprocessing.get_context("fork").Pool() as pool:
        programs = pool.map(compile_program, RECORDER.launches, chunksize=1)
    print(json.dumps([program._asdict() for program in programs]))


if __name__ == "__main__":
    main(*sys.argv[1:])
