"""On an NVIDIA GPU: kernels are deterministic."""

import numpy as np
import pytest

from tests.gpu import has_gpu
from tests.ops import cases, small, token_wise
from tests.ops.judge import kernels, run

if not has_gpu():
    pytest.skip("needs an NVIDIA GPU", allow_module_level=True)

CASES = {
    "bfloat16": cases.Case(4, 300, 64, "bfloat16", kinds=True, state=True),
    "short": cases.Case(4, 70, 16, "bfloat16", "float32", kinds=True),
    "float32": cases.Case(2, 1031, 32, state=True),
    "long": cases.Case(2, 7001, 128, kinds=True),
}
TOKEN_WISE = {
    "bfloat16": token_wise.Case((4, 300, 640), "bfloat16", "float32"),
    "float32": token_wise.Case((2, 1031, 96)),
    "long": token_wise.Case((9001, 700), "bfloat16", "float32"),
}
PARAMS = [
    pytest.param(case, *kernel, id=f"{'-'.join(kernel)}-{name}")
    for module, chosen in ((cases, CASES), (token_wise, TOKEN_WISE))
    for kernel in kernels(module.DRAW)
    for name, case in chosen.items()
]


@pytest.mark.parametrize(("case", "operation", "implementation"), PARAMS)
def test_kernel_is_deterministic(case, operation, implementation):
    """A kernel adds in a changing order: results of equal calls differ."""
    drawn = small.draw_case(operation, case)
    first = run(operation, implementation, drawn)
    for _ in range(8):
        for name, result in run(operation, implementation, drawn).items():
            np.testing.assert_array_equal(result, first[name], err_msg=name)
