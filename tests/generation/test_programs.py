"""Compiled programs and traced steps of generation: their number, weights, and samplers."""

import functools
import gc
from concurrent.futures import ThreadPoolExecutor

import keras
import keras_hub
import numpy as np
import pytest

from keras_recurrent import dispatch, which_generation
from keras_recurrent.generation import xla_programs
from keras_recurrent.generation.prompts import bucket, chunk_length
from keras_recurrent.layers import LowerBounds, hgrn2
from keras_recurrent.models import SamplingParams
from tests.generation.captures import capture_on_cpu
from tests.generation.tokens import generate, pad, random_prompts
from tests.models import plain_generation
from tests.models.test_generation import MARGIN
from tests.models.tiny import (
    FAMILIES,
    FEWER_LAYERS,
    NIGHTLY_IF_COMPILED,
    VOCABULARY,
    nightly_on_tensorflow,
    tiny_causal_lm,
    two_families,
)

BACKEND = keras.config.backend()
on_torch_cpu = pytest.mark.skipif(
    keras.ops.convert_to_tensor(0).device.type != "cpu" if BACKEND == "torch" else True,
    reason="torch's compiler is only used on CPUs",
)
on_jax = pytest.mark.skipif(BACKEND != "jax", reason="programs of JAX")


@pytest.fixture
def traced(monkeypatch):
    """Returns a list that gets an item for each program or step that is traced."""
    found = []
    if BACKEND == "torch":
        from keras_recurrent.generation import torch_programs as module

        name = "make_fx"
    else:
        module, name = xla_programs.Programs, "decode"
    original = getattr(module, name)

    @functools.wraps(original)  # the names of arguments decide which are static
    def trace(*args, **kwargs):
        found.append(args)
        return original(*args, **kwargs)

    monkeypatch.setattr(module, name, trace)
    return found


@pytest.mark.once
def test_bucket_has_few_values_and_at_most_doubles_long_sequences():
    """Each length compiles a program, padding takes most of the time, or chunks do not fit."""
    assert len({bucket(n) for n in range(1, 32769)}) == 8
    for length in (1, 64, 65, 1025, 32768, 100_000):
        padded = bucket(length)
        assert length <= padded <= max(2 * length, 1024)
        assert padded % chunk_length(3, padded) == 0


@on_jax
@pytest.mark.parametrize(
    ("lengths", "options"),
    [
        ((4, 9), {"return_cache": True}),
        ((3,) * 20, {}),  # `MIN_DELAYED_ROWS` and more
        ((4,), {"sampling": SamplingParams(logprobs=2, repetition_penalty=1.2, seed=0)}),
        ((4,), {"sampling": SamplingParams(n=2, seed=0)}),
    ],
)
def test_first_step_is_compiled_once_in_a_thread_while_prompts_are_processed(
    lengths, options, caplog
):
    """The step is compiled after the program of prompts, or once more when it runs."""
    import jax

    model = tiny_causal_lm(family="hgrn2", num_layers=1)
    model.compile(sampler="greedy")
    jax.config.update("jax_log_compiles", True)  # in all threads
    try:
        for _ in range(2):
            generate(model, lengths, 30, **options)
    finally:
        jax.config.update("jax_log_compiles", False)
    compiled = [r for r in caplog.records if "Compiling jit(decode)" in r.getMessage()]
    (record,) = compiled
    n = options.get("sampling", SamplingParams()).n
    assert (record.threadName == "MainThread") == (n > 1)  # the step has another batch size


@two_families
def test_lengths_of_a_bucket_share_a_program(family, traced):
    """Each length is compiled, or padding changes tokens."""
    model = tiny_causal_lm(family=family, **FEWER_LAYERS)
    model.compile(sampler="greedy")
    totals = [12, 64, 70]  # the start and end of a bucket, and the next bucket
    found = [generate(model, (5, 9), total)["token_ids"] for total in totals]
    expected = 1 if model.backbone.keeps_state else 2  # the length of a KV cache
    assert len(traced) == expected
    generate(model, (3, 4), 20)  # prompts of other lengths
    assert len(traced) == expected
    for total, rows in zip(totals, found, strict=True):
        np.testing.assert_array_equal(rows, found[-1][:, :total])


@pytest.mark.parametrize("sampler", ["greedy", "beam"])
def test_generate_without_new_tokens_runs_no_program(hgrn2, sampler, traced):
    """A call that only returns its prompts compiles for half a minute."""
    hgrn2.compile(sampler=sampler)
    found = generate(hgrn2, (9, 9), 9)
    assert len(traced) == 0
    np.testing.assert_array_equal(found["token_ids"], random_prompts((9, 9)))
    assert np.asarray(found["padding_mask"]).all()


def test_compile_after_a_change_of_a_layer_traces_again(hgrn2, traced):
    before = generate(hgrn2, (4, 6), 14)["token_ids"]
    hgrn2.backbone.transformer_layers[0].mlp.down_proj.activation = keras.activations.exponential
    hgrn2.compile(sampler="greedy")
    assert (generate(hgrn2, (4, 6), 14)["token_ids"] != before).any()
    assert len(traced) == 2


def scale_weights(model):
    for weight in model.weights:
        weight.assign(weight * 1.5)


def add_lora(model):
    model.backbone.enable_lora(2)
    for weight in model.trainable_weights:
        weight.assign(weight + 0.3)


def quantize(model):
    # Activations near a half would be rounded up in one program and down in another.
    model.quantize(config=keras.quantizers.Int8QuantizationConfig(activation_quantizer=None))


CHANGES = {"trained": scale_weights, "LoRA": add_lora, "quantized": quantize}


@pytest.mark.parametrize(
    "change", ["trained", "quantized", pytest.param("LoRA", marks=NIGHTLY_IF_COMPILED)]
)
def test_generate_after_a_change_of_weights_uses_the_new_ones(hgrn2, change):
    """A program has weights as constants."""
    generate(hgrn2, (4, 6), 14)
    CHANGES[change](hgrn2)
    found = generate(hgrn2, (4, 6), 14)["token_ids"]
    inputs = pad(random_prompts((4, 6)), 14)
    expected, margin = plain_generation.sample(hgrn2, hgrn2.sampler, *inputs.values())
    assert margin > MARGIN
    np.testing.assert_array_equal(found, expected)


@pytest.mark.skipif(BACKEND == "torch", reason="programs of XLA")
@pytest.mark.parametrize(
    ("family", "change"), [("lfm2", "trained"), ("hgrn2", "quantized"), ("griffin", "LoRA")]
)
def test_copies_of_weights_do_not_change_results(family, change, monkeypatch):
    """Products are not rounded, or copies are outdated, never freed, or of the wrong weights."""
    num_before = len(xla_programs._copies)
    model = tiny_causal_lm(family=family, dtype="bfloat16", **FEWER_LAYERS)
    model.compile(sampler="greedy")

    def collect():
        tokens, cache = generate(model, (4, 6), 14, return_cache=True)
        values = [tokens["token_ids"], *keras.tree.flatten(cache.state)]
        return [keras.ops.convert_to_numpy(keras.ops.cast(value, "float32")) for value in values]

    before, num_copies = collect(), len(model._programs()._copied_weights())
    CHANGES[change](model)
    found = collect()
    assert num_copies > len(model._programs()._copied_weights()) or change == "trained"
    assert any(np.any(x != y) for x, y in zip(before, found, strict=True))
    model.compile(sampler="greedy")
    monkeypatch.setattr(xla_programs, "is_on_cpu", lambda model: False)
    for x, y in zip(found, collect(), strict=True):
        np.testing.assert_array_equal(x, y)
    model = None
    gc.collect()
    assert len(xla_programs._copies) <= num_before


def check_threads(model, lengths):
    """Asserts that threads which call `generate` at once get the tokens of separate calls."""
    expected = [generate(model, each, 40)["token_ids"] for each in lengths]
    with ThreadPoolExecutor(len(lengths)) as threads:
        found = threads.map(lambda each: generate(model, each, 40)["token_ids"], lengths * 3)
        np.testing.assert_array_equal([*found], expected * 3)


@nightly_on_tensorflow
def test_generate_in_two_threads_returns_the_tokens_of_separate_calls(hgrn2):
    check_threads(hgrn2, [(4, 6), (7, 2)])


def test_values_of_sampling_options_share_a_program(hgrn2, traced):
    """Values that are constants of a program would compile it again for each request."""
    found = []
    for values in (
        {"temperature": 0.7, "top_k": 5, "top_p": 0.9, "seed": 1, "frequency_penalty": 0.5},
        {"temperature": 1.3, "top_k": 7, "top_p": 0.8, "seed": 2, "frequency_penalty": -1.0},
    ):
        sampling = [SamplingParams(**values), SamplingParams(**{**values, "seed": 3})]
        for stop_token_ids in ((1, 2), (1,)):
            options = {"stop_token_ids": stop_token_ids, "sampling": sampling}
            tokens = generate(hgrn2, (4, 9), 20, **options)["token_ids"]
        found.append(tokens)
    assert len(traced) == 1
    assert not np.array_equal(*found)


@on_jax
@pytest.mark.parametrize("on_cpu", [True, False])
def test_loop_on_accelerators_has_a_known_trip_count(hgrn2, on_cpu, monkeypatch):
    """On GPUs, XLA waits for the condition of each iteration of a loop of unknown length."""
    import jax

    monkeypatch.setattr(xla_programs, "runs_ahead", lambda model: not on_cpu)
    programs, texts = hgrn2._programs(), []
    original = programs.decode

    def decode(*arguments, **static):
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), arguments)
        texts.append(original.lower(*shapes, **static).compile().as_text())
        return original(*arguments, **static)

    decode.lower = original.lower
    monkeypatch.setattr(programs, "decode", decode)
    generate(hgrn2, (5, 9), 12)
    assert ("known_trip_count" in texts[0]) is not on_cpu


@pytest.mark.skipif(BACKEND == "torch", reason="test_torch_steps.py tests steps of torch")
def test_lower_bounds_are_computed_before_the_loop(monkeypatch):
    """XLA computes the lower bounds again for each token."""
    inside, found, loop, call = [], [], xla_programs.ops.while_loop, LowerBounds.call

    def while_loop(*arguments):
        inside.append(True)
        results = loop(*arguments)
        inside.clear()
        return results

    def record(layer, inputs):
        found.append(bool(inside))
        return call(layer, inputs)

    monkeypatch.setattr(xla_programs.ops, "while_loop", while_loop)
    monkeypatch.setattr(LowerBounds, "call", record)
    generate(tiny_causal_lm(family="hgrn2", num_layers=2), (5, 9), 12)
    assert found
    assert not any(found)
    with tiny_causal_lm(family="hgrn2").backbone.constant_block_arguments():
        # The blocks of another network take no lower bounds.
        tiny_causal_lm(family="griffin").backbone.hidden_states(np.ones((1, 3), "int32"))


@on_jax
@pytest.mark.parametrize("few_tokens", [10**9, 0])
def test_xla_accepts_the_compiler_options_of_prompts(hgrn2, few_tokens, monkeypatch):
    """Without this test, only users of GPUs would notice that XLA has renamed an option."""
    import jax

    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(xla_programs, "FEW_TOKENS", few_tokens)
    assert len(xla_programs.compiler_options_of_prompts(few_tokens > 0)) == 1 + (few_tokens > 0)
    assert hgrn2.prefill(pad(random_prompts((3, 5)))).batch_size == 2


@pytest.mark.skipif(BACKEND == "tensorflow", reason="only kernels of Triton delay writes")
def test_programs_with_delayed_writes_of_states_match_others(monkeypatch):
    """A returned cache misses recent tokens, or padding counts as one of them."""
    first, second = pad(random_prompts((3, 7)), 13), pad(random_prompts((1, 1), seed=1), 4)
    models = [tiny_causal_lm(family="hgrn2", num_layers=1) for _ in range(2)]

    def collect(model):
        model.compile(sampler="greedy")
        options = {"return_cache": True, "stop_token_ids": None}
        tokens, cache = model.generate(first, **options)
        more, cache = model.generate(second, cache=cache, **options)
        found = [tokens["token_ids"], more["token_ids"], *keras.tree.flatten(cache.state)]
        stream = model.stream(first, stop_token_ids=None)
        found += [next(stream) for _ in range(5)]
        return found + keras.tree.flatten(stream.cache.state)

    expected = collect(models[0])
    if BACKEND == "torch":
        from keras_recurrent.generation import torch_programs as programs

        capture_on_cpu(monkeypatch)
    else:
        programs = xla_programs
    monkeypatch.setattr(programs, "MIN_DELAYED_ROWS", 2)
    monkeypatch.setattr(hgrn2, "STATE_WRITE_INTERVAL", 3)
    monkeypatch.setattr(dispatch, "uses_triton_kernels", lambda tensor: True)
    monkeypatch.setattr(hgrn2, "hgrn2_step", None)
    for a, b in zip(collect(models[1]), expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)


@pytest.mark.nightly
@on_torch_cpu
@pytest.mark.parametrize("jit_compile", [True, "auto"])
def test_generate_with_torch_compiler_generates_the_same_tokens(hgrn2, jit_compile, monkeypatch):
    """Steps are compiled from another token on, or generate other tokens."""
    from torch._inductor import metrics

    from keras_recurrent.generation import torch_programs

    monkeypatch.setattr(torch_programs, "COMPILED_AFTER", 30)
    expected = generate(hgrn2, (4, 9), 20)["token_ids"]
    hgrn2.compile(sampler="greedy", jit_compile=jit_compile)
    metrics.reset()
    for number in range(3):  # of 16 tokens each
        np.testing.assert_array_equal(generate(hgrn2, (4, 9), 20)["token_ids"], expected)
        is_compiled = jit_compile is True or number > 1
        assert bool(metrics.generated_kernel_count) == is_compiled
    assert set(which_generation(hgrn2).refused) == {"cuda_graph"}
    assert which_generation(hgrn2).name == "compiled"


@on_torch_cpu
def test_generate_without_a_compiler_for_cpp_runs_the_traced_step(hgrn2, monkeypatch):
    import torch
    from torch._inductor.exc import InvalidCxxCompiler

    def fail(*arguments):
        raise InvalidCxxCompiler

    monkeypatch.setattr(torch._inductor, "compile", fail)
    expected = generate(hgrn2, (4, 9), 20)["token_ids"]
    hgrn2.compile(sampler="greedy", jit_compile=True)
    np.testing.assert_array_equal(generate(hgrn2, (4, 9), 20)["token_ids"], expected)
    assert "C++" in which_generation(hgrn2).refused["compiled"]


@pytest.mark.parametrize("run_eagerly", [False, True])
def test_which_generation_reports_mode_and_reasons(hgrn2, run_eagerly):
    """The mode of `generate` or `stream`, or the reason for a slow one, is wrong."""
    hgrn2.compile(sampler="greedy", run_eagerly=run_eagerly)
    assert which_generation(hgrn2) is None
    next(hgrn2.stream(pad(random_prompts((4, 4)), 20), stop_token_ids=None))
    found = which_generation(hgrn2)
    generate(hgrn2, (4, 4), 20)
    assert which_generation(hgrn2) == found
    names = ("traced", "cuda_graph") if BACKEND == "torch" else ("program",)
    assert found.name in (("eager",) if run_eagerly else names)
    assert bool(found.refused) == (found.name not in ("program", "cuda_graph"))
    assert found.name in str(found)
    with pytest.raises(TypeError, match="must be a language model"):
        which_generation(hgrn2.backbone)


class CustomStep(FAMILIES["hgrn2"].causal_lm):
    """A model of a user."""

    def generate_step(self, inputs, stop_token_ids=None):
        return inputs


@pytest.mark.once
@pytest.mark.parametrize(
    ("cls", "options", "words"),
    [
        (CustomStep, {}, "overrides `generate_step`.*`call_with_cache`"),
        (CustomStep.__base__, {"compile": False}, r"`compile=False`, and .* no sampler.*compile\("),
    ],
)
def test_generate_without_a_known_choice_of_tokens_raises(cls, options, words):
    """`generate` ignores a `generate_step` of a user, or fails without the remedy."""
    model = cls(tiny_causal_lm(family="hgrn2", num_layers=1).backbone, **options)
    for call in (model.generate, model.stream):
        with pytest.raises(ValueError, match=words):
            call(pad(random_prompts((4,)), 9))


class Custom(keras_hub.samplers.GreedySampler):
    """A sampler of a user."""


def replace_method():
    """Returns a sampler with a replaced method."""
    sampler = keras_hub.samplers.GreedySampler()
    sampler.get_next_token = lambda probabilities: keras.ops.argmin(probabilities, axis=-1)
    return sampler


@pytest.mark.once
@pytest.mark.parametrize(
    ("sampler", "words"),
    [
        ("contrastive", "must be 'greedy', .* got a ContrastiveSampler"),
        (Custom(), "must be 'greedy', .* got a Custom.*`SamplingParams`.*`call_with_cache`"),
        (replace_method(), "without a replaced method; got a GreedySampler"),
        (None, "must be a `keras_hub.samplers.Sampler`.* got None"),
        (keras_hub.samplers.GreedySampler, "must be a `keras_hub.samplers.Sampler`.* got <class"),
        (keras_hub.samplers.TopKSampler(k=2.5), "`k` of TopKSampler must be an integer"),
        (keras_hub.samplers.TopKSampler(k=0), f"`k` of TopKSampler .* {VOCABULARY}, .* got 0"),
        (keras_hub.samplers.TopKSampler(k=62), f"`k` of TopKSampler .* {VOCABULARY}, .* got 62"),
        (keras_hub.samplers.RandomSampler(temperature=0.0), "`temperature` of .* above 0; got 0.0"),
        (keras_hub.samplers.RandomSampler(temperature=np.nan), "`temperature` of .* got nan"),
        (keras_hub.samplers.TopPSampler(p=1.5), "`p` of TopPSampler .* at most 1; got 1.5"),
    ],
)
def test_generate_with_an_unsupported_sampler_raises(hgrn2, sampler, words):
    """A sampler of a user, or with values out of range, chooses other tokens without an error."""
    hgrn2.compile(sampler=sampler)
    with pytest.raises(ValueError, match=f"`sampler`.*{words}"):
        generate(hgrn2, (4, 9), 20)
