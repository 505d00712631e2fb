"""Grammars: JSON schemas whose answers validate, errors, and sequences without a grammar."""

import dataclasses
import json
import math
import random
import time

import numpy as np
import pytest

from keras_recurrent.generation import batch, grammar
from keras_recurrent.generation.batch import Batch
from keras_recurrent.generation.grammar import GrammarError, consume, make_masks, make_matchers
from keras_recurrent.generation.sampling import covers, features_of
from keras_recurrent.models import SamplingParams
from tests.generation.test_text import TOKENIZERS, make_preprocessor, text_model
from tests.models.tiny import nightly_on_tensorflow, tiny_causal_lm
from tests.tokenizers import bpe

pytestmark = pytest.mark.once
STRINGS = ["", "a b", "é\n", '"\\', "null"]
CLOSED = {"type": "object", "additionalProperties": False}
CAT = {
    "name": {"type": "string", "maxLength": 6},
    "age": {"type": "integer", "minimum": 0, "maximum": 99},
}
CAT = {**CLOSED, "properties": {**CAT, "kind": {"enum": ["cat", 1]}}, "required": ["name", "kind"]}


def random_schema(rng, depth=3):
    """Returns a JSON schema whose values have a bounded length, and that length in bytes."""
    kind = rng.choice(["integer", "string", "enum", "null"] + ["array", "object", "any"] * depth)
    if kind == "integer":
        low = rng.randint(-50, 50)
        return {"type": kind, "minimum": low, "maximum": low + rng.randint(0, 200)}, 4
    if kind == "string":
        low = rng.randint(0, 2)
        high = low + rng.randint(0, 4)
        # A character may be two escapes of six bytes.
        return {"type": kind, "minLength": low, "maxLength": high}, 2 + 12 * high
    if kind == "enum":
        values = rng.sample([*STRINGS, 1, -2, True, None], rng.randint(1, 4))
        return {"enum": values}, max(len(json.dumps(value)) for value in values)
    if kind == "null":
        return {"type": kind}, 4
    pairs = [random_schema(rng, depth - 1) for _ in range(rng.randint(1, 3))]
    schemas, lengths = zip(*pairs, strict=True)
    if kind == "any":
        return {"anyOf": list(schemas)}, max(lengths)
    if kind == "array":
        low = rng.randint(0, 2)
        high = low + rng.randint(0, 2)
        items = {"items": schemas[0], "minItems": low, "maxItems": high}
        return {"type": kind, **items}, 2 + high * (1 + lengths[0])
    names = rng.sample(["a", "b c", 'q"', "ü"], len(schemas))
    required = rng.sample(names, rng.randint(0, len(names)))
    properties = dict(zip(names, schemas, strict=True))
    return {**CLOSED, "properties": properties, "required": required}, 2 + sum(lengths) + 10 * 4


def is_valid(value, schema):
    """Returns True if a value validates against a schema of `random_schema`."""
    if "anyOf" in schema:
        return any(is_valid(value, each) for each in schema["anyOf"])
    if "enum" in schema:
        return json.dumps(value) in map(json.dumps, schema["enum"])
    kind = {"integer": int, "string": str, "null": type(None), "array": list, "object": dict}
    if type(value) is not kind[schema["type"]]:
        return False
    if isinstance(value, int):
        return schema.get("minimum", -math.inf) <= value <= schema.get("maximum", math.inf)
    if isinstance(value, str):
        return schema.get("minLength", 0) <= len(value) <= schema.get("maxLength", math.inf)
    if isinstance(value, list):
        is_short = schema["minItems"] <= len(value) <= schema["maxItems"]
        return is_short and all(is_valid(each, schema["items"]) for each in value)
    if isinstance(value, dict):
        known = schema["properties"]
        has_keys = set(schema["required"]) <= value.keys() <= known.keys()
        return has_keys and all(is_valid(value[name], known[name]) for name in value)
    return True


def random_tokens(rng, preprocessor, schema, limit):
    """Returns random tokens that a grammar allows, up to the end token or a number of tokens."""
    size, end = preprocessor.tokenizer.vocabulary_size(), preprocessor.tokenizer.end_token_id
    (matcher,) = make_matchers(preprocessor, size, [SamplingParams(grammar=schema)], (end,))
    tokens: list[int] = []
    while len(tokens) < limit and tokens[-1:] != [end]:
        mask = make_masks([(matcher, 1)], 2, size)
        assert (mask[0] == 255).all()
        bits = np.unpackbits(mask[1], bitorder="little")
        assert not bits[size:].any()
        tokens.append(int(rng.choice(np.flatnonzero(bits).tolist())))
        consume(matcher, tokens[-1])
    return tokens


@pytest.mark.parametrize("name", ["bytes", "bpe", "sentence_piece", "fallback"])
def test_random_tokens_of_random_schemas_validate(name):
    """The bytes of a token are wrong, an end token comes early, or it never comes."""
    rng, preprocessor = random.Random(name), make_preprocessor(TOKENIZERS[name]())
    end, num_ended, count = preprocessor.tokenizer.end_token_id, 0, 40
    for _ in range(count):
        schema, longest = random_schema(rng)
        tokens = random_tokens(rng, preprocessor, schema, 2 * longest)
        num_ended += tokens[-1] == end
        if tokens[-1] == end:
            text = preprocessor.tokenizer.detokenize(tokens[:-1])
            assert is_valid(json.loads(text), schema), (text, schema)
    assert num_ended >= 0.95 * count


@pytest.mark.every_backend
@nightly_on_tensorflow
@pytest.mark.parametrize("is_accelerated", [False, True])
def test_generate_with_grammars_in_a_batch_validates_and_changes_no_other_sequence(
    is_accelerated, monkeypatch
):
    """The mask of one sequence or step is applied to another, or a step precedes its mask.

    On an accelerator, a step may change the state of a sequence that waits for its mask.
    """
    if is_accelerated:
        monkeypatch.setattr(batch, "is_on_cpu", lambda model: False)
    model, prompts = text_model(), list("abcd")
    options = {"logprobs": 0, "frequency_penalty": 0.5}
    plain = [SamplingParams(seed=n, top_k=5 * (n % 2), **options) for n in range(4)]
    grammars = {1: CAT, 2: "start: /[0-9]{3,5}/ /[a-f]+/"}
    params = [dataclasses.replace(p, grammar=grammars.get(n)) for n, p in enumerate(plain)]
    options = {"max_new_tokens": 150, "strip_prompt": True}
    expected = model.generate(prompts, sampling=plain, **options)
    found = model.generate(prompts, sampling=params, **options)
    assert is_valid(json.loads(found.texts[1]), CAT)
    assert found.texts[2][:3].isdigit()
    for row in (0, 3):
        assert found.token_ids[row] == expected.token_ids[row]
    for row in (1, 2):
        alone = model.generate(prompts[row], sampling=params[row], **options)
        assert alone.token_ids[0] == found.token_ids[row]
        pair = ([each.logprob for each in o.logprobs[n]] for o, n in ((found, row), (alone, 0)))
        np.testing.assert_allclose(*pair, atol=1e-5)
        stream = model.stream(prompts[row], sampling=params[row], max_new_tokens=150)
        assert "".join(stream) == alone.texts


def test_features_with_a_grammar_serve_no_sequences_without_one():
    """Sequences decode one token at a time after others with a grammar have ended."""
    with_grammar, plain = (features_of([SamplingParams(grammar=g)], 9) for g in ({}, None))
    assert covers(with_grammar, with_grammar, 9)
    assert not covers(with_grammar, plain, 9)


def test_steps_run_ahead_only_without_a_grammar(monkeypatch):
    """A sequence without a grammar waits for the host in each step, or one with it does not."""
    model, launched, step = text_model(), [], Batch.step

    def record(self):
        launched.append(sum(len(s.token_ids) for s in self.active))
        return step(self)

    monkeypatch.setattr(Batch, "step", record)
    monkeypatch.setattr("keras_recurrent.generation.torch_batch.runs_ahead", lambda model: True)
    options = {"max_new_tokens": 12, "stop_token_ids": (2,)}
    bias = dict.fromkeys((0, 1, 2), -100)
    for grammar_text, known in ((None, [0, 0, 4]), ("start: /[a-z]+/", [*range(12)])):
        launched.clear()
        sampling = SamplingParams(seed=0, grammar=grammar_text, logit_bias=bias)
        model.generate("a", sampling=sampling, **options)
        assert launched == known


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ("start: foo", 'unknown name: "foo"'),
        ('{"type": "string"}', "pass a dictionary"),
        ({"type": "objekt"}, "Invalid type: objekt"),
        ({"a": {1}}, "must be JSON: .*set"),
        ({"a": math.nan}, "must be JSON: "),
        ({"x-guidance": 1}, "must be JSON: .*int"),
        ({"enum": ["a" * 2**16]}, "must have at most 65536 characters; got 65"),
        ({"$ref": "#"}, "no text of tokens satisfies it"),
        ({"allOf": [{"type": "string"}, {"type": "null"}]}, "Unsatisfiable"),
        ({"type": "integer", "multipleOf": 1_000_003}, "at most 50000 remainders .*got 1000003"),
        ({"type": "number", "multipleOf": 0.123457}, "got 123457"),
        ({"properties": {n: {"multipleOf": 997} for n in "abc"}, "allOf": []}, "got 997, 997, 997"),
        ({"items": [{"multipleOf": 997 + n} for n in range(51)]}, "got 1047, 1046"),
        ({"allOf": [{"pattern": f".*{c}.*"} for c in "abcdefghi"]}, "at most 8 of 'pattern'"),
        (
            {"$defs": {c: {"$ref": "#", "format": c} for c in "abcdefghi"}},
            "beside other keys; got 9",
        ),
        ({"type": "string", "pattern": "(?=a)b"}, "regex parse error: error: look-around"),
        ({"type": "string", "pattern": "(" * 9000}, "regex parse error"),
        ({"type": "array", "uniqueItems": True}, "Unimplemented keys"),
        (
            {
                "allOf": [
                    {"anyOf": [{"properties": {f"{i} {j}": {}}} for j in "abcd"]} for i in range(9)
                ]
            },
            "too large",
        ),
    ],
)
def test_invalid_or_hostile_grammar_raises_within_a_second(schema, words):
    """A grammar of a client ends the process, takes minutes or gigabytes, or ends another way."""
    preprocessor = make_preprocessor(TOKENIZERS["bytes"]())
    begin = time.process_time()
    with pytest.raises(GrammarError, match=f"^`grammar` .*{words}"):
        make_matchers(preprocessor, 259, [SamplingParams(grammar=schema)], (2,))
    assert time.process_time() - begin < 1


def test_chain_of_references_does_not_overflow_the_stack():
    """A schema of 60,000 characters ends the process."""
    chain = {n: {"properties": {"a": {"$ref": f"#/$defs/{n + 1}"}}} for n in range(1100)}
    schema = {"$defs": {**chain, 1100: {"type": "null"}}, "$ref": "#/$defs/0"}
    preprocessor = make_preprocessor(TOKENIZERS["bytes"]())
    (matcher,) = make_matchers(preprocessor, 259, [SamplingParams(grammar=schema)], (2,))
    assert make_masks([(matcher, 0)], 1, 259).any()


def test_answers_to_a_prompt_have_one_compiled_grammar_and_their_own_positions(monkeypatch):
    """An answer advances the grammar of another one, or each of them checks the schema again."""
    checked, check = [], grammar._check_automata
    monkeypatch.setattr(grammar, "_check_automata", lambda s: checked.append(s) or check(s))
    preprocessor, sampling = make_preprocessor(TOKENIZERS["bytes"]()), SamplingParams(grammar=CAT)
    matchers = make_matchers(preprocessor, 259, [sampling, SamplingParams(), sampling], (2,))
    assert (matchers[1], checked) == (None, [CAT])
    first, last = matchers[0], matchers[2]
    before = make_masks([(last, 0)], 1, 259)
    consume(first, int(preprocessor.tokenizer("{")[0]))
    assert (make_masks([(last, 0)], 1, 259) == before).all()
    assert (make_masks([(first, 0)], 1, 259) != before).any()


def test_grammar_that_exceeds_a_limit_raises_in_generate(monkeypatch):
    """A text that ends because of a limit looks like a complete one."""
    monkeypatch.setitem(grammar.LIMITS, "step_lexer_fuel", 50)
    items = {"items": {"type": "string", "pattern": "^(a|b)*$"}, "minItems": 1}
    sampling = SamplingParams(seed=0, grammar={"type": "array", **items})
    with pytest.raises(GrammarError, match="cannot be continued: lexer error"):
        text_model().generate("a", sampling=sampling, max_new_tokens=200)


def test_grammar_without_stop_tokens_preprocessor_or_bytes_of_tokens_raises():
    """The sequence would not end, or its mask would be of other texts."""
    sampling = SamplingParams(grammar={})
    with pytest.raises(GrammarError, match="requires `stop_token_ids`"):
        text_model().generate("a", sampling=sampling, stop_token_ids=None)
    tokens = {"token_ids": np.array([[1]]), "padding_mask": np.array([[1]])}
    with pytest.raises(GrammarError, match="requires a preprocessor"):
        tiny_causal_lm().generate(tokens, max_length=2, stop_token_ids=(1,), sampling=sampling)
    preprocessor = make_preprocessor(bpe.llama(bpe.DECODERS["suffix"]))
    with pytest.raises(GrammarError, match=r"bytes are known.*BPETokenizer"):
        make_matchers(preprocessor, 300, [sampling], (2,))
    for options, words in (({"grammar": [1]}, "got a list"), ({"min_new_tokens": 1}, "combined")):
        with pytest.raises(ValueError, match=f"^`grammar` .*{words}"):
            SamplingParams(**{"grammar": {}, **options})
