"""Base class of the language models of all families: training, scores, generation."""

import contextlib

import keras
import keras_hub
import numpy as np
from keras import ops

from keras_recurrent.checkpoints.export import export
from keras_recurrent.checks.shapes import check_rank_known
from keras_recurrent.checks.token_ids import check_token_ids
from keras_recurrent.families import FamilyMember
from keras_recurrent.generation.beam_search import convert_beam_sampler
from keras_recurrent.generation.causal_lm import GeneratingCausalLM
from keras_recurrent.generation.sampling import SAMPLERS
from keras_recurrent.inherited_docstrings import InheritedDocstring
from keras_recurrent.models.calibration import layer_structure
from keras_recurrent.models.parts import check_parts
from keras_recurrent.models.preset_loading import PresetLoading
from keras_recurrent.models.recurrent_backbone import token_input
from keras_recurrent.models.segments import SegmentsOptional
from keras_recurrent.ops.token_crossentropy import token_crossentropy
from keras_recurrent.training.dialogues import as_dialogues, has_responses
from keras_recurrent.training.loss_without_logits import LossWithoutLogits
from keras_recurrent.training.samples import check_samples, describe, is_text, is_tokens
from keras_recurrent.training.saved_training import SavedTraining
from keras_recurrent.training.text_training import TextTraining
from keras_recurrent.training.token_crossentropy import TokenCrossentropy
from keras_recurrent.training.torch_training import TorchTraining


class RecurrentCausalLM(
    LossWithoutLogits,
    SegmentsOptional,
    TorchTraining,
    TextTraining,
    SavedTraining,
    PresetLoading,
    FamilyMember,
    InheritedDocstring,
    GeneratingCausalLM,
):
    """Base class of the language models: a `RecurrentBackbone`, and logits from its embedding.

    To copy a model, assign its weights to `type(model).from_config(model.get_config())`.
    `keras.models.clone_model` copies only the graph, to a plain functional model: it cannot
    generate, and the tied weights of embedding and logits become separate weights. Neither copy has
    LoRA weights.

    Args:
        backbone: the network, a backbone of the same family.
        preprocessor: a preprocessor of the same family. None: inputs are tokens.
        compile: boolean, compiles with KerasHub's defaults, which suit fine-tuning (Adam at 2e-5).
            To train from scratch, compile with another optimizer.
        name: string.
        trainable: boolean.

    KerasHub's API of causal language models applies: `fit` and `evaluate` on strings or tokens,
    `generate`, `score`, `save_to_preset`, LoRA by `backbone.enable_lora`, and `quantize("int8")`.

    Call arguments:
        inputs: a dictionary of `token_ids`, `padding_mask` and optionally `segment_ids`, all
            `[B, T]`, as the backbone takes them.

    Returns:
        Logits `[B, T, vocabulary_size]`, in the compute dtype.

    Raises:
        ValueError: the backbone or preprocessor is of another class, or the tokenizer has more
            tokens than the backbone.

    Example: a small model learns a text and continues it.

    >>> import keras, keras_recurrent
    >>> model = keras_recurrent.models.GriffinCausalLM.from_preset("hawk_tiny", num_layers=1)
    >>> model.compile(keras.optimizers.Adam(1e-3), model.loss, sampler="greedy")
    >>> history = model.fit(["All happy families are alike."] * 4, batch_size=2, verbose=0)
    >>> text = model.generate("All happy", max_length=20)
    >>> text.startswith("All happy")
    True

    Without a preprocessor, a prompt is an array of tokens with padding at its right for the answer:

    >>> import numpy as np
    >>> model = keras_recurrent.models.GriffinCausalLM(model.backbone)
    >>> token_ids = np.array([[1, 68, 111, 0, 0, 0]])
    >>> prompt = {"token_ids": token_ids, "padding_mask": token_ids > 0}
    >>> model.generate(prompt, stop_token_ids=None)["token_ids"].shape
    (1, 6)
    """

    def __init__(self, backbone, preprocessor=None, compile=True, name=None, trainable=True):
        check_parts(type(self), backbone, preprocessor, keras_hub.models.CausalLMPreprocessor)
        self.backbone = backbone
        self.preprocessor = preprocessor
        # The graph has the inputs that the preprocessor makes.
        packed = getattr(preprocessor, "packed", False)
        inputs = dict(backbone.input)
        if packed:
            inputs["segment_ids"] = token_input("segment_ids")
        outputs = backbone.token_embedding(backbone(inputs), reverse=True)
        super().__init__(
            inputs=inputs, outputs=outputs, compile=compile, name=name, trainable=trainable
        )

    def call_with_segments(self, token_ids, padding_mask, segment_ids):
        hidden_states = self.backbone.call_with_segments(token_ids, padding_mask, segment_ids)
        return self.backbone.token_embedding(hidden_states, reverse=True)

    def compile(
        self, optimizer="auto", loss="auto", *, weighted_metrics="auto", sampler="top_k", **kwargs
    ):
        """Configures training and sampling; see `keras_hub.models.CausalLM.compile`.

        The default loss is `keras_recurrent.models.TokenCrossentropy`. With it, in both of its
        means, and the default metric, accuracy, `keras_recurrent.metrics.TokenLoss` or
        `Perplexity`, `fit` and `evaluate` do not compute the logits of all tokens;
        `keras_recurrent.which_loss` returns the reason if they do.

        The sampler is `"greedy"`, `"top_k"`, `"top_p"`, `"random"` or `"beam"`, or one of these
        classes of KerasHub; `generate` raises an error for others. `"beam"` is
        `keras_recurrent.samplers.BeamSampler`, to which KerasHub's `BeamSampler` is converted.

        `generate` traces its programs again after each `compile`. With `run_eagerly=True`, it runs
        the layers at each token.

        Raises:
            ValueError: the optimizer cannot train weights stored in 16 bits, such as Adam with the
                policy `"bfloat16"`; the sampler is unknown; or it is KerasHub's `BeamSampler` with
                a `temperature`, or of a subclass.
        """
        # KerasHub returns an unknown name unchanged, or raises KeyError for its lower case.
        with contextlib.suppress(KeyError):
            sampler = keras_hub.samplers.get(sampler)
        if isinstance(sampler, str):
            raise ValueError(
                f"`sampler` must be {SAMPLERS}, or one of these samplers of KerasHub; got "
                f"{sampler!r}."
            )
        sampler = convert_beam_sampler(sampler)
        if isinstance(loss, str) and loss == "auto":
            loss = TokenCrossentropy()
        super().compile(
            optimizer, loss, weighted_metrics=weighted_metrics, sampler=sampler, **kwargs
        )
        wanted = kwargs.get("jit_compile", "auto")
        self._decoding_programs = None
        self._compiles_generation = None if wanted == "auto" else bool(wanted)

    def get_compile_config(self):
        config = super().get_compile_config()
        if config:
            config["config"]["sampler"] = keras_hub.samplers.serialize(self.sampler)
        return config

    def export_to_transformers(self, path, dtype=None, max_shard_size=5):
        """Exports the model to a checkpoint for transformers and `from_preset`.

        Writes `config.json`, the tensors in `.safetensors` files, and `tokenizer.model` if the
        preprocessor has a `SentencePieceTokenizer` (a `ByteTokenizer` has no file). Its
        `chat_template` and `extra_stop_token_ids` are written to `chat_template.jinja` and
        `generation_config.json`. LoRA weights are merged. Files are first written to a temporary
        folder in the parent directory, which is moved to `path` at the end, so `path` is always
        complete. The next export to `path` removes a temporary folder that a killed process left.

        A layout restricts some arguments of the backbone; docs/checkpoints.md lists them.

        Args:
            path: string, a directory that does not exist yet or is empty.
            dtype: `"float32"`, `"bfloat16"` or `"float16"`. None: the dtype of the weights;
                exporting a checkpoint that was loaded in its own dtype reproduces it bit for bit.
            max_shard_size: number, the largest size of a file in GiB. A larger tensor gets a
                separate file.

        Raises:
            ValueError: the layout cannot store some arguments, all of which are named; the model is
                quantized; `dtype` is not one of these or too narrow for a weight; or
                `max_shard_size` is not above 0.
            FileExistsError: `path` is a symbolic link, or exists and is not empty, possibly because
                another process wrote to it during the export.

        Example:

        >>> import pathlib, tempfile
        >>> from keras_recurrent.models import HGRN2CausalLM
        >>> model = HGRN2CausalLM.from_preset("hgrn2_tiny", num_layers=1)
        >>> with tempfile.TemporaryDirectory() as parent:
        ...     path = pathlib.Path(parent, "checkpoint")
        ...     model.export_to_transformers(path)
        ...     again = HGRN2CausalLM.from_preset(str(path))
        ...     print(sorted(file.name for file in path.iterdir()))
        ['config.json', 'model.safetensors']
        >>> again.count_params() == model.count_params()
        True
        """
        tokenizer = getattr(self.preprocessor, "tokenizer", None)
        template = getattr(self.preprocessor, "chat_template", None)
        extra = getattr(self.preprocessor, "extra_stop_token_ids", ())
        stops = (tokenizer.end_token_id, *extra) if tokenizer and extra else ()
        export(self.backbone, path, tokenizer, dtype, max_shard_size, template, stops)

    def rematerialized_call(self, layer_call, *args, **kwargs):
        return layer_call  # only the backbone's blocks are rematerialized

    def get_quantization_layer_structure(self, mode):
        """Returns the layers that GPTQ and AWQ calibrate one by one, or None for other modes.

        They are called as in the forward pass: with scaled embeddings, and with the lower bound of
        each block in families that have them.
        """
        if mode not in ("gptq", "awq"):
            return None
        return layer_structure(self.backbone, example=ops.zeros((1, 1), "int32"))

    def convert_inputs(self, x, name="x"):
        """Converts prompts with responses, or conversations, in memory."""
        return as_dialogues(x, name)

    def preprocess_samples(self, x, y=None, sample_weight=None):
        if not has_responses(x):
            return super().preprocess_samples(x, y, sample_weight)
        for part in x.values() if isinstance(x, dict) else [as_dialogues(x)]:
            check_samples("x", part, self)
        return self.preprocessor(x, y=y, sample_weight=sample_weight)

    def check_labels(self, name, x, y, sample_weight):
        if is_text(x) and not (y is None and sample_weight is None):
            raise ValueError(
                f"`y` and `sample_weight` are made from the strings in `{name}`: the next tokens, "
                "and which of them are real. Leave them out."
            )
        if is_tokens(x) and isinstance(self.loss, TokenCrossentropy):
            if y is None:
                raise ValueError(
                    f"`{name}` holds tokens, which need labels: the next tokens, [batch, time]. A "
                    "preprocessor makes both from strings."
                )
            hint = "Give labels to ignore a `sample_weight` of 0."
            check_token_ids("y", y, self.backbone.vocabulary_size, sample_weight, hint)

    def check_class_weight(self, class_weight=None, **kwargs):
        if class_weight is not None:
            raise ValueError(
                f"`class_weight` needs one label per sample, but a language model has one per "
                f"token; got {class_weight!r}. Instead, pass tokens, labels and a `sample_weight` "
                "[batch, time], such as `model.preprocessor(texts)` returns."
            )

    # === Scores ===

    def score(
        self,
        token_ids,
        padding_mask=None,
        scoring_mode="logits",
        layer_intercept_fn=None,
        target_ids=None,
    ):
        """Computes logits or losses of tokens, and can intercept layer activations.

        Args:
            token_ids: integers `[B, T]`.
            padding_mask: boolean or integer `[B, T]`, False or 0 at padding. None: no padding.
            scoring_mode: `"logits"` or `"loss"`.
            layer_intercept_fn: a function of activations `[B, T, hidden_dim]` and an index, -1 for
                the embeddings and i for the output of block i. Its result replaces the activations.
            target_ids: integers `[B, T]`, the next tokens; needed for `"loss"`, which is NaN for
                ids outside the vocabulary.

        Returns:
            Logits `[B, T, vocabulary_size]`, or the cross-entropy of each target in nats `[B, T]`,
            in float32, or float64 for float64 logits.

        Raises:
            ValueError: `scoring_mode` is unknown; `target_ids` are missing for `"loss"` or have
                another shape; ids are not integers `[B, T]`, such as text, or are empty; the mask
                has another shape or is float; or a NumPy array or list of `token_ids` has an id
                outside the vocabulary.

        Example:

        >>> import numpy as np
        >>> import keras_recurrent
        >>> model = keras_recurrent.models.GriffinCausalLM.from_preset("hawk_tiny", num_layers=1)
        >>> token_ids = np.array([[1, 100, 101, 102]])
        >>> loss = model.score(
        ...     token_ids[:, :-1], scoring_mode="loss", target_ids=token_ids[:, 1:]
        ... )
        >>> tuple(loss.shape)
        (1, 3)
        """
        if scoring_mode not in ("logits", "loss"):
            raise ValueError(
                f"`scoring_mode` must be 'logits' or 'loss'. Received: {scoring_mode!r}"
            )
        if scoring_mode == "loss" and target_ids is None:
            raise ValueError(
                "`target_ids` is needed for `scoring_mode='loss'`: the next tokens, such as "
                "`keras.ops.roll(token_ids, -1, axis=1)`."
            )
        token_ids = _as_ids("token_ids", token_ids)
        check_token_ids("token_ids", token_ids, self.backbone.vocabulary_size, padding_mask)
        token_ids = ops.convert_to_tensor(token_ids)
        if target_ids is not None:
            target_ids = ops.convert_to_tensor(_as_ids("target_ids", target_ids))
            if tuple(target_ids.shape) != tuple(token_ids.shape):
                raise ValueError(
                    "`target_ids` must have the shape of `token_ids`, "
                    f"{tuple(token_ids.shape)}; got {tuple(target_ids.shape)}. Leave out the last "
                    "token, which has no next token, or give it a target."
                )
        if padding_mask is not None:
            padding_mask = ops.convert_to_tensor(padding_mask)
        hidden_states, _ = self.backbone.hidden_states(
            token_ids, padding_mask, intercept=layer_intercept_fn
        )
        logits = self.backbone.token_embedding(hidden_states, reverse=True)
        if scoring_mode == "logits":
            return logits
        return token_crossentropy(logits, target_ids)


def _as_ids(name, ids):
    """Validates ids `[B, T]`; returns arrays and tensors unchanged, and lists as an array."""
    given = ids
    if isinstance(ids, (str, bytes, list, tuple)):
        try:
            ids = np.asarray(ids)
        except ValueError:
            raise ValueError(
                f"`{name}` must be integers [batch, time]; got sequences of different lengths. "
                "Pad them, and pass a `padding_mask`."
            ) from None
    wanted = f"`{name}` must be integers [batch, time], at least one"
    if isinstance(ids, dict):
        raise ValueError(
            f"{wanted}; got {describe(ids)}. Pass its parts: `model.score(x['token_ids'], "
            "x['padding_mask'])`."
        )
    if not hasattr(ids, "dtype") or not hasattr(ids, "shape"):
        raise ValueError(f"{wanted}; got {describe(ids)}.")
    if isinstance(ids, np.ndarray) and ids.dtype.kind in "USO" and ids.size:
        text = "text" if is_text(ids) else describe(given)
        raise ValueError(
            f"{wanted}; got {text}. `preprocessor.generate_preprocess` makes `token_ids` and "
            "`padding_mask` from text."
        )
    check_rank_known("score", name, ids)
    dtype, shape = keras.backend.standardize_dtype(ids.dtype), tuple(ids.shape)
    if "int" not in dtype or len(shape) != 2 or 0 in shape:
        raise ValueError(f"{wanted}; got {dtype} of shape {shape}.")
    return ids
