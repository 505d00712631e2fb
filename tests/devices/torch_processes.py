"""Processes of torch, joined by gloo, and what they found."""

import json
import os
import pathlib
import subprocess
import sys

RUN = """
import runpy, sys, keras
sys.modules["tensorflow"] = None  # KerasHub would import it, which takes seconds
runpy.run_module("tests.devices.torch_cases", run_name="__main__")
"""
ROOT = pathlib.Path(__file__).parents[2]


def several_processes(folder, *cases, processes=2):
    """What `torch_cases` finds of cases in fresh processes: the JSON that the first prints last.

    Each gets its rank, how many there are, and `folder`, in which they find each other. Where one
    fails, the others are ended, which would wait for it.
    """
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    outputs = [pathlib.Path(folder, f"output_{rank}") for rank in range(processes)]
    running = []
    for rank, path in enumerate(outputs):
        command = [sys.executable, "-c", RUN, str(rank), str(processes), str(folder)]
        with path.open("w") as output:
            running.append(
                subprocess.Popen(
                    [*command, *cases],
                    cwd=ROOT,
                    env=environment,
                    stdout=output,
                    stderr=output,
                )
            )
    try:
        failed = None
        while failed is None and any(process.poll() is None for process in running):
            for rank, process in enumerate(running):
                try:
                    process.wait(timeout=0.1)
                except subprocess.TimeoutExpired:
                    continue
                if process.returncode and failed is None:
                    failed = rank
        codes = [process.poll() for process in running]
    finally:
        for process in running:
            process.kill()
            process.wait()
    text = [path.read_text() for path in outputs]
    assert codes == [0] * processes, "\n".join(text)
    return json.loads(text[0].splitlines()[-1])


def join(arguments):
    """In such a process: joins the others. Returns rank, processes, folder and the rest."""
    import torch.distributed

    rank, processes, folder, *further = arguments
    torch.distributed.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=int(rank),
        world_size=int(processes),
    )
    return int(rank), int(processes), pathlib.Path(folder), further
