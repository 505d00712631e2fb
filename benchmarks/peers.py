"""What the benchmarks on a GPU do for their peers."""

import concurrent.futures

from triton.runtime import Autotuner
from triton.runtime._async_compile import AsyncCompileMode


def compile_side_by_side():
    """Lets Triton compile all configurations of a kernel at once before it times them in turn.

    flash-linear-attention tries hundreds, for minutes; what it finds is the same.
    """
    prune = Autotuner.prune_configs

    def prune_and_compile(tuner, options):
        configs = prune(tuner, options)
        arguments = tuner.nargs.values()
        with (
            concurrent.futures.ThreadPoolExecutor() as pool,
            AsyncCompileMode(pool, ignore_errors=True),  # the tuner meets them again
        ):
            for config in configs:
                chosen = {**options, **config.all_kwargs(), "warmup": True}
                tuner.fn.run(*arguments, **chosen)
        return configs

    Autotuner.prune_configs = prune_and_compile
