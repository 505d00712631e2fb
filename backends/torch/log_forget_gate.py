"""log f = log(β + (1 - β) σ(logits)).  Qin et al. 2023, arXiv:2311.04823, section 3.2."""

import torch
from torch.nn import functional as F

from ._common import accumulation_dtype


def log_forget_gate(logits, lower_bound=None):
    """logits: [..., D]; lower_bound: [2, D], log β and log(1 - β), or None, β = 0.

    Returns [..., D] in float32, or float64 if an argument is float64.
    """
    dtype = accumulation_dtype(logits, lower_bound)
    logits = logits.to(dtype)
    log_s = F.logsigmoid(logits)
    if lower_bound is None:
        return log_s
    log_bound, log_rest = lower_bound.to(dtype)
    log_sum = torch.logaddexp(log_bound, log_rest + log_s)
    forgotten = log_rest.detach().exp() * torch.sigmoid(-logits.detach())
    # Near 1, the value is log(1 - forgotten) and the gradient that of the sum.
    near_1 = torch.log1p(-forgotten) + (log_sum - log_sum.detach())
    return torch.where(forgotten <= 0.5, near_1, log_sum)
