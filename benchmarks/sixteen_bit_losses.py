"""Trains a model from scratch with weights in float32 and in bfloat16, and compares the losses.

    python -m benchmarks.sixteen_bit_losses --backend jax --text shakespeare.txt
    python -m benchmarks.sixteen_bit_losses --backend torch --text shakespeare.txt \
        --preset hgrn2_150m --batch 16 --length 512

All runs begin with the same weights and take the same batches of bytes. Their optimizers are
Keras's AdamW (float32), `keras_recurrent.optimizers.AdamW` (bfloat16, stochastic rounding), and one
on float32 copies, which each step rounds to nearest into the weights (bfloat16, copy).
"""

import pathlib

import keras
import numpy as np
from keras import ops

import keras_recurrent
from benchmarks import make_parser
from benchmarks.timing import print_header, print_results
from keras_recurrent.models import GriffinCausalLM, HGRN2CausalLM

NUM_BATCHES = 60  # of held-out text
LAST = 200  # steps, of whose losses the mean is reported


class CopyAdamW(keras_recurrent.optimizers.AdamW):
    """AdamW on float32 copies; each step rounds them into the weights."""

    def build(self, variables):
        if self.built:
            return
        super().build(variables)
        self._copies = [self.add_variable_from_reference(v, name="copy") for v in variables]
        for copy, variable in zip(self._copies, variables, strict=True):
            copy.assign(ops.copy(ops.cast(variable, "float32")))

    def _parallel_update_step(self, grads, variables, learning_rate):  # of torch
        self._update_one_by_one(grads, variables, None, learning_rate)

    def update_step(self, gradient, variable, learning_rate):
        if variable.dtype != "bfloat16":
            super().update_step(gradient, variable, learning_rate)
            return
        index = self._get_variable_index(variable)
        momentum, velocity = self._momentums[index], self._velocities[index]
        weight, gradient = ops.convert_to_tensor(self._copies[index]), ops.cast(gradient, "float32")
        step = ops.cast(self.iterations + 1, "float32")
        rate = ops.cast(learning_rate, "float32")
        if self._is_decayed(variable):
            weight = weight - weight * self.weight_decay * rate
        rate *= ops.sqrt(1 - ops.power(self.beta_2, step)) / (1 - ops.power(self.beta_1, step))
        self.assign_add(momentum, (gradient - momentum) * (1 - self.beta_1))
        self.assign_add(velocity, (ops.square(gradient) - velocity) * (1 - self.beta_2))
        weight = weight - rate * momentum / (ops.sqrt(velocity) + self.epsilon)
        self.assign(self._copies[index], weight)
        self.assign(variable, ops.cast(weight, variable.dtype))


class WarmupAndDecay(keras.optimizers.schedules.LearningRateSchedule):
    """A learning rate with 100 steps of linear warmup and linear decay in the last fifth."""

    def __init__(self, peak, steps):
        super().__init__()
        self.peak, self.steps = peak, steps

    def __call__(self, step):
        step = ops.cast(step, "float32")
        falling = 5 * (1 - step / self.steps)
        return self.peak * ops.clip(ops.minimum((step + 1) / 100, falling), 0.0, 1.0)


# {name: (dtype policy, optimizer)}
RUNS = {
    "float32": ("float32", keras.optimizers.AdamW),
    "bfloat16": ("bfloat16", keras_recurrent.optimizers.AdamW),
    "bfloat16, copy": ("bfloat16", CopyAdamW),
}


def make_model(arguments, dtype):
    family = HGRN2CausalLM if arguments.preset.startswith("hgrn2") else GriffinCausalLM
    options = {"load_weights": False, "preprocessor": None, "dtype": dtype}
    return family.from_preset(arguments.preset, **options)


def batches(tokens, count, arguments, seed):
    """Yields inputs and labels of random pieces of a text."""
    random, length = np.random.default_rng(seed), arguments.length
    for _ in range(count):
        starts = random.integers(0, len(tokens) - length, arguments.batch)
        pieces = np.stack([tokens[start : start + length + 1] for start in starts])
        x = pieces[:, :-1]
        yield {"token_ids": x, "padding_mask": np.ones_like(x)}, pieces[:, 1:]


def train(name, arguments, weights, tokens):
    """Returns the results of one run, a dictionary."""
    dtype, optimizer = RUNS[name]
    model = make_model(arguments, dtype)
    model.set_weights(weights)
    rate = WarmupAndDecay(arguments.learning_rate, arguments.steps)
    optimizer = optimizer(rate, weight_decay=0.1, clipnorm=1.0)
    keras_recurrent.exclude_from_weight_decay(optimizer, model)
    model.compile(optimizer, weighted_metrics=[])
    cut = round(0.9 * len(tokens))
    training = batches(tokens[:cut], arguments.steps, arguments, seed=0)
    losses = [float(model.train_on_batch(*batch)) for batch in training]
    held_out = batches(tokens[cut:], NUM_BATCHES, arguments, seed=1)
    return {
        "weights": name,
        "steps": arguments.steps,
        "loss": round(float(np.mean(losses[-LAST:])), 4),
        "held-out loss": round(float(np.mean([model.test_on_batch(*b) for b in held_out])), 4),
    }


def main():
    parser = make_parser(__doc__)
    parser.add_argument("--text", type=pathlib.Path, required=True)
    parser.add_argument("--preset", default="griffin_tiny_text")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--learning-rate", type=float, default=4e-3)
    parser.add_argument("--only", choices=RUNS)
    arguments = parser.parse_args()
    tokens = np.frombuffer(arguments.text.read_bytes(), "uint8").astype("int32")
    keras.utils.set_random_seed(0)
    weights = make_model(arguments, "float32").get_weights()
    print_header("float32 and bfloat16")
    names = [arguments.only] if arguments.only else RUNS
    print_results(train(name, arguments, weights, tokens) for name in names)


if __name__ == "__main__":
    main()
