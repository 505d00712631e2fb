"""Checks cached generation in KerasHub and in this package.

    python benchmarks/cached_generation.py

Runs the three checks of `keras_recurrent.testing` on tiny models of each text family, each backend
in a separate process, and prints Markdown. It takes two minutes on torch and 20 on JAX.
"""

import argparse
import json
import os
import pathlib
import subprocess
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))

from benchmarks.cpu import ROOT, machine, table, version

BACKENDS = ("torch", "jax")
HEADER = ["model", "cached equals plain", "padding changes nothing", "cuts change nothing"]
# Found in KerasHub 0.32.0 and verified: with the named code changed, all checks pass.
CAUSES = {
    "GPT-NeoX": "a defect: `GPTNeoXAttention.call` rotates the query of a step as if it stood at "
    "position 0; `rotary_embedding_layer(query_rot)` lacks `start_index=cache_update_index` "
    "(keras-hub's pull request 2870 says the same)",
    "Phi-3, `su`, long": "a limit of the model, which has other factors for long texts, and a "
    "defect: `Phi3SuScaledRotaryEmbedding._compute_cos_sin_embedding` counts padding. The first "
    "pass takes the long factors where `max_length` is more than `pretraining_sequence_length`, "
    "the steps after it the short ones while the text itself is short",
    "Qwen MoE, window": "a defect, on JAX alone: where attention is not fused, "
    "`QwenMoeAttention._compute_attention` asks `if cache_update_index`, which has no value while "
    "JAX compiles; it needs `is not None`",
    "Qwen 3.5": "two defects. `Qwen3_5CausalLM.generate_step` puts whole prompts into the state, "
    "and its steps feed the last token (of longer prompts: all behind the shortest) once more. "
    "`_chunk_gated_delta_rule` does not use its `padding_mask`: padding decays the state, and "
    "writes to it what the convolution carries over",
    "Qwen 3.5 MoE": "as Qwen 3.5: `Qwen3_5MoeCausalLM.generate_step`, and the same layer",
}


def run(backend, names):
    """Returns the lines of `cached_generation_checks` by model name."""
    print(f"{backend} ...", file=sys.stderr, flush=True)
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.cached_generation_checks", *names],
        cwd=ROOT,
        env={**os.environ, "KERAS_BACKEND": backend},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return {line["name"]: line for line in map(json.loads, done.stdout.splitlines())}


def checks_table(results):
    names = list(dict.fromkeys(name for lines in results.values() for name in lines))
    rows = []
    for name in names:
        measured = {backend: lines[name] for backend, lines in results.items() if name in lines}
        first = next(iter(measured.values()))
        cells = []
        for number, found in enumerate(first["checks"]):
            others = [line["checks"][number] for line in measured.values()]
            same = all((other is None) == (found is None) for other in others)
            words = [found] if same else others
            cells.append("; ".join("right" if each is None else f"**{each}**" for each in words))
        off = [f"{measured[b]['cached']:.1g}" if b in measured else "" for b in results]
        moved = first.get("window")
        window = "" if moved is None else f"{moved:.2f}" if moved else "**ignored**"
        rows.append([name, *cells, *off, window])
    header = [*HEADER, *(f"off by, {backend}" for backend in results), "window"]
    return table(header, rows).replace("---:", "---")


def causes_table(results):
    first = next(iter(results.values()))
    rows = [
        [name, CAUSES.get(name, "not found yet"), f"{line['wrong']} of {line['new']}"]
        for name, line in first.items()
        if any(any(lines[name]["checks"]) for lines in results.values() if name in lines)
    ]
    return table(["model", "cause", f"wrong tokens on {next(iter(results))}"], rows).replace(
        "---:", "---"
    )


def agreement(results):
    """Compares backends: failed checks and plain logits."""
    first, *others = results.values()
    words = []
    for backend, lines in zip(list(results)[1:], others, strict=True):
        shared = [name for name in lines if name in first]
        same = sum(
            [found is None for found in lines[name]["checks"]]
            == [found is None for found in first[name]["checks"]]
            for name in shared
        )
        furthest = max(
            abs(a - b) / (max(row) - min(row))
            for name in shared
            for row, other in zip(lines[name]["logits"], first[name]["logits"], strict=True)
            for a, b in zip(row, other, strict=True)
        )
        words.append(
            f"On {backend} {len(shared)} of them were run, and for {same} the same checks fail; "
            f"plain logits differ from torch's\nby at most {furthest:.0e} of their range."
        )
    return "\n".join(words)


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--backends", nargs="+", choices=BACKENDS, default=BACKENDS)
    parser.add_argument("--jax", nargs="+", default=[], help="models to check on JAX, if not all")
    arguments = parser.parse_args()
    results = {
        backend: run(backend, arguments.jax if backend == "jax" else [])
        for backend in arguments.backends
    }
    report(results)


def report(results):
    from benchmarks.cached_generation_checks import LEFT_OUT

    first = next(iter(results.values()))
    blind = [name for name, line in first.items() if line.get("blind")]
    print(f"# Cached generation, checked\n\n{machine()}\nkeras-hub {version('keras-hub')}.\n")
    print(
        "The checks of `keras_recurrent.testing` on tiny models with random weights, float32: two "
        "to six layers,\nwidth 16, 61 tokens, prompts of 11, 7 and 2 tokens in a batch, filled to "
        "19. Sliding windows are of\n4 tokens. Where a check fails, the table has the first wrong "
        "token and by how much its logit is below\nthe best one of a plain forward pass; `alone` "
        "and `uncut` say that the token is right here and wrong\nin the row alone or in the uncut "
        "one. `off by` is how far logits with a cache are from those of a\nplain pass over the "
        "same tokens, at most, of the range of a token's logits. `window` is how far the\n"
        "window moves a plain pass's logits, of the same range.\n"
    )
    print(checks_table(results), end="\n\n")
    print(
        "That the first check could have failed was tried on torch: a cache that loses a tenth in "
        "every step was\nfound in "
        + (f"all models but {', '.join(blind)}." if blind else "every model.")
        + f"\n{agreement(results)}\n"
    )
    print("## What is wrong\n\nTokens of the batch that are not the best, and why.\n")
    print(causes_table(results), end="\n\n")
    print(
        "By their code, GPT-NeoX is wrong at every size, and Qwen 3.5 wherever there is a linear "
        "attention\nlayer. Phi-3 with `su` factors is right while `max_length` is at most "
        "`pretraining_sequence_length` (4,096 for the\npublished model of 128k). With one token "
        "more, logits of a text of 6 to 11 tokens were off by 0.15 to 0.46\nof their range.\n\n"
        "A window that is ignored is no matter of caches, and no check finds it, as plain passes "
        "ignore it, too:\n`_compute_attention` of Qwen, Qwen 3, Qwen 3 MoE and Qwen 3.5 gives "
        "`dot_product_attention` a mask without\nthe window wherever "
        "`fused_attention_op_available()`, which is everywhere on torch and JAX. On TensorFlow\n"
        "the window is heeded. Gemma had the same once (keras-hub's issue 2186). The windows of "
        "published models are\nlonger than most texts.\n"
    )
    print("## Not checked\n\nThese do not write from `token_ids` and `padding_mask`.\n")
    rows = [[f"`{name}`", reason] for name, reason in LEFT_OUT.items()]
    rows.append(["each `Seq2SeqLM`", "takes what its encoder reads"])
    print(table(["class", "why"], rows).replace("---:", "---"))


if __name__ == "__main__":
    main()
