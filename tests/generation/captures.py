"""CUDA graphs on a CPU."""

from types import SimpleNamespace


def capture_on_cpu(monkeypatch):
    """Makes torch's steps, chunks and batches capture; a replay runs the function.

    Models with `compile(jit_compile=False)` capture nothing. Returns lists of the functions that
    were captured, and of their memory pools.
    """
    import torch

    from keras_recurrent.generation import torch_graphs, torch_programs

    captured, pools = [], []
    # On a GPU, real captures of the same model get the pool after the test.
    new_pool = None if torch.cuda.is_available() else "pool"

    def capture(function, device, pool=None):
        captured.append(function)
        pools.append(pool)
        pool = pool or new_pool
        return SimpleNamespace(replay=function, pool=lambda: pool), function()

    monkeypatch.setattr(torch_graphs, "capture", capture)
    monkeypatch.setattr(
        torch_programs.Programs,
        "_graph_reason",
        lambda self, device: "`jit_compile=False`" if self._compiled is False else None,
    )
    if not torch.cuda.is_available():
        memory = SimpleNamespace(total_memory=2**40)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: memory)
    return captured, pools
