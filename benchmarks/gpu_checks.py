"""Compares results with float64 before they are timed.

The reference is the plain version of `backends/torch` in float64. The tolerance is the rule of the
tests: twice the error of the plain version in the dtype of the tensors, plus two units in the last
place. Before each checked call, free memory is filled with NaN, which reveals reads of
uninitialized memory.
"""

import math
import time

import torch

MOST = 24 * 2**30  # bytes to fill with NaN
# Baselines round at other places and are judged by their overall error.
FAR_OFF = 0.05


def poison():
    """Fills the memory of the next tensors with NaN."""
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info()
    held = [torch.full((min(MOST, free // 2) // 4,), math.nan, device="cuda")]
    held += [torch.full((2**k,), math.nan, device="cuda") for k in range(7, 18) for _ in range(4)]
    del held


def double(tensor):
    return tensor.double() if tensor.is_floating_point() else tensor


def results(function, tensors, d_output):
    """Returns the output and the gradient of each floating-point tensor (None if it has none)."""
    tensors = [t.detach().requires_grad_(t.is_floating_point()) for t in tensors]
    leaves = [t for t in tensors if t.requires_grad]
    output = function(*tensors)
    gradients = torch.autograd.grad(output, leaves, d_output.to(output.dtype), allow_unused=True)
    return [output.detach(), *gradients]


class Judge:
    """Compares implementations with the reference on the same tensors.

    Args:
        plain: the plain version, a function of the tensors that returns the output.
        tensors: its arguments.
        d_output: the gradient of the output.
        own_units: If True, the tolerance of each result has the units of its dtype; else those
            of the coarsest dtype of all.
    """

    def __init__(self, plain, tensors, d_output, own_units=False):
        self.tensors, self.d_output = tensors, d_output
        self.truth = results(plain, [double(t) for t in tensors], d_output)
        torch.cuda.empty_cache()
        of_plain = self._errors(results(plain, tensors, d_output))
        dtypes = [d_output.dtype, *(t.dtype for t in tensors if t.is_floating_point())]
        if not own_units:
            dtypes = [max(dtypes, key=lambda dtype: torch.finfo(dtype).eps)] * len(dtypes)
        self.allowed = [
            2 * error + 2 * unit(dtype, truth)
            for error, dtype, truth in zip(of_plain, dtypes, self.truth, strict=True)
        ]

    def _errors(self, found):
        """Returns the largest error of each result; infinite if one is not finite."""
        return [
            None if f is None else _finite((_flat(f) - _flat(t)).abs().max().item())
            for f, t in zip(found, self.truth, strict=True)
        ]

    def check(self, function):
        """Calls an implementation in memory full of NaN: (seconds of the call, *`judgement`)."""
        poison()
        torch.cuda.synchronize()
        start = time.perf_counter()
        found = results(function, self.tensors, self.d_output)
        torch.cuda.synchronize()
        return time.perf_counter() - start, *self.judgement(found)

    def judgement(self, found):
        """Returns (largest error / tolerance, largest relative error of a whole result)."""
        by_rule = far = 0.0
        errors = self._errors(found)
        for error, allowed, f, t in zip(errors, self.allowed, found, self.truth, strict=True):
            if error is None:
                continue
            by_rule = max(by_rule, _ratio(error, allowed))
            difference = torch.linalg.vector_norm(_flat(f) - _flat(t)).item()
            far = max(far, _ratio(difference, torch.linalg.vector_norm(t).item()))
        return by_rule, far

    def judgement_of_samples(self, samples):
        """Like `judgement`, for every n-th number of each result (`sampled`) in NumPy."""
        whole = self.truth
        self.truth = [sampled(t.flatten()) for t in whole]
        found = [None if s is None else torch.from_numpy(s).to("cuda").double() for s in samples]
        try:
            return self.judgement(found)
        finally:
            self.truth = whole


def sampled(flat):
    """Returns about a million numbers of a flat array: every n-th, where n is odd."""
    return flat[:: 1 | (len(flat) >> 20)]


def _flat(tensor):
    return tensor.detach().double().flatten()


def _finite(number):
    return number if math.isfinite(number) else math.inf


def _ratio(error, size):
    return _finite(error / size) if size else (math.inf if error else 0.0)


def unit(dtype, truth):
    """Returns a unit in the last place of the largest number."""
    largest = truth.abs().max().item()
    return torch.finfo(dtype).eps * 2.0 ** math.floor(math.log2(largest)) if largest else 0.0
