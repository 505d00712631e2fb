"""Updates of Adam on torch: one kernel for many weights."""

import collections
from typing import Any

import torch
from keras import ops

from keras_recurrent.compat import TorchParallelOptimizer, in_stateless_scope
from keras_recurrent.dispatch import uses_triton_kernels
from keras_recurrent.optimizers.stochastic_rounding import rounding_keys
from keras_recurrent.optimizers.updates import Updates, cast_to_float32

_PLAIN = (torch.Tensor, torch.nn.Parameter)  # others, such as DTensors, have no kernel


class FusedUpdates(Updates, TorchParallelOptimizer):
    """Base class of `Adam` and `AdamW`, whose kernels update and decay many weights at once.

    torch's fused kernel updates float32 weights, `backends/triton/_optimizers` weights in 16 bits.
    All other weights are updated one by one.
    """

    # The tensor of `_iterations` and its version after the last step, and the number of steps.
    _counted: Any = (None, -1, 0)
    _divisor = None  # of the gradients

    def apply(self, grads, trainable_variables=None):
        # The kernels need the number of the step on the host. It is read from the device only if it
        # changed since the last step; torch counts changes in `_version`.
        if torch.compiler.is_compiling():
            super().apply(grads, trainable_variables)
            return
        counter = self._iterations.value
        tensor, version, number = self._counted
        if counter is not tensor or counter._version != version:
            version, number = counter._version, int(counter)
        self._counted = counter, version, number
        super().apply(grads, trainable_variables)
        if counter._version == version + 1:
            self._counted = counter, version + 1, number + 1

    def _clip_gradients(self, grads):
        """Leaves clipping by the global norm to the kernels, which divide gradients in place."""
        if not self.global_clipnorm or torch.compiler.is_compiling():
            return super()._clip_gradients(grads)
        owned = {id(v.value.grad) for v in self._trainable_variables}
        if not all(id(g) in owned and type(g) in _PLAIN for g in grads):
            return super()._clip_gradients(grads)
        norm = torch.stack(torch._foreach_norm(grads, 2, dtype=torch.float32)).norm()
        # If the norm is infinite or NaN, all gradients become NaN, as in Keras.
        self._divisor = torch.clamp(norm / self.global_clipnorm, min=1) + (norm - norm)
        return grads

    def _apply_weight_decay(self, variables):
        """Does nothing: weights decay in `_parallel_update_step`."""

    def _parallel_update_step(self, grads, variables, learning_rate):
        groups = collections.defaultdict(list)
        for gradient, variable in zip(grads, variables, strict=True):
            value, is_decayed = variable.value, self._is_decayed(variable)
            is_plain = type(value) in _PLAIN and value.is_contiguous()
            types = (value.device, value.dtype, gradient.dtype) if is_plain else None
            groups[types, is_decayed].append((gradient.contiguous(), variable))
        for (types, is_decayed), pairs in groups.items():
            update = self._choose_update(*types[:2], pairs) if types else self._update_one_by_one
            decay = self.weight_decay if is_decayed else 0.0
            pair_grads, pair_variables = zip(*pairs, strict=True)
            update(pair_grads, pair_variables, decay, ops.convert_to_tensor(learning_rate))
        self._divisor = None

    def _choose_update(self, device, dtype, pairs):
        """Returns the method that updates the weights of `(gradient, variable)` pairs."""
        # Compiled and stateless steps must return new values; the kernels overwrite, so they run in
        # neither.
        if not torch.compiler.is_compiling() and not in_stateless_scope():
            if dtype == torch.float32 and device.type in ("cpu", "cuda"):
                return self._update_float32
            is_short = dtype in (torch.bfloat16, torch.float16)
            if is_short and not self.amsgrad and uses_triton_kernels(pairs[0][1].value):
                return self._update_16_bits
        return self._update_one_by_one

    def _update_one_by_one(self, grads, variables, decay, learning_rate):
        super()._apply_weight_decay(variables)
        if self._divisor is not None:
            grads = [gradient / self._divisor for gradient in cast_to_float32(grads)]
        for gradient, variable in zip(grads, variables, strict=True):
            self.update_step(gradient, variable, learning_rate)

    def _slot_values(self, slots, variables):
        return [slots[self._get_variable_index(variable)].value for variable in variables]

    def _step_number(self):
        return self._counted[2] // (self.gradient_accumulation_steps or 1) + 1

    def _update_float32(self, grads, variables, decay, learning_rate):
        weights, number = [v.value for v in variables], self._step_number()
        device = weights[0].device
        torch._fused_adamw_(
            weights,
            [gradient.float() for gradient in grads],
            self._slot_values(self._momentums, variables),
            self._slot_values(self._velocities, variables),
            self._slot_values(self._velocity_hats, variables) if self.amsgrad else [],
            [torch.full((), float(number), device=device)] * len(weights),
            lr=float(learning_rate) if device.type == "cpu" else learning_rate,
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

        number = self._step_number()
        correction = (1 - self.beta_2**number) ** 0.5 / (1 - self.beta_1**number)
        slots = (self._slot_values(slot, variables) for slot in (self._momentums, self._velocities))
        indices = torch.tensor([self._get_variable_index(v) for v in variables], dtype=torch.int32)
        # `ops.convert_to_tensor` would wait for the device.
        indices = indices.to(variables[0].value.device, non_blocking=True)
        update_weights(
            list(zip([v.value for v in variables], grads, *slots, strict=True)),
            torch.stack(rounding_keys(self._iterations, indices), 1),
            torch.stack([learning_rate * decay, learning_rate * correction]),
            self._divisor,
            decay != 0,
            (1 - self.beta_1, 1 - self.beta_2, self.epsilon),
        )
