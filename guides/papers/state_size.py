"""A larger state helps, up to a point; a complex one does not (HGRN2, figure 2 and table 1).

    make paper-state_size                     # minutes; or, where the package is installed:
    KERAS_BACKEND=jax python guides/papers/state_size.py
    KERAS_BACKEND=jax python guides/papers/state_size.py --full --text FILE     # on a GPU

Qin et al. 2024 (arXiv:2404.07904) train language models on WikiText-103. In figure 2, the
perplexity of HGRN2 falls as its expansion ratio grows, and little beyond 128: the state of each
channel is so many numbers, without a weight more. In table 1, an HGRN has a state of d real numbers
(test perplexity 26.12), of d complex ones (24.82), or of 2 d real ones (24.64).

Here the models are small and read bytes. All have about the same parameters: what the maps of a
larger state of HGRN take is taken off the layers that mix channels. Those of one seed share their
rows, and all are tested on the same windows of held-out text.
"""

import dataclasses
import math
import os
import pathlib
import time

# Keras reads this once, when it is imported. "torch" and "tensorflow" do as well.
os.environ.setdefault("KERAS_BACKEND", "jax")

import keras
import matplotlib.figure
import numpy as np
from keras import ops
from runs import (
    PASSES,
    Results,
    command_line,
    deviations,
    draw_band,
    guide_above,
    machine,
    picture,
    read_command_line,
    read_text,
    spread,
    table,
    text_batches,
    with_error,
    yes,
)
from training import adamw, token_losses, train

from keras_recurrent.layers import HGRN2, RMSNorm, StreamingLayer
from keras_recurrent.ops import complex_linear_scan, linear_scan, log_forget_gate

residual_blocks = guide_above("associative_recall").residual_blocks
MODELS = "HGRN2", "HGRN"
# The numbers of a state by the width, and whether pairs of them are complex ones.
FORMS = {"real, d": (1, False), "complex, 2 d": (2, True), "real, 2 d": (2, False)}


@dataclasses.dataclass
class Size:
    """What a run is made of; lengths are bytes."""

    width: int
    num_layers: int
    ratios: tuple  # of expansion, in growing order
    length: int  # of the rows to train and the windows to test on
    tokens: int  # a step
    steps: int  # or as many as two passes over the text take
    windows: int
    learning_rate: float


MINIATURE = Size(64, 3, (1, 4, 16, 64), 128, 1024, 400, 256, 5e-3)
FULL = Size(256, 6, (1, 4, 16, 64, 128, 256), 512, 8192, 1500, 512, 2e-3)


# --- 1. HGRN with states of several kinds ---


class StateHGRN(StreamingLayer):
    """HGRN with a norm and an output projection, whose state is of one of the `FORMS`.

    Complex ones turn by an angle a step that is learned for each channel, as in the first HGRN (Qin
    et al. 2023, arXiv:2311.04823): h_t = f_t e^(iθ) h_{t-1} + (1 - f_t) c_t.
    """

    def __init__(self, form, **kwargs):
        super().__init__(**kwargs)
        self.multiple, self.complex = FORMS[form]

    def build(self, input_shape):
        super().build(input_shape)
        self.numbers = self.multiple * self.width
        self.gates = self.width if self.complex else self.numbers
        self.f_proj = self._dense("f_proj", self.gates, self.width)
        self.i_proj = self._dense("i_proj", self.numbers, self.width)
        self.o_proj = self._dense("o_proj", self.numbers, self.width)
        self.norm = RMSNorm(zero_centered=False, name="norm")
        self.norm.build((None, None, self.numbers))
        self.projection = self._dense("projection", self.width, self.numbers)
        if self.complex:
            # From a turn of 1 radian a step to slow ones, as rotary positions have them.
            turns = 10_000 ** (-np.arange(self.width) / self.width)
            self.theta = self.add_weight(
                name="theta", shape=(self.width,), initializer="zeros", autocast=False
            )
            self.theta.assign(turns)

    def _dense(self, name, units, width):
        dense = keras.layers.Dense(units, use_bias=False, name=name)
        dense.build((None, None, width))
        return dense

    def check_arguments(self, inputs, lower_bound=None, **kwargs):
        super().check_arguments(inputs, **kwargs)

    def stream(self, inputs, tokens, state, lower_bound=None):
        if lower_bound is not None:
            lower_bound = ops.tile(lower_bound, (1, self.gates // self.width))
        log_f = log_forget_gate(self.f_proj(inputs), lower_bound)
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
        h = h * ops.sigmoid(self.o_proj(inputs))
        return self.projection(self.norm(h)), {"hidden": hidden}

    def own_state_spec(self, batch_size=None):
        return {"hidden": self.array_spec(batch_size, self.numbers)}


class ScannedHGRN2(HGRN2):
    """HGRN2 whose states are scanned number by number, without products of matrices.

    On a GPU those of heads of fewer than 16 channels are mostly padding, and the fewer the channels
    of a head, the more heads there are.
    """

    def stream(self, inputs, tokens, state, lower_bound=None):
        q, f, i = (layer(inputs) for layer in (self.q_proj, self.f_proj, self.i_proj))
        q, v, log_f = self.gates(q, f, i, lower_bound)
        # [B, T, H, K, V]: S_t = f_t S_{t-1} + (1 - f_t) v_t, row by row of the matrix
        written = -ops.expm1(log_f)[..., None] * v[..., None, :]
        decays = ops.broadcast_to(log_f[..., None], ops.shape(written))
        flat = (*ops.shape(inputs)[:2], self.width * self.expand_ratio)
        memory, last = linear_scan(
            ops.reshape(written, flat),
            ops.reshape(decays, flat),
            initial_state=None if not state else ops.reshape(state["memory"], (-1, flat[2])),
            token_kind=tokens.kind,
        )
        memory = ops.reshape(memory, ops.shape(written))
        recalled = ops.sum(ops.cast(q, memory.dtype)[..., None] * memory, axis=-2)
        shape = (-1, *self.own_state_spec()["memory"].shape[1:])
        return ops.cast(recalled, v.dtype), {"memory": ops.reshape(last, shape)}


def build(kind, setting, size, seed):
    """A language model of bytes: HGRN2 of a ratio, or HGRN of a form."""
    keras.utils.set_random_seed(seed)
    # In squares of the width, HGRN2's maps are 4 and those that mix channels 9.
    maps, make = 4, lambda: (ScannedHGRN2 if setting < 16 else HGRN2)(expand_ratio=setting)
    if kind == "HGRN":
        multiple, is_complex = FORMS[setting]
        maps, make = 3 * multiple + (1 if is_complex else multiple), lambda: StateHGRN(setting)
    tokens = keras.Input((None,), dtype="int32")
    x = keras.layers.Embedding(256, size.width)(tokens)
    mixers = [make() for _ in range(size.num_layers)]
    x = residual_blocks(x, mixers, intermediate_dim=(13 - maps) * size.width // 3)
    return keras.Model(tokens, keras.layers.Dense(256)(x))


# --- 2. Training and testing ---


def settings(size, models=MODELS):
    """What the lines of models are found by, one after another, without the seed."""
    for ratio in size.ratios:
        if "HGRN2" in models and size.width % ratio == 0:
            yield {"model": "HGRN2", "setting": ratio, "width": size.width}
    for form in FORMS:
        if "HGRN" in models:
            yield {"model": "HGRN", "setting": form, "width": size.width}


def apply(model, tokens):
    return model(tokens)


def run(key, size, seeds, training, windows):
    """Trains the seeds of a setting side by side, and gives a line of results for each."""
    steps = min(size.steps, PASSES * len(training) // size.tokens)
    models = [build(key["model"], key["setting"], size, seed) for seed in seeds]
    rows = text_batches(training, seeds, steps, size.length, size.tokens)
    optimizer = adamw(size.learning_rate, steps // 10, steps, end=0.1)
    start = time.perf_counter()
    losses = train(models, optimizer, rows, apply)
    seconds = time.perf_counter() - start
    test = token_losses(models[0], apply)
    for seed, model, loss in zip(seeds, models, losses, strict=True):
        yield {
            **key,
            "seed": seed,
            "parameters": model.count_params(),
            "length": size.length,
            "steps": steps,
            "bytes": steps * size.tokens,
            "windows": size.windows,
            "training_loss": round(loss, 4),
            "seconds_of_all_seeds": round(seconds, 1),
            "machine": machine(),
            "loss": round(float(test(model, windows).mean()), 4),
        }


# --- 3. What came out ---


def losses_of(results, size, model):
    """`{setting: the loss of each seed}`, of what has been run."""
    return {
        key["setting"]: np.array([line["loss"] for line in results.of(**key)])
        for key in settings(size, (model,))
        if results.of(**key)
    }


def draw(results, size, path):
    figure = matplotlib.figure.Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    found = losses_of(results, size, "HGRN2")
    if found:
        draw_band(axes, list(found), found.values(), marker="o", label="HGRN2")
    for form, losses in losses_of(results, size, "HGRN").items():
        multiple, _ = FORMS[form]
        error = deviations(losses)
        axes.errorbar(multiple, np.mean(losses), error, marker="s", label=f"HGRN, {form}")
    axes.set(xlabel="numbers of the state by the width", ylabel="loss, nats a byte")
    axes.set_xscale("log", base=2)
    axes.set_xticks(list(found), [str(ratio) for ratio in found])
    axes.legend()
    figure.savefig(path, dpi=120)


def better(losses, than):
    """Whether losses are below others by more than two deviations, in words."""
    gap = np.mean(than) - np.mean(losses)
    return yes(gap > 2 * np.hypot(deviations(losses), deviations(than)))


def tell(results, size):
    """A table in Markdown: loss and perplexity of all, and verdicts."""
    header = ("", "state", "parameters", "loss, nats a byte", "perplexity of a byte", "")
    rows = []
    ratios = losses_of(results, size, "HGRN2")
    before = None
    for ratio, losses in ratios.items():
        judged = ""
        if before is not None:
            judged = f"{better(losses, ratios[before])}: below {before} by more than 2 deviations"
        rows.append(row(results, size, "HGRN2", ratio, f"{ratio} d", losses, judged))
        before = ratio
    forms = losses_of(results, size, "HGRN")
    if len(forms) < len(FORMS):
        return table(header, rows)
    real, twice, turning = (forms[form] for form in ("real, d", "real, 2 d", "complex, 2 d"))
    verdicts = {
        "real, d": "",
        "complex, 2 d": f"{better(turning, real)}: below real, d by more than 2 deviations",
        "real, 2 d": f"{yes(np.mean(twice) <= np.mean(turning))}: at most complex",
    }
    rows += [row(results, size, "HGRN", form, form, forms[form], verdicts[form]) for form in FORMS]
    return table(header, rows)


def row(results, size, model, setting, state, losses, verdict):
    lines = results.of(model=model, setting=setting, width=size.width)
    perplexity = f"{math.exp(np.mean(losses)):.3f}"
    parameters = f"{lines[0]['parameters']:,}"
    return model, state, parameters, with_error(losses, 4), perplexity, verdict


# --- 4. All of it, in order ---


def main():
    parser = command_line(__doc__, MINIATURE, FULL)
    parser.add_argument("--text", type=pathlib.Path, help="a file; else Python's documentation")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    arguments, size = read_command_line(parser, MINIATURE, FULL)
    training, held_out = read_text(arguments.text)
    windows = spread(held_out, size.windows, size.length // 2, size.length)
    results = Results(arguments.output / "state_size.jsonl")
    print(f"{len(training):,} bytes to train on, {len(held_out):,} held out, on {machine()}")
    for key in settings(size, arguments.models):
        seeds = results.missing(arguments.seeds, **key)
        for line in run(key, size, seeds, training, windows) if seeds else ():
            results.append(**line)
            print(
                f"{key['model']}, {key['setting']}, seed {line['seed']}: loss {line['loss']}; "
                f"{line['seconds_of_all_seeds']} s",
                flush=True,
            )
    draw(results, size, picture(arguments, "state_size"))
    print(tell(results, size))


if __name__ == "__main__":
    main()
