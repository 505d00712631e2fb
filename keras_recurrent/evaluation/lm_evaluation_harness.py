"""Adapter for lm-evaluation-harness (Gao et al.), the package `lm_eval`."""

import keras_hub

from keras_recurrent.evaluation.continuations import Continuations

try:
    from lm_eval.api.model import TemplateLM
except ModuleNotFoundError as error:
    if not error.name or error.name.partition(".")[0] != "lm_eval":
        raise
    raise ImportError(
        "`keras_recurrent.lm_evaluation_harness` needs lm-evaluation-harness: "
        "`pip install lm_eval`, or the extra `evaluation` of keras-recurrent."
    ) from error

from lm_eval.api.registry import register_model
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

# Options of tasks for the maximum number of generated tokens, in the order of precedence.
LIMITS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
# Further options, which have no effect on greedy decoding.
WITHOUT_EFFECT = {"do_sample", "temperature", "top_p", "top_k", "until"}


@register_model("keras_recurrent")
class HarnessLM(TemplateLM):
    """Language model of this package for lm-evaluation-harness.

    A question is processed once, and all its answers start from the state after it. Text is
    generated greedily. The model's preprocessor tokenizes contexts and adds its start token, if
    any; an empty context is the start token, or the end token of a model without one.

    Args:
        pretrained: a language model with a preprocessor, or an argument of `from_preset`, such as
            `"hf://fla-hub/hgrn2-1.3B-100B"`.
        batch_size: integer, maximum number of contexts or answers in a batch.
        max_length: integer, maximum number of tokens processed for one answer: longer contexts lose
            their oldest tokens, and longer texts are scored in windows of this length. None: no
            limit.
        max_gen_toks: integer, maximum number of generated tokens for tasks that do not set it.
        device: ignored; Keras's backend chooses the device.
        **kwargs: arguments of `from_preset`, if `pretrained` is a name, such as `dtype=`.

    Raises:
        ImportError: on import of this module, if `lm_eval` is not installed.
        TypeError: `pretrained` is not a language model of this package.
        ValueError: the model has no preprocessor, a number is not an integer of at least 1, such as
            `batch_size="auto"`, or `kwargs` are passed with a model.

    Example:

    ```
    import lm_eval
    from keras_recurrent.lm_evaluation_harness import HarnessLM
    from keras_recurrent.models import HGRN2CausalLM

    model = HGRN2CausalLM.from_preset("hf://fla-hub/hgrn2-1.3B-100B", dtype="bfloat16")
    results = lm_eval.simple_evaluate(HarnessLM(model, batch_size=16), tasks=["piqa"])
    print(lm_eval.utils.make_table(results))
    ```
    """

    def __init__(
        self,
        pretrained,
        batch_size=8,
        max_length=None,
        max_gen_toks=256,
        device=None,
        **kwargs,
    ):
        super().__init__()
        batch_size = _as_integer("batch_size", batch_size)
        if isinstance(pretrained, str):
            pretrained = keras_hub.models.CausalLM.from_preset(pretrained, **kwargs)
        elif kwargs:
            raise ValueError(
                f"`{next(iter(kwargs))}` is an argument of `from_preset`, and `pretrained` is a "
                "model already."
            )
        self._continuations = Continuations(pretrained, batch_size, max_length)
        if pretrained.preprocessor is None:
            raise ValueError(
                "`pretrained` must have a preprocessor, which tokenizes text; this model has none. "
                "Pass `preprocessor=` to `from_preset`."
            )
        self.batch_size, self.max_length = batch_size, max_length
        self.max_gen_toks = _as_integer("max_gen_toks", max_gen_toks)
        self._preprocessor = pretrained.preprocessor
        self._tokenizer = pretrained.preprocessor.tokenizer

    @property
    def eot_token_id(self):
        return self._tokenizer.end_token_id

    @property
    def prefix_token_id(self):
        start = getattr(self._tokenizer, "start_token_id", None)
        return self.eot_token_id if start is None else start

    def tok_encode(self, string, add_special_tokens=None, **kwargs):
        if add_special_tokens is None:
            add_special_tokens = self._preprocessor.add_start_token
        tokens = [int(token) for token in self._tokenizer(string)]
        return [self.prefix_token_id, *tokens] if add_special_tokens else tokens

    def _loglikelihood_tokens(self, requests, **kwargs):
        texts, *tokens = zip(*requests, strict=True)
        found = self._continuations.score(list(zip(*tokens, strict=True)))
        for text, answer in zip(texts, found, strict=True):
            self.cache_hook.add_partial("loglikelihood", text, answer)
        return found

    def loglikelihood_rolling(self, requests, disable_tqdm=False):
        windows, request_of_window = [], []
        for number, request in enumerate(requests):
            tokens = self.tok_encode(request.args[0], add_special_tokens=False)
            size = self.max_length or max(len(tokens), 1)
            for window in get_rolling_token_windows(tokens, self.prefix_token_id, size, 1):
                windows.append(make_disjoint_window(window))
                request_of_window.append(number)
        totals = [0.0] * len(requests)
        scores = self._continuations.score(windows)
        for number, (score, _) in zip(request_of_window, scores, strict=True):
            totals[number] += score
        for request, total in zip(requests, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return totals

    def generate_until(self, requests, disable_tqdm=False):
        groups: dict = {}
        for number, request in enumerate(requests):
            until, limit = self._stop_options(request.args[1])
            groups.setdefault((tuple(until), limit), []).append(number)
        found = [""] * len(requests)
        for (until, limit), numbers in groups.items():
            contexts = [
                self.tok_encode(requests[n].args[0]) or [self.prefix_token_id] for n in numbers
            ]
            texts = self._continuations.generate(contexts, list(until), limit, self.eot_token_id)
            for number, text in zip(numbers, texts, strict=True):
                found[number] = text
                self.cache_hook.add_partial("generate_until", requests[number].args, text)
        return found

    def _stop_options(self, options):
        """Returns the stop strings of an answer and its maximum number of tokens."""
        until = options.get("until") or []
        until = [until] if isinstance(until, str) else list(until)
        if options.get("do_sample") and options.get("temperature", 1.0) > 0:
            raise ValueError(
                "This adapter generates greedily, and the task needs sampling (`do_sample`). Pass "
                "`gen_kwargs='do_sample=False'`, or leave the task out."
            )
        unknown = sorted(set(options) - set(LIMITS) - WITHOUT_EFFECT)
        if unknown:
            raise ValueError(
                f"The task has the options {unknown}, which this adapter does not support. It "
                f"supports {sorted({*LIMITS, *WITHOUT_EFFECT})}."
            )
        limits = [options[name] for name in LIMITS if options.get(name) is not None]
        return until, _as_integer(LIMITS[0], limits[0]) if limits else self.max_gen_toks


def _as_integer(name, value):
    """Converts an argument of the command line to an integer."""
    try:
        return int(value)
    except ValueError:
        raise ValueError(f"`{name}` must be an integer, at least 1; got {value!r}.") from None
