"""Recurrences extrapolate beyond their training length (Griffin, section 6, figures 5 and 10).

Byte-level models are tested on windows that are longer than the training sequences. Models with the
same seed train on the same sequences. A loss "at 512" is the mean over positions 257 to 512.
"""

import functools

import numpy as np
from runs import Panel, clear, mean_with_error, octaves, read_text, spread, yes
from tasks import GLOBAL, LOCAL, RECURRENT, language_model
from training import token_losses, train_on_text

from keras_recurrent.evaluation import LossByPosition

# The pattern of blocks, and the fraction of each head with rotary positions.
MODELS = {
    "Hawk": ((RECURRENT,), 1.0),
    "Griffin": ((RECURRENT, RECURRENT, LOCAL), 1.0),
    "MQA RoPE": ((GLOBAL,), 1.0),
    "MQA NoPE": ((GLOBAL,), 0.0),
}
# Claims about the loss at 4 L minus the loss at L. There is none about MQA without positions.
CLAIMS = {
    "Hawk": ("at most 0", lambda mean: mean <= 0),
    "Griffin": ("at most .01", lambda mean: mean <= 0.01),
    "MQA RoPE": ("at least .3", lambda mean: mean >= 0.3),
}
SIZES = {  # lengths are bytes
    "width": (64, 256),
    "lru_width": (80, 352),
    "num_layers": (3, 6),
    "lengths": ((128, 256), (512, 2048)),  # training lengths
    "tokens": (2048, 16_384),  # per step
    "steps": (300, 700),  # at most two passes over the text
    "longest": (1024, 32_768),  # length of the test windows
    "windows": (384, 128),
    "learning_rate": (5e-3, 2e-3),
}


def places_of(size):
    """Returns the positions of reported losses: powers of 2 times half the shortest length."""
    return octaves(min(size.lengths) // 2, size.longest)


def prepare(size, text):
    training, held_out = read_text(text)
    # From the shortest training length on, each octave of positions sees the same text.
    return training, spread(held_out, size.windows, min(size.lengths) // 2, size.longest)


def runs(size, results):
    for length in size.lengths:
        for name in MODELS:
            yield {"model": name, "length": length, "width": size.width}


def measure(key, seeds, size, data):
    training, windows = data
    blocks, turned = MODELS[key["model"]]
    sizes = {"lru_width": size.lru_width, "partial_rotary_factor": turned}
    window = key["length"] // 2
    models = [language_model(blocks, size, window, 256, seed, **sizes) for seed in seeds]
    lines = train_on_text(models, seeds, training, size, key["length"])
    # Equals `keras_recurrent.evaluation.loss_by_position`, in one program.
    test = token_losses(models[0], batch_size=max(1, 2**17 // size.longest))
    for line, model in zip(lines, models, strict=True):
        losses = test(model, windows).astype("float64").mean(axis=0)
        found = LossByPosition(losses, np.full(len(losses), len(windows)))
        places = places_of(size)
        at = {str(n): round(float(found.loss[n // 2 - 1 : n - 1].mean()), 4) for n in places}
        means = {str(n): round(float(found.running_mean[n - 2]), 4) for n in places}
        line.update(loss_at=at, running_mean_at=means)
    return lines


def values(results, size, name, length, kind, place):
    lines = results.select(model=name, length=length, width=size.width)
    return np.array([line[kind][str(place)] for line in lines])


def judge(name, change, rope):
    """Formats the verdict on the change of the loss from L to 4 L, compared with RoPE's."""
    text = f"loss at 4 L minus loss at L {mean_with_error(change)}"
    if name not in CLAIMS:
        return text
    claim, holds = CLAIMS[name]
    text += f"; {yes(holds(np.mean(change)))}: {claim}"
    return text if name == "MQA RoPE" else f"{text}; {yes(clear(change, rope))}: below RoPE"


def panels(results, size):
    """Running means of the loss, the paper's curves, for each training length."""
    found = []
    for length in size.lengths:
        get = functools.partial(values, results, size, length=length)
        names = [name for name in MODELS if len(get(name, kind="loss_at", place=length))]
        changes, verdicts = {}, {}
        if 4 * length <= size.longest:
            far, near = (
                {n: get(n, kind="loss_at", place=x) for n in names} for x in (4 * length, length)
            )
            changes = {name: far[name] - near[name] for name in names}
            verdicts = {n: judge(n, c, changes.get("MQA RoPE")) for n, c in changes.items()}
        curves = {
            name: {n: get(name, kind="running_mean_at", place=n) for n in places_of(size)}
            for name in names
        }
        title = f"trained on {length:,} bytes"
        ylabel = "mean loss so far, nats per byte"
        found.append(Panel(title, "bytes read", ylabel, curves, verdicts, mark=length))
    return found
