"""Engine: requests that join and leave a running batch."""

import keras
import pytest

from keras_recurrent.models import GriffinCausalLM, SamplingParams
from keras_recurrent.serving import Engine

IS_SUPPORTED = keras.config.backend() != "tensorflow"
needs_engine = pytest.mark.skipif(not IS_SUPPORTED, reason="the engine refuses TensorFlow")
PROMPTS = ("All happy families", "Once upon a time, there was", "x", "The cat sat on the mat and")
PARAMS = (
    SamplingParams(temperature=0),
    SamplingParams(temperature=1.2, seed=1),
    SamplingParams(temperature=0.8, top_k=5, seed=2, logprobs=2),
    SamplingParams(top_p=0.9, repetition_penalty=1.3, min_new_tokens=6, seed=3),
)


@pytest.fixture(scope="module")
def model():
    return GriffinCausalLM.from_preset("griffin_tiny_text", dtype="float32")


def _submit(engine, number, **options):
    options = {"sampling": PARAMS[number % 4], "max_new_tokens": 8 + number % 5} | options
    return engine.submit(PROMPTS[number % 4], **options)


@needs_engine
def test_tokens_are_those_of_generate(model):
    """A slot uses another slot's options, random numbers or state."""
    with Engine(model, num_slots=3, prefill_chunk=8) as engine:
        requests = [_submit(engine, number) for number in range(8)]
        answers = [request.result(60) for request in requests]
    for number, answer in enumerate(answers):
        options = {"sampling": PARAMS[number % 4], "max_new_tokens": 8 + number % 5}
        text = model.generate(PROMPTS[number % 4], strip_prompt=True, **options)
        text = text if isinstance(text, str) else text.texts
        assert answer.text == text
    assert len(answers[2].logprobs) == len(answers[2].token_ids)
