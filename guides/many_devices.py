"""One model on many devices: a flag says what is split, and the losses stay those of one device.

    KERAS_BACKEND=jax python guides/many_devices.py --split weights

JAX splits through `keras.distribution`, torch through its DistributedDataParallel, FSDP2, DTensor
and process groups, and TensorFlow rows alone, through MirroredStrategy. `--split` is one of

    rows      each device has all weights, and its own rows of a batch (data parallelism)
    weights   and a part of each weight, which is gathered where it is used (FSDP, or ZeRO-3)
    heads     each device has all rows, and its own heads and channels (tensor parallelism)
    time      each device has its own part of each row's tokens (sequence parallelism)

A tiny HGRN2 learns on the devices that are there, or else on simulated ones, eight on JAX and two
on torch and TensorFlow. On torch the script starts a process for each device, and under `torchrun
guides/many_devices.py` it is such a process. Then it prints by which meshes models of 1.3B to 15B
parameters fit 8 and 64 devices, and what 1,024 would be busy with. A minute on two CPU cores.
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
from typing import Any, NamedTuple

# Read once, when Keras and JAX are imported. Real devices are taken before simulated ones.
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
    keras.utils.set_random_seed(0)  # the same weights wherever it is made
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
    """Losses of a few steps on the batch."""
    on_jax = keras.config.backend() == "jax"
    # On TensorFlow each replica would clip the gradient of its own rows, before these are summed.
    optimizer = keras.optimizers.AdamW(LEARNING_RATE, global_clipnorm=1.0 if on_jax else None)
    exclude_from_weight_decay(optimizer, model)
    model.compile(optimizer, model.loss, weighted_metrics=[], jit_compile=on_jax)
    x, y = batch()
    return model.fit(x, y, batch_size=ROWS, epochs=STEPS, shuffle=False, verbose=0).history["loss"]


def distribution_of(split, devices):
    if split == "rows":
        return keras.distribution.DataParallel(devices=devices)
    sizes = [len(devices) if split == along else 1 for along in ("weights", "time", "heads")]
    mesh = keras.distribution.DeviceMesh(sizes, ("batch", "sequence", "model"), devices)
    return keras.distribution.ModelParallel(layout_map=HGRN2Backbone.get_layout_map(mesh))


def on_jax(arguments):
    one = fit(make())
    devices = keras.distribution.list_devices()
    with distribution_of(arguments.split, devices).scope():
        model = make()
        many = fit(model)
        # A weight at a time is gathered; of several processes the first one writes.
        model.save_weights(arguments.output / "model.weights.h5")
    compare(f"JAX on {len(devices)} devices", one, many)
    parts = [(w.path, w.shape, w.value.addressable_shards[0].data.shape) for w in model.weights]
    show_parts(parts)


def on_tensorflow(arguments):
    import tensorflow as tf

    if arguments.split != "rows":
        raise SystemExit("TensorFlow splits rows alone here. Take --split rows, JAX or torch.")
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


# --- 3. torch: processes that `torchrun` starts, and a loop of one's own ---


def on_torch(arguments):
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
    if split == "time":  # labels are made of whole rows: the next token may be another's
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
    """A module with the parameters, what is called in its place, and a context around each step."""
    import torch
    from torch.distributed.fsdp import MixedPrecisionPolicy
    from torch.nn.parallel import DistributedDataParallel

    from keras_recurrent.devices.torch_modules import TorchModule
    from keras_recurrent.devices.torch_sequence import sequence_parallel

    module = TorchModule(model)
    if split == "heads":
        return heads_split(module)
    if split == "weights":
        # Gathered in 16 bits, summed in 32, kept in 32.
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
    """An ordinary model, in one process, reads the checkpoint of all."""
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
    """parts: for each weight its name, its shape and that of one device's part."""
    shown = [part for part in parts if "block_1" in part[0] and "kernel" in part[0]]
    for name, shape, own in (*parts[:1], *shown):
        print(f"  {name}: {tuple(own)} of {tuple(shape)}")
    numbers = [sum(np.prod(part[i]) for part in parts) for i in (2, 1)]
    print("A device has {:,.0f} of {:,.0f} numbers of the weights".format(*numbers))


# --- 5. Meshes for models that do not fit a device: arithmetic, nothing is measured ---

MODELS: dict[str, tuple[str, Any, Any, int]] = {  # preset, its sizes, the family's layouts, heads
    "1.3B": ("hgrn2_1.3b_100b", hgrn2.SIZES["hgrn2_1.3b_100b"], HGRN2Backbone, 16),
    "7B": ("tnl_7b", transnormer.SIZES["tnl_7b"], TransNormerBackbone, 32),
    "15B": ("tnl_15b", transnormer.SIZES["tnl_15b"], TransNormerBackbone, 40),
}
ROOM = 80 * 2**30  # bytes of a device
SPARE = 0.9  # the part of it that a plan may take
HOST = 8  # devices that NVLink joins
NVLINK, INFINIBAND = 450e9, 50e9  # bytes a second to and from a device, of each direction: assumed
FLOPS = 400e12  # in products of matrices of 16 bits, about half of what is promised: assumed


class Mesh(NamedTuple):
    """How many devices along each axis; neighbours along the last are of one host."""

    data: int
    sequence: int
    model: int

    def link(self, axis):
        """The rate of the slowest link around a ring along this axis."""
        reach = {"model": 1, "sequence": self.model, "data": self.model * self.sequence}[axis]
        return NVLINK if reach * getattr(self, axis) <= HOST else INFINIBAND

    def layouts(self, family):
        devices = [f"gpu:{i}" for i in range(np.prod(self))]
        names = ("batch", "sequence", "model")
        return family.get_layout_map(keras.distribution.DeviceMesh(self, names, devices))


class Plan(NamedTuple):
    """A training step on one device: bytes that it keeps, and seconds if nothing overlapped."""

    model: str
    mesh: Mesh
    rows: int  # of all devices
    length: int

    @property
    def tokens(self):
        return self.rows * self.length / (self.mesh.data * self.mesh.sequence)

    def kept(self):
        """Weights, gradients and Adam's slots in 32 bits, as arrays are laid out."""
        preset, _, family, _ = MODELS[self.model]
        return training_sizes(preset, layout_map=self.mesh.layouts(family)).total

    def activations(self):
        """Roughly, in 16 bits: the inputs of blocks (a `keras.RematScope`), all of one block, the
        logits with their gradients, and the weights of two blocks, gathered."""
        size = MODELS[self.model][1]
        inside = (10 * size.hidden_dim + 4 * size.intermediate_dim) / self.mesh.model
        logits = 2 * size.vocabulary_size / self.mesh.model
        numbers = self.tokens * (size.num_layers * size.hidden_dim + inside + logits)
        return 2 * (numbers + 2 * size.parameters / size.num_layers / self.mesh.model)

    def bytes_moved(self):
        """By what is moved, and the axis of the mesh along which that is."""
        preset, size, _, _ = MODELS[self.model]
        data, sequence, model = self.mesh
        weights = "data" if data > 1 else "sequence"
        spread = getattr(self.mesh, weights)
        # Gathered twice in 16 bits, forwards and backwards; gradients are summed in 32.
        moved = {("weights", weights): 8 * size.parameters / model * (1 - 1 / spread)}
        if data > 1:  # the devices of a row have the same part of the weights
            part = 4 * size.parameters / model / data
            moved["gradients", "sequence"] = 2 * part * (1 - 1 / sequence)
        # Two sums over devices a block forwards, twice with remat, and backwards.
        sums = 6 * size.num_layers * self.tokens * size.hidden_dim * 2
        moved["activations", "model"] = 2 * sums * (1 - 1 / model)
        # States after each part of a row, forwards, once more, and their gradients. JAX sends them
        # over 1, 2, 4, ... devices, then to the next one; on torch all are gathered.
        states = memory_sizes(preset, 1, self.length).cache * self.rows / data / model
        if sequence > 1:
            moved["states", "sequence"] = 3 * states * (1 + math.ceil(math.log2(sequence)))
        return moved

    def seconds(self):
        """Of arithmetic and of each kind of bytes. A token is 8 operations for each weight: 2
        forwards, again with remat, and 4 backwards."""
        parameters = MODELS[self.model][1].parameters
        found = {"arithmetic": 8 * parameters * self.tokens / self.mesh.model / FLOPS}
        for (what, axis), moved in self.bytes_moved().items():
            if moved:
                found[what] = moved / self.mesh.link(axis)
        return found

    def step(self):
        """Seconds, where weights and gradients move behind arithmetic, and all else does not."""
        found = self.seconds()
        behind = found.pop("weights", 0) + found.pop("gradients", 0)
        return max(found.pop("arithmetic"), behind) + sum(found.values())


def best_plan(model, devices, rows, length):
    """The fastest of the meshes that fit."""
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
    print("\nMeshes (data, sequence, model) that fit devices of 80 GiB, the fastest on paper:\n")
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
    print("\n1,024 devices, simulated, of which nothing is measured. Assumed are NVLink with")
    print(f"{NVLINK / 1e9:.0f} GB/s a direction among {HOST} devices of a host, InfiniBand with")
    print(
        f"{INFINIBAND / 1e9:.0f} GB/s a device, and {FLOPS / 1e12:.0f} TFLOP/s in bfloat16. GB and"
    )
    print("seconds of a device and step; 1,024 rows of 4,096 tokens, and 4 of 1,048,576:\n")
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
    parser.add_argument("--no-tables", action="store_true", help="leaves out the plans on paper")
    arguments = parser.parse_args()
    arguments.output.mkdir(parents=True, exist_ok=True)
    if arguments.mixed_precision:
        keras.config.set_dtype_policy("mixed_bfloat16")
    ON[keras.config.backend()](arguments)
    if not arguments.no_tables and os.environ.get("RANK", "0") == "0":
        memory_table()
        thousand_devices()


ON = {"jax": on_jax, "torch": on_torch, "tensorflow": on_tensorflow}

if __name__ == "__main__":
    main()
