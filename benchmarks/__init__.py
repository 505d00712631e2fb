"""Benchmarks. `--backend` and `--device` take effect here, before Keras is imported."""

import argparse
import os
import sys

OPTIONS = argparse.ArgumentParser(add_help=False)
OPTIONS.add_argument(
    "--backend", choices=("jax", "tensorflow", "torch"), help="default: KERAS_BACKEND"
)
OPTIONS.add_argument("--device", help="cpu, or the number of a GPU; default: the first GPU, if any")


def make_parser(doc):
    """Returns a parser with the common options; `doc` is the docstring of the script."""
    return argparse.ArgumentParser(description=doc.partition("\n")[0], parents=[OPTIONS])


def read_shape(text):
    """Returns the integers of a size such as 8x2048."""
    return tuple(map(int, text.split("x")))


def apply_options():
    """Sets the environment variables that Keras and the backends read at import."""
    chosen, _ = OPTIONS.parse_known_args()
    if chosen.backend:
        os.environ["KERAS_BACKEND"] = chosen.backend
    if chosen.device == "cpu":
        os.environ |= {"CUDA_VISIBLE_DEVICES": "", "JAX_PLATFORMS": "cpu"}
    elif chosen.device:
        os.environ["CUDA_VISIBLE_DEVICES"] = chosen.device


if sys.argv[0] == "-m":  # `python -m benchmarks.SCRIPT` imports this package first
    apply_options()
