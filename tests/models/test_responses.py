"""Training on prompts with responses and on conversations: the loss covers responses only."""

import grain
import keras
import numpy as np
import pytest
import torch

from keras_recurrent.datasets import PackedText
from keras_recurrent.generation.text import tokenize_prompts
from keras_recurrent.tokenizers import ByteTokenizer, SentencePieceTokenizer
from tests.chat.test_chat import CHATML
from tests.layers.table import assert_rejects
from tests.models.data_sources import make_sources
from tests.models.tiny import FAMILIES, tiny_text_model
from tests.tokenizers import bpe, sentence_piece

pytestmark = pytest.mark.once

PAD, START, END = 0, 1, 2
PROMPTS, RESPONSES = ["tick ", "tock tick ", "é", ""], ["tock", "é", "", "tick tock"]
SAMPLES = {"prompts": PROMPTS, "responses": RESPONSES}
LENGTH = 14


def conversation(*contents):
    """Messages of a user and the assistant in turn."""
    roles = "user", "assistant"
    return [{"role": roles[i % 2], "content": content} for i, content in enumerate(contents)]


CONVERSATIONS = [conversation("tick", "tock", "t", "o", "left out"), conversation("x", "é")]
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ message.role[0] }}{{ message.content }}"
    "{{ eos_token }}{% endfor %}{% if add_generation_prompt %}a{% endif %}"
)


def preprocessor(tokenizer=None, **kwargs):
    kwargs = {"sequence_length": LENGTH, "chat_template": TEMPLATE, **kwargs}
    return FAMILIES["hgrn2"].preprocessor(tokenizer or ByteTokenizer(), **kwargs)


def causal_lm(**kwargs):
    options = {"sequence_length": LENGTH, "chat_template": TEMPLATE, **kwargs}
    return tiny_text_model("hgrn2", options, num_layers=1)


def arrays(sample):
    def as_array(x):
        return keras.ops.convert_to_numpy(x) if keras.ops.is_tensor(x) else np.asarray(x)

    return keras.tree.map_structure(as_array, sample)


def hand_built_batch(packed):
    """Tokens, labels and weights of the samples, built by loops.

    Packed, the first two documents share a sequence, and the last two share another.
    """
    sequences = [[0, 1], [2, 3]] if packed else [[0], [1], [2], [3]]
    shape = len(sequences), 28 if packed else LENGTH
    ids, segments, y = (np.zeros(shape, "int32") for _ in range(3))
    weights = np.zeros(shape, "float32")
    for row, documents in enumerate(sequences):
        position = 0
        for segment, d in enumerate(documents, start=1):
            prompt = [START, *(3 + byte for byte in PROMPTS[d].encode())]
            response = [*(3 + byte for byte in RESPONSES[d].encode()), END]
            for i, token in enumerate(prompt + response):
                ids[row, position], segments[row, position] = token, segment
                if i > 0:
                    y[row, position - 1] = token
                    weights[row, position - 1] = i >= len(prompt)
                position += 1
    x = {"token_ids": ids, "padding_mask": segments > 0}
    return {**x, "segment_ids": segments} if packed else x, y, weights


@pytest.mark.parametrize("packed", [False, True])
def test_fit_on_responses_equals_fit_on_a_batch_built_by_hand(packed):
    """The loss includes prompts or lacks end tokens, or packing changes the mask."""
    x, y, weights = hand_built_batch(packed)
    model = causal_lm(packed=packed, sequence_length=y.shape[1])
    model.compile(keras.optimizers.SGD(0.05))
    before, results = model.get_weights(), []
    for data in ({"x": SAMPLES}, {"x": x, "y": y, "sample_weight": weights}):
        model.set_weights(before)
        history = model.fit(**data, batch_size=4, shuffle=False, verbose=0).history
        results.append([history["loss"], *model.get_weights()])
    for a, b in zip(*results, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6)
    assert max(abs(a - b).max() for a, b in zip(results[0][1:], before, strict=True)) > 1e-3


def test_truncated_responses_have_the_tokens_of_truncated_text_and_warn():
    """Truncation differs from plain text's, or the loss includes the end of a lost response."""
    prompts, answers = ["ab", "abcde"], ["cdefgh", "gh"]
    pairs = {"prompts": prompts, "responses": answers}
    match = r"no token of a response .*`sequence_length=6`"
    with pytest.warns(UserWarning, match=match) as warnings:
        x, y, weights = arrays(preprocessor(sequence_length=6)(pairs))
    assert sum("of a response" in str(warning.message) for warning in warnings) == 1
    texts = [a + b for a, b in zip(prompts, answers, strict=True)]
    plain_x, plain_y, _ = arrays(preprocessor(sequence_length=6)(texts))
    keras.tree.map_structure(np.testing.assert_array_equal, (x, y), (plain_x, plain_y))
    assert weights.tolist() == [[False, False, True, True, True, True], [False] * 6]
    single = {"prompts": "ab", "responses": "c"}
    x, y, weights = arrays(preprocessor(sequence_length=6, add_end_token=False)(single))
    assert x["token_ids"].tolist() == [START, 100, 101, 102, PAD, PAD]
    assert y[weights].tolist() == [102]
    # Packing splits a long document and keeps all of the response.
    _, y, weights = arrays(preprocessor(sequence_length=6, packed=True)(pairs))
    assert sorted(y[weights]) == sorted([*(3 + ord(c) for c in "cdefghgh"), END, END])


SINGLE = [{"prompts": p, "responses": r} for p, r in zip(PROMPTS, RESPONSES, strict=True)]
COLUMNS = {name: np.array(column) for name, column in SAMPLES.items()}
SOURCES = make_sources(SINGLE, COLUMNS, batch_size=2) | {
    "arrays": lambda: COLUMNS,
    "grain, preprocessed": lambda: (
        grain.MapDataset.source(SINGLE).map(lambda x: arrays(preprocessor()(x))).batch(2)
    ),
}


@pytest.mark.parametrize("source", SOURCES)
def test_responses_of_every_source_give_the_loss_of_a_batch_built_by_hand(source):
    model = causal_lm()
    arguments = {"verbose": 0, "steps": 2 if "generator" in source else None}
    arguments["batch_size"] = 2 if source == "arrays" else None
    found = model.evaluate(SOURCES[source](), **arguments)
    x, y, weights = hand_built_batch(packed=False)
    expected = model.evaluate(x, y, sample_weight=weights, batch_size=2, verbose=0)
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_preprocessor_in_tensorflow_graphs_makes_equal_samples():
    tf = pytest.importorskip("tensorflow")
    for packed in (False, True):
        layer = preprocessor(packed=packed)
        whole = tf.data.Dataset.from_tensors(SAMPLES).map(layer)
        np_whole = keras.tree.map_structure(lambda t: t.numpy(), next(iter(whole)))
        keras.tree.map_structure(np.testing.assert_array_equal, np_whole, arrays(layer(SAMPLES)))
    one = next(iter(tf.data.Dataset.from_tensor_slices(SAMPLES).map(preprocessor())))
    assert one[2].shape == (LENGTH,)


def test_packed_text_keeps_the_loss_mask_of_responses_and_conversations():
    layer = preprocessor(packed=True, sequence_length=28)
    for samples, expected in (
        (SINGLE, hand_built_batch(packed=True)),
        (CONVERSATIONS, arrays(layer(CONVERSATIONS))),
    ):
        batch = next(iter(PackedText(grain.MapDataset.source(samples), layer, 4, passes=1)))
        keras.tree.map_structure(np.testing.assert_array_equal, arrays(batch), expected)


def test_conversations_of_every_source_give_equal_losses():
    model = causal_lm()
    expected = model.evaluate(CONVERSATIONS, verbose=0)
    x, y, weights = arrays(model.preprocessor(CONVERSATIONS))
    np.testing.assert_allclose(model.evaluate(x, y, sample_weight=weights, verbose=0), expected)
    for source in (
        (batch for _ in range(3) for batch in [CONVERSATIONS]),
        grain.MapDataset.source(CONVERSATIONS).batch(2, batch_fn=list),
        torch.utils.data.DataLoader(CONVERSATIONS, batch_size=2, collate_fn=list),
    ):
        np.testing.assert_allclose(model.evaluate(source, steps=1, verbose=0), expected, rtol=1e-6)
    model.fit(CONVERSATIONS, validation_data=SAMPLES, verbose=0)
    assert np.isfinite(model.fit(SAMPLES, validation_split=0.5, verbose=0).history["val_loss"])


TOKENIZERS = {
    "bytes": ByteTokenizer,
    "bpe": bpe.tokenizer,
    "default": lambda: SentencePieceTokenizer(sentence_piece.train()),
    "spaces kept": lambda: SentencePieceTokenizer(
        sentence_piece.train(add_dummy_prefix=False, remove_extra_whitespaces=False)
    ),
    "spaces removed": lambda: SentencePieceTokenizer(sentence_piece.train(add_dummy_prefix=False)),
    "symbols": lambda: SentencePieceTokenizer(
        sentence_piece.train(user_defined_symbols=["<|im_start|>", "<|im_end|>"])
    ),
}
SPACES = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ eos_token }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def documents(sample):
    """Returns the tokens of each sequence, and True where the loss includes them."""
    x, _, weights = arrays(sample)
    lengths = x["padding_mask"].sum(axis=1)
    ids = [row[:n].tolist() for row, n in zip(x["token_ids"], lengths, strict=True)]
    return ids, [[False, *row[: n - 1].tolist()] for row, n in zip(weights, lengths, strict=True)]


def num_shared(a, b):
    """Returns the number of equal tokens at the beginning of two sequences."""
    pairs = zip(a, b, strict=False)
    return next((i for i, (x, y) in enumerate(pairs) if x != y), min(len(a), len(b)))


@pytest.mark.parametrize("make", TOKENIZERS.values(), ids=TOKENIZERS)
@pytest.mark.parametrize("template", [TEMPLATE, SPACES, CHATML], ids=["tight", "spaces", "chatml"])
def test_conversation_for_training_has_the_tokens_of_the_prompt_for_generation(make, template):
    """The model is trained on other tokens than it generates, such as a space between turns."""
    options = {"tokenizer": make(), "chat_template": template}
    layer = preprocessor(sequence_length=300, **options)
    # The last message, which has no answer, is left out.
    turns = "all happy", "families are", "are", " alike families\n", "y", "a", "all"
    messages = conversation(*turns)

    def tokens(*arguments):
        return tokenize_prompts(layer.tokenizer, [layer.apply_chat_template(*arguments)], True)[0]

    def border(*arguments):
        index = num_shared(tokens(*arguments), whole)
        # SentencePiece removes a space of the template at the end of a text.
        return index + (whole[index : index + 1] == [space])

    whole = tokens(messages[:-1], False)
    is_piece = isinstance(layer.tokenizer, SentencePieceTokenizer)
    space = layer.tokenizer.token_to_id("▁") if is_piece else None
    in_loss = [False] * len(whole)
    for number in (1, 3, 5):
        begin, end = border(messages[:number]), border(messages[: number + 1], False)
        stops = [i for i in range(begin, end) if whole[i] in layer.stop_token_ids]
        end = stops[-1] + 1 if stops else end
        in_loss[begin:end] = [True] * (end - begin)
    expected = [whole], [in_loss]
    assert documents(layer([messages])) == expected
    packed = preprocessor(sequence_length=len(whole), packed=True, **options)
    assert documents(packed([messages])) == expected
    length = in_loss.index(True) + 1
    cut = preprocessor(sequence_length=length, **options)
    assert documents(cut([messages])) == ([whole[:length]], [in_loss[:length]])


@pytest.mark.parametrize("make", TOKENIZERS.values(), ids=TOKENIZERS)
def test_prompt_and_response_have_the_tokens_of_the_joined_text(make):
    """The model is trained on a space, or on merges, that it does not see when it generates."""
    tokenizer = make()
    pairs = [("all hap", "py families"), ("all ", "happy"), ("are", " alike")]
    pairs += [("", "a"), ("a", ""), ("a", "ll")]
    x = {part: list(texts) for part, texts in zip(SAMPLES, zip(*pairs, strict=True), strict=True)}
    start = [] if tokenizer.start_token_id is None else [tokenizer.start_token_id]
    expected = [], []
    for prompt, response in pairs:
        text = prompt + response
        (ids,) = tokenizer([text])
        expected[0].append([*start, *ids, tokenizer.end_token_id])
        # The text has at most one space, where SentencePiece adds or removes no further one.
        ends = np.cumsum([len(tokenizer.id_to_token(id)) for id in ids])
        in_response = (ends - (ends[-1] - len(text)) > len(prompt)).tolist()
        # The first token is not a label.
        expected[1].append([False, *[*[False] * len(start), *in_response, True][1:]])
    assert documents(preprocessor(tokenizer=tokenizer, sequence_length=40)(x)) == expected
    longest = max(map(len, expected[0]))
    packed = preprocessor(tokenizer=tokenizer, sequence_length=longest, packed=True)
    one = {part: texts[:1] for part, texts in x.items()}
    assert documents(packed(one)) == (expected[0][:1], expected[1][:1])


def test_templates_that_change_earlier_text_are_rejected():
    shortening = TEMPLATE.replace("message.content", "message.content[: none if loop.last else 1]")
    layer = preprocessor(chat_template=shortening)
    match = (
        r"prefix-preserving.* 2 messages of conversation 0.* from '<start>utick<.* to '<start>ut<"
    )
    assert_rejects(match, layer, CONVERSATIONS)


def test_fit_rejects_malformed_responses_and_conversations():
    model = causal_lm()
    for x, match in (
        ({"prompts": ["a"]}, r"`x` must have the keys .*got \['prompts'\]"),
        ({**SAMPLES, "images": [1]}, r"`x` must have the keys .*'images'"),
        ({"prompts": ["a"], "responses": []}, "got 1 prompts and 0 responses"),
        ({"prompts": "a", "responses": "b"}, r"`x\['prompts'\]` must be several .* got one string"),
        ({"prompts": [1], "responses": [2]}, r"`x\['prompts'\]` must be several .* with int"),
        ({"prompts": [], "responses": []}, "must hold at least one string"),
        ({"prompt": ["a"]}, r"a dictionary of `prompts` and `responses` .* got .* \['prompt'\]"),
        ([CONVERSATIONS[0][:1]], "conversation 0 has no message of the role 'assistant'"),
        ([CONVERSATIONS[0][1:]], "conversation 0 begins with a message of the role 'assistant'"),
        (CONVERSATIONS[0], "or a list of conversations; got a list with dict"),
    ):
        assert_rejects(match, model.fit, x, verbose=0)
    match = "`validation_data` must have a response for each"
    missing = {"prompts": ["a"], "responses": []}
    assert_rejects(match, model.fit, SAMPLES, validation_data=missing, verbose=0)
    match = "`y` and `sample_weight` are made from"
    assert_rejects(match, model.fit, SAMPLES, np.zeros(4), verbose=0)
    match = "several conversations; got one conversation"
    assert_rejects(match, model.fit, (c for c in CONVERSATIONS), steps_per_epoch=1, verbose=0)
    tokens_only = type(model)(model.backbone)
    for source in (SAMPLES, CONVERSATIONS, torch.utils.data.DataLoader(SINGLE)):
        match = "`x` is text, and the model has no preprocessor"
        assert_rejects(match, tokens_only.fit, source, verbose=0)
