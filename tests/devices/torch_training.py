"""Tiny models that are trained in several processes and in one: how far they differ."""

import contextlib

import keras
import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, distribute_module
from torch.distributed.tensor.experimental import implicit_replication
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.parallel import DistributedDataParallel

from keras_recurrent.devices.torch_modules import TorchModule
from keras_recurrent.devices.torch_tensor_parallel import ColumnParallel, RowParallel
from tests.models.tiny import VOCABULARY, tiny_causal_lm

STEPS, ROWS, LENGTH = 3, 4, 9
FULL = StateDictOptions(full_state_dict=True)


def batch(rows=slice(None)):
    rng = np.random.default_rng(0)
    tokens = rng.integers(VOCABULARY, size=(ROWS, LENGTH + 1))
    lengths = np.array([[LENGTH], [4], [LENGTH - 1], [LENGTH]])
    real = (np.arange(LENGTH) < lengths).astype("int32")
    x = {"token_ids": tokens[:, :-1], "padding_mask": real}
    return {k: torch.tensor(v[rows]) for k, v in x.items()}, tokens[rows, 1:], real[rows]


def train(module, model, rows=slice(None), replicated=contextlib.nullcontext, logits=True):
    """Losses, made with logits or without them, weights and slots."""
    x, y, real = batch(rows)
    # Beside a smaller ε, Adam moves weights by the rounding of gradients that are all but zero.
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.01, eps=1e-4)
    losses = []
    for _ in range(STEPS):
        with replicated():
            if logits:
                loss = model.loss(y, module(x), real)
            else:
                loss = module(x, labels=y, sample_weight=real)
            loss.backward()
        torch.nn.utils.clip_grad_norm_(module.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item() if not isinstance(loss, DTensor) else loss.full_tensor().item())
    weights, slots = get_state_dict(module, optimizer, options=FULL)
    found = dict(weights)
    for name, of_weight in slots["state"].items():
        found |= {f"{name}:{slot}": value for slot, value in of_weight.items()}
    return torch.tensor(losses), {name: value.float() for name, value in found.items()}


def ddp(module):
    return DistributedDataParallel(module)


def fsdp(module):
    return module.fully_shard()


def fsdp_in_16_bits(module):
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
    return module.fully_shard(mp_policy=policy)


def tensor_parallel(module):
    """As many linear maps as there are of either kind, and what no plan names on all devices."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    plan = {}
    for name, _ in module.named_modules():
        last = name.rpartition(".")[2]
        if last in ("down_proj", "o_proj", "linear_out"):
            plan[name] = RowParallel()
        elif last.endswith("_proj") or last in ("linear_x", "linear_y"):
            plan[name] = ColumnParallel()
    return distribute_module(parallelize_module(module, mesh, plan), mesh)


WAYS = {
    "tensor": tensor_parallel,
    "ddp": ddp,
    "fsdp": fsdp,
    "fsdp_remat": fsdp,
    "fsdp_in_16_bits": fsdp_in_16_bits,
    "fsdp_mixed_bfloat16": fsdp,
    "fsdp_bfloat16": fsdp,
}
POLICIES = {"bfloat16": "bfloat16", "mixed_bfloat16": "mixed_bfloat16", "16_bits": "mixed_bfloat16"}


def make(way, family):
    remat = way.endswith("remat")
    with keras.RematScope() if remat else contextlib.nullcontext():
        dtype = POLICIES.get(way.partition("fsdp_")[2].removeprefix("in_"), "float32")
        # Heads are split among the processes.
        sizes = {"num_heads": 4} if family == "transnormer" else {}
        return tiny_causal_lm(family=family, dtype=dtype, **sizes)


def compare(way, family, rank, processes, folder):
    logits = way in ("tensor", "fsdp_remat")
    one_losses, one = train(TorchModule(model := make(way, family)), model, logits=logits)
    model = make(way, family)
    module = TorchModule(model)
    part = ROWS // processes
    rows = slice(part * rank, part * (rank + 1))
    if way == "tensor":  # each process sees all rows
        losses, many = train(WAYS[way](module), model, replicated=implicit_replication)
    else:
        losses, many = train(WAYS[way](module), model, rows, logits=logits)
    dist.all_reduce(losses)
    found = {"losses": float((losses / processes - one_losses).abs().max())}
    if many:  # in the first process
        assert many.keys() == one.keys()
        found["weights"] = max(float((many[n] - one[n]).abs().max()) for n in one if ":" not in n)
        found["slots"] = max(float((many[n] - one[n]).abs().max()) for n in one if ":" in n)
    if way in ("fsdp", "fsdp_bfloat16"):
        found["loaded"] = saved_and_loaded(module, way, family, folder / f"{way}_{family}")
    if way == "fsdp_bfloat16" and family != "lightning_hybrid":  # which has no float32 weights
        found["replicated"] = difference_of_replicas(module, one, many)
        found["accumulated"] = difference_of_accumulated(module, rows)
    return found


def float32_parameters(module):
    found = {name: p for name, p in module.named_parameters() if p.dtype is torch.float32}
    assert found
    return found


def difference_of_replicas(module, one, many):
    """Largest relative difference of slots of float32 weights; 1 if processes' weights differ."""
    for parameter in float32_parameters(module).values():
        local = parameter.to_local()
        every = [torch.empty_like(local) for _ in range(dist.get_world_size())]
        dist.all_gather(every, local)
        if not all(torch.equal(local, other) for other in every):
            return 1.0
    slots = [f"{name}:exp_avg" for name in float32_parameters(module)] if many else []
    return max((float((many[n] - one[n]).norm() / one[n].norm()) for n in slots), default=0.0)


def difference_of_accumulated(module, rows):
    """Relative difference of gradients of two backward passes from twice those of one."""
    x, y, real = batch(rows)
    passes = []
    for _ in range(2):
        module(x, labels=y, sample_weight=real).backward()
        gradients = [p.grad.to_local().flatten() for p in float32_parameters(module).values()]
        passes.append(torch.cat(gradients))
    return float((passes[1] - 2 * passes[0]).norm() / passes[1].norm())


def saved_and_loaded(module, way, family, folder):
    """How far logits are from those of an ordinary model that read the shards."""
    dcp.save(module.state_dict(), checkpoint_id=folder)
    fresh = TorchModule(make(way, family))
    state = fresh.state_dict()
    dcp.load(state, checkpoint_id=folder)
    fresh.load_state_dict(state)
    with torch.no_grad():
        x = batch()[0]
        return float((module(x) - fresh.model(x)).abs().max())
