"""log f = log(β + (1 - β) σ(logits)).  Qin et al. 2023, arXiv:2311.04823, section 3.2."""

import torch
from torch.nn import functional as F

from keras_recurrent.backends.torch._common import accumulation_dtype


def log_forget_gate(logits, lower_bound=None):
    """logits: [..., D]; lower_bound: [2, D], log β and log(1 - β), or None, β = 0.

    Returns [..., D] in float32, or float64 if an argument is float64.
    """
    dtype = accumulation_dtype(logits, lower_bound)
    log_f = F.logsigmoid(logits.to(dtype))
    if lower_bound is None:
        return log_f
    log_bound, log_rest = lower_bound.to(dtype)
    log_f = torch.logaddexp(log_bound, log_rest + log_f)
    # Rounding may take log f above 0. It is cut off there, but its gradient is not.
    return log_f - log_f.detach().clamp(min=0)
