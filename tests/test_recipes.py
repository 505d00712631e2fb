"""The scripts of guides/recipes, at tiny sizes, and their notebooks."""

import contextlib
import json
import pathlib
import re
import runpy
import shutil
import sys
import threading
import types
import urllib.error

import keras
import numpy as np
import pytest

import keras_recurrent
from tests.tokenizers.sentence_piece import train

ROOT = pathlib.Path(__file__).parents[1]
RECIPES = ROOT / "guides/recipes"


def run(monkeypatch, name, *arguments):
    """Runs a script; returns its global variables."""
    monkeypatch.setattr(sys, "argv", [name, *map(str, arguments)])
    return runpy.run_path(str(RECIPES / f"{name}.py"), run_name="__main__")


def load(name):
    return runpy.run_path(str(RECIPES / f"{name}.py"), run_name=name)


class Stop(Exception):
    pass


class StopsAt(keras_recurrent.callbacks.TrainingBackup):
    """A backup that interrupts the run when a step of its second epoch begins."""

    def on_train_batch_begin(self, batch, logs=None):
        super().on_train_batch_begin(batch, logs)
        if self._epoch == 1 and batch == 1:
            raise Stop


@pytest.fixture
def published(tmp_path):
    """A checkpoint as it is published: configuration, weights and vocabulary."""
    folder = tmp_path / "published"
    shutil.copytree(ROOT / "tests/data/hgrn2_tiny", folder)
    (folder / "tokenizer.model").write_bytes(train(pad_id=0, bos_id=1, eos_id=2, unk_id=3))
    return folder


@pytest.fixture
def fine_tune(published, tmp_path, monkeypatch):
    """A function that fine-tunes the checkpoint, and writes to a folder of this name."""
    text = tmp_path / "text.txt"
    text.write_text("all happy families are alike\nare all alike happy\n" * 6)
    options = ("--sequence-length", 16, "--batch-size", 4, "--rank", 2, "--epochs", 2)
    options += ("--model", published, "--text", text, "--learning-rate", 1e-2, "--prompt", "all")
    return lambda name: run(monkeypatch, "fine_tuning", *options, "--output", tmp_path / name)


@pytest.mark.once
def test_fine_tuning_lowers_the_loss_and_saves_the_model(fine_tune, capsys):
    fine_tune("whole")
    printed = capsys.readouterr().out
    before, after = map(float, re.findall(r"training: loss ([\d.]+)", printed))
    assert after < before
    assert "10 documents to learn, 2 held out" in printed
    assert "Loaded again it writes the same." in printed


@pytest.mark.nightly
@pytest.mark.once
def test_fine_tuning_interrupted_run_ends_with_equal_weights(fine_tune, tmp_path, monkeypatch):
    """A run that is interrupted and resumed ends with other low-rank weights."""
    whole = fine_tune("whole")
    with monkeypatch.context() as patch:
        patch.setattr(keras_recurrent.callbacks, "TrainingBackup", StopsAt)
        with pytest.raises(Stop):
            fine_tune("resumed")
    assert (tmp_path / "resumed/run.backup").exists()
    resumed = fine_tune("resumed")
    assert not (tmp_path / "resumed/run.backup").exists()
    pairs = zip(whole["model"].get_weights(), resumed["model"].get_weights(), strict=True)
    for one, other in pairs:
        np.testing.assert_array_equal(one, other)
    assert resumed["patience"].best == whole["patience"].best


@pytest.mark.once
def test_from_files_trains_a_tokenizer_and_a_model(tmp_path, monkeypatch, capsys):
    text, held_out = tmp_path / "text.txt", tmp_path / "more.jsonl"
    text.write_text("all happy families are alike\n\nare  all alike, happy?\n" * 20)
    held_out.write_text(json.dumps({"text": "families\n  are happy é"}) + "\n")
    sizes = ("--vocabulary-size", 290, "--width", 16, "--num-layers", 1, "--sequence-length", 16)
    sizes += ("--epochs", 2, "--steps-per-epoch", 2, "--batch-size", 2)
    arguments = ("--text", text, "--held-out", held_out, "--prompt", "all", "--output", tmp_path)
    found = run(monkeypatch, "from_files", *sizes, *arguments)
    printed = capsys.readouterr().out
    assert "290 tokens" in printed
    assert len(re.findall(r"Epoch [12]: [\d.]+ bits a byte", printed)) == 2
    assert "as it was: True" in printed
    # The loss of one document is its mean over all of its tokens and the end.
    nats = found["history"].history["val_nats"][-1]
    count = len(found["tokens"][0]) + 1
    assert found["bits_per_byte"](nats) == pytest.approx(nats * count / 23 / np.log(2))


@pytest.mark.once
def test_classifier_learns_two_words_and_saves_their_names(tmp_path, monkeypatch, capsys):
    data = tmp_path / "data.csv"
    rows = [f'"{word * 3}, {i}",{word}\n' for word in ("tick", "boom") for i in range(20)]
    data.write_text("text,label\n" + "".join(rows))
    options = ("--sequence-length", 12, "--batch-size", 8, "--epochs", 1, "--output", tmp_path)
    found = run(monkeypatch, "classifier", "--data", data, *options)
    printed = capsys.readouterr().out
    assert "32 texts to learn, 8 held out" in printed
    assert "Naive Bayes: 100.0% right" in printed
    assert len(re.findall(r"of held-out texts right", printed)) == 2
    assert "the logits differ by 0.0\n" in printed
    assert found["names"] == ["boom", "tick"]
    assert (tmp_path / "classifier/classes.txt").read_text() == "boom\ntick"
    data.write_text("words,label\nx,y\n")
    with pytest.raises(SystemExit, match="no columns 'text' and 'label'"):
        run(monkeypatch, "classifier", "--data", data, *options)


@pytest.mark.once
def test_forecasting_with_a_state_equals_forecasting_from_the_whole_past(monkeypatch, capsys):
    arguments = ("--width", 8, "--rows", 16, "--epochs", 1, "--hours", 3)
    run(monkeypatch, "forecasting", *arguments)
    assert len(re.findall(r"^  .*: \d\.\d{3}$", capsys.readouterr().out, re.M)) == 3
    recipe = load("forecasting")
    model = recipe["Forecaster"](8)
    samples, calendar = recipe["series"](2, 43, seed=2)
    past = samples[:, :40]
    found = recipe["forecast"](model, past, calendar, 3)
    # For each hour, the model processes all earlier hours again.
    for hour in (40, 41, 42):
        following = model(recipe["inputs_of"](past, calendar[:, : hour + 1]))
        past = np.concatenate([past, keras.ops.convert_to_numpy(following)[:, -1:]], axis=1)
    np.testing.assert_allclose(found, past[:, 40:], atol=1e-5)


@pytest.mark.once
def test_long_series_windows_continue_from_the_states_of_the_stream(monkeypatch, capsys):
    """Streams are not in order, a state is lost between windows, or validation changes it."""
    pytest.importorskip("matplotlib")
    arguments = ("--width", 8, "--window", 128, "--epochs", 1)
    run(monkeypatch, "long_series", *arguments)
    assert len(re.findall(r"^  .*: \d+\.\d{2} mV$", capsys.readouterr().out, re.M)) == 4
    recipe = load("long_series")
    series = recipe["load_series"]()
    (windows, _), streams = recipe["windows_of"](series, 3, 16), 3
    model = recipe["Forecaster"](8, streams)
    found = []
    for window in (windows[:3], windows[3:6]):
        found.append(keras.ops.convert_to_numpy(model(window, training=True)))
        model(windows[:1])  # as in validation, with another batch size
    length = len(windows) // streams * 16
    starts = [series[i * length :][:32, None] for i in range(streams)]
    whole, states = keras.tree.map_structure(
        keras.ops.convert_to_numpy, model.advance(np.stack(starts))
    )
    np.testing.assert_allclose(np.concatenate(found, axis=1), whole, atol=1e-5)
    for variable, state in zip(model.states, keras.tree.flatten(states), strict=True):
        np.testing.assert_allclose(keras.ops.convert_to_numpy(variable), state, atol=1e-5)
    model.reset_states()
    again = keras.ops.convert_to_numpy(model(windows[:3], training=True))
    np.testing.assert_array_equal(again, found[0])


class FakeEngine:
    """An engine whose answers are the seeds of requests; it fails after some of them."""

    def __init__(self, num_requests):
        self.num_requests = num_requests

    def submit(self, prompt, sampling, max_new_tokens):
        if prompt is None:
            raise ValueError("`prompt` must be a string")
        self.num_requests -= 1
        if self.num_requests < 0:
            raise RuntimeError
        text = f"{prompt} {sampling.seed} {max_new_tokens}"
        return types.SimpleNamespace(result=lambda: types.SimpleNamespace(text=text))


@pytest.mark.once
def test_batch_inference_resumes_after_the_last_complete_part(tmp_path):
    """Answers are lost, twice there, out of order, or depend on an interruption."""
    recipe = load("batch_inference")
    prompts = [{"id": i, "prompt": f"é{i}"} for i in range(7)]
    del prompts[5]["prompt"]
    lines = [json.dumps(prompt, ensure_ascii=False) for prompt in prompts]
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(lines), encoding="utf-8")  # as if the last line is not complete

    def generate(num_requests):
        generator = object.__new__(recipe["Generator"])
        generator.engine, generator.max_new_tokens = FakeEngine(num_requests), 4
        generator.sampling = {"temperature": 1.0, "seed": 10}
        parts = list(recipe["missing_parts"]([path], tmp_path, 2))
        return [generator(part) for part in parts]

    with pytest.raises(RuntimeError):
        generate(num_requests=3)
    assert [file.name for file in tmp_path.glob("prompts-*")] == ["prompts-000000000.jsonl"]
    counts = generate(num_requests=4)
    assert counts == [{"answers": n, "errors": e} for n, e in [(2, 0), (1, 1), (1, 0)]]
    assert generate(num_requests=0) == []
    text = "".join(file.read_text("utf-8") for file in sorted(tmp_path.glob("prompts-*")))
    answers = [json.loads(line) for line in text.splitlines()]
    assert answers[5] == {"id": 5, "error": "`prompt` must be a string"}
    for i in (0, 1, 2, 3, 4, 6):
        assert answers[i] == {"id": i, "prompt": f"é{i}", "text": f"é{i} {10 + i} 4"}
    settings = {"seed": 10}
    recipe["check_settings"](tmp_path, settings)
    recipe["check_settings"](tmp_path, settings)
    with pytest.raises(SystemExit, match="other settings"):
        recipe["check_settings"](tmp_path, {"seed": 11})


@pytest.mark.once
def test_long_documents_are_read_in_chunks_with_a_state_of_constant_size(
    tmp_path, monkeypatch, capsys
):
    document = tmp_path / "long.txt"
    document.write_text("All happy families are alike. " * 30)
    arguments = ("--topics", 1, "--epochs", 1, "--sequence-length", 64, "--document", document)
    sizes = ("--piece", 300, "--most", 100, "--output", tmp_path)
    found = run(monkeypatch, "long_documents", *arguments, *sizes)
    printed = capsys.readouterr().out
    read = re.findall(r"([\d,]+) tokens read, ([\d,]+) bytes kept", printed)
    assert [tokens for tokens, _ in read] == ["301", "601", "901"]
    assert len({size for _, size in read}) == 1
    assert printed.count("After '") == 3
    places = re.findall(r"to +([\d,]+): [\d.]+", printed)
    assert places == ["2", "4", "8", "16", "32", "64", "100"]
    assert list(found["pieces_of"](document, 400)) == [
        document.read_text()[i : i + 400] for i in (0, 400, 800)
    ]


# Exporting a step to ONNX takes long: `make test-export` does it.
@pytest.mark.nightly
@pytest.mark.skipif(keras.backend.backend() != "tensorflow", reason="what TensorFlow exports")
def test_serving_answers_requests_and_names_wrong_fields(tmp_path, monkeypatch, capsys):
    model = keras_recurrent.models.HGRN2CausalLM.from_preset("hgrn2_tiny", num_layers=1)
    model.save_to_preset(str(tmp_path / "model"))
    arguments = ("--model", tmp_path / "model", "--max-tokens", 12, "--output", tmp_path / "served")
    recipe = run(monkeypatch, "serving", *arguments)
    assert "From its beginning Keras writes the same." in capsys.readouterr().out

    writer = recipe["Writer"](tmp_path / "served")
    one, other = ("".join(writer.write("Who?", 8, 1.0, seed=3)) for _ in range(2))
    assert one == other
    with recipe["server"](writer) as serving:
        threading.Thread(target=serving.serve_forever, daemon=True).start()
        address = recipe["address_of"](serving)
        for question, match in [
            ({"prompt": 3}, 'a string "prompt"'),
            ({"prompt": "x", "max_tokens": 0}, '"max_tokens" must be'),
            ({"prompt": "x", "temperature": -1}, '"temperature" must be'),
            ({"prompt": "\ud800"}, "surrogates not allowed"),
        ]:
            with pytest.raises(urllib.error.HTTPError) as refused:
                list(recipe["ask"](address, **question))
            with contextlib.closing(refused.value) as error:
                assert error.code == 400
                assert match in error.read().decode()
        serving.shutdown()


@pytest.mark.once
def test_serving_streams_whole_characters():
    """A character is cut, or invalid bytes raise an error."""
    recipe = load("serving")
    writer = object.__new__(recipe["Writer"])
    writer.about = {"tokenizer": "bytes", "start": [1], "end": 2, "reads_at_once": True}
    writer.first_state = {}
    answer = [byte + 3 for byte in "é€".encode() + b"\xffa\xe2"] + [2]
    steps = iter(answer)

    def step(tokens, state):
        logits = np.zeros((1, tokens.shape[1], 259))
        logits[0, -1, next(steps)] = 1.0
        return logits, state

    writer.step = step
    assert list(writer.write("x", 20, 0)) == ["é", "€", "\ufffda", "\ufffd"]


@pytest.mark.once
@pytest.mark.parametrize("name", ["fine_tuning", "from_files", "classifier", "tpu_report"])
def test_notebook_is_generated_from_its_script(name):
    made = load("notebooks")["notebook"]((RECIPES / f"{name}.py").read_text(encoding="utf-8"))
    found = (RECIPES / f"{name}.ipynb").read_text(encoding="utf-8")
    assert found == made, "run `make notebooks`"
    cells = json.loads(found)["cells"]
    assert "\n".join(cells[0]["source"]).startswith("# ")
    for cell in cells:
        assert cell["source"], "an empty cell"
        if cell["cell_type"] == "code":
            compile("".join(cell["source"]), name, "exec")


@pytest.mark.once
def test_table_of_recipes_links_every_script():
    table = (RECIPES / "README.md").read_text()
    links = re.findall(r"\]\(([^)#:]+)\)", table)
    scripts = {path.name for path in RECIPES.glob("*.py")} - {"notebooks.py"}
    assert scripts <= set(links)
    assert {path.name for path in RECIPES.glob("*.ipynb")} <= set(links)
