"""The guides run, at tiny sizes."""

import functools
import re
import sys

import keras
import numpy as np
import pytest

from tests import scripts
from tests.models.tiny import tiny_text_model

pytestmark = pytest.mark.once

BITS = r"Validation, bits per byte: Hawk ([\d.]+), bigrams ([\d.]+), unigrams ([\d.]+)"


@functools.cache
def load(name):
    pytest.importorskip("matplotlib")
    return scripts.load(f"guides/{name}.py")


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """A function that runs a guide with arguments, and returns what it prints."""

    def run(name, *arguments):
        guide = load(name)
        arguments = (name, *arguments, "--output", tmp_path)
        monkeypatch.setattr(sys, "argv", [*map(str, arguments)])
        guide.main()
        return capsys.readouterr().out

    return run


def test_quickstart_trains_and_writes_losses_and_a_figure(run, tmp_path):
    printed = run("quickstart", "--epochs", 1, "--topics", 2, "--sample", 20)
    assert len(re.findall(BITS, printed)) == 1
    assert "Before training it writes:\nThe statement" in printed
    assert "After training it writes:\nThe statement" in printed
    assert "the logits differ by 0.0\n" in printed
    assert (tmp_path / "loss.png").stat().st_size > 0


def test_quickstart_shares_no_text_between_training_and_validation():
    training, validation = (
        [paragraph for document in documents for paragraph in document.split("\n\n")]
        for documents in load("quickstart").load_documents(None)
    )
    paragraphs = training + validation
    assert len(set(paragraphs)) == len(paragraphs)
    assert 0.05 < len("".join(validation)) / len("".join(paragraphs)) < 0.2


def test_quickstart_unigram_and_bigram_have_the_bits_of_the_equation():
    """Text "ab", "aa" has a 3 times and b once; a begins twice, and b and a follow it once each."""
    unigram, bigram = load("quickstart").unigram_and_bigram(["ab", "aa"], ["ab"])
    a, b = 4 / 260, 2 / 260
    assert unigram == pytest.approx(-(np.log2(a) + np.log2(b)) / 2)
    first, second = (2 + 1 * a) / (2 + 1), (1 + 2 * b) / (2 + 2)
    assert bigram == pytest.approx(-(np.log2(first) + np.log2(second)) / 2)


@pytest.mark.nightly
def test_constant_speed_prints_a_speed_for_each_length(run, tmp_path):
    printed = run("constant_speed", "--tokens", 128, "--shortest", 64, "--width", 16)
    for name in ("Lightning Attention", "softmax attention"):
        for length in (64, 128):
            assert re.search(rf"^{name}, {length} tokens a row: [\d,]+ a second", printed, re.M)
    assert re.search(r"^At 128 tokens a row: [\d.]+ times the speed$", printed, re.M)
    assert (tmp_path / "speed.png").stat().st_size > 0


@pytest.mark.nightly
def test_associative_recall_guide_prints_accuracies(run, tmp_path):
    arguments = ("--pairs", 2, "--length", 8, "--rows", 128, "--epochs", 2)
    printed = run("associative_recall", *arguments)
    for name, state in (("HGRN", "128"), ("HGRN2", "4,096")):
        assert f"parameters, {state} numbers in its state" in printed
        assert len(re.findall(rf"^{name}, epoch [12]: [\d.]+% right$", printed, re.M)) == 2
    assert (tmp_path / "accuracy.png").stat().st_size > 0


@pytest.mark.nightly
def test_layers_guide_compares_models_of_equal_size(run, tmp_path, monkeypatch):
    guide = load("layers")
    monkeypatch.setattr(guide.Forecast, "LENGTH", 24)
    arguments = ("--rows", 16, "--epochs", 2, "--seeds", 1, "--length", 24, "--width", 16)
    printed = run("layers", *arguments)
    for name in guide.LAYERS:
        rows = re.findall(rf"^\| {name} \| ([\d,]+) \| [\d.]+ ± [\d.]+ \| [\d.]+ \|", printed, re.M)
        assert len(rows) == 2
        # Each of two blocks has 16 times the width squared, and few other parameters.
        assert all(8192 < int(parameters.replace(",", "")) < 9300 for parameters in rows)
    assert (tmp_path / "layers.png").stat().st_size > 0


def test_layers_guide_forecasts_from_the_past_alone():
    guide = load("layers")
    task = guide.Forecast(rows=3, epochs=1, held_out=2, width=16)
    x, y = task.training
    assert x.shape == y.shape == (3, task.LENGTH, 1)
    series, noisy = y[:, : -task.AHEAD, 0], x[:, task.AHEAD :, 0]
    np.testing.assert_allclose(np.std(noisy - series), task.NOISE, rtol=0.2)
    assert abs(np.mean(noisy - series)) < 0.1
    # The deviation of the equation's solution, sampled by many, is 0.23 around 0.9.
    values = task.simulate(20, seed=3)
    np.testing.assert_allclose([values.mean(), values.std()], [0.9, 0.23], atol=0.03)
    for name in guide.LAYERS:
        model = task.build(name)
        changed = x.copy()
        changed[:, 60:] += 1.0
        before, after = model.predict(x, verbose=0), model.predict(changed, verbose=0)
        np.testing.assert_allclose(after[:, :60], before[:, :60], atol=1e-5)
        assert np.abs(after[:, 60:] - before[:, 60:]).max() > 1e-3


def test_layers_guide_ignores_padding():
    guide = load("layers")
    task = guide.ListOps(rows=4, epochs=1, held_out=2, width=16, length=24)
    rows = task.training[0]
    assert rows.shape == (4, 24)
    longer = np.pad(rows, ((0, 0), (0, 9)))
    for name in guide.LAYERS:
        model = task.build(name)
        found = model.predict(longer, verbose=0)
        np.testing.assert_allclose(found, model.predict(rows, verbose=0), atol=1e-5, err_msg=name)


@pytest.mark.nightly
def test_conversation_guide_restores_states_of_constant_size(tmp_path, monkeypatch, capfd):
    load_file = pytest.importorskip("safetensors.numpy").load_file
    guide = load("conversation")
    monkeypatch.setattr(sys, "argv", ["conversation", "--steps", "2", "--output", str(tmp_path)])
    monkeypatch.setenv("PYTHONIOENCODING", "utf-8")  # the untrained model generates any bytes
    guide.main()
    printed = capfd.readouterr().out
    assert printed.count("from the whole text the last answer is the same") == 2
    assert printed.count("that were not read again]") == 6
    caches = [load_file(path) for path in tmp_path.glob("*.safetensors")]
    states = [[t.nbytes for name, t in c.items() if name != "token_ids"] for c in caches]
    assert len(states) > 1
    assert all(sizes == states[0] for sizes in states)


@pytest.mark.nightly
def test_laptop_guide_learns_chats_and_serves(run):
    """A loss that does not fall, another answer in a conversation, or over HTTP."""
    arguments = ("--model", "lfm2_tiny", "--learning-rate", 3e-3, "--epochs", 20)
    printed = run("laptop", *arguments)
    assert "6 of 6 answers are those of the samples." in printed
    question, answer = next(iter(load("laptop").FACTS.items()))
    assert f"Over HTTP: {question} {answer}\n" in printed


def test_laptop_guide_decodes_tokens_of_generate():
    """The loop around an exported step feeds a token twice, or stops too late."""
    guide = load("laptop")
    model = tiny_text_model("lfm2", preprocessor={"sequence_length": 24})
    model.compile(sampler="greedy")
    step = guide.DecodingStep(model, 24)
    prompt = model.preprocessor.generate_preprocess("ab")
    prompt = np.asarray(prompt["token_ids"])[np.asarray(prompt["padding_mask"], "bool")]
    inputs = {"token_ids": prompt[None], "padding_mask": np.ones_like(prompt)[None]}
    model.preprocessor = None
    expected = model.generate(inputs, max_length=24, stop_token_ids=None)["token_ids"][0]

    def run(inputs):
        return [keras.ops.convert_to_numpy(array) for array in step(inputs)]

    tokens = guide.decode(run, step.initial_state, prompt, (), 24 - len(prompt))
    np.testing.assert_array_equal([*prompt, *tokens], expected)
    stops = tokens[3:4]
    tokens = guide.decode(run, step.initial_state, prompt, stops, 24 - len(prompt))
    assert not set(stops) & set(tokens)


@pytest.mark.nightly
def test_train_preset_writes_weights_that_load(run, tmp_path):
    (tmp_path / "play.txt").write_text("ALL:\nSpeak, speak.\n\n" * 200)
    arguments = ("--topics", 3, "--steps", 2, "--decay-steps", 1, "--sample", 20)
    printed = run("train_preset", *arguments, "--text", tmp_path / "play.txt")
    for name in ("griffin_tiny_text", "n-grams of 1", "n-grams of 7", "gzip", "xz, alone"):
        assert len(re.findall(rf"^{name} +([\d.]+) +([\d.]+)$", printed, re.M)) == 1, name
    assert "\nROMEO:\n" in printed
    backbone = load("train_preset").GriffinCausalLM.from_preset("griffin_tiny_text").backbone
    backbone.load_weights(tmp_path / "griffin_tiny_text.weights.h5")


def test_train_preset_keeps_paragraphs_whole():
    text = "\n\n".join(f"{i} {'a' * 190}" for i in range(10)) + f"\n\n{'b' * 600}\n"
    documents = load("train_preset").documents_of(text)
    assert "\n\n".join(documents) == text.strip("\n")
    assert [document.count("\n\n") for document in documents] == [1, 1, 1, 1, 1, 0]


def test_train_preset_n_grams_have_the_bits_of_the_equation():
    """Text "ab", "aa" has a 3 times and b once; a begins twice, and b and a follow it once each."""
    a, b = (3 + 2 / 256) / 6, (1 + 2 / 256) / 6
    first, second = (2 + 1 * a) / 3, (1 + 2 * b) / 4
    c = 2 / 256 / 6 / 3  # the beginning counts as one of three bytes, which "c" never follows
    for text, n, probabilities in (("ab", 1, [a, b]), ("ab", 2, [first, second]), ("c", 3, [c])):
        bits = load("train_preset").n_gram_bits(["ab", "aa"], [text], n)
        assert bits == pytest.approx(-np.mean(np.log2(probabilities)))


def test_train_preset_learning_rate_rises_stays_and_falls():
    rate = load("train_preset").ConstantThenLinear(2.0, warmup_steps=4, steps=20, decay_steps=10)
    steps = (0, 1, 3, 4, 10, 15, 19, 20, 30)
    expected = [0.5, 1.0, 2.0, 2.0, 2.0, 1.0, 0.2, 0.0, 0.0]
    assert [float(rate(step)) for step in steps] == pytest.approx(expected)


def test_uptraining_guide_prints_losses_and_memory(run, tmp_path, monkeypatch):
    monkeypatch.setattr(load("gqa_uptraining"), "VALIDATION_ROWS", 32)
    arguments = ("--seeds", 1, "--steps", 8, "--width", 16, "--layers", 1)
    printed = run("gqa_uptraining", *arguments, "--topics", 4, "--groups", 2)
    rows = re.findall(r"\| 2 \| (\w+) \| [\d.]+ ± 0.000 \| [\d.]+ ± 0.000 \|", printed)
    assert rows == ["mean", "first", "random"]
    assert "| key-value bytes a token | 2,048 | 512 | 0.250 |" in printed
    assert (tmp_path / "loss.png").stat().st_size > 0
