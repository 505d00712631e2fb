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
import time
import zlib

import keras
import numpy as np
from runs import Panel, clear, mean_with_error, read_text, spread, table, text_batches, yes
from training import adamw, results_of, token_losses, train

from keras_recurrent.layers import LocalAttention
from keras_recurrent.models import GriffinBackbone, GriffinCausalLM

SEEDS = 2, 2
RECURRENT = "recurrent"
MODELS = {
    "Hawk": (RECURRENT,),
    "Griffin": (RECURRENT, RECURRENT, "local_attention"),
    "MQA": ("global_attention",),
}
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


# --- 1. Text ---


def is_held_out(package):
    """Returns True for about one in sixteen names."""
    return zlib.crc32(package.encode()) % 16 == 0


def read_packages(path=None):
    """Returns training and held-out text as arrays of bytes, and a description of both.

    Packages are sorted by name. Files that are equal to an earlier file, and copies of other
    packages below a folder `_vendor`, are left out.

    path: a list of folders with installed packages, or None for this environment.
    """
    options = {} if path is None else {"path": path}
    found = importlib.metadata.distributions(**options)
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
    return training, windows.astype("int32"), corpus


# --- 2. Training ---


def runs(size, results):
    for width in size.widths:
        for name in MODELS:
            yield key_of(name, size, width)


def key_of(name, size, width):
    sizes = {"num_layers": size.num_layers, "length": size.length}
    return {"model": name, "width": width, **sizes, "bytes_per_weight": size.bytes_per_weight}


def build(name, size, width, seed):
    keras.utils.set_random_seed(seed)
    heads = max(1, width // 32)
    backbone = GriffinBackbone(
        vocabulary_size=256,
        num_layers=size.num_layers,
        hidden_dim=width,
        intermediate_dim=3 * width,
        lru_width=round(width / 12) * 16,
        block_types=MODELS[name],
        num_query_heads=heads,
        head_dim=width // heads,
        sliding_window=size.window,
        dtype=size.dtype,
    )
    return GriffinCausalLM(backbone)


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
    """Trains a model for each of the seeds, one after another."""
    training, windows, corpus = data
    width, rate = key["width"], size.learning_rate / key["width"] ** 0.5
    tokens = round(size.rows_per_channel * width) * size.length
    for seed in seeds:
        model = build(key["model"], size, width, seed)
        steps = max(1, round(size.bytes_per_weight * model.count_params() / tokens))
        batches = text_batches(training, [seed], steps, size.length, tokens)
        batches = (tuple(part.astype("int32") for part in batch) for batch in batches)
        start = time.perf_counter()
        loss = train([model], adamw(rate, max(1, steps // 10), steps, end=0.1), batches)
        seconds = round(time.perf_counter() - start, 1)
        every, of_weights = (steps * tokens * n for n in flops_per_byte(model, size.length))
        yield {
            **results_of([model], loss)[0],
            "steps": steps,
            "bytes": steps * tokens,
            "flops": float(every),
            "flops_of_weights": float(of_weights),
            "learning_rate": round(rate, 6),
            "loss": round(float(token_losses(model)(model, windows).astype("float64").mean()), 5),
            "seconds": seconds,
            "corpus": corpus,
        }


# --- 3. Results ---


def curves(results, size, name, kind="flops"):
    """Returns, for each seed that has all widths, the FLOPs and the losses `[widths]`."""
    lines = [results.select(**key_of(name, size, width)) for width in size.widths]
    by_seed = [{line["seed"]: line for line in found} for found in lines]
    return [
        tuple(np.array([found[seed][k] for found in by_seed]) for k in (kind, "loss"))
        for seed in sorted(set.intersection(*map(set, by_seed)))
    ]


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


class Losses:
    """Plot and table of the losses by FLOPs."""

    def __init__(self, results, size):
        self.lines = {
            (name, width): results.select(**key_of(name, size, width))
            for name in MODELS
            for width in size.widths
        }
        self.curves = {name: curves(results, size, name) for name in MODELS}

    def draw(self, axes):
        for i, (name, found) in enumerate(self.curves.items()):
            for j, (flops, losses) in enumerate(found):
                axes.loglog(flops, losses, "o-", color=f"C{i}", label=None if j else name)
        axes.set(xlabel="FLOPs of training", ylabel="held-out loss, nats per byte")
        axes.legend()

    def table(self):
        rows = []
        for (name, width), lines in self.lines.items():
            if not lines:
                continue
            line = lines[0]
            sizes = [f"{line[kind]:,}" for kind in ("parameters", "bytes")]
            flops = [f"{line[kind]:.3g}" for kind in ("flops", "flops_of_weights")]
            loss = mean_with_error([line["loss"] for line in lines], 4)
            rows.append((f"{name}, width {width}", *sizes, *flops, loss))
        header = ("", "weights", "bytes", "FLOPs", "of weights alone", "loss, nats per byte")
        several = {n: found for n, found in self.curves.items() if found and len(found[0][0]) > 1}
        laws = {name: power_law(found) for name, found in several.items()}
        said = (
            f"- {name}: loss ~ FLOPs^{mean_with_error(exponents)}, within 1 %: "
            f"{yes(error < 0.01)}, {100 * error:.2f} %"
            for name, (exponents, error) in laws.items()
        )
        return table(header, rows) + "\n\n" + "\n".join(said)


def gaps(results, size, kind, words):
    """Returns the panel of losses minus MQA's at equal FLOPs."""
    found = {name: curves(results, size, name, kind) for name in MODELS}
    flops = budgets(found.values())
    losses = {name: losses_at(one, flops).T for name, one in found.items()}
    seeds = min(len(one[0]) for one in losses.values())
    base = losses["MQA"][:, :seeds]
    gap = {name: losses[name][:, :seeds] - base for name in ("Hawk", "Griffin")}
    zero = np.zeros(seeds)
    lower = {name: [clear(one, zero) for one in found] for name, found in gap.items()}
    higher = [clear(zero, one) for one in gap["Hawk"]]
    verdicts = {
        "Hawk": f"{yes(all(higher))}: above; {yes(clear(gap['Hawk'][-1], gap['Hawk'][0]))}: closes",
        "Griffin": f"{yes(all(lower['Griffin']))}: below",
    }
    places = [float(f"{n / 1e12:.3g}") for n in flops]
    gap = {name: dict(zip(places, one, strict=True)) for name, one in gap.items()}
    return Panel(f"at equal {words}", f"{words} / 10^12", "loss minus MQA's", gap, verdicts, 4)


def panels(results, size):
    if len(size.widths) < 2 or not all(curves(results, size, name) for name in MODELS):
        return [Losses(results, size)]  # a comparison needs all models
    by_all = gaps(results, size, "flops", "FLOPs")
    by_weights = gaps(results, size, "flops_of_weights", "FLOPs of weights")
    return [Losses(results, size), by_all, by_weights]
