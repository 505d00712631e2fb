"""Recurrences extrapolate beyond their training length (Griffin, section 6, figures 5 and 10).

Byte-level models are tested on windows that are longer than the training sequences. Models with the
same seed train on the same sequences. A loss "at 512" is the mean over positions 257 to 512.
"""

import numpy as np
from runs import Panel, clear, mean_with_error, octaves, read_text, spread, yes
from tasks import GRIFFINS, language_model
from training import train_on_text

# The pattern of blocks, and the fraction of each head with rotary positions.
MODELS = {
    "Hawk": (GRIFFINS["Hawk"], 1.0),
    "Griffin": (GRIFFINS["Griffin"], 1.0),
    "MQA RoPE": (GRIFFINS["MQA"], 1.0),
    "MQA NoPE": (GRIFFINS["MQA"], 0.0),
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
    (blocks, turned), length = MODELS[key["model"]], key["length"]
    shape, window = (blocks, size.num_layers, size.width), length // 2
    options = {"lru_width": size.lru_width, "partial_rotary_factor": turned}
    models = [language_model(*shape, window, seed, **options) for seed in seeds]
    training = length, size.steps, size.tokens, size.learning_rate
    batch_size = max(1, 2**17 // size.longest)
    for line, losses in train_on_text(models, seeds, data, *training, batch_size=batch_size):
        places = places_of(size)
        at = {str(n): round(losses[n // 2 - 1 : n - 1].mean(), 4) for n in places}
        means = {str(n): round(losses[: n - 1].mean(), 4) for n in places}
        yield {**line, "loss_at": at, "running_mean_at": means}


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
    found = results.lines_by(runs(size, results), "length", "model")
    return [panel_of(length, found.get(length, {}), size) for length in size.lengths]


def panel_of(length, found, size):
    def values(kind, n):
        return {k: np.array([line[kind][str(n)] for line in lines]) for k, lines in found.items()}

    verdicts = {}
    if 4 * length <= size.longest:
        near, far = (values("loss_at", n) for n in (length, 4 * length))
        changes = {name: far[name] - near[name] for name in found}
        verdicts = {n: judge(n, change, changes.get("MQA RoPE")) for n, change in changes.items()}
    means = {n: values("running_mean_at", n) for n in places_of(size)}
    curves = {name: {n: by_name[name] for n, by_name in means.items()} for name in found}
    labels = f"trained on {length:,} bytes", "bytes read", "mean loss so far, nats per byte"
    return Panel(*labels, curves, verdicts, mark=length)
