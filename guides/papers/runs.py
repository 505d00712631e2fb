"""What the guides of this folder share: text, seeds side by side, raw results, pictures, tables."""

import json
import os
import pathlib
import pydoc_data.topics

import keras
import numpy as np
from keras import ops

from keras_recurrent.ops import token_crossentropy

PASSES = 2  # over the text, at most


# --- Text ---


def read_text(file=None, held_out=0.15):
    """Training and held-out text, as arrays of bytes.

    It is the documentation that Python brings along, each paragraph once, or a file. The text
    behind the first `1 - held_out` of it is held out.
    """
    if file is None:
        paragraphs = "\n\n".join(pydoc_data.topics.topics.values()).split("\n\n")
        text = "\n\n".join(dict.fromkeys(paragraphs)).encode()
    else:
        text = pathlib.Path(file).read_bytes()
    found = np.frombuffer(text, "uint8").astype("int32")
    return np.split(found, [round(len(found) * (1 - held_out))])


def rows_of(text, starts, length):
    """The bytes from each of `starts` [...] on in a text, which begins again at its end."""
    return text[(np.asarray(starts)[..., None] + np.arange(length)) % len(text)]


def spread(text, count, distance, length):
    """`count` windows [count, length] that begin `distance` bytes behind each other.

    Those that reach the end of the text that they begin in go on at its beginning. So any
    `distance` places beside each other see, in all windows together, all of it once: whatever
    model reads them, no place has easier text than another.
    """
    if max(length, count * distance) > len(text) or length > count * distance:
        raise SystemExit(
            f"{count:,} windows of {length:,} bytes, {distance:,} behind each other, need a "
            f"held-out text of {max(length, count * distance):,} bytes, and as many windows; it "
            f"has {len(text):,}: take a longer --text, or other --windows."
        )
    return rows_of(text[: count * distance], np.arange(count) * distance, length)


# --- Models of several seeds, side by side ---


def train(models, optimizer, batches):
    """Trains models of one shape on tokens, each on rows of its own.

    On JAX, all of them are one program on a GPU, where one alone would leave most of it idle, and
    take turns on a CPU, where products of many small matrices are slow. On other backends they
    take turns.

    Args:
        models: language models of this package, which differ in their weights.
        optimizer: a Keras optimizer, of which each model gets a copy.
        batches: an iterable of pairs of integers `[models, B, T]`: tokens, and those that follow.

    Returns:
        The mean loss of each model over the last tenth of the batches, a list of floats.
    """
    optimizers = [type(optimizer).from_config(optimizer.get_config()) for _ in models]
    for model, own in zip(models, optimizers, strict=True):
        own.build(model.trainable_variables)
    start = _in_one_program if keras.config.backend() == "jax" else _by_keras
    step, finish = start(models, optimizers)
    losses = [step(tokens, following) for tokens, following in batches]
    finish()
    last = losses[-max(1, len(losses) // 10) :]
    return np.mean([[float(loss) for loss in step] for step in last], axis=0).tolist()


def _loss(model, tokens, following):
    hidden_states, _ = model.backbone.hidden_states(tokens)
    logits = model.backbone.token_embedding(hidden_states, reverse=True)
    return ops.mean(token_crossentropy(logits, following))


def _in_one_program(models, optimizers, side_by_side=None):
    import jax

    model, optimizer = models[0], optimizers[0]
    if side_by_side is None:
        side_by_side = jax.default_backend() != "cpu"

    def loss(weights, tokens, following):
        with keras.StatelessScope(list(zip(model.trainable_variables, weights, strict=True))):
            return _loss(model, tokens, following)

    def program(state, tokens, following):
        weights, memory = state
        value, gradients = jax.value_and_grad(loss)(weights, tokens, following)
        return optimizer.stateless_apply(memory, gradients, weights), value

    # JAX may write over the memory of the state, which therefore is none of the variables'.
    states = [
        jax.tree.map(lambda v: jax.numpy.array(v.value, copy=True), pair)
        for pair in zip(
            (list(model.trainable_variables) for model in models),
            (list(own.variables) for own in optimizers),
            strict=True,
        )
    ]
    if side_by_side:
        states = [jax.tree.map(lambda *same: jax.numpy.stack(same), *states)]
        program = jax.vmap(program)
    program = jax.jit(program, donate_argnums=0)

    def step(tokens, following):
        rows = [(tokens, following)] if side_by_side else zip(tokens, following, strict=True)
        values = []
        for i, row in enumerate(rows):
            states[i], value = program(states[i], *row)
            values.append(value)
        return values[0] if side_by_side else values

    def finish():
        for i, model in enumerate(models):
            weights = [v[i] for v in states[0][0]] if side_by_side else states[i][0]
            for variable, value in zip(model.trainable_variables, weights, strict=True):
                variable.assign(value)

    return step, finish


def _by_keras(models, optimizers):
    for model, own in zip(models, optimizers, strict=True):
        model.compile(own, model.loss)

    def step(tokens, following):
        return [
            model.train_on_batch({"token_ids": x, "padding_mask": np.ones_like(x)}, y)[0]
            for model, x, y in zip(models, tokens, following, strict=True)
        ]

    return step, lambda: None


# --- Raw results, a line of JSON a run ---


class Results:
    """The lines of a file, to which a later sitting appends what is missing."""

    def __init__(self, path):
        self.path = pathlib.Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        lines = self.path.read_text().splitlines() if self.path.exists() else []
        self.lines = [json.loads(line) for line in lines]

    def append(self, **line):
        self.lines.append(line)
        with self.path.open("a") as file:
            file.write(json.dumps(line) + "\n")

    def of(self, **key):
        """The lines that have these values."""
        return [line for line in self.lines if all(line[k] == v for k, v in key.items())]

    def missing(self, seeds, **key):
        """The seeds that have no line with these values."""
        return [seed for seed in seeds if not self.of(seed=seed, **key)]


def machine():
    """What a run ran on."""
    backend = keras.config.backend()
    name = f"{os.cpu_count()} CPU cores"
    if backend == "jax":
        import jax

        device = jax.devices()[0]
        name = name if device.platform == "cpu" else device.device_kind
    if backend == "torch":
        import torch

        name = torch.cuda.get_device_name() if torch.cuda.is_available() else name
    return f"{name}, {backend}"


# --- Pictures and tables ---


def draw_band(axes, x, curves, **style):
    """The mean of curves `[seeds, points]`, in a band of one standard deviation to each side."""
    mean, deviation = np.mean(curves, axis=0), deviations(curves)
    (line,) = axes.plot(x, mean, **style)
    axes.fill_between(
        x, mean - deviation, mean + deviation, color=line.get_color(), alpha=0.25, linewidth=0
    )


def deviations(values):
    """The standard deviation over seeds, the first axis; 0 of a single one."""
    return np.std(values, axis=0, ddof=1) if len(values) > 1 else np.zeros_like(values[0])


def with_error(values, digits=3):
    """`mean ± standard deviation` over seeds."""
    return f"{np.mean(values):.{digits}f} ± {deviations(np.asarray(values)):.{digits}f}"


def table(header, rows):
    """A table in Markdown: text in the first column, numbers in the others."""
    rule = ["---", *["---:"] * (len(header) - 1)]
    return "\n".join("| " + " | ".join(map(str, row)) + " |" for row in (header, rule, *rows))
