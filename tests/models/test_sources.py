"""`fit`, `evaluate` and `predict` on strings from every source that Keras accepts."""

import logging

import grain
import keras
import numpy as np
import pytest
import torch

from keras_recurrent.training import sources
from tests.layers.table import JIT, assert_rejects
from tests.models.data_sources import make_sources
from tests.models.tiny import tiny_text_model

pytestmark = pytest.mark.once

TEXTS = ["tick tock ", "tick tock tick", "tock", "tick"] * 3
BATCHES = [TEXTS[i : i + 3] for i in range(0, 12, 3)]


class Strings(keras.utils.PyDataset):
    """Batches of strings, which Keras requests by their index."""

    epochs = 0

    def __len__(self):
        return len(BATCHES)

    def __getitem__(self, index):
        return (np.array(BATCHES[index]),)

    def on_epoch_end(self):
        self.epochs += 1


class Stream(torch.utils.data.IterableDataset):
    def __init__(self, passes=1):
        self.passes = passes

    def __iter__(self):
        return iter((text,) for text in TEXTS * self.passes)


def generator(batches):
    for _ in range(3):  # Keras looks at two batches before the first
        yield from batches


def grain_loader(passes=1):
    return grain.DataLoader(
        data_source=TEXTS,
        sampler=grain.samplers.IndexSampler(len(TEXTS), num_epochs=passes, shuffle=False),
        operations=[grain.transforms.Batch(3)],
    )


MADE_BY = {
    **make_sources(TEXTS, np.array(TEXTS), batch_size=3),
    "array": lambda: np.array(TEXTS),
    "grain, as a stream": lambda: grain.MapDataset.source(TEXTS).to_iter_dataset().batch(3),
    "grain, a loader": grain_loader,
    "torch, as a stream": lambda: torch.utils.data.DataLoader(Stream(), batch_size=3),
    "generator of lists": lambda: generator(BATCHES),
    "generator of tuples": lambda: generator([(np.array(batch),) for batch in BATCHES]),
    "PyDataset": Strings,
    "PyDataset with threads": lambda: Strings(workers=2),
}
# Keras does not know when these end, and warns at the end unless the number of steps is given.
ENDLESS = {
    "grain, as a stream": lambda: (
        grain.MapDataset.source(TEXTS).repeat(3).to_iter_dataset().batch(3)
    ),
    "grain, a loader": lambda: grain_loader(passes=3),
    "torch, as a stream": lambda: torch.utils.data.DataLoader(Stream(passes=3), batch_size=3),
    **{name: make for name, make in MADE_BY.items() if "generator" in name},
}


@pytest.fixture(scope="module")
def model():
    model = tiny_text_model("hgrn2", num_layers=1)
    model.compile(keras.optimizers.SGD(0.1), jit_compile=JIT)
    return model


@pytest.fixture(scope="module")
def list_results(model):
    """Initial weights, and the history of two epochs on lists of strings."""
    start = model.get_weights()
    arguments = {"batch_size": 3, "epochs": 2, "shuffle": False, "verbose": 0}
    history = model.fit(TEXTS, validation_data=TEXTS, **arguments).history
    assert history["loss"][1] < history["loss"][0]
    return start, history


def test_class_weight_with_token_labels_raises(model):
    """Keras interprets labels of tokens as one-hot classes, and weights them by their argmax."""
    x, y, _ = model.preprocessor(TEXTS)
    data = [(x, y), (TEXTS,), *((make(),) for make in MADE_BY.values())]
    for train, given in [(model.train_on_batch, (x, y)), *((model.fit, given) for given in data)]:
        match = r"`class_weight` needs one label .* `sample_weight`"
        assert_rejects(match, train, *given, class_weight={9: 100.0})


@pytest.mark.parametrize("source", MADE_BY)
def test_fit_on_a_source_has_the_losses_of_a_list(model, list_results, source, caplog):
    start, history = list_results
    make = MADE_BY[source]
    model.set_weights(start)
    arguments = {"epochs": 2, "verbose": 0}
    if source == "array":
        arguments |= {"batch_size": 3, "shuffle": False}
    elif source.startswith("PyDataset"):
        arguments |= {"shuffle": False}  # Keras shuffles the batches of these
    elif source in ENDLESS:
        arguments |= {"steps_per_epoch": 4, "validation_steps": 4}
        make = ENDLESS[source]
    train_data = make()
    with caplog.at_level(logging.WARNING):
        found = model.fit(train_data, validation_data=make(), **arguments).history
    assert source != "PyDataset" or train_data.epochs >= 2
    for name in history:
        # Keras begins the second validation by a generator with the two batches that it looked at
        # before the first, then continues where the first ended.
        compared = 1 if "generator" in source and name.startswith("val") else 2
        np.testing.assert_allclose(found[name][:compared], history[name][:compared], rtol=1e-4)
    assert not caplog.records  # grain logs its warnings


def test_predict_on_a_source_has_the_logits_of_a_list(model):
    loader = MADE_BY["torch"]()
    logits = model.predict(TEXTS, batch_size=3, verbose=0)
    np.testing.assert_allclose(model.predict(loader, verbose=0), logits, rtol=1e-5)


def read_epochs(source, count):
    """Returns the batches of each epoch, read in reversed order, as a resumed run may do."""
    epochs = []
    for epoch in reversed(range(count)):
        source.epoch = epoch
        epochs.insert(0, [source[i] for i in range(len(source))])
    return epochs


def test_in_memory_source_shuffles_by_seed_and_epoch():
    def orders(shuffle, epochs=3, steps=None):
        keras.utils.set_random_seed(7)
        source = sources.InMemory((list("abcdefghij"), None, None), None, 4, shuffle, steps)
        return [tuple("".join(*batch) for batch in e) for e in read_epochs(source, epochs)]

    assert orders(False) == [("abcd", "efgh", "ij")] * 3
    shuffled = orders(True)
    assert shuffled == orders(True)
    assert len(set(shuffled)) == 3
    assert all(sorted("".join(order)) == list("abcdefghij") for order in shuffled)
    assert set(orders("batch", 9)) == {("abcd", "efgh", "ij"), ("efgh", "abcd", "ij")}
    # Epochs of other lengths divide the same passes over the strings.
    for steps in (1, 2, 9):
        assert sum(orders(True, 18 // steps, steps), ()) == sum(orders(True, 6), ())


def test_grain_dataset_continues_from_epoch_to_epoch():
    texts = grain.MapDataset.source(list("abcdefghij")).shuffle(seed=3).batch(4)

    def prepared(dataset, steps, epochs):
        source, steps = sources.as_source(dataset, lambda x, y, w: (np.array(x), y, w), steps)
        assert steps is None
        return ["".join(batch[0]) for epoch in read_epochs(source, epochs) for batch in epoch]

    expected = ["".join(batch) for batch in texts.repeat(4)]
    assert sorted("".join(expected)) == sorted("abcdefghij" * 4)
    assert expected[:3] != expected[3:6]
    for dataset, steps in [(texts, None), (texts, 2), (texts, 6), (texts.repeat(), 3)]:
        assert prepared(dataset, steps, 12 // (steps or 3)) == expected
    match = r"The dataset has no end.*`steps_per_epoch`"
    assert_rejects(match, prepared, texts.repeat(), None, 1)


def test_validation_split_holds_out_the_last_strings(model, list_results):
    model.set_weights(list_results[0])
    arguments = {"validation_split": 0.25, "batch_size": 9, "verbose": 0}
    found = model.fit(TEXTS, steps_per_epoch=1, **arguments).history["val_loss"][0]
    np.testing.assert_allclose(found, model.evaluate(TEXTS[9:], verbose=0)[0], rtol=1e-5)
    match = r"`validation_split` of 0.99 leaves no samples .* of 12"
    assert_rejects(match, model.fit, TEXTS, validation_split=0.99, verbose=0)


def test_fit_rejects_sources_of_single_strings_and_other_data(model):
    match = "Each batch must hold several strings; got one string"
    assert_rejects(match, model.fit, generator(TEXTS), steps_per_epoch=1, verbose=0)
    dictionaries = torch.utils.data.DataLoader([{"text": "tick"}] * 2)
    match = r"`x` must be several .* got a dictionary of \['text'\]"
    assert_rejects(match, model.fit, dictionaries, verbose=0)
