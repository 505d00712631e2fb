"""Preprocessor of the language models: strings to padded or packed sequences of tokens."""

import functools

import keras_hub
import numpy as np

from keras_recurrent import compat
from keras_recurrent.atomic_files import AtomicPreset
from keras_recurrent.chat.preprocessing import ChatPreprocessing
from keras_recurrent.checks.arguments import check_boolean, check_positive_integer
from keras_recurrent.families import FamilyMember
from keras_recurrent.generation.prompts import check_lengths, pad_prompts
from keras_recurrent.generation.text import tokenize_texts
from keras_recurrent.inherited_docstrings import InheritedDocstring
from keras_recurrent.models import responses
from keras_recurrent.models.packing import pack_documents, pad_documents
from keras_recurrent.progress import progress
from keras_recurrent.tokenizers.checkpoint_files import tokenize_parts
from keras_recurrent.training import dialogues
from keras_recurrent.training.samples import as_texts

TEXTS_PER_CALL = 4096


class RecurrentCausalLMPreprocessor(
    ChatPreprocessing,
    AtomicPreset,
    FamilyMember,
    InheritedDocstring,
    keras_hub.models.CausalLMPreprocessor,
):
    """Converts strings to the inputs of the language models for training and generation.

    Returns `(x, y, sample_weight)`: `x` is a dictionary of tokens, `y` the next token of each token
    in `x`, and `sample_weight` is True where `y` is a token to learn.

    **Padded**, the default: each string is a sequence, as in KerasHub. `x` has `token_ids` and
    `padding_mask`, `[batch_size, sequence_length]`. Short strings are padded, and long strings are
    truncated to `sequence_length + 1` tokens, with the end token as the last.

    **Packed**, with `packed=True`: the strings of a call are packed into as few sequences as
    possible, without losing text. `x` also has `segment_ids`, the number of each token's document,
    from 1 in each sequence (0 at padding). The model separates documents by it: a packed document
    has the same results as alone. The label of a token is never in another document. A document
    that fits into a sequence is not split; a longer one continues in further sequences, without the
    state of those before, but each of its tokens is still a label once. The number of sequences
    depends on the text. Therefore:

    - `fit` and `evaluate` of the models pack lists and arrays of strings as a whole and
      then take `batch_size` sequences per step, so that all steps have equal shapes.
    - In a dataset, each batch of strings is packed separately. For batches of equal shapes, batch
      again: `dataset.map(preprocessor).unbatch().batch(8)`; `fit` takes the result directly.

    **Responses only**: from prompts with responses, and from conversations, `sample_weight` is True
    only where `y` is a token of a response or its end token.

    - A dictionary of `prompts` and `responses`, as in KerasHub: a document is the tokens of
      `prompt + response` between start and end token. A document that is truncated keeps its
      beginning; if no token of the response is left, the loss leaves it out, with a warning.
    - A list of conversations, each a list of messages `{"role": ..., "content": ...}`: the text is
      that of `apply_chat_template`, which has all special tokens except, possibly, the start token.
      The loss includes each turn of the assistant up to the end-of-turn token, without what the
      template writes after it.

    The whole text is tokenized, as `generate` tokenizes it. A token with characters of two texts
    counts as one of the second text. (A tokenizer of KerasHub does not tell the
    characters of its tokens: prompts and responses are tokenized separately.)

    Args:
        tokenizer: the tokenizer of the family, a `ByteTokenizer`, or any KerasHub tokenizer with
            end and padding tokens.
        sequence_length: integer, tokens in a sequence. Defaults to 1024.
        add_start_token: boolean, begins documents with the start token, if the tokenizer has one.
            Defaults to True.
        add_end_token: boolean, ends documents with the end token. Defaults to True.
        packed: boolean, packs documents into sequences. Defaults to False.
        chat_template: string, the jinja2 template of `apply_chat_template`, as checkpoints have
            it. Defaults to None.
        extra_stop_token_ids: a tuple of token ids that end a generated text, in addition to the
            end token and the token with which `chat_template` ends an answer. Defaults to `()`.
        **kwargs: `name`, as for any layer.

    Call arguments:
        x: a string, or a list, array or tensor of strings; a dictionary of `prompts` and
            `responses`, which are such values; or a conversation or a list of them (not inside
            `tf.data`).
        y, sample_weight: must be left out; both are made from `x`.
        sequence_length: integer, tokens in a sequence in this call.

    `generate_preprocess` makes prompts for generation, and `generate_postprocess` converts the
    results to text; neither packs.

    Raises:
        ValueError: `sequence_length` is not an integer of at least 1, `chat_template` is not a
            string, or `extra_stop_token_ids` are not integers of at least 0; labels or weights are
            passed with strings to pack, or with responses; `prompts` and `responses` differ in
            length; a conversation has no turn of the assistant, or its template is not
            prefix-preserving, that is, a further message changes the text of those before; there
            are no prompts, or one is longer than `max_length`, which defaults to
            `sequence_length`. (A `tf.data` pipeline truncates it instead.)

    Example:

    >>> import keras
    >>> from keras_recurrent.models import GriffinCausalLMPreprocessor
    >>> from keras_recurrent.tokenizers import ByteTokenizer
    >>> preprocessor = GriffinCausalLMPreprocessor(ByteTokenizer(), sequence_length=8, packed=True)
    >>> x, y, sample_weight = preprocessor(["ab", "c"])
    >>> for part in (x["token_ids"], x["segment_ids"], y, sample_weight):
    ...     print(keras.ops.convert_to_numpy(part).astype("int32"))
    [[  1 100 101   2   1 102   2   0]]
    [[1 1 1 1 2 2 2 0]]
    [[100 101   2   0 102   2   0   0]]
    [[1 1 1 0 1 1 0 0]]
    """

    def __init__(
        self,
        tokenizer,
        sequence_length=1024,
        add_start_token=True,
        add_end_token=True,
        packed=False,
        chat_template=None,
        extra_stop_token_ids=(),
        **kwargs,
    ):
        check_positive_integer("sequence_length", sequence_length)
        check_boolean("add_start_token", add_start_token)
        check_boolean("add_end_token", add_end_token)
        check_boolean("packed", packed)
        super().__init__(
            tokenizer,
            sequence_length=sequence_length,
            add_start_token=add_start_token,
            add_end_token=add_end_token,
            **kwargs,
        )
        self.packed = packed
        self._set_template(chat_template, extra_stop_token_ids)

    def build(self, input_shape):
        super().build(input_shape)
        self.packer.built = True  # `quantize` of a model rejects layers that are not built

    def call(self, x, y=None, sample_weight=None, sequence_length=None):
        check_positive_integer("sequence_length", sequence_length, or_none=True)
        if not (self.packed or dialogues.is_conversation(x) or dialogues.has_responses(x)):
            return super().call(x, y, sample_weight, sequence_length=sequence_length)
        if y is not None or sample_weight is not None:
            raise ValueError(
                "`y` and `sample_weight` are made from the strings in `x`"
                f"{', which do not correspond to the packed sequences' if self.packed else ''}. "
                "Leave them out."
            )
        make = self._make_in_graph if compat.in_tf_function() else self._make
        return make(x, sequence_length or self.sequence_length)

    def _generate_preprocess_python(self, x, sequence_length=None):
        # KerasHub's method adds the start token for any `add_start_token`.
        if not self.built:
            self.build(None)
        token_ids, padding_mask = self.packer(
            self.tokenizer(x),
            sequence_length=sequence_length,
            add_start_value=self.add_start_token,
            add_end_value=False,
        )
        return {"token_ids": token_ids, "padding_mask": padding_mask}

    def generate_preprocess(self, x, sequence_length=None):
        # `sequence_length` is the `max_length` of `generate`. KerasHub would take a negative value
        # as a number of tokens to cut off at the end, and 0 as None.
        check_positive_integer("max_length", sequence_length, or_none=True)
        if compat.in_tf_function():
            return super().generate_preprocess(x, sequence_length=sequence_length)
        max_length = sequence_length or self.sequence_length
        prompts, is_single = tokenize_texts(self, x)
        check_lengths(map(len, prompts), max_length)
        inputs = pad_prompts(prompts, max_length, self.tokenizer.pad_token_id)
        if is_single:
            inputs = {name: array[0] for name, array in inputs.items()}
        return compat.convert_preprocessing_outputs_python(inputs)

    def pack(self, texts, sequence_length=None):
        """Packs samples, like a call with `packed=True`, into NumPy arrays.

        Args:
            texts: a list of strings, of conversations, or of dictionaries of one of `prompts` and
                one of `responses`.
            sequence_length: integer, tokens in a sequence. None: the preprocessor's.

        Returns:
            `(x, y, sample_weight)`, all `[rows, sequence_length]`, with at least one row.
        """
        if texts and all(map(dialogues.is_prompts_with_responses, texts)):
            for pair in texts:
                dialogues.check_keys(pair)
            texts = {part: [pair[part] for pair in texts] for part in dialogues.PARTS}
        arrays = self._arrays(texts, sequence_length or self.sequence_length, packed=True)
        return _as_samples(*arrays)

    def _make(self, x, sequence_length):
        single = dialogues.is_conversation(x)
        if single:
            x = [x]
        elif isinstance(x, dict):
            single = all(map(_is_single, x.values()))
            x = {name: [_as_string(text)] for name, text in x.items()} if single else x
        elif _is_single(x):
            x = [_as_string(x)]
        samples = self._as_output(self._arrays(x, sequence_length, self.packed), single)
        return compat.convert_preprocessing_outputs_python(samples)

    def _arrays(self, x, sequence_length, packed):
        """Returns the arrays of `pack_documents` for strings, dialogues, or nothing."""
        x = as_texts(dialogues.as_dialogues(x))
        start, end = self._start_and_end()
        limit = None if packed else sequence_length + 1
        tokenize = functools.partial(tokenize_parts, self.tokenizer)
        if isinstance(x, dialogues.Conversations):
            documents, in_loss = responses.conversation_documents(
                x, self._render, tokenize, start, self.stop_token_ids, limit
            )
        elif isinstance(x, dialogues.PromptsWithResponses):
            documents, in_loss = responses.pair_documents(x, tokenize, start, end, limit)
        else:
            return self._pack_tokens(self._tokens(x), sequence_length)
        responses.warn_without_responses(in_loss, sequence_length)
        arrange = pack_documents if packed else pad_documents
        return arrange(documents, sequence_length, self.tokenizer.pad_token_id, in_loss)

    def _pack_tokens(self, tokens, sequence_length):
        start, end = self._start_and_end()
        documents = [
            np.concatenate([start, np.asarray(ids, "int32"), end]).astype("int32") for ids in tokens
        ]
        return pack_documents(documents, sequence_length, self.tokenizer.pad_token_id)

    def _tokens(self, texts):
        """Tokenizes several strings."""
        if not isinstance(texts, (list, tuple)):
            return self.tokenizer(texts)
        tokens = []
        with progress("Packing text", "text", sum(map(len, texts))) as done:
            for begin in range(0, len(texts), TEXTS_PER_CALL):
                batch = list(texts[begin : begin + TEXTS_PER_CALL])
                tokens += list(self.tokenizer(batch))
                done(sum(map(len, batch)))
        return tokens

    def _make_in_graph(self, x, sequence_length):
        import tensorflow as tf

        has_responses = isinstance(x, dict)
        if has_responses:
            dialogues.check_keys(x)
            single = x[dialogues.PARTS[0]].shape.rank == 0
            given = [x[part][None] if single else x[part] for part in dialogues.PARTS]
        else:
            single = x.shape.rank == 0
            tokens = self.tokenizer(x[None] if single else x)
            given = [tokens.flat_values, tokens.row_lengths()]

        def arrays(*given):
            if has_responses:
                pairs = dict(zip(dialogues.PARTS, given, strict=True))
                return self._arrays(pairs, sequence_length, self.packed)
            values, row_lengths = given
            return self._pack_tokens(np.split(values, np.cumsum(row_lengths)[:-1]), sequence_length)

        dtypes = ("int32", "bool", "int32", "int32", "bool")
        found = tf.numpy_function(arrays, given, dtypes, stateful=False)
        for array in found:
            array.set_shape((None, sequence_length))
        return self._as_output(found, single)

    def _as_output(self, arrays, single):
        """Returns `(x, y, sample_weight)`; padded, without segments and, for one, a batch axis."""
        if self.packed:
            return _as_samples(*arrays)
        token_ids, padding_mask, _, labels, weights = [a[0] for a in arrays] if single else arrays
        return {"token_ids": token_ids, "padding_mask": padding_mask}, labels, weights

    def _start_and_end(self):
        """Returns lists of the special tokens before and after a document, or of none."""
        start, end = self.tokenizer.start_token_id, self.tokenizer.end_token_id
        has_start = self.add_start_token and start is not None
        return [start] if has_start else [], [end] if self.add_end_token else []

    def get_config(self):
        return {
            **super().get_config(),
            "packed": self.packed,
            "chat_template": self.chat_template,
            "extra_stop_token_ids": self.extra_stop_token_ids,
        }


def _as_samples(token_ids, padding_mask, segment_ids, labels, sample_weight):
    x = {"token_ids": token_ids, "padding_mask": padding_mask, "segment_ids": segment_ids}
    return x, labels, sample_weight


def _is_single(x):
    return isinstance(x, (str, bytes)) or getattr(x, "ndim", 1) == 0


def _as_string(x):
    """Converts an array or a tensor of one string."""
    return np.asarray(x).item() if hasattr(x, "ndim") else x
