"""Operations and networks on parts of time, and on whole rows: how far they differ."""

import contextlib

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import keras_recurrent
from keras_recurrent import layers, ops
from keras_recurrent.devices.torch_modules import TorchModule
from keras_recurrent.devices.torch_sequence import sequence_parallel
from tests.models.tiny import VOCABULARY, tiny_causal_lm

B, T, D, H, G, K = 2, 24, 4, 4, 2, 3
BTD, HEADS, FEWER = (B, T, D), (B, T, H, K), (B, T, G, K)
# The shapes of an operation's tensors, and of its state.
OPERATIONS = {
    "linear_scan": ([BTD, BTD], (B, D)),
    "rg_lru": ([BTD, BTD, BTD, (D,)], (B, D)),
    "causal_conv1d": ([BTD, (4, D), (D,)], (B, 3, D)),
    "complex_linear_scan": ([(B, T, 2 * D), BTD, BTD], (B, 2 * D)),
    "gated_linear_attention": ([HEADS] * 4, (B, H, K, K)),
    "lightning_attention": ([*[HEADS] * 3, (H,)], (B, H, K, K)),
    "sliding_window_attention": ([HEADS, FEWER, FEWER], None),
}
# Blocks without attention to all tokens, which shards refuse.
BLOCK_TYPES = {
    "griffin": ("recurrent", "local_attention"),
    "lightning_hybrid": ("lightning_attention",),
}
LOG_DECAYS = {
    "linear_scan": 1,
    "complex_linear_scan": 1,
    "gated_linear_attention": 3,
    "lightning_attention": 3,
}


def draw(operation, variant):
    """Tensors, what tokens are, and weights of the outputs, 0 at padding."""
    rng = np.random.default_rng(len(operation))
    shapes, state = OPERATIONS[operation]
    tensors = [rng.normal(size=shape) for shape in shapes]
    if operation in LOG_DECAYS:
        place = LOG_DECAYS[operation]
        tensors[place] = -0.3 * np.abs(tensors[place])
    weights = rng.normal(size=(B, T))
    tokens = {}
    if variant == "documents":  # with padding in a row's middle, and a part that is padding alone
        real = rng.random((B, T)) < 0.7
        real[0, 6:12] = False
        tokens["mask"] = torch.tensor(real)
        tokens["segment_ids"] = torch.tensor(np.sort(rng.integers(4, size=(B, T)), axis=1))
        weights = weights * real
    if variant == "state" and state:
        tensors.append(rng.normal(size=state))
    tensors = [torch.tensor(x, dtype=torch.float32) for x in tensors]
    return tensors, tokens, torch.tensor(weights, dtype=torch.float32)


def computed(operation, tensors, tokens, weights, is_last=True):
    """The output and the gradients, also those through the state after the last token."""
    tensors = [t.detach().clone().requires_grad_() for t in tensors]
    shapes = OPERATIONS[operation][0]
    given = dict(tokens)
    if len(tensors) > len(shapes):
        given["initial_state"] = tensors[-1]
    if operation == "sliding_window_attention":
        given["sliding_window"] = 8
    output, state = getattr(ops, operation)(*tensors[: len(shapes)], **given)
    output = output * weights.reshape(*weights.shape, *[1] * (output.ndim - 2))
    loss = (output**2).sum()
    if operation != "sliding_window_attention":
        loss += (state * is_last).pow(2).sum()
    loss.backward()
    zeros = (torch.zeros_like(t) if t.grad is None else t.grad for t in tensors)
    return output.detach(), list(zeros)


def compare_operation(operation, part, whole):
    worst = 0.0
    for variant in ("plain", "documents", "state"):
        tensors, tokens, weights = draw(operation, variant)
        wanted, d_wanted = computed(operation, tensors, tokens, weights)
        timed = [tuple(t.shape[:2]) == (B, T) for t in tensors]
        parts = [part(t) if of_time else t for t, of_time in zip(tensors, timed, strict=True)]
        tokens = {name: part(t) for name, t in tokens.items()}
        with sequence_parallel():
            is_last = dist.get_rank() == dist.get_world_size() - 1
            found, d_found = computed(operation, parts, tokens, part(weights), is_last)
        pairs = [(whole(found), wanted)]
        for d, d_whole, of_time in zip(d_found, d_wanted, timed, strict=True):
            if not of_time:
                dist.all_reduce(d)
            pairs.append((whole(d) if of_time else d, d_whole))
        for x, y in pairs:
            worst = max(worst, float((x - y).abs().max()) / max(1.0, float(y.abs().max())))
    return worst


def compare_family(family, part):
    """Three steps of a network with a window, positions, padding and documents."""
    rng = np.random.default_rng(0)
    tokens = torch.tensor(rng.integers(VOCABULARY, size=(B, T + 1)))
    real = torch.ones((B, T), dtype=torch.int32)
    real[0, 5:9] = 0
    x = {
        "token_ids": tokens[:, :-1],
        "padding_mask": real,
        "segment_ids": torch.tensor(np.sort(rng.integers(3, size=(B, T)), axis=1)),
    }
    kinds = {"block_types": BLOCK_TYPES[family]} if family in BLOCK_TYPES else {}
    found = []
    for split in (False, True):
        model = tiny_causal_lm(family=family, **kinds)
        module = TorchModule(model)
        called = DistributedDataParallel(module) if split else module
        own = part if split else (lambda t: t)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        losses = []
        for _ in range(3):
            with sequence_parallel() if split else contextlib.nullcontext():
                inputs = {name: own(t) for name, t in x.items()}
                loss = model.loss(own(tokens[:, 1:]), called(inputs), own(real))
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        losses = torch.stack(losses)
        if split:
            dist.all_reduce(losses)
            losses /= dist.get_world_size()
        found.append([losses, *(p.detach() for p in module.parameters())])
    return max(float((a - b).abs().max()) for a, b in zip(*found, strict=True))


def refusals():
    """The errors of what is not split, by name."""
    x, ids = torch.ones(B, 6, 4), torch.zeros((B, 6), dtype=torch.int32)
    q = torch.ones(B, 6, 1, 2)
    model = tiny_causal_lm()
    ways = {
        "`reverse=True`": lambda: ops.linear_scan(x, -x, reverse=True),
        "no `sliding_window`": lambda: ops.sliding_window_attention(q, q, q),
        "`return_sequences=False`": lambda: layers.RGLRU(num_blocks=2, return_sequences=False)(x),
        "`go_backwards=True`": lambda: layers.RGLRU(num_blocks=2, go_backwards=True)(x),
        "`zero_output_for_mask=False`": lambda: layers.RGLRU(
            num_blocks=2, zero_output_for_mask=False
        )(x, mask=ids == 0),
        "A state of a layer": lambda: layers.RGLRU(num_blocks=2, return_state=True)(x),
        "A state of a layer or network": lambda: model.generate(
            {"token_ids": np.ones((1, 8), "int32"), "padding_mask": np.array([[1] * 3 + [0] * 5])},
            stop_token_ids=None,
        ),
    }
    missing = []
    for name, call in ways.items():
        try:
            with sequence_parallel():
                call()
        except Exception as error:
            if name in str(error) and "inside `sequence_parallel`" in str(error):
                continue
            name += f": {error!r}"
        missing.append(name)
    return missing


def compare(case, *arguments):
    """Returns how far an operation or a family is off, or what is not refused.

    arguments: the implementation or nothing, then rank, processes and folder.
    """
    *implementation, rank, processes, _ = arguments

    def part(tensor):
        return tensor.chunk(processes, dim=1)[rank].contiguous()

    def whole(tensor):
        parts = [torch.empty_like(tensor) for _ in range(processes)]
        dist.all_gather(parts, tensor.contiguous())
        return torch.cat(parts, dim=1)

    if case == "refusals":
        return refusals()
    if case in OPERATIONS:
        with keras_recurrent.implementation(*implementation or [None]):
            return compare_operation(case, part, whole)
    return compare_family(case, part)
