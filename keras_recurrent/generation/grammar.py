"""Grammars that restrict generated text, with the package llguidance."""

import decimal
import functools
import importlib.util
import json
import math
import threading
import weakref
from types import SimpleNamespace
from typing import Any

import numpy as np

from keras_recurrent.checks.arguments import check_unicode, is_finite_number
from keras_recurrent.tokenizers.detokenizer import token_bytes

WORD = 32  # bits in the unit of llguidance's masks
MAX_CHARACTERS = 2**16  # of a grammar
# Stack of the thread that compiles a grammar. llguidance compiles chains of rules or references by
# nested calls, and about 1,000 of them overflow a stack of the default size.
STACK_BYTES = 2**29
MAX_REASON = 500  # characters of an error, which may quote the grammar
MAX_COMPILED = 16  # compiled grammars that are kept for later sequences
# Of a JSON schema. llguidance makes a state for each remainder of `multipleOf`, and in an
# intersection, for each combination of the states of its parts, which its limits do not bound.
MAX_REMAINDERS, MAX_PATTERNS = 50_000, 8
# Keys of a schema that do not restrict what the `$ref` in the same schema allows.
ANNOTATIONS = {"$ref", "$defs", "definitions", "$schema", "$comment", "x-guidance"}
ANNOTATIONS |= {"title", "description", "default", "examples"}
# Limits of llguidance, which allow about 10 ms for a mask and 50 MB for a grammar.
LIMITS: dict[str, Any] = {
    "max_items_in_row": 500,
    "initial_lexer_fuel": 1_000_000,
    "step_lexer_fuel": 100_000,
    "step_max_items": 20_000,
    "max_lexer_states": 20_000,
    "max_grammar_size": 100_000,
    "verbose_errors": False,
}
# Where the grammar determines the text, the model still chooses its tokens.
OPTIONS = '\n%llguidance {"no_forcing": true}\n'
JSON_OPTIONS = {"whitespace_flexible": False}

# {tokenizer: {(size of the vocabulary, stop tokens): a function of `_make_compiler`}}
_compilers: weakref.WeakKeyDictionary[Any, dict] = weakref.WeakKeyDictionary()
_stack_size = threading.Lock()


class GrammarError(ValueError):
    """Error for a grammar that is invalid, or exceeds a limit while a text is generated."""


def unsupported_reason():
    """Reason why grammars are unsupported, or None."""
    if importlib.util.find_spec("llguidance") is None:
        extra = "the extra `structured` of keras-recurrent"
        return f"requires the package 'llguidance': {extra}, or pip install llguidance"
    return None


def make_matchers(preprocessor, vocabulary_size, params, stop_token_ids):
    """Returns the `LLMatcher` of each new sequence, None for those without a grammar.

    Args:
        preprocessor: the preprocessor of the model, or None.
        vocabulary_size: integer, number of tokens of the model.
        params: a list of the `SamplingParams` of each sequence. Sequences with the same object
            share its compiled grammar.
        stop_token_ids: a tuple of integers, the tokens that end the sequences.

    Raises:
        GrammarError: the grammar is invalid or too large, no text satisfies it, the preprocessor
            or stop tokens are missing, or the bytes of the tokens are unknown.
        ImportError: llguidance is not installed.
    """
    grammars = {id(each): each.grammar for each in params if each.grammar is not None}
    if not grammars:
        return [None] * len(params)
    if reason := unsupported_reason():
        raise ImportError(f"`grammar` {reason}")
    if preprocessor is None:
        raise GrammarError("`grammar` requires a preprocessor, which has the texts of tokens.")
    if not stop_token_ids:
        raise GrammarError("`grammar` requires `stop_token_ids`, which end the text; got none.")
    texts = {number: _as_lark(grammar) for number, grammar in grammars.items()}
    key = vocabulary_size, frozenset(stop_token_ids)
    compilers = _compilers.setdefault(preprocessor.tokenizer, {})
    if key not in compilers:
        compilers[key] = _make_compiler(token_bytes(preprocessor), *key)
    compiled = {number: compilers[key](text) for number, text in texts.items()}
    found = (compiled.get(id(each)) for each in params)
    return [matcher and matcher.deep_copy() for matcher in found]


def make_masks(matchers, num_rows, vocabulary_size):
    """Returns masks of the tokens that may be next, uint8 `[num_rows, N]`.

    A bit is 1 if its token may be next. The lowest bit of the first byte belongs to token 0.

    matchers: a list of `(LLMatcher, row)`. Rows without a matcher allow all tokens.
    """
    masks = neutral_masks(num_rows, vocabulary_size)
    if matchers:
        size = masks[0].nbytes
        _executor().unsafe_compute_mask_ptr(matchers, masks.ctypes.data, size, num_rows)
    return masks


def neutral_masks(num_rows, vocabulary_size):
    """Returns masks in the form of `make_masks` that allow all tokens."""
    return np.full((num_rows, WORD // 8 * -(-vocabulary_size // WORD)), 255, "uint8")


@functools.cache
def _executor():
    """Returns the pool of threads that compute masks."""
    import llguidance

    return llguidance.LLExecutor()


def _as_lark(grammar):
    """Converts the `grammar` of `SamplingParams` to text in Lark's syntax for llguidance."""
    text = grammar
    if not isinstance(grammar, str):
        try:
            options = {**JSON_OPTIONS, **grammar.get("x-guidance", {})}
            schema = json.dumps({**grammar, "x-guidance": options}, allow_nan=False)
        except (RecursionError, TypeError, ValueError) as error:
            raise GrammarError(f"`grammar` must be JSON: {error}.") from error
        _check_automata(grammar)
        text = f"start: %json {schema}"
    elif grammar.lstrip().startswith("{"):
        raise GrammarError(
            "`grammar` is the text of a JSON schema; pass a dictionary, as of `json.loads`."
        )
    if len(text) > MAX_CHARACTERS:
        raise GrammarError(
            f"`grammar` must have at most {MAX_CHARACTERS} characters; got {len(text)}."
        )
    check_unicode("grammar", text)
    return text + OPTIONS


def _check_automata(schema):
    """Raises an error if llguidance might need more than a second for parts of a JSON schema."""
    remainders, num_patterns, intersects, nodes = [], 0, False, [schema]
    while nodes:
        node = nodes.pop()
        if isinstance(node, dict):
            if is_finite_number(value := node.get("multipleOf")):
                number = abs(decimal.Decimal(str(value)))
                while number != number.to_integral_value():
                    number *= 10
                remainders.append(int(number))
            num_patterns += ("pattern" in node) + ("format" in node)
            intersects |= "allOf" in node or ("$ref" in node and bool(node.keys() - ANNOTATIONS))
            nodes += node.values()
        elif isinstance(node, list | tuple):
            nodes += node
    if (math.prod(remainders) if intersects else sum(remainders)) > MAX_REMAINDERS:
        raise GrammarError(
            f"`grammar` must have at most {MAX_REMAINDERS} remainders of 'multipleOf', in all; got "
            f"{', '.join(map(str, remainders))[:MAX_REASON]}. Use smaller numbers."
        )
    if intersects and num_patterns > MAX_PATTERNS:
        raise GrammarError(
            f"`grammar` must have at most {MAX_PATTERNS} of 'pattern' and 'format' if it has "
            f"'allOf', or '$ref' beside other keys; got {num_patterns}."
        )


def _make_compiler(known, vocabulary_size, stop_token_ids):
    """Returns a function of the text of a grammar, which returns its `LLMatcher`.

    Args:
        known: the `TokenBytes` of the preprocessor.
        vocabulary_size, stop_token_ids: as in `make_matchers`.
    """
    import llguidance

    tokenizer = known.tokenizer
    if known.errors is None:
        kind = type(tokenizer).__name__
        raise GrammarError(
            f"`grammar` requires tokens whose bytes are known; those of a {kind} are not."
        )
    special = [id for id in getattr(tokenizer, "special_token_ids", ()) if id < vocabulary_size]
    count = min(vocabulary_size, tokenizer.vocabulary_size())
    tokens = [known[id] for id in range(count)] + [b""] * (vocabulary_size - count)
    for id in special:
        tokens[id] = tokenizer.id_to_token(id).encode()
    vocabulary: Any = SimpleNamespace(
        is_tokenizer_wrapper=True,
        tokens=tokens,
        special_token_ids=special,
        bos_token_id=None,
        eos_token_id=min(stop_token_ids),
    )
    known_tokens = llguidance.LLTokenizer(vocabulary, eos_token=sorted(stop_token_ids))
    options: dict[str, Any] = {"log_level": 0, "limits": llguidance.LLParserLimits(**LIMITS)}
    make: Any = functools.partial(llguidance.LLMatcher, known_tokens, **options)
    return functools.lru_cache(MAX_COMPILED)(lambda text: _compile(make, text))


def _compile(make, text):
    """Returns the `LLMatcher` that `make` makes of a grammar, whose text may be untrusted."""
    found: list[Any] = []

    def compile_grammar():
        matcher = make(text)
        matcher.compute_bitmask()  # sets the error if no text satisfies the grammar
        found.append(matcher)

    with _stack_size:
        previous = threading.stack_size(STACK_BYTES)
        try:
            thread = threading.Thread(target=compile_grammar)
            thread.start()
        finally:
            threading.stack_size(previous)
    thread.join()
    (matcher,) = found
    if matcher.is_error():
        raise GrammarError(f"`grammar` is invalid: {_reason(matcher)}")
    return matcher


def consume(matcher, token):
    """Advances an `LLMatcher` by a token, or raises a `GrammarError` if a limit is exceeded."""
    # After an error, the masks allow only stop tokens.
    if not matcher.consume_token(token) or matcher.is_error():
        raise GrammarError(f"`grammar` cannot be continued: {_reason(matcher)}")


def _reason(matcher):
    """Returns the first line of the error of an `LLMatcher`, and that of a regular expression."""
    first, *lines = matcher.get_error().splitlines() or [""]
    if first.startswith("NoExtension"):
        return "no text of tokens satisfies it"
    details = [line for line in lines if line.startswith("error: ")]
    return " ".join([first, *details])[:MAX_REASON]
