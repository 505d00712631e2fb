"""KerasHub's models: equal to heads that share, cached like uncached, saved and loaded."""

import inspect
import json

import keras
import keras_hub
import numpy as np
import pytest

from keras_recurrent.conversion import convert_to_gqa, gqa_report
from keras_recurrent.gqa.hub import CONFIGURABLE, unsupported_class_reason
from keras_recurrent.gqa.hub_models import GROUPED_MODELS
from tests.gqa.families import CAUSAL, CONFIGURED, HEADS, POSITIONS, SEQ2SEQ, VOCABULARY
from tests.gqa.oracle import assert_equal, numpy, set_weights, share, share_heads
from tests.gqa.unsupported import UNSUPPORTED

# KerasHub's T5 passes its masks by hand and does not tell Keras so.
pytestmark = pytest.mark.filterwarnings(
    "ignore:Layer '.*attention' \\(of type .*T5.*Attention\\) was passed an input with a mask"
)

hub = keras_hub.models
GROUPS = 2
TOKENS = np.random.default_rng(0).integers(1, VOCABULARY, size=(2, 8)).astype("int32")
SOURCE = np.random.default_rng(1).integers(1, VOCABULARY, size=(2, 5)).astype("int32")


def families(names, everywhere=()):
    return [n if n in everywhere else pytest.param(n, marks=pytest.mark.once) for n in names]


def inputs(tokens=TOKENS, seq2seq=False):
    if not seq2seq:
        return {"token_ids": tokens, "padding_mask": np.ones_like(tokens)}
    return {
        "encoder_token_ids": SOURCE,
        "encoder_padding_mask": np.ones_like(SOURCE),
        "decoder_token_ids": tokens,
        "decoder_padding_mask": np.ones_like(tokens),
    }


def causal_lm(name):
    backbone = getattr(hub, f"{name}Backbone")(**CAUSAL[name][0])
    set_weights(backbone)
    return getattr(hub, f"{name}CausalLM")(backbone)


def seq2seq_lm(name):
    backbone = getattr(hub, f"{name}Backbone")(**SEQ2SEQ[name][0])
    set_weights(backbone)
    return getattr(hub, f"{name}Seq2SeqLM")(backbone)


def share_fused(model):
    """GPT-NeoX: [..., heads, 3 · size], queries first."""
    for weight in model.weights:
        if "query_key_value" in weight.path:
            size = weight.shape[-1] // 3
            values = numpy(weight).copy()
            values[..., size:] = share(values[..., size:], values.ndim - 2, HEADS, GROUPS)
            weight.assign(values)


def share_in(model, axes):
    if axes is None:
        share_fused(model)
    else:
        share_heads(model, axes, HEADS, GROUPS)


@pytest.mark.parametrize("name", families(CAUSAL, everywhere=["GPT2"]))
def test_causal_lm_equals_shared_heads_and_its_cache_the_whole(name):
    model = causal_lm(name)
    grouped = convert_to_gqa(model, GROUPS)
    assert gqa_report(model, grouped).splitlines()[3].endswith(" 0.500 |")
    share_in(model, CAUSAL[name][1])
    whole = numpy(grouped(inputs()))
    assert_equal(whole, model(inputs()))

    # What is after the prefix is not in its cache: the last token must bring it all.
    prefix = TOKENS.copy()
    prefix[:, 7] = 0
    _, cache = grouped._build_cache(prefix)
    assert tuple(cache.shape) == (2, model.backbone.num_layers, 2, 8, GROUPS, 8)
    logits, _, cache = grouped.call_with_cache(TOKENS[:, 7:], cache, 7)
    assert_equal(logits[:, 0], whole[:, 7])


@pytest.mark.once
@pytest.mark.parametrize("name", families(SEQ2SEQ, everywhere=["Bart"]))
def test_seq2seq_lm_equals_shared_heads_and_its_caches_the_whole(name):
    model = seq2seq_lm(name)
    grouped = convert_to_gqa(model, GROUPS)
    share_in(model, SEQ2SEQ[name][1])
    whole = numpy(grouped(inputs(seq2seq=True)))
    assert_equal(whole, model(inputs(seq2seq=True)))

    mask = np.ones_like(SOURCE)
    prefix = TOKENS.copy()
    prefix[:, 7] = 0
    _, encoded, own, cross = grouped._build_cache(SOURCE, mask, prefix)
    assert tuple(own.shape) == (2, model.backbone.num_layers, 2, 8, GROUPS, 8)
    assert tuple(cross.shape) == (2, model.backbone.num_layers, 2, 5, GROUPS, 8)
    logits, *_ = grouped.call_decoder_with_cache(encoded, mask, TOKENS[:, 7:], own, 7, cross, None)
    assert_equal(logits[:, 0], whole[:, 7])


@pytest.mark.once
def test_cross_attention_alone():
    model = seq2seq_lm("Bart")
    grouped = convert_to_gqa(model, 1, where="cross_attention")
    assert grouped.backbone.num_key_value_heads == HEADS
    assert grouped.backbone.cross_num_key_value_heads == 1
    axes = {part: axis for part, axis in SEQ2SEQ["Bart"][1].items() if "cross" in part}
    share_heads(model, axes, HEADS, 1)
    assert_equal(grouped(inputs(seq2seq=True)), model(inputs(seq2seq=True)))


def inputs_of(model):
    """What a backbone asks for by the names of its inputs."""
    known = {
        **inputs(),
        **inputs(seq2seq=True),
        "position_ids": np.arange(8)[None] * np.ones_like(TOKENS),
        "response_mask": np.ones_like(TOKENS),
        "images": np.random.default_rng(2).normal(size=(2, 16, 16, 3)).astype("float32"),
    }
    if isinstance(model.input, dict):
        return {name: known[name] for name in model.input}
    return [known[tensor.name] for tensor in model.input]


def configured(name, **changes):
    model = getattr(hub, f"{name}Backbone")(**CONFIGURED[name][0] | changes)
    set_weights(model)
    return model


@pytest.mark.once
@pytest.mark.parametrize("name", families(CONFIGURED, everywhere=["Llama"]))
def test_configured_backbones_equal_shared_heads(name):
    """Kernels have their heads in the first axis, in the second, or flattened with the size."""
    model = configured(name)
    grouped = convert_to_gqa(model, GROUPS)
    assert type(grouped) is type(model)
    assert gqa_report(model, grouped).splitlines()[3].endswith(" 0.500 |")
    share_heads(model, CONFIGURED[name][1], HEADS, GROUPS)
    data = inputs_of(model)
    for actual, expected in zip(
        keras.tree.flatten(grouped(data)), keras.tree.flatten(model(data)), strict=True
    ):
        assert_equal(actual, expected)


@pytest.mark.once
def test_gemma_4_with_fewer_heads_in_its_global_layers():
    model = configured("Gemma4", num_global_key_value_heads=2)
    with pytest.raises(ValueError, match=r"the 2 key .*`num_global_key_value_heads`"):
        convert_to_gqa(model, 4)
    config = convert_to_gqa(model, 1).get_config()
    assert (config["num_key_value_heads"], config["num_global_key_value_heads"]) == (1, 1)
    all_shared = configured("Gemma4", num_kv_shared_layers=2)
    with pytest.raises(ValueError, match="read the keys and values of another model"):
        convert_to_gqa(all_shared, 2)


@pytest.mark.once
def test_every_backbone_of_kerashub_is_converted_or_refused_with_a_reason():
    exported = {
        cls
        for cls in vars(hub).values()
        if inspect.isclass(cls) and issubclass(cls, hub.Backbone) and cls is not hub.Backbone
    }
    grouped = {cls for cls in GROUPED_MODELS if issubclass(cls, hub.Backbone)}
    converted = grouped | set(CONFIGURABLE)
    assert {cls for cls in exported if unsupported_class_reason(cls) is None} == converted
    assert {cls.__name__ for cls in exported - converted} == UNSUPPORTED
    # Each of the converted ones is shown to be.
    shown = (*CAUSAL, *SEQ2SEQ, *CONFIGURED)
    assert {cls.__name__ for cls in converted} == {f"{name}Backbone" for name in shown}


def greedy(model, tokens, start, seq2seq=False):
    """Without a cache: the whole again for each token. The best one must be clearly the best."""
    tokens = tokens.copy()
    name = "decoder_token_ids" if seq2seq else "token_ids"
    for i in range(start, tokens.shape[1]):
        logits = numpy(model(inputs(seq2seq=seq2seq) | {name: tokens}))[:, i - 1]
        best = np.sort(logits, axis=-1)
        assert (best[:, -1] - best[:, -2]).min() > 1e-3
        tokens[:, i] = logits.argmax(-1)
    return tokens


def llama_lm():
    return hub.LlamaCausalLM(configured("Llama"))


@pytest.mark.once
@pytest.mark.parametrize("name", ["GPT2", "Llama", "Bart"])
def test_generate_equals_generation_without_a_cache(name):
    seq2seq = name == "Bart"
    model = {"GPT2": causal_lm, "Bart": seq2seq_lm}[name](name) if name != "Llama" else llama_lm()
    grouped = convert_to_gqa(model, GROUPS)
    grouped.compile(sampler="greedy")
    start = 5
    batch = inputs(seq2seq=seq2seq)
    side = "decoder_" if seq2seq else ""
    batch[f"{side}padding_mask"] = (np.arange(8) < start) * np.ones_like(TOKENS)
    generated = grouped.generate(batch, stop_token_ids=None)[f"{side}token_ids"]
    expected = greedy(grouped, TOKENS, start, seq2seq)
    np.testing.assert_array_equal(numpy(generated), expected)
    assert (expected[:, :start] == TOKENS[:, :start]).all()


def with_preprocessor(model):
    """A task that reads strings of the letters a to d, and a word of two of them."""
    special = ("<s>", "<pad>", "</s>", "<unk>", "<mask>", "<|endoftext|>")
    vocabulary = {token: i for i, token in enumerate((*special, "a", "b", "c", "d", "ab"))}
    name = type(model).__name__.removesuffix("CausalLM").removesuffix("Seq2SeqLM")
    tokenizer = getattr(hub, f"{name}Tokenizer")(vocabulary=vocabulary, merges=["a b"])
    sides = ("encoder_", "decoder_") if isinstance(model, hub.Seq2SeqLM) else ("",)
    lengths = {f"{side}sequence_length": 8 for side in sides}
    preprocessor = getattr(hub, f"{type(model).__name__}Preprocessor")(tokenizer, **lengths)
    return type(model)(model.backbone, preprocessor)


@pytest.mark.once
@pytest.mark.parametrize("name", families(["GPT2", "Bart"], everywhere=["GPT2"]))
def test_presets(name, tmp_path):
    if name == "Bart":
        pytest.importorskip("tensorflow", reason="KerasHub's preprocessor of Bart needs it")
    kind = "CausalLM" if name == "GPT2" else "Seq2SeqLM"
    model = with_preprocessor(causal_lm(name) if kind == "CausalLM" else seq2seq_lm(name))
    grouped = convert_to_gqa(model, GROUPS)
    grouped.compile(sampler="greedy")
    written = grouped.generate("abcd")
    grouped.save_to_preset(str(tmp_path))
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["config"]["num_key_value_heads"] == GROUPS

    base, own = getattr(hub, kind), type(model)
    for loaded in (base.from_preset(str(tmp_path)), own.from_preset(str(tmp_path))):
        assert type(loaded) is type(grouped)
        for actual, expected in zip(loaded.weights, grouped.weights, strict=True):
            np.testing.assert_array_equal(numpy(actual), numpy(expected))
    if name == "Bart":  # KerasHub does not save the lengths of this preprocessor
        loaded.preprocessor.encoder_sequence_length = 8
        loaded.preprocessor.decoder_sequence_length = 8
    loaded.compile(sampler="greedy")
    assert loaded.generate("abcd") == written

    assert type(hub.Backbone.from_preset(str(tmp_path))) is type(grouped.backbone)
    for preprocessor in (getattr(hub, f"{kind}Preprocessor"), type(model.preprocessor)):
        loaded = preprocessor.from_preset(str(tmp_path))
        assert type(loaded) is type(model.preprocessor)
        assert loaded.get_config() == model.preprocessor.get_config()
    for tokenizer in (hub.Tokenizer, type(model.preprocessor.tokenizer)):
        loaded = tokenizer.from_preset(str(tmp_path))
        assert type(loaded) is type(model.preprocessor.tokenizer)
        assert loaded.get_vocabulary() == model.preprocessor.tokenizer.get_vocabulary()


@pytest.mark.once
@pytest.mark.parametrize("name", families(["Bart", "T5", "Bloom", "GPTNeoX"]))
def test_files_of_weights(name, tmp_path):
    model = seq2seq_lm(name) if name in SEQ2SEQ else causal_lm(name)
    backbone = convert_to_gqa(model, GROUPS).backbone
    backbone.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    for actual, expected in zip(loaded.weights, backbone.weights, strict=True):
        np.testing.assert_array_equal(numpy(actual), numpy(expected))


@pytest.mark.once
def test_grouped_further_is_grouped_at_once():
    for model in (causal_lm("GPTNeoX"), llama_lm()):
        twice = convert_to_gqa(convert_to_gqa(model, 2), 1)
        once = convert_to_gqa(model, 1)
        assert type(twice) is type(once)
        for actual, expected in zip(twice.weights, once.weights, strict=True):
            np.testing.assert_allclose(numpy(actual), numpy(expected), rtol=1e-6, atol=1e-7)


@pytest.mark.once
def test_random_heads_in_a_fused_kernel():
    model = causal_lm("GPTNeoX").backbone
    grouped = convert_to_gqa(model, GROUPS, "random")
    before = {w.path: numpy(w) for w in model.weights}
    for weight in grouped.weights:
        prefix, _, last = weight.path.rpartition("/query/")
        if prefix:
            fused = before[f"{prefix}/query_key_value/{last}"]
            np.testing.assert_array_equal(numpy(weight), fused[..., : weight.shape[-1]])
        elif weight.path.endswith("key_value/bias"):
            assert not numpy(weight).any()  # as its initializer has it


@pytest.mark.once
def test_scores_of_the_cached_layer():
    model = hub.GPT2Backbone(**POSITIONS)
    set_weights(model)
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
