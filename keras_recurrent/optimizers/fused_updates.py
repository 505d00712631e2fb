"""Updates of Adam on torch: one kernel for many weights."""

import collections
from typing import Any

import keras
import torch

from keras_recurrent.compat import TorchParallelOptimizer, in_stateless_scope
from keras_recurrent.dispatch import uses_triton_kernels
from keras_recurrent.optimizers.updates import Updates, cast_to_float32

_PLAIN = (torch.Tensor, torch.nn.Parameter)  # others, such as DTensors, have no kernel


class FusedUpdates(Updates, TorchParallelOptimizer):
    """Base class of `Adam` and `AdamW`, whose kernels update and decay many weights at once.

    torch's fused kernel updates float32 weights, and `backends/triton/_optimizers` updates 16-bit
    weights. All other weights are updated one by one. Steps with the kernels never wait for the
    device, to which Keras would copy each Python number. They read `Variable._value`, because
    `Variable.value` takes longer than the update of a small weight.
    """

    _divisor = None  # of the gradients

    def build(self, variables):
        super().build(variables)
        self._iterations.__class__ = _Counter

    def _get_current_learning_rate(self):
        """Computes learning rate schedules on the CPU, where their Python numbers need no copy."""
        step, schedules = self._iterations._value, keras.optimizers.schedules
        is_schedule = isinstance(self._learning_rate, schedules.LearningRateSchedule)
        if not is_schedule or _is_traced() or type(step) not in _PLAIN:
            return super()._get_current_learning_rate()
        with keras.device("cpu"):
            rate = self._learning_rate(torch.tensor(int(self._iterations)))
        return _scalar(rate, step.device)

    def _clip_gradients(self, grads):
        """Clips gradients in a few launches, or leaves the clipping by global norm to the kernels.

        The kernels divide gradients in place, and only gradients that the variables own.
        """
        if _is_traced() or not all(type(g) in _PLAIN for g in grads):
            return super()._clip_gradients(grads)
        if self.clipvalue:
            grads = torch._foreach_clamp_min(cast_to_float32(grads), -self.clipvalue)
            return torch._foreach_clamp_max(grads, self.clipvalue)
        if self.clipnorm:
            norms = torch.stack(torch._foreach_norm(grads, 2, dtype=torch.float32))
            factors = self.clipnorm / torch.clamp(norms, min=self.clipnorm)
            return torch._foreach_mul(cast_to_float32(grads), factors.unbind())
        if not self.global_clipnorm:
            return grads
        norm = torch.stack(torch._foreach_norm(grads, 2, dtype=torch.float32)).norm()
        # If the norm is infinite or NaN, all gradients become NaN, as in Keras.
        divisor = torch.clamp(norm / self.global_clipnorm, min=1) + (norm - norm)
        owned = {id(v._value.grad) for v in self._trainable_variables}
        if not all(id(g) in owned for g in grads):
            return torch._foreach_div(cast_to_float32(grads), divisor)
        self._divisor = divisor
        return grads

    def _apply_weight_decay(self, variables):
        """Does nothing: weights decay in `_parallel_update_step`."""

    def _parallel_update_step(self, grads, variables, learning_rate):
        if _is_traced():  # must return new values; the kernels overwrite weights
            self._update_one_by_one(grads, variables, None, learning_rate)
            return
        groups = collections.defaultdict(list)
        for gradient, variable in zip(grads, variables, strict=True):
            value = variable._value
            is_plain = type(value) in _PLAIN and value.is_contiguous()
            types = (value.device, value.dtype, gradient.dtype) if is_plain else None
            groups[types, self._is_decayed(variable)].append((gradient.contiguous(), variable))
        for (types, is_decayed), pairs in groups.items():
            update = self._choose_update(*types[:2], pairs) if types else self._update_one_by_one
            decay = self.weight_decay if is_decayed else 0.0
            pair_grads, pair_variables = zip(*pairs, strict=True)
            update(pair_grads, pair_variables, decay, learning_rate)
        self._divisor = None

    def _choose_update(self, device, dtype, pairs):
        """Returns the method that updates the weights of `(gradient, variable)` pairs."""
        if dtype == torch.float32 and device.type in ("cpu", "cuda"):
            return self._update_float32
        is_short = dtype in (torch.bfloat16, torch.float16)
        if is_short and not self.amsgrad and uses_triton_kernels(pairs[0][1]._value):
            return self._update_16_bits
        return self._update_one_by_one

    def _update_one_by_one(self, grads, variables, decay, learning_rate):
        super()._apply_weight_decay(variables)
        if self._divisor is not None:
            grads = [gradient / self._divisor for gradient in cast_to_float32(grads)]
        for gradient, variable in zip(grads, variables, strict=True):
            self.update_step(gradient, variable, learning_rate)

    def _update_model_variables_moving_average(self, trainable_variables):
        averages = self._model_variables_moving_average
        pairs = [
            (average._value, variable._value)
            for average, variable in zip(averages, trainable_variables, strict=True)
            if average is not None
        ]
        if _is_traced() or not all(type(weight) in _PLAIN for _, weight in pairs):
            super()._update_model_variables_moving_average(trainable_variables)
            return
        averages, weights = zip(*pairs, strict=True)
        share = 1 - self.ema_momentum if self._step_number() > 1 else 1.0
        with torch.no_grad():
            torch._foreach_lerp_(averages, cast_to_float32(weights), share)

    def _slot_values(self, slots, variables):
        return [slots[self._get_variable_index(variable)]._value for variable in variables]

    def _step_number(self):
        return int(self._iterations) // (self.gradient_accumulation_steps or 1) + 1

    def _update_float32(self, grads, variables, decay, learning_rate):
        weights, number = [v._value for v in variables], self._step_number()
        device = weights[0].device
        torch._fused_adamw_(
            weights,
            [gradient.float() for gradient in grads],
            self._slot_values(self._momentums, variables),
            self._slot_values(self._velocities, variables),
            self._slot_values(self._velocity_hats, variables) if self.amsgrad else [],
            [torch.full((), float(number), device=device)] * len(weights),
            lr=_scalar(learning_rate, device),
            beta1=self.beta_1,
            beta2=self.beta_2,
            weight_decay=decay,
            # torch adds ε after dividing √v by the correction of its bias, and Keras before.
            eps=self.epsilon / (1 - self.beta_2**number) ** 0.5,
            amsgrad=self.amsgrad,
            maximize=False,
            grad_scale=self._divisor,
        )

    def _update_16_bits(self, grads, variables, decay, learning_rate):
        from keras_recurrent.backends.triton._optimizers.adam_kernel import update_weights

        weights, number = [v._value for v in variables], self._step_number()
        correction = (1 - self.beta_2**number) ** 0.5 / (1 - self.beta_1**number)
        device = weights[0].device
        learning_rate = _scalar(learning_rate, device)
        slots = (self._slot_values(slot, variables) for slot in (self._momentums, self._velocities))
        update_weights(
            (weights, grads, *slots),
            [self._get_variable_index(variable) for variable in variables],
            self._iterations._value.to(device, non_blocking=True),
            torch.stack([learning_rate * decay, learning_rate * correction]),
            self._divisor,
            decay != 0,
            (1 - self.beta_1, 1 - self.beta_2, self.epsilon),
        )


class _Counter(keras.Variable):
    """Integer variable that is read from the device only after other code has changed it."""

    _known: Any = (None, -1, 0)  # a tensor, its version, and the number in it

    def __int__(self):
        tensor, version, _ = self._known
        if self._value is not tensor or tensor._version != version:  # torch counts all changes
            self._known = self._value, self._value._version, int(self._value)
        return self._known[2]

    def assign_add(self, value):
        if _is_traced() or type(value) is not int or type(self._value) not in _PLAIN:
            return super().assign_add(value)
        number = int(self) + value
        with torch.no_grad():
            self._value.add_(value)
        self._known = self._value, self._value._version, number
        return self._value


def _is_traced():
    """Returns True in compiled and stateless steps, which must return new values."""
    return torch.compiler.is_compiling() or in_stateless_scope()


def _scalar(x, device):
    """Returns a variable, tensor or number as a tensor, without waiting for the device."""
    x = x._value if isinstance(x, keras.Variable) else torch.as_tensor(x)
    return x.to(device, torch.float32, non_blocking=True)
