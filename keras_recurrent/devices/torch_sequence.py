"""Rows longer than a device: sequence parallelism on torch."""

import contextlib

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from keras_recurrent.backends.torch import _sequence
from keras_recurrent.devices import split_time


@contextlib.contextmanager
def sequence_parallel(group=None):
    """Inside, operations over time take each process's part of the time of the same rows.

    The processes of the group have equal parts of each row, in the order of their ranks, and call
    the same operations on them. Outputs and gradients are those of the whole rows:

    - Of a recurrence, the processes exchange the product of decays over each part and the state
      that it ends in, which do not grow with its length, and each goes on from what came before
      its own. That takes two passes over a part.
    - Of a convolution and of attention with a window, they exchange the last tokens of each part.
    - Masks and segments are gathered, a number a token, so that `keras_recurrent.ops.token_kind`
      and positions are those of the whole rows.

    Layers and networks of these operations work on parts of rows as well. Labels are parts like the
    inputs, the token after a part's last one included, which is on the next process: make them of
    whole rows first. A loss is then the mean over a part; with `DistributedDataParallel` over the
    group, gradients are those of the mean over whole rows. The backward pass belongs inside, too.

    An `initial_state` of a recurrence or convolution is that before the whole row: all processes
    give it, and the first one's counts. A `final_state` is that after a process's own part.

    Args:
        group: a process group of torch; None: all processes.

    Raises:
        NotImplementedError: what is not split, by its name: attention without a window or with an
            `initial_state`, `reverse=True`, layers with a state or with `return_sequences=False`,
            second derivatives; and `generate`, which follows from these.
        RuntimeError: `torch.distributed` is not initialized.

    Example:

    ```
    with sequence_parallel():
        h, _ = keras_recurrent.ops.linear_scan(x_part, log_a_part)
        (h**2).sum().backward()
    ```
    """
    if not (dist.is_available() and dist.is_initialized()):
        raise RuntimeError(
            "`sequence_parallel` needs `torch.distributed.init_process_group`, called before."
        )
    split_time.push(Shards(group))
    try:
        yield
    finally:
        split_time.pop()


class Shards:
    """The parts of time on the processes of a group, each on one."""

    def __init__(self, group):
        self.group, self.count = group, dist.get_world_size(group)
        self.rank = dist.get_rank(group)

    def gather(self, tensor):
        """The tensors of all processes, in a list, without gradients."""
        tensor = tensor.detach().contiguous()
        found = [torch.empty_like(tensor) for _ in range(self.count)]
        dist.all_gather(found, tensor, group=self.group)
        return found

    def whole(self, tensor):
        """Parts [B, T] of all processes in a row, without gradients; None stays None."""
        return None if tensor is None else torch.cat(self.gather(tensor), dim=1)

    def own(self, tensor):
        """The part of this process of whole rows [B, T]."""
        return tensor.chunk(self.count, dim=1)[self.rank].contiguous()

    def of_whole_rows(self, function, like, *per_token):
        """This process's part of what `function(like, *per_token)` finds of whole rows.

        function: of integers alone; `like` is a tensor [B, T, ...] that gives the shape.
        """
        batch, length = like.shape[:2]
        like = like.new_empty((batch, length * self.count))
        whole = [self.whole(t) for t in per_token]
        split_time.push(None)
        try:
            return self.own(function(like, *whole))
        finally:
            split_time.pop()

    def run(self, operation, arguments, function):
        """What an implementation of an operation returns for this process's part of time."""
        if operation.endswith("_step"):
            split_time.refuse(f"`{operation}`")
        rule = _sequence.RULES.get(operation)
        if rule is None:
            return function(**arguments)
        return rule(self, arguments, function)

    def before(self, fold, floats, integers=()):
        """The state before this process's part, with gradients.

        Args:
            fold: a function of `floats` and `integers` of each part, in two lists of lists, to the
                states before each part: a list of tuples of tensors.
            floats, integers: this process's own.

        Returns:
            A tuple of tensors.
        """
        gathered = [self.gather(t) for t in integers]
        of_parts = [list(part) for part in zip(*gathered, strict=True)] or [[]] * self.count
        return _Before.apply(self, fold, of_parts, *floats)


class _Before(torch.autograd.Function):
    """Also on the first process, before which there is nothing: all take part in the gradient."""

    @staticmethod
    def forward(ctx, shards, fold, integers, *floats):
        parts = list(zip(*(shards.gather(t) for t in floats), strict=True))
        ctx.shards, ctx.fold, ctx.integers = shards, fold, integers
        ctx.save_for_backward(*(t for part in parts for t in part))
        return tuple(t.clone() for t in fold(parts, integers)[shards.rank])

    @staticmethod
    @once_differentiable
    def backward(ctx, *d_states):
        shards, size = ctx.shards, len(ctx.needs_input_grad) - 3
        of_parts = list(zip(*(shards.gather(d) for d in d_states), strict=True))
        saved = ctx.saved_tensors
        parts = [saved[i : i + size] for i in range(0, len(saved), size)]
        with torch.enable_grad():
            own = [t.detach().requires_grad_() for t in parts[shards.rank]]
            parts[shards.rank] = own
            states = ctx.fold(parts, ctx.integers)
            pairs = [
                (state, d_state)
                for state, d_state in zip(_flat(states), _flat(of_parts), strict=True)
                if state.requires_grad
            ]
        if not pairs:  # the last process, whose part nothing follows
            return None, None, None, *(torch.zeros_like(t) for t in own)
        of_states, d_of_states = zip(*pairs, strict=True)
        found = torch.autograd.grad(of_states, own, d_of_states, allow_unused=True)
        zeros = (torch.zeros_like(t) if d is None else d for t, d in zip(own, found, strict=True))
        return None, None, None, *zeros


def _flat(states):
    return [t for state in states for t in state]
