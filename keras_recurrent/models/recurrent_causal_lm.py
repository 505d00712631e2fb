"""What the language models of all families share: training, scores, generation."""

import contextlib

import keras
import keras_hub
import numpy as np
from keras import ops

from keras_recurrent.checkpoints import loading
from keras_recurrent.checkpoints.export import export
from keras_recurrent.checks.shapes import check_rank_known
from keras_recurrent.checks.token_ids import check_token_ids
from keras_recurrent.generation.causal_lm import GeneratingCausalLM
from keras_recurrent.models.calibration import layer_structure
from keras_recurrent.models.parts import check_parts
from keras_recurrent.models.recurrent_backbone import token_input
from keras_recurrent.models.segments import SegmentsOptional
from keras_recurrent.ops.token_crossentropy import token_crossentropy
from keras_recurrent.training.loss_without_logits import LossWithoutLogits
from keras_recurrent.training.samples import describe, is_text, is_tokens
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
    GeneratingCausalLM,
):
    """Base class of the language models: a `RecurrentBackbone`, and logits from its embedding.

    A family says `backbone_cls` and `preprocessor_cls`, and registers its class with Keras.

    For a copy, give `type(model).from_config(model.get_config())` the weights of the model.
    `keras.models.clone_model` copies the graph alone: a plain functional model, which generates
    nothing, and in which the embedding and the logits no longer share their weights, tied or not.
    Neither has low-rank weights.

    Args:
        backbone: a `RecurrentBackbone`.
        preprocessor: a `RecurrentCausalLMPreprocessor`; None: inputs are tokens.
        compile: whether to compile with KerasHub's defaults. They suit fine-tuning (Adam at 2e-5):
            compile with an optimizer of your own to train from the start.
        name: string.
        trainable: boolean.

    Call arguments:
        inputs: a dictionary of `token_ids`, `padding_mask` and optionally `segment_ids`, all
            `[B, T]`, as `RecurrentBackbone` takes them.

    Returns:
        Logits `[B, T, vocabulary_size]`, in the compute dtype.

    Raises:
        ValueError: a backbone or preprocessor of another kind, or a tokenizer with tokens that the
            backbone does not know.
    """

    def __init__(self, backbone, preprocessor=None, compile=True, name=None, trainable=True):
        check_parts(type(self), backbone, preprocessor, keras_hub.models.CausalLMPreprocessor)
        self.backbone = backbone
        self.preprocessor = preprocessor
        # The inputs are what the preprocessor makes.
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

    @classmethod
    def from_preset(cls, preset, load_weights=None, **kwargs):
        """A model by name, from a checkpoint, or from a directory of `save_to_preset`.

        `presets` of the class lists the names. Those without published weights start from fresh
        initialization, and say so once; `griffin_tiny_text` has its weights in this package; the
        others fetch theirs from the Hugging Face Hub.

        A checkpoint is a directory of `config.json` and `.safetensors` files as transformers
        saves them, or the name of one on the Hub, such as `"hf://google/recurrentgemma-2b"`
        (with the extra `huggingface` of this package). Its `tokenizer.model` makes the
        preprocessor; without one, `preprocessor` is None and the model takes tokens. Weights get
        the dtype of the Keras policy or of `dtype=`, one tensor at a time: `dtype="bfloat16"`
        never holds more of the model than that.

        Args:
            preset: string, a name, a directory, or `hf://owner/repository`.
            load_weights: None, the default, loads weights where they belong to the preset: all but
                names without published ones. True insists on them, False leaves them alone.
            **kwargs: whatever the backbone (`vocabulary_size=`, `dtype=`), the preprocessor
                (`sequence_length=`, `packed=`) and the model (`preprocessor=`, `compile=`) take,
                in place of what the preset says.

        Raises:
            ValueError: an unknown name, one of another class, `load_weights=True` where there are
                none, or an argument that nothing understands; a checkpoint whose configuration this
                version does not serve, or whose tensors are missing, too many, misshapen or
                damaged. All of this is known before a model is built.
            FileNotFoundError: a checkpoint without `.safetensors` files, as pickled weights are not
                read; a directory of `save_to_preset` without its `.weights.h5`.

        Example:

        >>> import keras_recurrent
        >>> model = keras_recurrent.models.GriffinCausalLM.from_preset(
        ...     "hawk_tiny", num_layers=2, dtype="mixed_bfloat16", sequence_length=64, packed=True
        ... )
        >>> model.backbone.num_layers, model.preprocessor.sequence_length
        (2, 64)
        """
        loader, load_weights, kwargs = loading.resolve_task(cls, preset, load_weights, kwargs)
        return super().from_preset(loader, load_weights, **kwargs)

    def compile(
        self, optimizer="auto", loss="auto", *, weighted_metrics="auto", sampler="top_k", **kwargs
    ):
        """Sets how the model trains and samples; see `keras_hub.models.CausalLM.compile`.

        The loss is a `keras_recurrent.models.TokenCrossentropy` where none is given. With it and
        the default metric, accuracy, `fit` and `evaluate` never make the logits of all tokens;
        `keras_recurrent.which_loss` tells why where they do.

        Raises:
            ValueError: the sampler is unknown; it is speculative, which takes back tokens that it
                tried, as a recurrent state cannot; or it returns several beams for a prompt.
        """
        # KerasHub hands back a name that it does not know, or looks for the name in small letters.
        with contextlib.suppress(KeyError):
            sampler = keras_hub.samplers.get(sampler)
        if isinstance(sampler, str):
            raise ValueError(
                "`sampler` must be 'top_k', 'top_p', 'random', 'greedy', 'beam', 'contrastive' or "
                f"a sampler of KerasHub; got {sampler!r}."
            )
        if isinstance(sampler, keras_hub.samplers.SpeculativeSampler):
            raise ValueError(
                f"`sampler`: `{type(self).__name__}` does not support the speculative sampler. It "
                "takes back tokens that it tried, which a recurrent state cannot undo. Use "
                "'top_k', 'top_p', 'random', 'greedy', 'beam' or 'contrastive'."
            )
        if getattr(sampler, "return_all_beams", False):
            raise ValueError(
                "`sampler`: `generate` has one text for a prompt. Leave out `return_all_beams`."
            )
        if isinstance(loss, str) and loss == "auto":
            loss = TokenCrossentropy()
        super().compile(
            optimizer, loss, weighted_metrics=weighted_metrics, sampler=sampler, **kwargs
        )
        wanted = kwargs.get("jit_compile", "auto")
        self._compiles_generation = None if wanted == "auto" else bool(wanted)

    def get_compile_config(self):
        config = super().get_compile_config()
        if config:
            arguments = config["config"]
            arguments["sampler"] = keras_hub.samplers.serialize(self.sampler)
            # Keras keeps what "auto" is for `fit` here; generation decides for itself.
            wanted = self._compiles_generation
            arguments["jit_compile"] = "auto" if wanted is None else wanted
        return config

    def export_to_transformers(self, path, dtype=None, max_shard_size=5):
        """Writes the model as a checkpoint that transformers and `from_preset` read.

        `config.json`, the tensors in `.safetensors` files, and `tokenizer.model` if the
        preprocessor has a `SentencePieceTokenizer` (a `ByteTokenizer` leaves no file). Low-rank
        weights are merged in. What appears at `path` is complete: all is written beside it first,
        in a folder `.export-*`. A process that is killed leaves that folder, which may be deleted
        once no export into the same parent directory runs.

        These checkpoints hold models whose backbone has

        - of Griffin, `block_types` of `"recurrent"` and `"local_attention"`; `lru_width`,
          `num_query_heads`, `sliding_window` and `final_logit_soft_cap` that are not None, even
          where no block uses them; `num_blocks` equal to `num_query_heads`; `embedding_scale`
          equal to `float(ml_dtypes.bfloat16(hidden_dim**0.5))`, the square root in bfloat16;
          `scale_first_input=False` and `recurrence="rg_lru"`; `partial_rotary_factor` and
          `layer_norm_epsilon` above 0;
        - of HGRN2, `gate_activation="silu"`, `input_activation="linear"` and `layer_norm_epsilon`
          above 0;
        - of TransNormerLLM, `decay_schedule="checkpoints"`, `tie_word_embeddings=False` and
          `layer_norm_epsilon=1e-6`.

        Args:
            path: string, a directory that does not exist yet or is empty.
            dtype: `"float32"`, `"bfloat16"` or `"float16"`; None: the dtype of the weights, in
                which a checkpoint read in its own dtype comes back bit for bit.
            max_shard_size: number, gigabytes a file at most, if no tensor alone is larger.

        Raises:
            ValueError: checkpoints of this family cannot hold the model, of which all that is not
                as above is named; it is quantized; `dtype` is none of these or too narrow for a
                weight; or `max_shard_size` is not above 0.
            FileExistsError: there is something at `path`, or a symbolic link, or another process
                has put something there meanwhile.

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
        export(self.backbone, path, tokenizer, dtype, max_shard_size)

    def rematerialized_call(self, layer_call, *args, **kwargs):
        return layer_call  # only the backbone's blocks are rematerialized

    def get_quantization_layer_structure(self, mode):
        """The parts of the network that GPTQ and AWQ calibrate one by one; None for other modes.

        As the forward pass calls them: with scaled embeddings, and with the lower bound of each
        block where a family has them.
        """
        if mode not in ("gptq", "awq"):
            return None
        return layer_structure(self.backbone, example=ops.zeros((1, 1), "int32"))

    def check_labels(self, name, x, y, sample_weight):
        if is_text(x) and not (y is None and sample_weight is None):
            raise ValueError(
                f"`y` and `sample_weight` are made of the strings in `{name}`: the tokens that "
                "follow, and which of them are real. Leave them out."
            )
        if is_tokens(x) and isinstance(self.loss, TokenCrossentropy):
            if y is None:
                raise ValueError(
                    f"`{name}` holds tokens, whose labels are needed beside it: the tokens that "
                    "follow, [batch, time]. A preprocessor makes both of strings."
                )
            hint = "Give labels that do not count a `sample_weight` of 0."
            check_token_ids("y", y, self.backbone.vocabulary_size, sample_weight, hint)

    # === Scores ===

    def score(
        self,
        token_ids,
        padding_mask=None,
        scoring_mode="logits",
        layer_intercept_fn=None,
        target_ids=None,
    ):
        """Logits or losses of given tokens; can intercept layer activations.

        Args:
            token_ids: integers `[B, T]`.
            padding_mask: boolean `[B, T]`, or integers, False or 0 at padding; None: all tokens are
                real.
            scoring_mode: `"logits"` or `"loss"`.
            layer_intercept_fn: a function of activations `[B, T, hidden_dim]` and a number, -1 for
                the embeddings and i for the output of block i; the model goes on with what it
                returns.
            target_ids: integers `[B, T]`, the tokens that should follow; needed for `"loss"`, which
                is NaN where the vocabulary lacks one.

        Returns:
            Logits `[B, T, vocabulary_size]`, or the cross-entropy of each target in nats `[B, T]`,
            in float32, or float64 if the logits are.

        Raises:
            ValueError: an unknown `scoring_mode`, `"loss"` without `target_ids`, targets of another
                shape, ids that are no integers `[B, T]`, such as text, or none at all, a mask of
                another shape or of floats, or a NumPy array or list of `token_ids` with an id that
                the vocabulary lacks.

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
                "`target_ids` is needed for `scoring_mode='loss'`: the tokens that should follow, "
                "such as `keras.ops.roll(token_ids, -1, axis=1)`."
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
                    "token, which nothing follows, or give it a target."
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
    """Ids `[B, T]`, at least one, as the array or tensor that they are, else as an array."""
    given = ids
    if isinstance(ids, (str, bytes, list, tuple)):
        try:
            ids = np.asarray(ids)
        except ValueError:
            raise ValueError(
                f"`{name}` must be integers [batch, time]; got rows of several lengths. Pad "
                "them, and say by `padding_mask` where."
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
            "`padding_mask` of text."
        )
    check_rank_known("score", name, ids)
    dtype, shape = keras.backend.standardize_dtype(ids.dtype), tuple(ids.shape)
    if "int" not in dtype or len(shape) != 2 or 0 in shape:
        raise ValueError(f"{wanted}; got {dtype} of shape {shape}.")
    return ids
