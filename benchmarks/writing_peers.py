"""Times `generate` of flash-linear-attention and transformers.

    python -m benchmarks.writing_peers hgrn2 1

Baselines of `benchmarks.writing`. Arguments: a model, `hgrn2` (flash-linear-attention's) or
`recurrentgemma` (transformers'), with the sizes of this package's presets; and a batch size.
Weights are random in bfloat16, decoding is greedy, and the time per token is the difference between
two calls that generate different numbers of tokens; fewer than there, because each takes up to a
tenth of a second.
"""

import json
import os
import statistics
import sys
import time
from typing import Any

os.environ.setdefault("KERAS_BACKEND", "torch")  # this package's modules import Keras

import numpy as np
import torch

from benchmarks import peer_models
from benchmarks.writing import PROMPT
from keras_recurrent.presets import griffin, hgrn2

MODELS: dict[str, Any] = {  # library, builder, row in the table of presets
    "hgrn2": ("flash-linear-attention", peer_models.fla_hgrn2, hgrn2.SIZES["hgrn2_1.3b_100b"]),
    "recurrentgemma": (
        "transformers",
        peer_models.transformers_gemma,
        griffin.SIZES["recurrentgemma_2b"],
    ),
}
FEW, MANY = 16, 48  # tokens
RUNS = 3


def measure(name, batch):
    peer, make, row = MODELS[name]
    model = make(row.backbone_arguments, use_cache=True).eval()
    model.generation_config.eos_token_id = None  # no sequence ends early
    vocabulary = row.vocabulary_size
    prompt = np.random.default_rng(0).integers(1, vocabulary, (batch, PROMPT))
    token_ids = torch.tensor(prompt, device="cuda")

    def seconds(new):
        torch.cuda.synchronize()
        start = time.perf_counter()
        with torch.no_grad():
            written = model.generate(
                token_ids,
                attention_mask=torch.ones_like(token_ids),
                max_new_tokens=new,
                do_sample=False,
                pad_token_id=0,
            ).cpu()
        if written.shape != (batch, PROMPT + new):
            sys.exit(f"{peer} wrote {tuple(written.shape)}, not {(batch, PROMPT + new)}")
        return time.perf_counter() - start

    first = seconds(MANY)
    seconds(FEW)
    times = [(seconds(MANY) - seconds(FEW)) / (MANY - FEW) for _ in range(RUNS)]
    return {
        "model": f"{peer}: {name}",
        "batch": batch,
        "ms a token": [round(1000 * t, 3) for t in sorted(times)],
        "tokens/s": round(batch / statistics.median(times)),
        "first call s": round(first, 1),
    }


if __name__ == "__main__":
    print(json.dumps(measure(sys.argv[1], int(sys.argv[2]))), flush=True)
