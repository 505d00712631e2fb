"""Times `generate` and `stream` of a model: `python -m benchmarks.writing hgrn2 1`.

Arguments are a model, `hgrn2` or `recurrentgemma`, and a batch size. Weights are random and in
bfloat16, tokens greedy. The time of a new token is the difference of two calls that write different
numbers of tokens, so it holds neither the prompt nor what a call begins with. A stream is timed
between the same tokens. The backend is that of KERAS_BACKEND.
"""

import json
import statistics
import sys
import time

import keras
import numpy as np

from keras_recurrent import which_generation
from keras_recurrent.models import GriffinCausalLM, HGRN2CausalLM

MODELS = {
    "hgrn2": (HGRN2CausalLM, "hgrn2_1.3b_100b"),
    "recurrentgemma": (GriffinCausalLM, "recurrentgemma_2b"),
    "griffin_100m": (GriffinCausalLM, "griffin_100m"),
    "hawk_tiny": (GriffinCausalLM, "hawk_tiny"),
}
PROMPT, FEW, MANY = 16, 32, 288  # tokens
RUNS = 3


def prompts(vocabulary, batch, new):
    token_ids = np.random.default_rng(0).integers(1, vocabulary, (batch, PROMPT + new))
    given = np.arange(PROMPT + new) < PROMPT
    mask = np.broadcast_to(given, token_ids.shape)
    return {"token_ids": (token_ids * given).astype("int32"), "padding_mask": mask}


def measure(name, batch, dtype="bfloat16"):
    family, preset = MODELS[name]
    model = family.from_preset(preset, load_weights=False, preprocessor=None, dtype=dtype)
    model.compile(sampler="greedy")
    vocabulary = model.backbone.vocabulary_size

    def seconds(new):
        inputs = prompts(vocabulary, batch, new)
        start = time.perf_counter()
        written = model.generate(inputs, stop_token_ids=None)
        keras.ops.convert_to_numpy(written["token_ids"])
        return time.perf_counter() - start

    def seconds_of_stream():
        stream = model.stream(prompts(vocabulary, batch, MANY), stop_token_ids=None)
        times = [time.perf_counter() for _ in stream]
        return (times[-1] - times[FEW - 1]) / (MANY - FEW)

    first = seconds(MANY)
    seconds(FEW)
    times = [(seconds(MANY) - seconds(FEW)) / (MANY - FEW) for _ in range(RUNS)]
    way = which_generation(model)
    seconds_of_stream()
    streamed = [seconds_of_stream() for _ in range(RUNS)]
    return {
        "model": preset,
        "backend": keras.config.backend(),
        "batch": batch,
        "ms a token": [round(1000 * t, 3) for t in sorted(times)],
        "tokens/s": round(batch / statistics.median(times)),
        "stream tokens/s": round(batch / statistics.median(streamed)),
        "first call s": round(first, 1),
        "way": str(way),
    }


if __name__ == "__main__":
    print(json.dumps(measure(sys.argv[1], int(sys.argv[2]), *sys.argv[3:])), flush=True)
