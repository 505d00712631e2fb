"""Asserts that training of tiny models in several processes matches one process."""

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

STEPS, BATCH, LENGTH = 3, 4, 9
FULL = StateDictOptions(full_state_dict=True)


def training_batch(rows=slice(None)):
    rng = np.random.default_rng(0)
    tokens = rng.integers(VOCABULARY, size=(BATCH, LENGTH + 1))
    lengths = np.array([[LENGTH], [4], [LENGTH - 1], [LENGTH]])
    real = (np.arange(LENGTH) < lengths).astype("int32")
    x = {"token_ids": tokens[:, :-1], "padding_mask": real}
    return {k: torch.tensor(v[rows]) for k, v in x.items()}, tokens[rows, 1:], real[rows]


def train(module, model, rows=slice(None), replicated=contextlib.nullcontext, logits=True):
    """Returns losses, computed with or without logits, and {name: weight or slot}."""
    x, y, real = training_batch(rows)
    # With a smaller ε, Adam would move weights by the rounding of gradients close to zero.
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
    arrays = dict(weights)
    for name, weight_slots in slots["state"].items():
        arrays |= {f"{name}:{slot}": value for slot, value in weight_slots.items()}
    return torch.tensor(losses), {name: value.float() for name, value in arrays.items()}


def ddp(module):
    return DistributedDataParallel(module)


def fsdp(module):
    return module.fully_shard()


def fsdp_in_16_bits(module):
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
    return module.fully_shard(mp_policy=policy)


def tensor_parallel(module):
    """Splits linear layers by columns or rows, and replicates all other weights."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    plan = {}
    for name, _ in module.named_modules():
        last = name.rpartition(".")[2]
        if last in ("down_proj", "o_proj", "linear_out"):
            plan[name] = RowParallel()
        elif last.endswith("_proj") or last in ("linear_x", "linear_y"):
            plan[name] = ColumnParallel()
    return distribute_module(parallelize_module(module, mesh, plan), mesh)


PARALLELISMS = {
    "tensor": tensor_parallel,
    "ddp": ddp,
    "fsdp": fsdp,
    "fsdp_remat": fsdp,
    "fsdp_in_16_bits": fsdp_in_16_bits,
    "fsdp_mixed_bfloat16": fsdp,
    "fsdp_bfloat16": fsdp,
}
POLICIES = {"bfloat16": "bfloat16", "mixed_bfloat16": "mixed_bfloat16", "16_bits": "mixed_bfloat16"}


def make_model(parallelism, family):
    remat = parallelism.endswith("remat")
    with keras.RematScope() if remat else contextlib.nullcontext():
        dtype = POLICIES.get(parallelism.partition("fsdp_")[2].removeprefix("in_"), "float32")
        # The processes split the heads.
        sizes = {"num_heads": 4} if family == "transnormer" else {}
        return tiny_causal_lm(family=family, dtype=dtype, **sizes)


def tolerances(parallelism):
    if "16" in parallelism:
        # Adam moves a weight by 0.01 a step, also if its gradient in 16 bits is almost zero.
        exact = {"loaded": 0, "accumulated": 1e-6}
        return {"weights": 0.05, "losses": 0.05, "slots": 1e-3, "replicated": 0.05, **exact}
    # Sums are in another order, and Adam divides them by values close to zero.
    weights = 1e-4 if parallelism == "tensor" else 5e-6
    return {"weights": weights, "losses": 5e-6, "slots": 5e-6, "loaded": 0}


def check(parallelism, family, rank, processes, folder):
    logits = parallelism in ("tensor", "fsdp_remat")
    model = make_model(parallelism, family)
    expected_losses, expected = train(TorchModule(model), model, logits=logits)
    model = make_model(parallelism, family)
    module = TorchModule(model)
    size = BATCH // processes
    rows = slice(size * rank, size * (rank + 1))
    parallel = PARALLELISMS[parallelism](module)
    if parallelism == "tensor":  # each process has the whole batch
        losses, arrays = train(parallel, model, replicated=implicit_replication)
    else:
        losses, arrays = train(parallel, model, rows, logits=logits)
    dist.all_reduce(losses)
    errors = {"losses": float((losses / processes - expected_losses).abs().max())}
    if rank == 0:
        assert arrays.keys() == expected.keys()
        differences = {n: float((arrays[n] - expected[n]).abs().max()) for n in expected}
        errors["weights"] = max(value for name, value in differences.items() if ":" not in name)
        errors["slots"] = max(value for name, value in differences.items() if ":" in name)
    if parallelism in ("fsdp", "fsdp_bfloat16"):
        path = folder / f"{parallelism}_{family}"
        errors["loaded"] = difference_of_loaded(module, parallelism, family, path)
    if parallelism == "fsdp_bfloat16" and family != "lightning_hybrid":  # has no float32 weights
        errors["replicated"] = difference_of_replicas(module, expected, arrays)
        errors["accumulated"] = difference_of_accumulated(module, rows)
    most = tolerances(parallelism)
    assert all(error <= most[name] for name, error in errors.items()), errors


def float32_parameters(module):
    parameters = {n: p for n, p in module.named_parameters() if p.dtype is torch.float32}
    assert parameters
    return parameters


def difference_of_replicas(module, expected, arrays):
    """Largest relative difference of slots of float32 weights; 1 if processes' weights differ."""
    for parameter in float32_parameters(module).values():
        local = parameter.to_local()
        replicas = [torch.empty_like(local) for _ in range(dist.get_world_size())]
        dist.all_gather(replicas, local)
        if not all(torch.equal(local, replica) for replica in replicas):
            return 1.0
    slots = [f"{name}:exp_avg" for name in float32_parameters(module)] if arrays else []
    errors = (float((arrays[n] - expected[n]).norm() / expected[n].norm()) for n in slots)
    return max(errors, default=0.0)


def difference_of_accumulated(module, rows):
    """Relative difference of gradients of two backward passes from twice those of one."""
    x, y, real = training_batch(rows)
    sums = []
    for _ in range(2):
        module(x, labels=y, sample_weight=real).backward()
        gradients = [p.grad.to_local().flatten() for p in float32_parameters(module).values()]
        sums.append(torch.cat(gradients))
    return float((sums[1] - 2 * sums[0]).norm() / sums[1].norm())


def difference_of_loaded(module, parallelism, family, folder):
    """Largest difference of logits from a model in one process that loads the saved shards."""
    dcp.save(module.state_dict(), checkpoint_id=folder)
    fresh = TorchModule(make_model(parallelism, family))
    state = fresh.state_dict()
    dcp.load(state, checkpoint_id=folder)
    fresh.load_state_dict(state)
    with torch.no_grad():
        x = training_batch()[0]
        return float((module(x) - fresh.model(x)).abs().max())
