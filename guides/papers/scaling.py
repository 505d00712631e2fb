"""Loss by training compute of Hawk, Griffin and a Transformer (Griffin, figure 1a).

De et al. 2024 (arXiv:2402.19427) train models of 100 million to 7 billion weights on about 20
tokens per weight: the logarithm of the held-out loss falls linearly with the logarithm of the
compute. Griffin is below a Transformer with multi-query attention (MQA) at every budget; Hawk is
slightly above it, and the gap closes with the budget.

Here, at full size, the models have 1, 3 and 10 million weights and train on bytes: the sources and
documentation of the installed packages. Some packages are held out. Losses at equal compute are
interpolated between the sizes of a model, in logarithms.
"""

import hashlib
import importlib.metadata
import pathlib
import sys
import zlib

import numpy as np
from runs import Panel, clear, mean_with_error, read_text, spread, table, yes
from tasks import GRIFFINS, language_model
from training import train_on_text

from keras_recurrent.layers import LocalAttention

SEEDS = 2, 2
SUFFIXES = (".py", ".md", ".rst", ".txt")
SIZES = {  # lengths are bytes
    "widths": ((12, 24, 36), (96, 160, 288)),
    "num_layers": (3, 9),
    "length": (128, 1024),
    "window": (64, 512),  # of Griffin's local attention
    "bytes_per_weight": (20.0, 20.0),
    "rows_per_channel": (0.5, 0.1875),  # sequences of a step, divided by the width
    "windows": (1024, 2048),  # held-out sequences
    "learning_rate": (0.04, 0.03),  # divided by the square root of the width
    "dtype": ("float32", "mixed_bfloat16"),
}


def is_held_out(package):
    """Returns True for about one in sixteen names."""
    return zlib.crc32(package.encode()) % 16 == 0


def read_packages(path=None):
    """Returns training and held-out text as arrays of bytes, and a description of both.

    Packages are sorted by name. Files that are equal to an earlier file, and copies of other
    packages below a folder `_vendor`, are left out.

    path: a list of folders with installed packages, or None for this environment.
    """
    found = importlib.metadata.distributions(path=path or sys.path)
    named = ((package.metadata["Name"], package) for package in found)
    packages = {name.lower(): package for name, package in named if name}
    # Held-out packages come first, so that training has none of their files.
    names = sorted(packages, key=lambda name: (not is_held_out(name), name))
    texts: dict = {True: [], False: []}
    known = set()
    for name in names:
        for file in sorted(packages[name].files or ()):
            source = pathlib.Path(file.locate())
            if file.suffix not in SUFFIXES or "vendor" in str(file) or not source.is_file():
                continue
            text = source.read_bytes()
            digest = hashlib.sha256(text).digest()
            if digest not in known:
                known.add(digest)
                texts[is_held_out(name)].append(text)
    training, held_out = (b"".join(texts[kind]) for kind in (False, True))
    corpus = {
        "bytes": len(training),
        "sha256": hashlib.sha256(training).hexdigest(),
        "held_out_bytes": len(held_out),
        "held_out_sha256": hashlib.sha256(held_out).hexdigest(),
        "held_out": [name for name in names if is_held_out(name)],
    }
    return *(np.frombuffer(text, "uint8") for text in (training, held_out)), corpus


def prepare(size, text):
    """Returns training text, held-out windows [windows, length + 1], and a description."""
    found = read_packages() if text is None else (*read_text(text), {"file": str(text)})
    training, held_out, corpus = found
    windows = spread(held_out, size.windows, len(held_out) // size.windows, size.length + 1)
    return training, windows, corpus


def runs(size, results):
    sizes = {"num_layers": size.num_layers, "length": size.length}
    for width in size.widths:
        for name in GRIFFINS:
            key = {"model": name, "width": width, **sizes}
            yield {**key, "bytes_per_weight": size.bytes_per_weight}


def build(name, size, width, seed):
    shape = GRIFFINS[name], size.num_layers, width, size.window
    options = {"heads": max(1, width // 32), "lru_width": round(width / 12) * 16}
    return language_model(*shape, seed, **options, dtype=size.dtype)


def flops_per_byte(model, length):
    """Returns the FLOPs of training on a byte: the total, and the part without attention.

    In the forward pass, a weight takes two FLOPs. Each pair of tokens in attention takes two FLOPs
    per channel of the keys, and two per channel of the values. The backward pass takes twice as
    many. The recurrences' element-wise operations are not counted.
    """
    attention = 0.0
    for block in model.backbone.transformer_layers:
        mixer = block.temporal_block
        if isinstance(mixer, LocalAttention):
            keys = np.minimum(np.arange(length) + 1, mixer.sliding_window or length).mean()
            attention += 12 * mixer.num_query_heads * mixer.head_dim * keys
    of_weights = 6 * model.count_params()
    return of_weights + attention, of_weights


def measure(key, seeds, size, data):
    """Trains a model for each of the seeds."""
    width, rate = key["width"], size.learning_rate / key["width"] ** 0.5
    tokens = round(size.rows_per_channel * width) * size.length
    models = [build(key["model"], size, width, seed) for seed in seeds]
    steps = max(1, round(size.bytes_per_weight * models[0].count_params() / tokens))
    for line, _ in train_on_text(models, seeds, data, size.length, steps, tokens, rate):
        every, of_weights = (line["bytes"] * n for n in flops_per_byte(models[0], size.length))
        flops = {"flops": float(every), "flops_of_weights": float(of_weights)}
        yield {**line, **flops, "learning_rate": round(rate, 6), "corpus": data[2]}


def curves_of(results, size, kind):
    """Returns, for each model and each seed that has all widths, FLOPs and losses `[widths]`."""
    lines: dict = {name: {} for name in GRIFFINS}
    for key in runs(size, results):
        for line in results.select(**key):
            lines[key["model"]].setdefault(line["seed"], []).append((line[kind], line["loss"]))
    return {
        name: [
            np.transpose(by_seed[n]) for n in sorted(by_seed) if len(by_seed[n]) == len(size.widths)
        ]
        for name, by_seed in lines.items()
    }


def budgets(curves_of_models):
    """Returns the smallest and largest FLOPs that all models have, and their geometric mean."""
    ends = np.array([flops[[0, -1]] for found in curves_of_models for flops, _ in found])
    return np.geomspace(ends[:, 0].max(), ends[:, 1].min(), 3)


def losses_at(found, flops):
    """Returns the losses `[seeds, budgets]`, interpolated in logarithms."""
    return np.exp([np.interp(np.log(flops), np.log(x), np.log(y)) for x, y in found])


def power_law(found):
    """Returns the exponent of each seed, and the largest relative error of the fits."""
    logs = [(np.log(x), np.log(y)) for x, y in found]
    fits = [np.polyfit(x, y, 1) for x, y in logs]
    errors = [abs(np.polyval(fit, x) - y).max() for fit, (x, y) in zip(fits, logs, strict=True)]
    return np.array([fit[0] for fit in fits]), max(errors)


def losses(results, size, curves):
    """Returns the panel of losses by FLOPs, with a table of the runs and the power laws."""
    keys = sorted(runs(size, results), key=lambda key: list(GRIFFINS).index(key["model"]))
    shown, rows = {name: {} for name in GRIFFINS}, []
    for key in keys:
        if lines := results.select(**key):
            line, found = lines[0], [line["loss"] for line in lines]
            shown[key["model"]][line["flops"]] = found
            sizes = [f"{line[kind]:,}" for kind in ("parameters", "bytes")]
            flops = [f"{line[kind]:.3g}" for kind in ("flops", "flops_of_weights")]
            label = f"{key['model']}, width {key['width']}"
            rows.append((label, *sizes, *flops, mean_with_error(found, 4)))
    header = "", "weights", "bytes", "FLOPs", "of weights alone", "loss, nats per byte"
    text = [table(header, rows), ""]
    for name, found in curves.items():
        if found and len(size.widths) > 1:
            exponents, error = power_law(found)
            holds = f"{yes(error < 0.01)}, {100 * error:.2f} %"
            law = f"loss ~ FLOPs^{mean_with_error(exponents)}"
            text.append(f"- {name}: {law}, within 1 %: {holds}")
    labels = "", "FLOPs of training", "held-out loss, nats per byte"
    return Panel(*labels, shown, scale="log", text="\n".join(text))


def gaps(curves, words):
    """Returns the panel of losses minus MQA's at equal FLOPs."""
    flops = budgets(curves.values())
    found = {name: losses_at(of_seeds, flops).T for name, of_seeds in curves.items()}
    seeds = min(len(of_seeds[0]) for of_seeds in found.values())
    gap = {name: found[name][:, :seeds] - found["MQA"][:, :seeds] for name in ("Hawk", "Griffin")}
    zero = np.zeros(seeds)
    above = all(clear(zero, of_seeds) for of_seeds in gap["Hawk"])
    below = all(clear(of_seeds, zero) for of_seeds in gap["Griffin"])
    verdicts = {
        "Hawk": f"{yes(above)}: above; {yes(clear(gap['Hawk'][-1], gap['Hawk'][0]))}: closes",
        "Griffin": f"{yes(below)}: below",
    }
    places = [float(f"{n / 1e12:.3g}") for n in flops]
    gap = {name: dict(zip(places, of_budgets, strict=True)) for name, of_budgets in gap.items()}
    return Panel(f"at equal {words}", f"{words} / 10^12", "loss minus MQA's", gap, verdicts, 4)


def panels(results, size):
    by_all, by_weights = (curves_of(results, size, k) for k in ("flops", "flops_of_weights"))
    found = [losses(results, size, by_all)]
    if len(size.widths) > 1 and all(by_all.values()):  # a comparison needs all models
        found += [gaps(by_all, "FLOPs"), gaps(by_weights, "FLOPs of weights")]
    return found
