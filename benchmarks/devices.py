"""Compares all GPUs of a host with one.

The argument selects what the devices split: sequences of a batch (data parallel), weights (FSDP),
heads (tensor parallel, generation at batch size 1 on JAX only), or time (sequence parallel). The
backend is JAX or torch.

Each count of devices is measured in fresh processes, one per device on torch. `--toy` tries a tiny
size on a CPU that simulates `--devices 2`.
"""

import argparse
import contextlib
import json
import os
import subprocess
import sys
from typing import Any

# JAX reads this on import; it affects CPUs only.
os.environ["XLA_FLAGS"] = " ".join(
    ("--xla_force_host_platform_device_count=8", os.environ.get("XLA_FLAGS", ""))
)
os.environ.setdefault("KERAS_BACKEND", "jax")

import keras
import numpy as np

from benchmarks import make_parser
from benchmarks.decoding import seconds_a_token
from benchmarks.models import make_model
from benchmarks.timing import BACKEND, print_results, random_tokens, seconds
from keras_recurrent import exclude_from_weight_decay, implementation, which_generation
from keras_recurrent.models import GriffinBackbone, HGRN2Backbone

RUNS = 3


def make(arguments):
    toy, name = "hgrn2_tiny", "hgrn2"
    if arguments.split == "heads":
        toy, name = "hawk_tiny", arguments.preset
    name, sizes = (toy, {"vocabulary_size": 64}) if arguments.toy else (name, {})
    with keras.RematScope() if arguments.split == "time" else contextlib.nullcontext():
        return make_model(name, arguments.dtype, **sizes)


def batch(model, arguments, devices):
    """Returns sequences for all devices, and the next token of each token."""
    rows, length = (1, arguments.tokens) if arguments.split == "time" else (8 * devices, 2048)
    if arguments.toy:
        rows, length = (1, 64) if arguments.split == "time" else (2 * devices, 16)
    tokens = random_tokens(model.backbone.vocabulary_size, rows, length)
    x = {"token_ids": tokens, "padding_mask": np.ones_like(tokens)}
    return x, np.roll(tokens, -1, axis=1)


def repeated(step, tokens, steps):
    """Returns tokens/s of each of several runs."""
    for _ in range(2):  # compiles; JAX compiles again for arrays with the layout of a step
        step()
    return [tokens / seconds(step, steps) for _ in range(RUNS)]


def measure_jax(arguments, count):
    devices = keras.distribution.list_devices()[:count]
    scope = contextlib.nullcontext()
    if arguments.split == "rows":
        scope = keras.distribution.DataParallel(devices=devices).scope()
    elif count > 1:
        sizes = [count if arguments.split == w else 1 for w in ("weights", "time", "heads")]
        mesh = keras.distribution.DeviceMesh(sizes, ("batch", "sequence", "model"), devices)
        network = GriffinBackbone if arguments.split == "heads" else HGRN2Backbone
        layout_map = network.get_layout_map(mesh)
        scope = keras.distribution.ModelParallel(layout_map=layout_map).scope()
    with scope:
        model = make(arguments)
        # In bfloat16, 0.999 rounds to 1, and Keras's AdamW changes no weight.
        optimizer = keras.optimizers.AdamW(1e-4, beta_2=0.99)
        exclude_from_weight_decay(optimizer, model)
        model.compile(optimizer, model.loss, weighted_metrics=[])
        if arguments.split == "heads":
            speeds = generation_speeds(model, arguments)
            return {"speeds": speeds, "bytes": bytes_on_device(model.weights)}
        x, y = batch(model, arguments, count)

        def step():
            loss = model.train_on_batch(x, y)
            if not np.isfinite(float(loss)):  # an error of the device is raised here
                raise ValueError(f"The loss is {loss}.")

        speeds = repeated(step, y.size, arguments.steps)
    variables = (*model.weights, *model.optimizer.variables)
    return {"speeds": speeds, "bytes": bytes_on_device(variables)}


def generation_speeds(model, arguments):
    """Returns tokens/s at batch size 1."""
    few, many = (2, 8) if arguments.toy else (8, 264)
    with implementation("jax" if arguments.layers else None):
        times = [seconds_a_token(model, 1, many, 16, few) for _ in range(2 + RUNS)]
    print(which_generation(model), file=sys.stderr)
    return [1 / time for time in times[2:]]  # the first two compile


def bytes_on_device(variables):
    return sum(v.value.addressable_shards[0].data.nbytes for v in variables)


def measure_torch(arguments, count):
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    from keras_recurrent.devices.torch_modules import TorchModule
    from keras_recurrent.devices.torch_sequence import sequence_parallel

    has_gpu = torch.cuda.is_available()
    if has_gpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if has_gpu else "gloo")
    model = make(arguments)
    module = TorchModule(model)
    called: Any = module
    if arguments.split == "weights" and count > 1:
        called = module.fully_shard()
    elif count > 1:
        called = DistributedDataParallel(module, gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(module.parameters(), 1e-5, fused=has_gpu)
    x, y = batch(model, arguments, count)
    axis = 1 if arguments.split == "time" else 0
    device = next(module.parameters()).device

    def local_part(tokens):
        return torch.tensor(np.array_split(tokens, count, axis)[dist.get_rank()], device=device)

    inputs, labels = {name: local_part(tokens) for name, tokens in x.items()}, local_part(y)
    parts_of_rows = arguments.split == "time" and count > 1

    def step():
        with sequence_parallel() if parts_of_rows else contextlib.nullcontext():
            called(inputs, labels=labels).backward()
        optimizer.step()
        optimizer.zero_grad()
        if has_gpu:
            torch.cuda.synchronize()

    speeds = repeated(step, y.size, arguments.steps)
    kept = [*module.parameters(), *(t for s in optimizer.state.values() for t in s.values())]
    kept = [t.to_local() if hasattr(t, "to_local") else t for t in kept]
    found = {"speeds": speeds, "bytes": sum(t.nbytes for t in kept)}
    dist.barrier()
    rank = dist.get_rank()
    dist.destroy_process_group()
    return found if rank == 0 else None


def measure_in_processes(arguments, count):
    """Measures `count` devices in fresh processes; returns the JSON of the first."""
    script = ("benchmarks.devices", *sys.argv[1:], "--measure", str(count))
    launch = ["-m"]
    if BACKEND == "torch":
        launch += ["torch.distributed.run", "--standalone", f"--nproc-per-node={count}", "-m"]
    done = subprocess.run([sys.executable, *launch, *script], stdout=subprocess.PIPE, text=True)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    return json.loads(lines[-1]) if done.returncode == 0 else None


def measure_counts(arguments):
    """Yields the speeds of one device and of all, and the bytes of weights and slots."""
    one = None
    for count in (1, arguments.devices):
        line = {"split": arguments.split, "backend": BACKEND, "dtype policy": arguments.dtype}
        line["devices"] = count
        found = measure_in_processes(arguments, count)
        if found is None:
            raise SystemExit(f"failed: {line}")
        one = one or found
        speeds, (median, first) = found["speeds"], (np.median(f["speeds"]) for f in (found, one))
        yield {
            **line,
            "tokens/s": f"{min(speeds):,.0f} to {max(speeds):,.0f}",
            "times the speed": round(float(median / first), 2),
            "GiB a device": round(found["bytes"] / 2**30, 3),
            "times the memory": round(found["bytes"] / one["bytes"], 3),
        }


def main():
    parser = make_parser(__doc__)
    parser.add_argument("split", choices=("rows", "weights", "heads", "time"))
    parser.add_argument("--devices", type=int, default=2)
    policies = ("float32", "mixed_bfloat16", "bfloat16")
    parser.add_argument("--dtype", choices=policies, default="bfloat16")
    parser.add_argument("--tokens", type=int, default=131_072, help="sequence length of `time`")
    parser.add_argument("--steps", type=int, default=10, help="training steps of each of 3 runs")
    parser.add_argument("--preset", default="recurrentgemma_2b", help="Griffin preset of `heads`")
    parser.add_argument("--layers", action="store_true", help="`heads` without fused steps")
    parser.add_argument("--toy", action="store_true")
    parser.add_argument("--measure", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if BACKEND not in ("jax", "torch") or (BACKEND, arguments.split) == ("torch", "heads"):
        parser.error(f"there is no row `{arguments.split}` on {BACKEND}")
    if arguments.measure:
        found = (measure_jax if BACKEND == "jax" else measure_torch)(arguments, arguments.measure)
        if found:
            print(json.dumps(found))
        return
    print_results(measure_counts(arguments))


if __name__ == "__main__":
    main()
