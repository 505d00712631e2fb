"""Times `generate` and `stream` of a model.

    KERAS_BACKEND=torch python -m benchmarks.writing hgrn2 1

Arguments: a model, `hgrn2`, `hgrn2_hybrid` (three HGRN2 layers for each of attention), `hypenet`,
`minicpm_sala` or `recurrentgemma`, or on a CPU `griffin_100m` or `hawk_tiny`; a batch size; and
optionally quantizations, `int8`, `int8-weights`, `int4` (blocks of 128 channels) or
`int4-columns`, which are compared with bfloat16 in one process; logits of a fused step are compared
with those of the layers one by one. Weights are random in bfloat16, decoding is greedy. The time
per token is the difference between two calls that generate different numbers of tokens, so that it
contains neither prefill nor the start of a call. A stream is timed between the same tokens. The
floor is `decoding_time` at the rates of a copy and of a matrix product in the same process.

With `--turns`, a process compiles and is then measured in turns by `benchmarks.in_turns`, with the
last of the quantizations only.
"""

import argparse
import contextlib
import json
import statistics
import time

import keras
import numpy as np

from benchmarks.decoding import device_rates, least_seconds_a_token
from benchmarks.in_turns import answer_turns
from keras_recurrent import which_generation
from keras_recurrent.layers.decoding import decoding_scope
from keras_recurrent.models import GriffinCausalLM, HGRN2CausalLM, LightningHybridCausalLM

if keras.config.backend() == "torch":
    import torch

HYBRID = {
    "attention_layers": tuple(range(3, 24, 4)),
    "num_query_heads": 16,
    "num_key_value_heads": 16,
}
# {name: (family, preset, arguments of the backbone)}
MODELS: dict = {
    "hgrn2": (HGRN2CausalLM, "hgrn2_1.3b_100b", {}),
    "hgrn2_hybrid": (HGRN2CausalLM, "hgrn2_1.3b_100b", HYBRID),
    "hypenet": (LightningHybridCausalLM, "hypenet_2b", {}),
    "minicpm_sala": (LightningHybridCausalLM, "minicpm_sala", {}),
    "recurrentgemma": (GriffinCausalLM, "recurrentgemma_2b", {}),
    "griffin_100m": (GriffinCausalLM, "griffin_100m", {}),
    "hawk_tiny": (GriffinCausalLM, "hawk_tiny", {}),
}
PROMPT, FEW, MANY = 16, 64, 1088  # tokens
RUNS = 5
TIMES = ("generate, ms a token", "stream, ms a token", "stream, ms to the first token")


def make_model(name, preprocessor=None, dtype="bfloat16"):
    """Returns a model with random weights."""
    family, preset, arguments = MODELS[name]
    options = {"load_weights": False, "preprocessor": preprocessor, "dtype": dtype}
    return family.from_preset(preset, **options, **arguments)


def prompts(vocabulary, batch, new):
    token_ids = np.random.default_rng(0).integers(1, vocabulary, (batch, PROMPT + new))
    given = np.arange(PROMPT + new) < PROMPT
    mask = np.broadcast_to(given, token_ids.shape)
    return {"token_ids": (token_ids * given).astype("int32"), "padding_mask": mask}


def quantizations():
    of = keras.quantizers
    return {
        "int8": of.Int8QuantizationConfig(),
        "int8-weights": of.Int8QuantizationConfig(activation_quantizer=None),
        "int4": of.Int4QuantizationConfig(),
        "int4-columns": of.Int4QuantizationConfig(block_size=-1),
    }


def logits_apart(model):
    """Returns the largest difference of logits, fused and layer by layer, over the largest."""
    state = model.backbone.get_initial_state(1, max_length=PROMPT)
    token = np.ones((1, 1), "int32")

    def logits(*contexts):
        with contextlib.ExitStack() as stack:
            for context in contexts:
                stack.enter_context(context)
            found = model.call_with_cache(token, state)[0]
        return keras.ops.convert_to_numpy(keras.ops.cast(found, "float32"))

    no_gradients = [torch.no_grad()] if keras.config.backend() == "torch" else []
    fused, expected = logits(decoding_scope(), *no_gradients), logits(*no_gradients)
    return float(np.abs(fused - expected).max() / np.abs(expected).max())


def measure(name, batch, quantization=None, turns=False):
    model = make_model(name)
    apart = None
    if quantization is not None:
        # Not the embedding: Keras dequantizes all of it for the logits of each token.
        def filters(layer):
            return type(layer) is keras.layers.Dense

        model.quantize(config=quantizations()[quantization], filters=filters)
        apart = logits_apart(model)
    model.compile(sampler="greedy")
    vocabulary = model.backbone.vocabulary_size

    def seconds(new):
        inputs = prompts(vocabulary, batch, new)
        start = time.perf_counter()
        written = model.generate(inputs, stop_token_ids=None)
        keras.ops.convert_to_numpy(written["token_ids"])
        return time.perf_counter() - start

    def seconds_of_stream():
        """Returns the seconds of a token after the first ones, and those to the first one."""
        start = time.perf_counter()
        stream = model.stream(prompts(vocabulary, batch, MANY), stop_token_ids=None)
        times = [time.perf_counter() for _ in stream]
        return (times[-1] - times[FEW - 1]) / (MANY - FEW), times[0] - start

    def measure_turn():
        token = (seconds(MANY) - seconds(FEW)) / (MANY - FEW)
        way = str(which_generation(model))
        times = zip(TIMES, (token, *seconds_of_stream()), strict=True)
        return {**{name: 1000 * value for name, value in times}, "way": way}

    first = seconds(MANY)
    seconds(FEW)
    seconds_of_stream()
    if turns:
        return answer_turns(measure_turn)
    measured = [measure_turn() for _ in range(RUNS)]
    token, streamed, to_first = (sorted(turn[name] for turn in measured) for name in TIMES)
    median = statistics.median(token) / 1000
    rates = device_rates("bfloat16")
    floor = least_seconds_a_token(model, batch, MANY - FEW, PROMPT + FEW, **rates)
    return {
        "model": name,
        "quantization": quantization,
        "logits apart": apart,
        "backend": keras.config.backend(),
        "batch": batch,
        "ms a token": [round(t, 3) for t in token],
        "floor ms": round(1000 * floor, 3),
        "share of floor": round(floor / median, 3),
        "copy TB/s": round(rates["bytes_per_second"] / 1e12, 2),
        "tokens/s": round(batch / median),
        "stream tokens/s": round(1000 * batch / statistics.median(streamed)),
        "stream ms to the first token": round(statistics.median(to_first), 1),
        "first call s": round(first, 1),
        "way": measured[-1]["way"],
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model", choices=MODELS)
    parser.add_argument("batch", type=int)
    parser.add_argument("quantizations", nargs="*", help=", ".join(quantizations()))
    parser.add_argument("--turns", action="store_true", help="of `benchmarks.in_turns`")
    arguments = parser.parse_args()
    if unknown := set(arguments.quantizations) - set(quantizations()):
        parser.error(f"there is no quantization {sorted(unknown)}")
    modes = [None, *arguments.quantizations]
    if arguments.turns:
        return measure(arguments.model, arguments.batch, modes[-1], turns=True)
    for quantization in modes:
        found = measure(arguments.model, arguments.batch, quantization)
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
