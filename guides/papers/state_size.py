"""A larger state helps to a point; a complex state does not (HGRN2, figure 2 and table 1).

The models are byte-level and have about the same number of parameters: where a larger state needs
larger projections, the MLPs are smaller. Models with the same seed train on the same sequences.
"""

import itertools

import keras
import numpy as np
from associative_recall import residual_blocks
from keras import ops
from runs import Panel, clear, read_text, spread, yes
from training import train_on_text

from keras_recurrent.layers import HGRN2, RMSNorm
from keras_recurrent.layers.lower_bounds import ForgetGateLayer
from keras_recurrent.ops import complex_linear_scan, linear_scan

# Numbers of the state relative to the width, and True if pairs of them are complex numbers.
FORMS = {"real, d": (1, False), "complex, 2 d": (2, True), "real, 2 d": (2, False)}
SIZES = {  # lengths are bytes
    "width": (64, 256),
    "num_layers": (3, 6),
    "ratios": ((1, 4, 16, 64), (1, 4, 16, 64, 128, 256)),  # expansion ratios, increasing
    "length": (128, 512),  # of training sequences and test windows
    "tokens": (1024, 8192),  # per step
    "steps": (400, 1500),  # at most two passes over the text
    "windows": (256, 512),
    "learning_rate": (5e-3, 2e-3),
}


class StateHGRN(ForgetGateLayer):
    """HGRN with a norm and an output projection, and a state of one of the `FORMS`.

    A complex state rotates at each step by an angle learned per channel, as in the first HGRN (Qin
    et al. 2023, arXiv:2311.04823): h_t = f_t e^(iθ) h_{t-1} + (1 - f_t) c_t.
    """

    kernel_initializer = "glorot_uniform"

    def __init__(self, form, **kwargs):
        super().__init__(**kwargs)
        self.multiple, self.complex = FORMS[form]

    def build(self, input_shape):
        super().build(input_shape)
        self.numbers = self.multiple * self.width
        self.gates = self.width if self.complex else self.numbers
        self.f_proj = self.make_dense(self.gates, "f_proj", input_shape=input_shape)
        self.i_proj = self.make_dense(self.numbers, "i_proj", input_shape=input_shape)
        self.o_proj = self.make_dense(self.numbers, "o_proj", input_shape=input_shape)
        inner = (*input_shape[:-1], self.numbers)
        self.norm = RMSNorm(zero_centered=False, name="norm")
        self.norm.build(inner)
        self.projection = self.make_dense(self.width, "projection", input_shape=inner)
        if self.complex:
            # Angles from 1 radian per step downwards, as in rotary positions.
            turns = 10_000 ** (-np.arange(self.width) / self.width)
            self.theta = self.add_state_weight("theta", (self.width,), "zeros")
            self.theta.assign(turns)

    def stream(self, inputs, tokens, state, lower_bound=None):
        if lower_bound is not None:
            lower_bound = ops.tile(lower_bound, (1, self.gates // self.width))
        log_f = self.log_forget_gate(self.f_proj(inputs), lower_bound)
        written = -ops.expm1(log_f)
        if self.complex:
            written = ops.concatenate([written, written], axis=-1)
        written = written * ops.silu(self.i_proj(inputs))
        after = {"initial_state": state.get("hidden"), "token_kind": tokens.kind}
        if self.complex:
            phase = ops.broadcast_to(ops.convert_to_tensor(self.theta), ops.shape(log_f))
            h, hidden = complex_linear_scan(written, log_f, phase, **after)
        else:
            h, hidden = linear_scan(written, log_f, **after)
        return h, {"hidden": hidden}

    def finish(self, output, inputs):
        return self.projection(self.norm(output * ops.sigmoid(self.o_proj(inputs))))

    def own_state_spec(self, batch_size=None):
        return {"hidden": self.array_spec(batch_size, self.numbers)}


def build(kind, setting, size, seed):
    """Builds a byte-level language model: HGRN2 with a ratio, or HGRN with a form of state."""
    keras.utils.set_random_seed(seed)
    # In units of the squared width, HGRN2's projections have 4 weights and its MLP 9.
    maps, make = 4, lambda: HGRN2(expand_ratio=setting)
    if kind == "HGRN":
        multiple, is_complex = FORMS[setting]
        maps, make = 3 * multiple + (1 if is_complex else multiple), lambda: StateHGRN(setting)
    tokens = keras.Input((None,), dtype="int32")
    x = keras.layers.Embedding(256, size.width)(tokens)
    mixers = [make() for _ in range(size.num_layers)]
    x = residual_blocks(x, mixers, intermediate_dim=(13 - maps) * size.width // 3)
    return keras.Model(tokens, keras.layers.Dense(256)(x))


def prepare(size, text):
    training, held_out = read_text(text)
    return training, spread(held_out, size.windows, size.length // 2, size.length)


def runs(size, results):
    ratios = [ratio for ratio in size.ratios if size.width % ratio == 0]
    for model, settings in {"HGRN2": ratios, "HGRN": FORMS}.items():
        for setting in settings:
            yield {"model": model, "setting": setting, "width": size.width}


def measure(key, seeds, size, data):
    models = [build(key["model"], key["setting"], size, seed) for seed in seeds]
    training = size.length, size.steps, size.tokens, size.learning_rate
    return [line for line, _ in train_on_text(models, seeds, data, *training)]


def panels(results, size):
    """Losses of HGRN2 by ratio, and of each form of HGRN."""
    losses = results.curves(runs(size, results), "model", "setting", lambda line: line["loss"])
    ratios, forms = losses.get("HGRN2", {}), losses.get("HGRN", {})
    compared = itertools.pairwise(ratios)
    verdicts = {
        "HGRN2": "; ".join(f"{n} {judge(ratios[n], ratios[few], few)}" for few, n in compared)
    }
    if len(forms) == len(FORMS):
        real, complex_, larger = forms.values()
        verdicts["HGRN, complex, 2 d"] = judge(complex_, real, "real, d")
        verdicts["HGRN, real, 2 d"] = (
            f"{yes(np.mean(larger) <= np.mean(complex_))}: at most complex"
        )
    curves = {f"HGRN, {form}": {FORMS[form][0]: values} for form, values in forms.items()}
    labels = "size of the state", "state / width", "loss, nats per byte"
    return [Panel(*labels, {"HGRN2": ratios, **curves}, verdicts, digits=4)]


def judge(losses, others, name):
    return f"{yes(clear(losses, others))}: below {name} by more than 2 deviations"
