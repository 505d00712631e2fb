"""Starts the process that times operations on JAX (`gpu_on_jax`) for `benchmarks.gpu`."""

import importlib.util
import json
import subprocess
import sys
import tempfile
from typing import Any

import numpy as np
import torch

from benchmarks.gpu_timing import Times
from keras_recurrent.import_order import CUDA_PLUGINS


class OnJax:
    """The process, if JAX is installed for CUDA."""

    def __init__(self, wanted=True):
        self.process: Any = None
        if wanted and any(map(importlib.util.find_spec, CUDA_PLUGINS)):
            self.process = subprocess.Popen(
                [sys.executable, "-m", "benchmarks.gpu_on_jax"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )

    def measure(self, work, tensors, d_output):
        """Returns {name: (samples of the results, figures)} on the same tensors.

        The speed of a GPU depends on the values it multiplies.
        """
        if self.process is None:
            return {}
        message = {"operation": work.operation, "tied": work.tied, "options": work.options}
        with tempfile.TemporaryDirectory() as folder:
            given = [d_output, *tensors]
            files = [
                (f"{folder}/{i}.npy", str(t.dtype).removeprefix("torch."))
                for i, t in enumerate(given)
            ]
            for (file, dtype), tensor in zip(files, given, strict=True):
                bits = tensor.detach().view(torch.int16) if dtype == "bfloat16" else tensor.detach()
                np.save(file, bits.cpu().numpy())
            message |= {"tensors": files, "samples": f"{folder}/samples"}
            print(json.dumps(message), file=self.process.stdin, flush=True)
            answer = self.process.stdout.readline()
            if not answer:
                self.process = None
                print("the process on JAX has ended", file=sys.stderr, flush=True)
                return {}
            found = {}
            for name, figures in json.loads(answer).items():
                samples = _samples(figures.pop("samples"))
                figures |= {n: Times(*figures[n]) for n in ("forward", "both", "wall")}
                found["triton on JAX" if name == "triton" else "JAX"] = samples, figures
            return found


def _samples(file):
    with np.load(file) as arrays:
        return [arrays[f"arr_{i}"] for i in range(len(arrays.files))]
