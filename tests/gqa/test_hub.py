"""Conversion of KerasHub's models: outputs, caches, generation and saved files."""

import inspect
import json

import keras
import keras_hub
import numpy as np
import pytest

from keras_recurrent.conversion import convert_to_gqa, gqa_report
from keras_recurrent.gqa.hub import unsupported_class_reason
from tests.gqa import families
from tests.gqa.families import CAUSAL, CONFIGURED, HEADS, SEQ2SEQ, make_backbone
from tests.gqa.oracle import assert_equal, assert_equal_weights, numpy, share, share_heads
from tests.layers.table import assert_rejects

# KerasHub's T5 passes its masks explicitly, which Keras does not know.
pytestmark = [
    pytest.mark.once,
    pytest.mark.filterwarnings(
        "ignore:Layer '.*attention' \\(of type .*T5.*Attention\\) was passed an input with a mask"
    ),
]

hub = keras_hub.models
GROUPS = 2
TOKENS = np.random.default_rng(0).integers(1, families.VOCABULARY, size=(2, 8)).astype("int32")
SOURCE = np.random.default_rng(1).integers(1, families.VOCABULARY, size=(2, 5)).astype("int32")


def inputs(tokens=TOKENS, seq2seq=False):
    if not seq2seq:
        return {"token_ids": tokens, "padding_mask": np.ones_like(tokens)}
    return {
        "encoder_token_ids": SOURCE,
        "encoder_padding_mask": np.ones_like(SOURCE),
        "decoder_token_ids": tokens,
        "decoder_padding_mask": np.ones_like(tokens),
    }


def make_task(name):
    kind = "Seq2SeqLM" if name in SEQ2SEQ else "CausalLM"
    return getattr(hub, f"{name}{kind}")(make_backbone(name))


def share_fused(model):
    """Pools the heads of GPT-NeoX, whose kernels are [..., heads, 3 · size], queries first."""
    for weight in model.weights:
        if "query_key_value" in weight.path:
            size = weight.shape[-1] // 3
            values = numpy(weight).copy()
            values[..., size:] = share(values[..., size:], values.ndim - 2, HEADS, GROUPS)
            weight.assign(values)


@pytest.mark.parametrize("name", [*CAUSAL, *SEQ2SEQ])
def test_converted_task_matches_shared_heads_with_and_without_caches(name):
    """Logits are wrong, or a cache does not shrink or lacks the last token."""
    model, seq2seq = make_task(name), name in SEQ2SEQ
    grouped = convert_to_gqa(model, GROUPS)
    axes = {**CAUSAL, **SEQ2SEQ}[name][1]
    share_fused(model) if axes is None else share_heads(model, axes, HEADS, GROUPS)
    logits = numpy(grouped(inputs(seq2seq=seq2seq)))
    assert_equal(logits, model(inputs(seq2seq=seq2seq)))

    prefix, mask, last = TOKENS.copy(), np.ones_like(SOURCE), TOKENS[:, 7:]
    prefix[:, 7] = 0  # the cache must not depend on tokens after the prefix
    shape = (2, model.backbone.num_layers, 2, 8, GROUPS, 8)
    if seq2seq:
        _, encoded, cache, cross = grouped._build_cache(SOURCE, mask, prefix)
        assert tuple(cross.shape) == (*shape[:3], 5, GROUPS, 8)
        arguments = encoded, mask, last, cache, 7, cross, None
        cached, *_ = grouped.call_decoder_with_cache(*arguments)
    else:
        assert gqa_report(model, grouped).splitlines()[3].endswith(" 0.500 |")
        _, cache = grouped._build_cache(prefix)
        cached, *_ = grouped.call_with_cache(last, cache, 7)
    assert tuple(cache.shape) == shape
    assert_equal(cached[:, 0], logits[:, 7])


def test_conversion_of_cross_attention_keeps_self_attention():
    model = make_task("Bart")
    grouped = convert_to_gqa(model, 1, where="cross_attention")
    assert grouped.backbone.num_key_value_heads == HEADS
    assert grouped.backbone.cross_num_key_value_heads == 1
    axes = {part: axis for part, axis in SEQ2SEQ["Bart"][1].items() if "cross" in part}
    share_heads(model, axes, HEADS, 1)
    assert_equal(grouped(inputs(seq2seq=True)), model(inputs(seq2seq=True)))


def backbone_inputs(model):
    """Returns arrays for the inputs of a backbone, by their names."""
    arrays = {
        **inputs(),
        **inputs(seq2seq=True),
        "position_ids": np.arange(8)[None] * np.ones_like(TOKENS),
        "response_mask": np.ones_like(TOKENS),
        "images": np.random.default_rng(2).normal(size=(2, 16, 16, 3)).astype("float32"),
    }
    if isinstance(model.input, dict):
        return {name: arrays[name] for name in model.input}
    return [arrays[tensor.name] for tensor in model.input]


# One family for each place of the heads in kernels and layers.
EVERY_CHANGE = ("Llama", "Gemma", "Gemma3n", "Gemma4", "T5Gemma", "T5Gemma2", "SmolLM3")


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in EVERY_CHANGE else [pytest.mark.nightly])
        for name in CONFIGURED
    ],
)
def test_configured_backbone_matches_shared_heads(name):
    """Heads in the first axis of a kernel, in the second, or flattened with the size are mixed."""
    model = make_backbone(name)
    grouped = convert_to_gqa(model, GROUPS)
    assert type(grouped) is type(model)
    assert gqa_report(model, grouped).splitlines()[3].endswith(" 0.500 |")
    share_heads(model, CONFIGURED[name][1], HEADS, GROUPS)
    data = backbone_inputs(model)
    for actual, expected in zip(
        keras.tree.flatten(grouped(data)), keras.tree.flatten(model(data)), strict=True
    ):
        assert_equal(actual, expected)


def test_conversion_of_gemma_4_respects_the_heads_of_global_layers():
    """Global layers keep their heads, or layers without keys of their own are converted."""
    model = make_backbone("Gemma4", num_global_key_value_heads=2)
    assert_rejects(r"the 2 key .*`num_global_key_value_heads`", convert_to_gqa, model, 4)
    config = convert_to_gqa(model, 1).get_config()
    assert (config["num_key_value_heads"], config["num_global_key_value_heads"]) == (1, 1)
    all_shared = make_backbone("Gemma4", num_kv_shared_layers=2)
    assert_rejects("read the keys and values of another model", convert_to_gqa, all_shared, 2)


def test_every_backbone_of_keras_hub_that_generates_is_tested_or_unsupported():
    classes = {cls for cls in vars(hub).values() if inspect.isclass(cls)}
    tasks = {cls for cls in classes if issubclass(cls, (hub.CausalLM, hub.Seq2SeqLM))}
    generating = {cls.backbone_cls.__name__ for cls in tasks if cls.backbone_cls}
    backbones = {cls for cls in classes if issubclass(cls, hub.Backbone)} - {hub.Backbone}
    supported = {cls.__name__ for cls in backbones if unsupported_class_reason(cls) is None}
    assert supported == {f"{name}Backbone" for name in (*CAUSAL, *SEQ2SEQ, *CONFIGURED)}
    assert generating - supported == {f"{name}Backbone" for name in families.UNSUPPORTED}


def add_preprocessor(model):
    """Returns the task with a tokenizer of the letters a to d and the word "ab"."""
    special = ("<s>", "<pad>", "</s>", "<unk>", "<mask>", "<|endoftext|>")
    vocabulary = {token: i for i, token in enumerate((*special, "a", "b", "c", "d", "ab"))}
    name = type(model).__name__.removesuffix("CausalLM").removesuffix("Seq2SeqLM")
    tokenizer = getattr(hub, f"{name}Tokenizer")(vocabulary=vocabulary, merges=["a b"])
    sides = ("encoder_", "decoder_") if isinstance(model, hub.Seq2SeqLM) else ("",)
    lengths = {f"{side}sequence_length": 8 for side in sides}
    preprocessor = getattr(hub, f"{type(model).__name__}Preprocessor")(tokenizer, **lengths)
    return type(model)(model.backbone, preprocessor)


@pytest.mark.parametrize("name", ["GPT2", pytest.param("Bart", marks=pytest.mark.nightly)])
def test_preset_of_converted_task_loads_by_all_classes(name, tmp_path):
    """KerasHub's base classes or the family's load another class, or other weights or strings."""
    if name == "Bart":
        pytest.importorskip("tensorflow", reason="KerasHub's preprocessor of Bart needs it")
    model = add_preprocessor(make_task(name))
    grouped = convert_to_gqa(model, GROUPS)
    grouped.compile(sampler="greedy")
    text = grouped.generate("abcd")
    grouped.save_to_preset(str(tmp_path))
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["config"]["num_key_value_heads"] == GROUPS

    kind = "Seq2SeqLM" if name == "Bart" else "CausalLM"
    for cls in (getattr(hub, kind), type(model)):
        loaded = cls.from_preset(str(tmp_path))
        assert type(loaded) is type(grouped)
        assert_equal_weights(loaded, grouped)
    if name == "Bart":  # KerasHub does not save the lengths of this preprocessor
        loaded.preprocessor.encoder_sequence_length = 8
        loaded.preprocessor.decoder_sequence_length = 8
    loaded.compile(sampler="greedy")
    assert loaded.generate("abcd") == text

    assert type(hub.Backbone.from_preset(str(tmp_path))) is type(grouped.backbone)
    preprocessor, tokenizer = model.preprocessor, model.preprocessor.tokenizer
    for cls in (getattr(hub, f"{kind}Preprocessor"), type(preprocessor)):
        loaded = cls.from_preset(str(tmp_path))
        assert type(loaded) is type(preprocessor)
        assert loaded.get_config() == preprocessor.get_config()
    for cls in (hub.Tokenizer, type(tokenizer)):
        loaded = cls.from_preset(str(tmp_path))
        assert type(loaded) is type(tokenizer)
        assert loaded.get_vocabulary() == tokenizer.get_vocabulary()


def test_keras_file_of_converted_backbone_keeps_weights(tmp_path):
    backbone = convert_to_gqa(make_backbone("GPTNeoX"), GROUPS)
    backbone.save(tmp_path / "model.keras")
    assert_equal_weights(keras.saving.load_model(tmp_path / "model.keras"), backbone)


@pytest.mark.parametrize("name", ["GPTNeoX", "Llama"])
def test_two_conversions_match_one(name):
    model = make_task(name)
    twice = convert_to_gqa(convert_to_gqa(model, 2), 1)
    once = convert_to_gqa(model, 1)
    assert type(twice) is type(once)
    assert_equal_weights(twice, once, rtol=1e-6, atol=1e-7)


def test_random_pooling_of_fused_kernel_keeps_queries_and_zeroes_biases():
    model = make_backbone("GPTNeoX")
    grouped = convert_to_gqa(model, GROUPS, "random")
    original = {w.path: numpy(w) for w in model.weights}
    for weight in grouped.weights:
        prefix, _, last = weight.path.rpartition("/query/")
        if prefix:
            fused = original[f"{prefix}/query_key_value/{last}"]
            np.testing.assert_array_equal(numpy(weight), fused[..., : weight.shape[-1]])
        elif weight.path.endswith("key_value/bias"):
            assert not numpy(weight).any()


def test_attention_scores_of_converted_layer_are_the_weights_of_values():
    model = make_backbone("GPT2", num_layers=1)
    layer = convert_to_gqa(model, GROUPS).transformer_layers[0]._self_attention_layer
    x = np.random.default_rng(0).normal(size=(1, 3, 32)).astype("float32")
    output, scores = layer(x, x, return_attention_scores=True)
    plain = layer(x, x)
    assert tuple(scores.shape) == (1, HEADS, 3, 3)
    np.testing.assert_allclose(numpy(scores).sum(-1), 1, rtol=1e-5)
    assert_equal(output, plain)
    value = numpy(layer._value_dense(x))[0]  # [S, G, K]
    mixed = np.einsum("nts,snk->tnk", numpy(scores)[0], np.repeat(value, HEADS // GROUPS, 1))
    kernel, bias = numpy(layer._output_dense.kernel), numpy(layer._output_dense.bias)
    assert_equal(np.einsum("tnk,nkd->td", mixed, kernel) + bias, numpy(output)[0])
