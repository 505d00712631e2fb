"""`fit`, `evaluate` and `predict` on strings from every source that Keras takes."""

import logging

import grain
import keras
import numpy as np
import pytest
import torch

from keras_recurrent.training import sources
from tests.models.tiny import FAMILIES

pytestmark = pytest.mark.once

TEXTS = ["tick tock ", "tick tock tick", "tock", "tick"] * 3
BATCHES = [TEXTS[i : i + 3] for i in range(0, 12, 3)]


class Strings(keras.utils.PyDataset):
    """Batches of strings, each with its length, of which Keras asks for one after another."""

    epochs = 0

    def __len__(self):
        return len(BATCHES)

    def __getitem__(self, index):
        return (np.array(BATCHES[index]),)

    def on_epoch_end(self):
        self.epochs += 1


class Texts(torch.utils.data.Dataset):
    def __len__(self):
        return len(TEXTS)

    def __getitem__(self, index):
        return TEXTS[index]


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


def tensorflow_dataset():
    tf = pytest.importorskip("tensorflow")
    return tf.data.Dataset.from_tensor_slices(TEXTS).batch(3)


MADE_BY = {
    "array": lambda: np.array(TEXTS),
    "tf.data": tensorflow_dataset,
    "grain, of known length": lambda: grain.MapDataset.source(TEXTS).batch(3),
    "grain, as a stream": lambda: grain.MapDataset.source(TEXTS).to_iter_dataset().batch(3),
    "grain, a loader": grain_loader,
    "torch": lambda: torch.utils.data.DataLoader(Texts(), batch_size=3),
    "torch, as a stream": lambda: torch.utils.data.DataLoader(Stream(), batch_size=3),
    "a generator of lists": lambda: generator(BATCHES),
    "a generator of tuples": lambda: generator([(np.array(batch),) for batch in BATCHES]),
    "PyDataset": Strings,
    "PyDataset with threads": lambda: Strings(workers=2),
}
# Keras cannot know when these end, and warns when they do, unless it is told of the steps.
ENDLESS = {
    "grain, as a stream": lambda: (
        grain.MapDataset.source(TEXTS).repeat(3).to_iter_dataset().batch(3)
    ),
    "grain, a loader": lambda: grain_loader(passes=3),
    "torch, as a stream": lambda: torch.utils.data.DataLoader(Stream(passes=3), batch_size=3),
    "a generator of lists": MADE_BY["a generator of lists"],
    "a generator of tuples": MADE_BY["a generator of tuples"],
}


@pytest.fixture(scope="module")
def model():
    family = FAMILIES["hgrn2"]
    preprocessor = family.preprocessor(family.tokenizer(), sequence_length=8)
    sizes = {**family.sizes, "vocabulary_size": 259, "num_layers": 1}
    model = family.causal_lm(family.backbone(**sizes), preprocessor)
    # XLA on TensorFlow would compile a step for each source anew.
    jit_compile = "auto" if keras.backend.backend() == "jax" else False
    model.compile(keras.optimizers.SGD(0.1), jit_compile=jit_compile)
    return model


@pytest.fixture(scope="module")
def wanted(model):
    """What lists of strings give: weights to start from, and the losses of two epochs."""
    start = model.get_weights()
    arguments = {"batch_size": 3, "epochs": 2, "shuffle": False, "verbose": 0}
    history = model.fit(TEXTS, validation_data=TEXTS, **arguments).history
    assert history["loss"][1] < history["loss"][0]
    return start, history


def test_class_weight_with_token_labels_raises(model):
    """Keras takes the labels of a sequence for one-hot classes, and weights it by their argmax."""
    x, y, _ = model.preprocessor(TEXTS)
    data = [(x, y), (TEXTS,), *((make(),) for make in MADE_BY.values())]
    for train, given in [(model.train_on_batch, (x, y)), *((model.fit, given) for given in data)]:
        with pytest.raises(ValueError, match=r"`class_weight` needs one label .* `sample_weight`"):
            train(*given, class_weight={9: 100.0})


@pytest.mark.parametrize("source", MADE_BY)
def test_a_source_of_strings_trains_as_a_list_of_them(model, wanted, source, caplog):
    start, history = wanted
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
    with caplog.at_level(logging.WARNING):
        found = model.fit(make(), validation_data=make(), **arguments).history
    for name in history:
        # Keras begins another validation by a generator with the two batches that it looked at
        # before the first, and goes on where that one stopped.
        compared = 1 if "generator" in source and name.startswith("val") else 2
        np.testing.assert_allclose(found[name][:compared], history[name][:compared], rtol=1e-4)
    assert not caplog.records  # grain logs its warnings


@pytest.mark.once
@pytest.mark.parametrize("source", MADE_BY)
def test_a_source_of_strings_is_evaluated_as_a_list_of_them(model, wanted, source):
    model.set_weights(wanted[0])
    loss = model.evaluate(TEXTS, batch_size=3, verbose=0)
    steps = 4 if source in ENDLESS else None
    batch_size = 3 if source == "array" else None
    found = model.evaluate(MADE_BY[source](), batch_size=batch_size, steps=steps, verbose=0)
    np.testing.assert_allclose(found, loss, rtol=1e-4)


@pytest.mark.once
def test_logits_of_a_source_are_those_of_a_list(model):
    loader = torch.utils.data.DataLoader(Texts(), batch_size=3)
    logits = model.predict(TEXTS, batch_size=3, verbose=0)
    np.testing.assert_allclose(model.predict(loader, verbose=0), logits, rtol=1e-5)


def epochs_of(source, number):
    """What a source gives in each epoch, the last one first, as a resumed run may ask."""
    found = {}
    for epoch in reversed(range(number)):
        source.epoch = epoch
        found[epoch] = [source[i] for i in range(len(source))]
    return [found[epoch] for epoch in range(number)]


@pytest.mark.once
def test_strings_are_shuffled_by_the_seed_and_the_epoch():
    def orders(shuffle, epochs=3, steps=None):
        keras.utils.set_random_seed(7)
        source = sources.InMemory((list("abcdefghij"), None, None), None, 4, shuffle, steps)
        return [tuple("".join(*batch) for batch in e) for e in epochs_of(source, epochs)]

    assert orders(False) == [("abcd", "efgh", "ij")] * 3
    shuffled = orders(True)
    assert shuffled == orders(True)
    assert len(set(shuffled)) == 3
    assert all(sorted("".join(order)) == list("abcdefghij") for order in shuffled)
    assert set(orders("batch", 9)) == {("abcd", "efgh", "ij"), ("efgh", "abcd", "ij")}
    # Epochs of other lengths share the passes.
    for steps in (1, 2, 9):
        assert sum(orders(True, 18 // steps, steps), ()) == sum(orders(True, 6), ())


@pytest.mark.once
def test_datasets_of_grain_go_on_from_epoch_to_epoch():
    texts = grain.MapDataset.source(list("abcdefghij")).shuffle(seed=3).batch(4)

    def prepared(dataset, steps, epochs):
        source, steps = sources.as_source(dataset, lambda x, y, w: (np.array(x), y, w), steps)
        assert steps is None
        return ["".join(batch[0]) for epoch in epochs_of(source, epochs) for batch in epoch]

    wanted = ["".join(batch) for batch in texts.repeat(4)]
    assert sorted("".join(wanted)) == sorted("abcdefghij" * 4)
    assert wanted[:3] != wanted[3:6]
    for dataset, steps in [(texts, None), (texts, 2), (texts, 6), (texts.repeat(), 3)]:
        assert prepared(dataset, steps, 12 // (steps or 3)) == wanted
    with pytest.raises(ValueError, match=r"The dataset has no end.*`steps_per_epoch`"):
        prepared(texts.repeat(), None, 1)


@pytest.mark.once
def test_the_last_strings_are_held_out(model, wanted):
    model.set_weights(wanted[0])
    arguments = {"validation_split": 0.25, "batch_size": 9, "verbose": 0}
    found = model.fit(TEXTS, steps_per_epoch=1, **arguments).history["val_loss"][0]
    np.testing.assert_allclose(found, model.evaluate(TEXTS[9:], verbose=0)[0], rtol=1e-5)
    with pytest.raises(ValueError, match=r"`validation_split` of 0.99 leaves no samples .* of 12"):
        model.fit(TEXTS, validation_split=0.99, verbose=0)


@pytest.mark.once
def test_batches_that_are_none_are_errors(model):
    with pytest.raises(ValueError, match="Each batch must hold several strings; got one string"):
        model.fit(generator(TEXTS), steps_per_epoch=1, verbose=0)
    numbers = torch.utils.data.DataLoader([{"text": "tick"}] * 2)
    with pytest.raises(ValueError, match=r"`x` must be several .* got a dictionary of \['text'\]"):
        model.fit(numbers, verbose=0)
    with pytest.raises(ValueError, match="`y` and `sample_weight` are made from the strings"):
        model.fit(TEXTS, np.zeros(2), verbose=0)


@pytest.mark.once
def test_tokens_pass_through_every_source(model, wanted):
    rows = keras.tree.map_structure(keras.ops.convert_to_numpy, model.preprocessor(TEXTS))

    class Tokens(Strings):
        def __getitem__(self, index):
            part = slice(3 * index, 3 * index + 3)
            return keras.tree.map_structure(lambda array: array[part], rows)

    model.set_weights(wanted[0])
    loss = model.evaluate(TEXTS, batch_size=3, verbose=0)
    tokens = Tokens()
    np.testing.assert_allclose(model.evaluate(tokens, verbose=0), loss, rtol=1e-5)
    model.fit((tokens[i] for i in range(4)), steps_per_epoch=2, verbose=0)


@pytest.mark.once
def test_a_dataset_of_ones_own_hears_of_epochs(model):
    dataset = Strings()
    model.fit(dataset, epochs=2, verbose=0)
    assert dataset.epochs >= 2
