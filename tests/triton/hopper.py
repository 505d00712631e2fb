"""Compile every Triton kernel for a Hopper GPU, which need not be there. Prints JSON.

A process of its own: with the interpreter chosen, Triton compiles nothing.
"""

import json

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from keras_recurrent.backends.triton import causal_conv1d, linear_scan, rg_lru
from keras_recurrent.backends.triton._common import MAX_REGISTERS

HOPPER = GPUTarget("cuda", 90, 32)
SIZES = ("B", "T", "D", "tiles")
STATES = ("first", "last", "d_first", "d_last", "d_logit", "d_parameters", "a_logit")
INTEGERS = ("carry", "token", "document", "count", "documents")
TILE = {"BLOCK_D": 64, "GROUPS": 16, "ROWS": 4}
KERNELS = {
    "linear_scan forward": (linear_scan._forward_kernel, TILE),
    "linear_scan backward": (linear_scan._backward_kernel, TILE),
    "rg_lru forward": (rg_lru._forward_kernel, TILE),
    "rg_lru backward": (rg_lru._backward_kernel, TILE),
    "causal_conv1d places": (causal_conv1d._places_kernel, {"BLOCK": 1024}),
    "causal_conv1d forward": (causal_conv1d._forward_kernel, {**TILE, "W": 4}),
    "causal_conv1d backward": (causal_conv1d._backward_kernel, {**TILE, "W": 4, "STEPS": 8}),
}


def dtype(argument):
    if argument in SIZES:
        return "i32"
    if argument in STATES:
        return "*fp32"
    if argument in INTEGERS:
        return "*i32"
    return "*i8" if argument == "token_kind" else "*bf16"


def compile_for_hopper(kernel, constants):
    signature = {a: "constexpr" if a in constants else dtype(a) for a in kernel.arg_names}
    aligned = {
        (i,): [["tt.divisibility", 16]]
        for i, argument in enumerate(kernel.arg_names)
        if signature[argument].startswith("*") or argument in ("T", "D")
    }
    source = ASTSource(kernel, signature, constants, aligned)
    options = {"num_warps": 4, "maxnreg": MAX_REGISTERS}
    return triton.compile(source, target=HOPPER, options=options)


if __name__ == "__main__":
    compiled = {name: compile_for_hopper(*kernel) for name, kernel in KERNELS.items()}
    print(json.dumps({name: len(k.asm["cubin"]) for name, k in compiled.items()}))
