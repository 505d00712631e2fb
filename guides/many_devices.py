"""Train one model on many devices, split in four ways, with the losses of one device.

    KERAS_BACKEND=jax python guides/many_devices.py --split weights

JAX uses `keras.distribution`; torch uses DistributedDataParallel, FSDP2, DTensor and process
groups; TensorFlow uses MirroredStrategy and splits batches only. `--split` is one of

    rows      data parallelism: each device has all weights and a part of the batch
    weights   FSDP (ZeRO-3): additionally, a part of each weight, gathered when it is used
    heads     tensor parallelism: each device has the whole batch and a part of the heads
    time      sequence parallelism: each device has a part of each sequence's tokens

A tiny HGRN2 is trained on the available devices, or on simulated ones: eight on JAX, two on torch
and TensorFlow. On torch the script starts one process per device; `torchrun
guides/many_devices.py` works as well. It then prints meshes with which models of 1.3B to 15B
parameters fit 8 and 64 devices, and estimates for 1,024. It takes a minute on two CPU cores.
"""

import argparse
import contextlib
import itertools
import math
import os
import pathlib
import subprocess
import sys
import tempfile
import types
from typing import Any, NamedTuple

# Read once, when Keras and JAX are imported. Real devices take precedence over simulated ones.
os.environ.setdefault("KERAS_BACKEND", "jax")
os.environ["XLA_FLAGS"] = " ".join(
    ("--xla_force_host_platform_device_count=8", os.environ.get("XLA_FLAGS", ""))
)

import keras
import numpy as np

from keras_recurrent import exclude_from_weight_decay
from keras_recurrent.models import (
    HGRN2Backbone,
    HGRN2CausalLM,
    TransNormerBackbone,
    memory_sizes,
    training_sizes,
)
from keras_recurrent.presets import hgrn2, transnormer

SPLITS = ("rows", "weights", "heads", "time")
OUTPUT = pathlib.Path(tempfile.gettempdir(), "many_devices")
ROWS, LENGTH, STEPS, LEARNING_RATE = 8, 64, 4, 3e-3


# --- 1. A tiny model and a batch: the first bytes of this file ---


def make():
    keras.utils.set_random_seed(0)  # equal weights in every process
    backbone = HGRN2Backbone(
        vocabulary_size=256, num_layers=2, hidden_dim=64, intermediate_dim=128, expand_ratio=8
    )
    return HGRN2CausalLM(backbone)


def batch():
    tokens = np.frombuffer(pathlib.Path(__file__).read_bytes(), "uint8")
    tokens = tokens[: ROWS * (LENGTH + 1)].reshape(ROWS, -1).astype("int32")
    x = {"token_ids": tokens[:, :-1], "padding_mask": np.ones((ROWS, LENGTH), "int32")}
    return x, tokens[:, 1:]


# --- 2. JAX and TensorFlow: a scope around model and `fit` ---


def fit(model):
    """Trains a few steps on the batch and returns the losses."""
    is_jax = keras.config.backend() == "jax"
    # On TensorFlow each replica would clip its gradient before the gradients are summed.
    optimizer = keras.optimizers.AdamW(LEARNING_RATE, global_clipnorm=1.0 if is_jax else None)
    exclude_from_weight_decay(optimizer, model)
    model.compile(optimizer, model.loss, weighted_metrics=[], jit_compile=is_jax)
    x, y = batch()
    return model.fit(x, y, batch_size=ROWS, epochs=STEPS, shuffle=False, verbose=0).history["loss"]


def distribution_of(split, devices):
    if split == "rows":
        return keras.distribution.DataParallel(devices=devices)
    sizes = [len(devices) if split == along else 1 for along in ("weights", "time", "heads")]
    mesh = keras.distribution.DeviceMesh(sizes, ("batch", "sequence", "model"), devices)
    return keras.distribution.ModelParallel(layout_map=HGRN2Backbone.get_layout_map(mesh))


def run_jax(arguments):
    one = fit(make())
    devices = keras.distribution.list_devices()
    with distribution_of(arguments.split, devices).scope():
        model = make()
        many = fit(model)
        # Gathers one weight at a time; with several processes, the first one writes the file.
        model.save_weights(arguments.output / "model.weights.h5")
    compare(f"JAX on {len(devices)} devices", one, many)
    parts = [(w.path, w.shape, w.value.addressable_shards[0].data.shape) for w in model.weights]
    show_parts(parts)


def run_tensorflow(arguments):
    import tensorflow as tf

    if arguments.split != "rows":
        raise SystemExit("TensorFlow supports only --split rows. Use JAX or torch for others.")
    devices = tf.config.list_physical_devices("GPU")
    if not devices:
        (cpu,) = tf.config.list_physical_devices("CPU")
        pair = [tf.config.LogicalDeviceConfiguration()] * 2
        tf.config.set_logical_device_configuration(cpu, pair)
    kind = "GPU" if devices else "CPU"
    strategy = tf.distribute.MirroredStrategy(
        [device.name for device in tf.config.list_logical_devices(kind)]
    )
    one = fit(make())
    with strategy.scope():
        model = make()
        many = fit(model)
        model.save_weights(arguments.output / "model.weights.h5")
    compare(f"TensorFlow on {strategy.num_replicas_in_sync} devices", one, many)
    show_parts([(w.path, w.shape, w.shape) for w in model.weights])


# --- 3. torch: processes started by `torchrun`, and a custom training loop ---


def run_torch(arguments):
    import torch

    if "RANK" in os.environ:
        torch_process(arguments.split, arguments.output, arguments.mixed_precision)
        return
    count = torch.cuda.device_count() or 2
    launch = ("torch.distributed.run", "--standalone", f"--nproc-per-node={count}")
    script = (__file__, *sys.argv[1:], "--no-tables")
    subprocess.run([sys.executable, "-m", *launch, *script], check=True)


def torch_process(split, folder, mixed_precision):
    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp

    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    rank, processes = dist.get_rank(), dist.get_world_size()
    one = alone()
    module, called, around = distributed(make(), split, mixed_precision)
    part = slice(None), slice(None)
    if split in ("rows", "weights"):
        part = share(ROWS, rank, processes), slice(None)
    if split == "time":  # labels come from whole sequences, as the next device has the next token
        part = slice(None), share(LENGTH, rank, processes)
    x, y = batch()
    x, y = {name: torch.tensor(tokens[part]) for name, tokens in x.items()}, y[part]
    many = learn(module, called, x, y, around)
    losses = torch.tensor(many, device=next(module.parameters()).device)
    dist.all_reduce(losses)
    dcp.save({"model": module.state_dict()}, checkpoint_id=folder / "shards")
    if rank == 0:
        compare(f"torch on {processes} devices", one, (losses / processes).tolist())
        show_parts([(n, p.shape, local(p).shape) for n, p in module.named_parameters()])
        read_again(folder / "shards")
    dist.barrier()
    dist.destroy_process_group()


def alone():
    from keras_recurrent.devices.torch_modules import TorchModule

    module = TorchModule(make())
    x, y = batch()
    return learn(module, module, x, y, contextlib.nullcontext)


def share(size, rank, processes):
    return slice(rank * size // processes, (rank + 1) * size // processes)


def distributed(model, split, mixed_precision):
    """Returns the module with the parameters, the callable, and a context for each step."""
    import torch
    from torch.distributed.fsdp import MixedPrecisionPolicy
    from torch.nn.parallel import DistributedDataParallel

    from keras_recurrent.devices.torch_modules import TorchModule
    from keras_recurrent.devices.torch_sequence import sequence_parallel

    module = TorchModule(model)
    if split == "heads":
        return heads_split(module)
    if split == "weights":
        # Weights are gathered in 16 bits; gradients are summed and weights stored in 32.
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
        policy = policy if mixed_precision else MixedPrecisionPolicy()
        return module, module.fully_shard(mp_policy=policy), contextlib.nullcontext
    around = sequence_parallel if split == "time" else contextlib.nullcontext
    return module, DistributedDataParallel(module), around


def heads_split(module):
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import distribute_module
    from torch.distributed.tensor.experimental import implicit_replication
    from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module

    from keras_recurrent.devices.torch_tensor_parallel import ColumnParallel, RowParallel

    mesh = init_device_mesh(next(module.parameters()).device.type, (dist.get_world_size(),))
    mixing, mlp = "block_*.temporal_block", "block_*.mlp"
    plan: dict[str, ParallelStyle]
    plan = {f"{mixing}.{name}": ColumnParallel() for name in ("q_proj", "f_proj", "i_proj")}
    plan |= {f"{mlp}.{name}": ColumnParallel() for name in ("gate_proj", "up_proj")}
    plan |= {f"{mixing}.o_proj": RowParallel(), f"{mlp}.down_proj": RowParallel()}
    module = distribute_module(parallelize_module(module, mesh, plan), mesh)
    return module, module, implicit_replication


def learn(module, called, x, y, around):
    import torch

    undecayed = module.find_parameters(exclude_from_weight_decay(None, module.model))
    ids = {id(parameter) for parameter in undecayed}
    others = [parameter for parameter in module.parameters() if id(parameter) not in ids]
    groups = [{"params": others}, {"params": undecayed, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, LEARNING_RATE)
    losses = []
    for _ in range(STEPS):
        with around():
            loss = module.model.loss(y, called(x))
            loss.backward()
        torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(whole(loss.detach())))
    return losses


def whole(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def local(tensor):
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def read_again(shards):
    """Loads the checkpoint of all processes into a model in one process."""
    import torch
    import torch.distributed.checkpoint as dcp

    from keras_recurrent.devices.torch_modules import TorchModule

    module = TorchModule(make())
    state = {"model": module.state_dict()}
    dcp.load(state, checkpoint_id=shards, no_dist=True)
    module.load_state_dict(state["model"])
    x, y = batch()
    with torch.no_grad():
        print(f"One process reads the shards: its loss is {module.model.loss(y, module(x)):.4f}")


# --- 4. Results ---


def compare(where, one, many):
    for step, losses in enumerate(zip(one, many, strict=True), start=1):
        print("Step {}: loss {:.6f} on one device, {:.6f} on all".format(step, *losses))
    print(f"{where}: losses differ by {max(abs(np.subtract(one, many))):.1e} at most")


def show_parts(parts):
    """Prints shapes of weights. parts: name, shape and one device's shape of each weight."""
    shown = [part for part in parts if "block_1" in part[0] and "kernel" in part[0]]
    for name, shape, own in (*parts[:1], *shown):
        print(f"  {name}: {tuple(own)} of {tuple(shape)}")
    numbers = [sum(np.prod(part[i]) for part in parts) for i in (2, 1)]
    print("A device has {:,.0f} of {:,.0f} numbers of the weights".format(*numbers))


# --- 5. Meshes for models that do not fit one device: computed, not measured ---


def sizes_of(preset):
    return types.SimpleNamespace(parameters=preset.parameters, **preset.backbone_arguments)


MODELS: dict[str, tuple[str, Any, Any, int]] = {  # preset, sizes, class with layouts, heads
    "1.3B": ("hgrn2_1.3b_100b", sizes_of(hgrn2.SIZES["hgrn2_1.3b_100b"]), HGRN2Backbone, 16),
    "7B": ("tnl_7b", sizes_of(transnormer.SIZES["tnl_7b"]), TransNormerBackbone, 32),
    "15B": ("tnl_15b", sizes_of(transnormer.SIZES["tnl_15b"]), TransNormerBackbone, 40),
}
ROOM = 80 * 2**30  # memory of a device in bytes
SPARE = 0.9  # fraction of the memory that a plan may use
HOST = 8  # devices connected by NVLink
NVLINK, INFINIBAND = 450e9, 50e9  # bytes/s per device and direction, assumed
FLOPS = 400e12  # 16-bit matrix products, about half of the peak, assumed


class Mesh(NamedTuple):
    """Number of devices along each axis; neighbors along the last axis share a host."""

    data: int
    sequence: int
    model: int

    def link(self, axis):
        """Returns the bandwidth of the slowest link along this axis."""
        reach = {"model": 1, "sequence": self.model, "data": self.model * self.sequence}[axis]
        return NVLINK if reach * getattr(self, axis) <= HOST else INFINIBAND

    def layouts(self, family):
        devices = [f"gpu:{i}" for i in range(np.prod(self))]
        names = ("batch", "sequence", "model")
        return family.get_layout_map(keras.distribution.DeviceMesh(self, names, devices))


class Plan(NamedTuple):
    """Estimate of a training step on one device: memory, and seconds without overlap."""

    model: str
    mesh: Mesh
    rows: int  # global batch size
    length: int

    @property
    def tokens(self):
        return self.rows * self.length / (self.mesh.data * self.mesh.sequence)

    def kept(self):
        """Returns the bytes of weights, gradients and Adam's slots in 32 bits, as sharded."""
        preset, _, family, _ = MODELS[self.model]
        return training_sizes(preset, layout_map=self.mesh.layouts(family)).total

    def activations(self):
        """Returns the approximate bytes of activations in 16 bits.

        These are the inputs of all blocks (a `keras.RematScope`), everything inside one block, the
        logits with their gradients, and the gathered weights of two blocks.
        """
        size = MODELS[self.model][1]
        inside = (10 * size.hidden_dim + 4 * size.intermediate_dim) / self.mesh.model
        logits = 2 * size.vocabulary_size / self.mesh.model
        numbers = self.tokens * (size.num_layers * size.hidden_dim + inside + logits)
        return 2 * (numbers + 2 * size.parameters / size.num_layers / self.mesh.model)

    def bytes_moved(self):
        """Returns `{(kind, mesh axis): bytes}` of the communication."""
        preset, size, _, _ = MODELS[self.model]
        data, sequence, model = self.mesh
        weights = "data" if data > 1 else "sequence"
        spread = getattr(self.mesh, weights)
        # Weights are gathered in 16 bits, forward and backward; gradients are summed in 32.
        moved = {("weights", weights): 8 * size.parameters / model * (1 - 1 / spread)}
        if data > 1:  # devices that share a sequence hold the same part of the weights
            part = 4 * size.parameters / model / data
            moved["gradients", "sequence"] = 2 * part * (1 - 1 / sequence)
        # Two all-reduces per block forward, twice with rematerialization, and backward.
        sums = 6 * size.num_layers * self.tokens * size.hidden_dim * 2
        moved["activations", "model"] = 2 * sums * (1 - 1 / model)
        # States after each part of a sequence, forward, recomputed, and their gradients. JAX sends
        # them over 1, 2, 4, ... devices, then to the next one; torch gathers all.
        states = memory_sizes(preset, 1, self.length).cache * self.rows / data / model
        if sequence > 1:
            moved["states", "sequence"] = 3 * states * (1 + math.ceil(math.log2(sequence)))
        return moved

    def seconds(self):
        """Returns the seconds of arithmetic and of each kind of communication.

        A token takes 8 operations per weight: 2 forward, 2 with rematerialization, 4 backward.
        """
        parameters = MODELS[self.model][1].parameters
        found = {"arithmetic": 8 * parameters * self.tokens / self.mesh.model / FLOPS}
        for (what, axis), moved in self.bytes_moved().items():
            if moved:
                found[what] = moved / self.mesh.link(axis)
        return found

    def step(self):
        """Returns the seconds of a step if only weights and gradients overlap with arithmetic."""
        found = self.seconds()
        overlapped = found.pop("weights", 0) + found.pop("gradients", 0)
        return max(found.pop("arithmetic"), overlapped) + sum(found.values())


def best_plan(model, devices, rows, length):
    """Returns the plan with the fastest mesh that fits, or None."""
    heads = MODELS[model][3]
    divisors = [n for n in range(1, devices + 1) if devices % n == 0]
    meshes = [
        Mesh(data, devices // data // split, split)
        for data, split in itertools.product(divisors, divisors)
        if devices % (data * split) == 0 and rows % data == 0
        if split <= HOST and heads % split == 0
    ]
    plans = [Plan(model, mesh, rows, length) for mesh in meshes]
    for plan in sorted(plans, key=Plan.step):
        if plan.activations() < SPARE * ROOM and plan.kept() + plan.activations() < SPARE * ROOM:
            return plan
    return None


def row(*cells):
    print("| " + " | ".join(map(str, cells)) + " |")


def table(*header):
    row(*header)
    row(*["---"] * len(header))


def memory_table():
    print("\nFastest meshes (data, sequence, model) by estimate that fit devices of 80 GiB:\n")
    header = ("model", "devices", "rows × tokens", "mesh", "weights, gradients, slots GiB")
    table(*header, "activations GiB", "a copy of all GiB")
    for model, devices in itertools.product(MODELS, (8, 64)):
        for rows, length in ((devices, 4096), (1, 2**20)):
            plan = best_plan(model, devices, rows, length)
            cells = (model, devices, f"{rows} × {length:,}")
            if plan is None:
                row(*cells, "none", "", "", "")
                continue
            found = plan.kept(), plan.activations(), training_sizes(MODELS[model][0]).total
            row(*cells, tuple(plan.mesh), *[f"{n / 2**30:.1f}" for n in found])


def thousand_devices():
    print("\n1,024 devices: estimates, not measurements. Assumed are NVLink with")
    print(f"{NVLINK / 1e9:.0f} GB/s a direction among {HOST} devices of a host, InfiniBand with")
    print(
        f"{INFINIBAND / 1e9:.0f} GB/s a device, and {FLOPS / 1e12:.0f} TFLOP/s in bfloat16. GB and"
    )
    print("seconds per device and step; 1,024 sequences of 4,096 tokens, and 4 of 1,048,576:\n")
    kinds = ("weights", "gradients", "activations", "states")
    table("model", "mesh", *[f"{kind} GB" for kind in kinds], "step s", "arithmetic s", "limit")
    short = [Mesh(1024, 1, 1), Mesh(256, 1, 4), Mesh(128, 1, 8)]
    long = [Mesh(4, 256, 1), Mesh(1, 1024, 1), Mesh(4, 32, 8), Mesh(1, 128, 8)]
    for model, mesh in itertools.product(MODELS, short + long):
        rows, length = (1024, 4096) if mesh in short else (4, 2**20)
        plan = Plan(model, mesh, rows, length)
        moved = {what: n / 1e9 for (what, _), n in plan.bytes_moved().items()}
        seconds = plan.seconds()
        limit = max(seconds, key=seconds.get)
        if plan.kept() + plan.activations() > SPARE * ROOM:
            limit = "does not fit"
        numbers = [f"{moved.get(kind, 0):.2f}" for kind in kinds]
        row(
            model,
            tuple(mesh),
            *numbers,
            f"{plan.step():.2f}",
            f"{seconds['arithmetic']:.2f}",
            limit,
        )


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--split", choices=SPLITS, default="rows")
    parser.add_argument("--mixed-precision", action="store_true", help="computes in bfloat16")
    parser.add_argument("--output", type=pathlib.Path, default=OUTPUT, help="folder for weights")
    parser.add_argument("--no-tables", action="store_true", help="omits the estimates")
    arguments = parser.parse_args()
    arguments.output.mkdir(parents=True, exist_ok=True)
    if arguments.mixed_precision:
        keras.config.set_dtype_policy("mixed_bfloat16")
    RUN[keras.config.backend()](arguments)
    if not arguments.no_tables and os.environ.get("RANK", "0") == "0":
        memory_table()
        thousand_devices()


RUN = {"jax": run_jax, "torch": run_torch, "tensorflow": run_tensorflow}

if __name__ == "__main__":
    main()
