"""A larger state helps to a point; a complex state does not (HGRN2, figure 2 and table 1).

    make paper-state_size                     # minutes; or, with the package installed:
    KERAS_BACKEND=jax python guides/papers/state_size.py
    KERAS_BACKEND=jax python guides/papers/state_size.py --full --text FILE     # on a GPU

Qin et al. 2024 (arXiv:2404.07904) train language models on WikiText-103. In figure 2, the
perplexity of HGRN2 falls as its expansion ratio, the state's numbers per channel, grows, and little
beyond 128; the number of weights is constant. In table 1, an HGRN has a state of d real numbers
(test perplexity 26.12), of d complex ones (24.82), or of 2 d real ones (24.64).

Here the models are small and byte-level. All have about the same number of parameters: where a
larger state needs larger projections, the MLPs are smaller. Models with the same seed train on the
same sequences, and all are tested on the same windows of held-out text.
"""

import dataclasses
import math
import os
import pathlib
import time

# Keras reads this once, at import. "torch" and "tensorflow" also work.
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
# Numbers of the state relative to the width, and True if pairs of them are complex numbers.
FORMS = {"real, d": (1, False), "complex, 2 d": (2, True), "real, 2 d": (2, False)}


@dataclasses.dataclass
class Size:
    """Sizes of a run; lengths are bytes."""

    width: int
    num_layers: int
    ratios: tuple  # expansion ratios, in increasing order
    length: int  # of training sequences and test windows
    tokens: int  # per step
    steps: int  # at most two passes over the text
    windows: int
    learning_rate: float


MINIATURE = Size(64, 3, (1, 4, 16, 64), 128, 1024, 400, 256, 5e-3)
FULL = Size(256, 6, (1, 4, 16, 64, 128, 256), 512, 8192, 1500, 512, 2e-3)


# --- 1. HGRN with real and complex states ---


class StateHGRN(StreamingLayer):
    """HGRN with a norm and an output projection, and a state of one of the `FORMS`.

    A complex state rotates at each step by an angle learned per channel, as in the first HGRN (Qin
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
            # Angles from 1 radian per step downwards, as in rotary positions.
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
    """HGRN2 computed as an elementwise scan, without matrix products.

    For heads with fewer than 16 channels, matrix products on a GPU compute mostly padding.
    """

    def stream(self, inputs, tokens, state, lower_bound=None):
        q, f, i = (layer(inputs) for layer in (self.q_proj, self.f_proj, self.i_proj))
        q, v, log_f = self.gates(q, f, i, lower_bound)
        # [B, T, H, K, V]: S_t = f_t S_{t-1} + (1 - f_t) v_t, for each row of the matrix
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
    """Builds a byte-level language model: HGRN2 with a ratio, or HGRN with a form of state."""
    keras.utils.set_random_seed(seed)
    # In units of the squared width, HGRN2's projections have 4 weights and its MLP 9.
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
    """Yields the keys of all results, without the seed."""
    for ratio in size.ratios:
        if "HGRN2" in models and size.width % ratio == 0:
            yield {"model": "HGRN2", "setting": ratio, "width": size.width}
    for form in FORMS:
        if "HGRN" in models:
            yield {"model": "HGRN", "setting": form, "width": size.width}


def apply(model, tokens):
    return model(tokens)


def run(key, size, seeds, training, windows):
    """Trains the seeds of a setting in parallel and yields a line of results for each."""
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


# --- 3. Results ---


def losses_of(results, size, model):
    """Returns `{setting: loss of each seed}` for the settings with results."""
    return {
        key["setting"]: np.array([line["loss"] for line in results.select(**key)])
        for key in settings(size, (model,))
        if results.select(**key)
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
    axes.set(xlabel="size of the state / width", ylabel="loss, nats per byte")
    axes.set_xscale("log", base=2)
    axes.set_xticks(list(found), [str(ratio) for ratio in found])
    axes.legend()
    figure.savefig(path, dpi=120)


def better(losses, than):
    """Formats the verdict: losses are below others by more than two deviations."""
    gap = np.mean(than) - np.mean(losses)
    return yes(gap > 2 * np.hypot(deviations(losses), deviations(than)))


def tell(results, size):
    """Formats a Markdown table of losses, perplexities and verdicts."""
    header = ("", "state", "parameters", "loss, nats per byte", "perplexity of a byte", "")
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
    lines = results.select(model=model, setting=setting, width=size.width)
    perplexity = f"{math.exp(np.mean(losses)):.3f}"
    parameters = f"{lines[0]['parameters']:,}"
    return model, state, parameters, with_error(losses, 4), perplexity, verdict


# --- 4. Main program ---


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
