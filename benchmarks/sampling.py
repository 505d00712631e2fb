"""Times options of `generate`, and the first token of a second chat turn.

    KERAS_BACKEND=torch python -m benchmarks.sampling hgrn2 16

Arguments: a model of `benchmarks.writing`, or `griffin_tiny_text`, and a batch size. Weights are
random in bfloat16, but those of `griffin_tiny_text`; the tokenizer is that of bytes. The time per
token is the difference between two calls that generate different numbers of tokens. The cases take
turns. The first turn of the chat has 4,000 tokens; the second one is compared with a prompt of its
new tokens alone.
"""

import argparse
import json
import statistics
import time

import keras

from benchmarks import writing
from keras_recurrent import which_generation
from keras_recurrent.models import GriffinCausalLM, SamplingParams
from keras_recurrent.tokenizers import ByteTokenizer

FEW, MANY, RUNS = 64, 576, 5  # new tokens
TURN = 4000  # tokens
TEMPLATE = (
    "{% for message in messages %}{{ message.role[0] }}{{ message.content }}{{ eos_token }}"
    "{% endfor %}{% if add_generation_prompt %}a{% endif %}"
)
CASES: dict = {
    "greedy": {"sampling": SamplingParams(temperature=0)},
    "top_k": {"sampling": SamplingParams(top_k=5)},
    "top_p": {"sampling": SamplingParams(top_p=0.9)},
    "penalty": {"sampling": SamplingParams(temperature=0, repetition_penalty=1.2)},
    "logprobs": {"sampling": SamplingParams(temperature=0, logprobs=5)},
    "stop": {"sampling": SamplingParams(temperature=0), "stop": ["a stop string"]},
    "penalty, logprobs and stop": {
        "sampling": SamplingParams(temperature=0, repetition_penalty=1.2, logprobs=5),
        "stop": ["a stop string"],
    },
}


def make_model(name):
    if name == "griffin_tiny_text":
        return GriffinCausalLM.from_preset(name, chat_template=TEMPLATE)
    family = writing.MODELS[name][0]
    preprocessor = family.preprocessor_cls(ByteTokenizer(), chat_template=TEMPLATE)
    return writing.make_model(name, preprocessor)


def times_of_options(model, batch_size):
    prompts = ["All happy families"] * batch_size

    def seconds(case, new):
        start = time.perf_counter()
        model.generate(prompts, stop_token_ids=None, max_new_tokens=new, **CASES[case])
        return time.perf_counter() - start

    for case in CASES:
        seconds(case, MANY), seconds(case, FEW)
    found: dict = {case: [] for case in CASES}
    for _ in range(RUNS):
        for case, times in found.items():
            times.append((seconds(case, MANY) - seconds(case, FEW)) / (MANY - FEW))
    base = statistics.median(found["greedy"])
    return {
        case: {
            "ms a token": [round(1000 * t, 3) for t in sorted(times)],
            "times greedy": round(statistics.median(times) / base, 3),
        }
        for case, times in found.items()
    }


def times_of_chat(model):
    """Seconds until the first token."""
    options = {"max_new_tokens": 8, "sampling": SamplingParams(temperature=0)}
    messages = [{"role": "user", "content": "x" * TURN}]
    answer, cache = model.chat(messages, return_cache=True, **options)
    question = {"role": "user", "content": "And now?"}

    def seconds(messages, cache=None):
        start = time.perf_counter()
        stream = model.stream(messages, cache=cache, stop_token_ids=None, **options)
        next(stream)
        stream.close()
        return time.perf_counter() - start

    turns = {"second turn": ([*messages, answer, question], cache), "new tokens": ([question],)}
    found: dict = {name: [] for name in turns}
    for _ in range(RUNS + 1):
        for name, arguments in turns.items():
            found[name].append(seconds(*arguments))
    return {name: [round(1000 * t, 1) for t in sorted(times[1:])] for name, times in found.items()}


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model", choices=[*writing.MODELS, "griffin_tiny_text"])
    parser.add_argument("batch_size", type=int)
    arguments = parser.parse_args()
    model = make_model(arguments.model)
    model.compile(sampler="greedy")
    result = {
        "model": arguments.model,
        "backend": keras.config.backend(),
        "batch size": arguments.batch_size,
        "options": times_of_options(model, arguments.batch_size),
        "mode": str(which_generation(model)),
        "ms to the first token": times_of_chat(model),
    }
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
