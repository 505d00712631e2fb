"""How many programs or traced steps generation makes, and that they all write the same."""

import threading

import keras
import keras_hub
import numpy as np
import pytest

from keras_recurrent import dispatch, which_generation
from keras_recurrent.generation import loop, xla_programs
from keras_recurrent.generation.lengths import bucket, chunk_length
from keras_recurrent.layers import hgrn2
from keras_recurrent.models import SamplingParams
from tests.models import plain_generation
from tests.models.test_generation import MARGIN
from tests.models.tiny import FEWER_LAYERS, VOCABULARY, shared_by_families, tiny_causal_lm

BACKEND = keras.config.backend()
on_torch = pytest.mark.skipif(BACKEND != "torch", reason="steps are traced on torch")
on_a_cpu = pytest.mark.skipif(
    keras.ops.convert_to_tensor(0).device.type != "cpu" if BACKEND == "torch" else True,
    reason="torch's compiler is asked on CPUs alone",
)


def prompts(lengths, total, seed=3):
    rng = np.random.default_rng(seed)
    given = np.arange(total) < np.array(lengths)[:, None]
    token_ids = np.zeros(given.shape, "int32")
    token_ids[:, : max(lengths)] = rng.integers(1, VOCABULARY, (len(lengths), max(lengths)))
    return {"token_ids": np.where(given, token_ids, 0), "padding_mask": given}


def generate(model, lengths, total, **kwargs):
    return model.generate(prompts(lengths, total), **{"stop_token_ids": None, **kwargs})


@pytest.mark.once
def test_buckets():
    assert len({bucket(n) for n in range(1, 32769)}) == 8
    for length in (1, 64, 65, 1025, 32768, 100_000):
        room = bucket(length)
        assert room >= length
        assert room % chunk_length(3, room) == 0
        assert room <= 2 * length or room <= 1024


@pytest.fixture
def traced(monkeypatch):
    """Counts the programs or steps that are traced."""
    found = []
    if BACKEND == "torch":
        from keras_recurrent.generation.torch import step as module

        name = "make_fx"
    else:
        from keras_recurrent.generation import loop as module

        name = "decode"
    original = getattr(module, name)
    monkeypatch.setattr(module, name, lambda *args: found.append(args) or original(*args))
    return found


@shared_by_families
def test_lengths_of_a_bucket_share_a_program_and_others_write_the_same(family, traced):
    model = tiny_causal_lm(family=family, **FEWER_LAYERS)
    model.compile(sampler="greedy")
    # A bucket's start, its middle, another prompt's length, its end, and the next bucket.
    totals = [12, 30, 64, 70]
    written = [generate(model, (5, 9), total)["token_ids"] for total in totals]
    # A step depends on lengths where there is global attention alone.
    has_global_attention = family in ("griffin", "lightning_hybrid")
    wanted = 1 if BACKEND == "torch" and not has_global_attention else 2
    assert len(traced) == wanted
    generate(model, (3, 4), 50)
    assert len(traced) == wanted
    for total, rows in zip(totals, written, strict=True):
        np.testing.assert_array_equal(rows, written[-1][:, :total])


@shared_by_families
def test_prompts_are_read_in_pieces(family, monkeypatch):
    model = tiny_causal_lm(family=family, num_layers=1)
    model.compile(sampler="greedy")
    expected = generate(model, (50, 3, 31), 60)["token_ids"]
    monkeypatch.setattr("keras_recurrent.generation.lengths.MIN_CHUNK", 16)
    monkeypatch.setattr("keras_recurrent.generation.lengths.TOKENS_PER_CHUNK", 16)
    model = tiny_causal_lm(family=family, num_layers=1)
    model.compile(sampler="greedy")
    np.testing.assert_array_equal(generate(model, (50, 3, 31), 60)["token_ids"], expected)


@pytest.mark.parametrize("sampler", ["greedy", "beam"])
def test_nothing_left_to_generate_runs_no_program(sampler, traced):
    """JAX compiled 29 seconds for a call that returned its prompts."""
    model = tiny_causal_lm(family="hgrn2", num_layers=1)
    model.compile(sampler=sampler)
    found = generate(model, (9, 9), 9)
    assert len(traced) == 0
    np.testing.assert_array_equal(found["token_ids"], prompts((9, 9), 9)["token_ids"])
    assert np.asarray(found["padding_mask"]).all()


def test_compile_after_a_change_of_a_layer_traces_again(traced):
    model = tiny_causal_lm(family="hgrn2", num_layers=1)
    model.compile(sampler="greedy")
    before = generate(model, (4, 6), 14)["token_ids"]
    model.backbone.transformer_layers[0].mlp.down_proj.activation = keras.activations.exponential
    model.compile(sampler="greedy")
    assert (generate(model, (4, 6), 14)["token_ids"] != before).any()
    assert len(traced) == 2


def change_lora(model):
    model.backbone.enable_lora(2)
    for weight in model.trainable_weights:
        weight.assign(weight + 0.3)


def change_weights(model):
    for weight in model.weights:
        weight.assign(weight * 1.5)


def quantize(model):
    # Activations near a half would be rounded up in one program and down in another.
    model.quantize(config=keras.quantizers.Int8QuantizationConfig(activation_quantizer=None))


CHANGES = {
    "trained": change_weights,
    "adapted": change_lora,
    "quantized": quantize,
}


@pytest.mark.filterwarnings("ignore:Layer .* does not have a `quantize` method:UserWarning")
@pytest.mark.filterwarnings("ignore:.*The use of `x.T` on tensors:UserWarning")
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_the_weights_are_those_of_now(change):
    model = tiny_causal_lm(family="hgrn2", num_layers=1)
    model.compile(sampler="greedy")
    generate(model, (4, 6), 14)
    change(model)
    found = generate(model, (4, 6), 14)["token_ids"]
    prompt = prompts((4, 6), 14)
    expected, margin = plain_generation.sample(
        model, model.sampler, prompt["token_ids"], prompt["padding_mask"]
    )
    assert margin > MARGIN
    np.testing.assert_array_equal(found, expected)


def test_two_threads():
    model = tiny_causal_lm(family="hgrn2", num_layers=1)
    model.compile(sampler="greedy")
    lengths = [(4, 6), (7, 2)]
    expected = [generate(model, pair, 40)["token_ids"] for pair in lengths]
    found = [None, None]

    def run(i):
        for _ in range(3):
            found[i] = generate(model, lengths[i], 40)["token_ids"]

    threads = [threading.Thread(target=run, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    np.testing.assert_array_equal(found, expected)


def test_other_values_of_sampling_share_a_program(traced):
    """Values that are constants of a program would compile it again for each request."""
    model = tiny_causal_lm(family="hgrn2", num_layers=1)
    model.compile(sampler="greedy")
    found = []
    for values in (
        {"temperature": 0.7, "top_k": 5, "top_p": 0.9, "seed": 1, "frequency_penalty": 0.5},
        {"temperature": 1.3, "top_k": 7, "top_p": 0.8, "seed": 2, "frequency_penalty": -1.0},
    ):
        sampling = [SamplingParams(**values), SamplingParams(**{**values, "seed": 3})]
        prompt = prompts((4, 9), 20)
        found.append(model.generate(prompt, stop_token_ids=(1,), sampling=sampling)["token_ids"])
        model.generate(prompt, stop_token_ids=(1, 2), sampling=sampling)  # more stop tokens, too
    assert len(traced) == 1
    assert not np.array_equal(*found)


@pytest.mark.skipif(BACKEND != "jax", reason="reads a program of JAX")
def test_the_host_does_not_wait_for_a_loop_of_steps():
    """On GPUs, XLA waits for the condition of each iteration of a loop of unknown length."""
    import jax

    def step(token, mask, cache):
        return jax.nn.one_hot(token[:, 0] + cache, 7), cache + 1

    def sample(logits, count, uniform, memory):
        return logits.argmax(axis=-1), memory, ()

    zeros = np.zeros(3, "int32")
    state = loop.initial_state(zeros[0], zeros[:, None], zeros + 4, ())

    def program(state, ends_early):
        network = loop.Network(None, step, sample, None)
        return loop.decode(network, state, zeros + 4, zeros[:1] - 1, None, True, 2, ends_early)

    for ends_early in (True, False):
        jitted = jax.jit(program, static_argnums=1)
        text = jitted.lower(state, ends_early).compile().as_text()
        assert ("known_trip_count" in text) is not ends_early
        assert jitted(state, ends_early)[1].tolist() == [[0, 1]] * 3


@pytest.mark.skipif(BACKEND != "jax", reason="programs of JAX")
def test_programs_write_states_every_few_tokens(monkeypatch):
    """Fails if a returned cache misses recent tokens, or padding counts as one of them."""
    first, second = prompts((3, 7), 13), prompts((1, 1), 4, seed=1)
    models = [tiny_causal_lm(family="hgrn2", num_layers=1) for _ in range(2)]
    models[1].set_weights(models[0].get_weights())

    def answers(model):
        model.compile(sampler="greedy")
        options = {"return_cache": True, "stop_token_ids": None}
        tokens, cache = model.generate(first, **options)
        more, cache = model.generate(second, cache=cache, **options)
        found = [tokens["token_ids"], more["token_ids"], *keras.tree.flatten(cache.state)]
        stream = model.stream(first, stop_token_ids=None)
        found += [next(stream) for _ in range(5)]
        return found + keras.tree.flatten(stream.cache.state)

    expected = answers(models[0])
    monkeypatch.setattr(xla_programs, "MIN_DELAYED_ROWS", 2)
    monkeypatch.setattr(hgrn2, "STATE_WRITE_INTERVAL", 3)
    monkeypatch.setattr(dispatch, "decodes_with_kernels", lambda tensor: True)
    monkeypatch.setattr(hgrn2, "hgrn2_step", None)
    for found, wanted in zip(answers(models[1]), expected, strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.nightly
@on_a_cpu
def test_compiled():
    """By torch's compiler, from the first token on."""
    from torch._inductor import metrics

    model = tiny_causal_lm(family="hgrn2", num_layers=1)
    model.compile(sampler="greedy")
    expected = generate(model, (4, 9), 20)["token_ids"]
    model.compile(sampler="greedy", jit_compile=True)
    metrics.reset()
    np.testing.assert_array_equal(generate(model, (4, 9), 20)["token_ids"], expected)
    assert metrics.generated_kernel_count
    assert set(which_generation(model).refused) == {"cuda_graph"}
    assert which_generation(model).name == "compiled"


@on_a_cpu
def test_without_a_compiler_for_cpp_the_traced_step_runs(monkeypatch):
    import torch
    from torch._inductor.exc import InvalidCxxCompiler

    def compiler_is_missing(*arguments):
        raise InvalidCxxCompiler

    monkeypatch.setattr(torch._inductor, "compile", compiler_is_missing)
    model = tiny_causal_lm(family="hgrn2", num_layers=1)
    model.compile(sampler="greedy")
    expected = generate(model, (4, 9), 20)["token_ids"]
    model.compile(sampler="greedy", jit_compile=True)
    np.testing.assert_array_equal(generate(model, (4, 9), 20)["token_ids"], expected)
    assert "C++" in which_generation(model).refused["compiled"]


@pytest.mark.nightly
@on_a_cpu
def test_compiled_after_many_tokens(monkeypatch):
    import torch

    from keras_recurrent.generation.torch import step

    compiled = []
    monkeypatch.setattr(step, "COMPILED_AFTER", 30)
    monkeypatch.setattr(
        torch._inductor, "compile", lambda graph, inputs: compiled.append(graph) or graph
    )
    model = tiny_causal_lm(family="hgrn2", num_layers=1)
    model.compile(sampler="greedy")
    for _ in range(2):
        generate(model, (4, 9), 20)  # 16 tokens
        assert not compiled
    for _ in range(2):
        generate(model, (4, 9), 20)
        assert len(compiled) == 1


WAYS = {
    "chosen by logits": ({"sampler": "greedy"}, {"torch": "traced"}, "program"),
    "eager": ({"sampler": "greedy", "run_eagerly": True}, {}, "eager"),
}


@pytest.mark.parametrize("case", WAYS)
def test_which_generation(case):
    arguments, special, way = WAYS[case]
    model = tiny_causal_lm(family="hgrn2", num_layers=1)
    model.compile(**arguments)
    assert which_generation(model) is None
    generate(model, (4, 4), 20)
    found = which_generation(model)
    if BACKEND == "torch" and found.name == "cuda_graph":
        return  # tests/generation/test_cuda_graph.py
    assert found.name == special.get(BACKEND, way)
    assert bool(found.refused) == (found.name != "program")
    assert found.name in str(found)
    with pytest.raises(TypeError, match="must be a language model"):
        which_generation(model.backbone)


@pytest.mark.once
def test_a_sampler_of_more_tokens_than_there_are():
    model = tiny_causal_lm(family="hgrn2", num_layers=1)
    for k in (VOCABULARY + 1, 0):
        model.compile(sampler=keras_hub.samplers.TopKSampler(k=k))
        with pytest.raises(ValueError, match=f"`k` of TopKSampler must be .* {VOCABULARY}, .* {k}"):
            generate(model, (4, 9), 20)
        with pytest.raises(ValueError, match="`sampler`: `k`"):
            model.stream(prompts((4, 9), 20), stop_token_ids=None)
    model.compile(sampler=keras_hub.samplers.TopKSampler(k=VOCABULARY))
    generate(model, (4, 9), 12)


@pytest.mark.once
def test_without_a_sampler_there_is_nothing_to_write_by():
    model = tiny_causal_lm(family="hgrn2", num_layers=1)
    model = type(model)(model.backbone, compile=False)
    for write in (lambda: generate(model, (4,), 9), lambda: model.stream(prompts((4,), 9))):
        with pytest.raises(ValueError, match=r"`compile=False`, and has no sampler.*compile\(samp"):
            write()


class Custom(keras_hub.samplers.GreedySampler):
    """A sampler of a user."""


def replaced_method():
    sampler = keras_hub.samplers.GreedySampler()
    sampler.get_next_token = lambda probabilities: keras.ops.argmin(probabilities, axis=-1)
    return sampler


@pytest.mark.once
@pytest.mark.parametrize(
    ("sampler", "words"),
    [
        ("contrastive", "must be 'greedy', .* got a ContrastiveSampler"),
        (Custom(), "must be 'greedy', .* got a Custom.*`SamplingParams`.*`call_with_cache`"),
        (replaced_method(), "without a replaced method; got a GreedySampler"),
        (None, "must be a `keras_hub.samplers.Sampler`.* got None"),
        (keras_hub.samplers.GreedySampler, "must be a `keras_hub.samplers.Sampler`.* got <class"),
        (keras_hub.samplers.TopKSampler(k=2.5), "`k` of TopKSampler must be an integer"),
        (keras_hub.samplers.RandomSampler(temperature=0.0), "`temperature` of .* above 0; got 0.0"),
        (keras_hub.samplers.RandomSampler(temperature=np.nan), "`temperature` of .* got nan"),
        (keras_hub.samplers.TopPSampler(p=1.5), "`p` of TopPSampler .* at most 1; got 1.5"),
    ],
)
def test_samplers_that_choose_no_token(sampler, words):
    model = tiny_causal_lm(family="hgrn2", num_layers=1)
    model.compile(sampler=sampler)
    with pytest.raises(ValueError, match=f"`sampler`.*{words}"):
        generate(model, (4, 9), 20)


@pytest.mark.once
def test_generate_with_overridden_generate_step_raises():
    """Fails if `generate` ignores a `generate_step` of a user."""
    model = tiny_causal_lm(family="hgrn2", num_layers=1)
    custom = type("Custom", (type(model),), {"generate_step": lambda self, inputs: inputs})
    model = custom(model.backbone)
    for generate_text in (lambda: generate(model, (4,), 9), lambda: model.stream(prompts((4,), 9))):
        with pytest.raises(ValueError, match=r"overrides `generate_step`.*`call_with_cache`"):
            generate_text()
