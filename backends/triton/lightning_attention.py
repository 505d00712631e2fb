"""S_t = exp(log_decay) S_{t-1} + k_t v_t^T,  o_t = S_t^T q_t,  in every head.

Qin et al. 2024, arXiv:2405.17381 (Lightning Attention), and 2023, arXiv:2307.14995
(TransNormerLLM): `scalar_decay_attention` with constant decays, [H].
"""

from ._linear_attention.linear_attention import unsupported_reason
from ._runtime.framework import operation
from ._runtime.operation import Operation
from .scalar_decay_attention import backward, forward, results

lightning_attention = operation(
    Operation("lightning_attention", forward, results, backward, unsupported_reason)
)
