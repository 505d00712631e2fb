"""One of several processes, which asserts that they match one process.

Arguments: the rank of this process, a folder in which they find each other, the number of
processes, and cases. The case `training:fsdp:griffin` names the module `torch_training` of this
folder, and the first arguments of its `check`.
"""

import importlib
import pathlib
import sys

import keras  # noqa: F401

sys.modules["tensorflow"] = None  # KerasHub would import it, which takes seconds

import torch.distributed as dist  # noqa: E402


def main(rank, folder, processes, *cases):
    rank, processes = int(rank), int(processes)
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=processes)
    for case in cases:
        print(case)
        name, *arguments = case.split(":")
        module = importlib.import_module(f"tests.devices.torch_{name}")
        module.check(*arguments, rank, processes, pathlib.Path(folder))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
