"""What several processes compute beside what one computes, printed as JSON.

Arguments are cases, such as `training:fsdp:griffin` or `sequences:rg_lru`: a file beside this one,
and what its `compare` takes.
"""

import importlib
import json
import sys

import torch.distributed as dist

from tests.devices.torch_processes import join


def main(arguments):
    rank, processes, folder, cases = join(arguments)
    found = {}
    for case in cases:
        name, *what = case.split(":")
        module = importlib.import_module(f"tests.devices.torch_{name}")
        found[case] = module.compare(*what, rank, processes, folder)
    dist.destroy_process_group()
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1:])
