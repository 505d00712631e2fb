"""Strings to rows of tokens, one document a row or several."""

import keras
import keras_hub
import numpy as np

from keras_recurrent import compat
from keras_recurrent.checks.arguments import check_boolean, check_positive_integer
from keras_recurrent.models.packing import pack_documents
from keras_recurrent.progress import progress
from keras_recurrent.training.samples import check_prompts

TEXTS_AT_A_TIME = 4096


class RecurrentCausalLMPreprocessor(keras_hub.models.CausalLMPreprocessor):
    """Turns strings into what the language models train on and generate from.

    Returns `(x, y, sample_weight)`: `x` a dictionary of tokens, `y` the token after each token of
    `x`, and `sample_weight` True where `y` is a token to learn.

    **Padded**, the default, a string is a row, as everywhere in KerasHub: `x` holds `token_ids` and
    `padding_mask`, `[batch_size, sequence_length]`. Short strings are padded; of longer ones all
    after the first `sequence_length + 1` tokens is cut off.

    **Packed**, with `packed=True`, the strings of a call share as few rows as they need, and no
    text is lost. `x` also holds `segment_ids`, the number of its document for every token, counted
    from 1 in each row (0 at padding), by which the model keeps documents apart: a packed document
    gives the numbers it would give alone. No label crosses from a document to the next.
    A document that fits in a row is never cut; a longer one goes on in further rows, without memory
    of the rows before, and still every one of its tokens is a label once. The number of rows
    follows the text. Thus:

    - `fit` and `evaluate` of the models pack lists and arrays of strings as a whole and
      then take `batch_size` rows a step, so that all steps have one shape.
    - In a dataset, each batch of strings is packed by itself. For batches of one shape, cut them
      anew: `dataset.map(preprocessor).unbatch().batch(8)`; `fit` takes the result as it is.

    Args:
        tokenizer: the family's, a `ByteTokenizer`, or any KerasHub tokenizer with start, end and
            padding tokens.
        sequence_length: integer, tokens a row. Defaults to 1024.
        add_start_token: whether a document begins with the start token. Defaults to True.
        add_end_token: whether a document ends with the end token. Defaults to True.
        packed: whether documents share rows. Defaults to False.
        **kwargs: `name`, as for any layer.

    Call arguments:
        x: a string, or a list, array or tensor of strings.
        y, sample_weight: leave them out; both are made here.
        sequence_length: integer, tokens a row in this call.

    Generation takes its prompts from `generate_preprocess` and its text from
    `generate_postprocess`; neither packs.

    Raises:
        ValueError: a `sequence_length`, here or in a call, that is no integer from 1 on; labels or
            weights beside strings to pack; no prompts, or one that is longer than `max_length`,
            or `sequence_length` where none is given. (In a `tf.data` pipeline it is cut instead.)

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

    # A family's class says its `backbone_cls` and `tokenizer_cls`, by which KerasHub finds it.

    def __init__(
        self,
        tokenizer,
        sequence_length=1024,
        add_start_token=True,
        add_end_token=True,
        packed=False,
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

    def build(self, input_shape):
        super().build(input_shape)
        self.packer.built = True  # a model with layers that are not built refuses to quantize

    def call(self, x, y=None, sample_weight=None, sequence_length=None):
        if sequence_length is not None:
            check_positive_integer("sequence_length", sequence_length)
        if not self.packed:
            return super().call(x, y, sample_weight, sequence_length=sequence_length)
        if y is not None or sample_weight is not None:
            raise ValueError(
                "`y` and `sample_weight` are made here, of the strings in `x`, whose rows are not "
                "those of the result when they are packed. Leave them out."
            )
        pack = self._pack_in_graph if compat.in_tf_function() else self._pack
        return pack(x, sequence_length or self.sequence_length)

    def _generate_preprocess_python(self, x, sequence_length=None):
        # KerasHub's begins with the start token whatever `add_start_token` says.
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
        # It is the `max_length` of `generate`. KerasHub would take a negative one for a number of
        # tokens to cut off at the end, and 0 for None.
        if sequence_length is not None:
            check_positive_integer("max_length", sequence_length)
        check_prompts(x)
        inputs = super().generate_preprocess(x, sequence_length=sequence_length)
        if not compat.in_tf_function():
            limit = sequence_length or self.sequence_length
            self._check_prompts_are_whole(x, inputs["padding_mask"], limit)
        return inputs

    def _check_prompts_are_whole(self, x, padding_mask, max_length):
        """Raises for a prompt of which the end was cut off."""
        single = isinstance(x, (str, bytes)) or getattr(x, "ndim", 1) == 0
        full = np.atleast_2d(keras.ops.convert_to_numpy(padding_mask)).all(axis=1)
        for row in np.flatnonzero(full):  # hardly ever any
            tokens = self.tokenizer(x) if single else self.tokenizer(x[row : row + 1])[0]
            length = int(self.add_start_token) + len(tokens)
            if length > max_length:
                raise ValueError(
                    f"`max_length` is {max_length} tokens, prompt and answer together, and prompt "
                    f"{row} alone has {length}. Ask for a larger `max_length`, or cut the prompt."
                )

    def pack(self, texts, sequence_length=None):
        """Packs a list of strings, as a call does where `packed=True`, in NumPy arrays.

        Args:
            texts: a list of strings.
            sequence_length: integer, tokens a row; None: that of the preprocessor.

        Returns:
            `(x, y, sample_weight)`, all `[rows, sequence_length]`; one row at least.
        """
        tokens = self.tokenizer(texts) if texts else []
        return _as_samples(*self._rows(tokens, sequence_length or self.sequence_length))

    def _pack(self, x, sequence_length):
        single = isinstance(x, (str, bytes)) or getattr(x, "ndim", 1) == 0
        tokens = [self.tokenizer(x)] if single else self._tokens(x)
        rows = self._rows(tokens, sequence_length)
        return compat.convert_preprocessing_outputs_python(_as_samples(*rows))

    def _tokens(self, texts):
        """The tokens of each of several strings."""
        if not isinstance(texts, (list, tuple)):
            return self.tokenizer(texts)
        tokens = []
        with progress("Packing text", "text", sum(map(len, texts))) as done:
            for begin in range(0, len(texts), TEXTS_AT_A_TIME):
                some = texts[begin : begin + TEXTS_AT_A_TIME]
                tokens += list(self.tokenizer(some))
                done(sum(map(len, some)))
        return tokens

    def _pack_in_graph(self, x, sequence_length):
        import tensorflow as tf

        tokens = self.tokenizer(x[None] if x.shape.rank == 0 else x)

        def rows(values, row_lengths):
            documents = np.split(values, np.cumsum(row_lengths)[:-1])
            return self._rows(documents, sequence_length)

        dtypes = ("int32", "bool", "int32", "int32", "bool")
        arguments = (tokens.flat_values, tokens.row_lengths())
        arrays = tf.numpy_function(rows, arguments, dtypes, stateful=False)
        for array in arrays:
            array.set_shape((None, sequence_length))
        return _as_samples(*arrays)

    def _rows(self, documents, sequence_length):
        start = [self.tokenizer.start_token_id] if self.add_start_token else []
        end = [self.tokenizer.end_token_id] if self.add_end_token else []
        documents = [
            np.concatenate([start, np.asarray(d, "int32"), end]).astype("int32") for d in documents
        ]
        return pack_documents(documents, sequence_length, self.tokenizer.pad_token_id)

    def get_config(self):
        return {**super().get_config(), "packed": self.packed}


def _as_samples(token_ids, padding_mask, segment_ids, labels, sample_weight):
    x = {"token_ids": token_ids, "padding_mask": padding_mask, "segment_ids": segment_ids}
    return x, labels, sample_weight
