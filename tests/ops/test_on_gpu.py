"""On an NVIDIA GPU: a kernel gives the same bits every time."""

import numpy as np
import pytest

from tests.gpu import has_gpu
from tests.ops import cases, token_wise
from tests.ops.judge import kernels, run

if not has_gpu():
    pytest.skip("needs an NVIDIA GPU", allow_module_level=True)

CASES = {
    "bfloat16": cases.Case(4, 300, 64, "bfloat16", kinds=True, state=True),
    "short": cases.Case(4, 70, 16, "bfloat16", "float32", kinds=True),
    "float32": cases.Case(2, 1031, 32, state=True),
}
TOKEN_WISE = {
    "bfloat16": token_wise.Case((4, 300, 640), "bfloat16", "float32"),
    "float32": token_wise.Case((2, 1031, 96)),
}
DRAWN = {
    (operation, name): (module.draw, operation, case)
    for module, chosen in ((cases, CASES), (token_wise, TOKEN_WISE))
    for operation in module.DRAW
    for name, case in chosen.items()
}
KERNELS = [
    (*kernel, name)
    for kernel in kernels([*cases.DRAW, *token_wise.DRAW])
    for of, name in DRAWN
    if of == kernel[0]
]


@pytest.mark.parametrize(("operation", "implementation", "name"), KERNELS)
def test_the_same_bits_every_time(operation, implementation, name):
    draw, *of = DRAWN[operation, name]
    drawn = draw(*of)
    first = run(operation, implementation, drawn)
    for _ in range(8):
        for result, found in run(operation, implementation, drawn).items():
            np.testing.assert_array_equal(found, first[result], err_msg=result)
