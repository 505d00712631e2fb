"""Sequence parallelism on torch, for sequences that do not fit on one device."""

import contextlib

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from keras_recurrent import dispatch
from keras_recurrent.backends.torch import _sequence


@contextlib.contextmanager
def sequence_parallel(group=None):
    """Context manager in which operations over time run on one shard of each sequence.

    The processes of the group have equal shards of each sequence, in the order of their ranks, and
    call the same operations on them. Outputs and gradients equal those of the whole sequences:

    - For a recurrence, the processes exchange the product of decays over each shard and the final
      state of each shard, whose sizes do not depend on its length. Each process continues from the
      state before its shard. This takes two passes over a shard; for linear attention, the first
      one is not differentiated.
    - For a convolution and attention with a window, they exchange the last tokens of each shard.
    - Masks and segments are gathered, one number per token, so that
      `keras_recurrent.ops.token_kind` and positions equal those of the whole sequences.

    Layers and networks of these operations work on shards, too. Labels are shards like the inputs.
    The label of a shard's last token is the first token of the next process: make labels from whole
    sequences before splitting them. A loss is then the mean over a shard; with
    `DistributedDataParallel` over the group, gradients equal those of the mean over whole
    sequences. Run the backward pass inside the block as well.

    An `initial_state` of a recurrence or convolution is the state before the whole sequence: all
    processes pass it, and that of the first process is used. A `final_state` is the state after the
    process's shard.

    Args:
        group: a process group of torch. None: all processes.

    Raises:
        NotImplementedError: for features that need whole sequences, named in the message: attention
            without a window or with an `initial_state`, `reverse=True`, layers with a state or with
            `return_sequences=False`, second derivatives, and therefore `generate`.
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
            "`sequence_parallel` needs `torch.distributed.init_process_group` to be called first."
        )
    with dispatch.activate_shards(Shards(group)):
        yield


class Shards:
    """Shards of sequences, one on each process of a group."""

    def __init__(self, group):
        self.group, self.count = group, dist.get_world_size(group)
        self.rank = dist.get_rank(group)

    def gather(self, tensor):
        """Returns the tensors of all processes in a list, without gradients."""
        tensor = tensor.detach().contiguous()
        tensors = [torch.empty_like(tensor) for _ in range(self.count)]
        dist.all_gather(tensors, tensor, group=self.group)
        return tensors

    def concatenate(self, tensor):
        """Concatenates the shards [B, T] of all processes, without gradients. None stays None."""
        return None if tensor is None else torch.cat(self.gather(tensor), dim=1)

    def local_part(self, tensor):
        """Returns this process's shard of whole sequences [B, T]."""
        return tensor.chunk(self.count, dim=1)[self.rank].contiguous()

    def run_whole(self, function, like, *per_token):
        """Returns this process's shard of `function(like, *per_token)` on whole sequences.

        function: takes integer tensors. `like` is a tensor [B, T, ...] that gives the shape.
        """
        batch, length = like.shape[:2]
        like = like.new_empty((batch, length * self.count))
        whole = [self.concatenate(t) for t in per_token]
        with dispatch.activate_shards(None):
            return self.local_part(function(like, *whole))

    def run(self, operation, arguments, kernel):
        """Runs the `Kernel` of an operation on this process's shard."""
        if operation.endswith("_step"):
            dispatch.check_not_split(f"`{operation}`")
        rule = _sequence.RULES.get(operation)
        if rule is None:
            return kernel.function(**arguments)
        return rule(self, arguments, kernel)

    def state_before(self, fold, floats, integers=()):
        """Returns the state before this process's shard, with gradients.

        Args:
            fold: a function from `floats` and `integers` of each shard, in two lists of lists, to
                the states before each shard, a list of tuples of tensors.
            floats, integers: tensors of this process.

        Returns:
            A tuple of tensors.
        """
        gathered = [self.gather(t) for t in integers]
        integer_parts = [list(part) for part in zip(*gathered, strict=True)] or [[]] * self.count
        return _Before.apply(self, fold, integer_parts, *floats)


class _Before(torch.autograd.Function):
    """State before a shard. Runs on the first process, too: all take part in the gradient."""

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
        d_parts = list(zip(*(shards.gather(d) for d in d_states), strict=True))
        saved = ctx.saved_tensors
        parts = [saved[i : i + size] for i in range(0, len(saved), size)]
        with torch.enable_grad():
            local = [t.detach().requires_grad_() for t in parts[shards.rank]]
            parts[shards.rank] = local
            states = ctx.fold(parts, ctx.integers)
            pairs = [
                (state, d_state)
                for state, d_state in zip(_flat(states), _flat(d_parts), strict=True)
                if state.requires_grad
            ]
        if not pairs:  # the last process: no shard follows its own
            return None, None, None, *(torch.zeros_like(t) for t in local)
        outputs, d_outputs = zip(*pairs, strict=True)
        gradients = torch.autograd.grad(outputs, local, d_outputs, allow_unused=True)
        zeros = (
            torch.zeros_like(t) if d is None else d for t, d in zip(local, gradients, strict=True)
        )
        return None, None, None, *zeros


def _flat(states):
    return [t for state in states for t in state]
