"""Checks cached generation of language models in KerasHub and in this package.

An error in a recurrent state, or in a cache of keys and values, is easily overlooked: texts stay
fluent. Three checks compare generated tokens with plain forward passes of the model, which use no
cache. Each raises an `AssertionError` with the position of the first difference. The script runs
them on tiny models with random weights, for all families, or for those named.

`rows` are prompts, lists of token ids of any lengths. The longest one is continued by `new_tokens`,
shorter ones to the same length. Models take `token_ids` and `padding_mask`, and optionally
`position_ids`. If the two largest logits are closer than rounding errors, either token is accepted,
and the rest of the sequence is skipped. A check raises a `ValueError` if no token could fail.
"""

import contextlib

import keras
import keras_hub
import numpy as np
from keras import ops

from benchmarks import make_parser
from benchmarks.timing import print_header, print_results
from keras_recurrent import models
from keras_recurrent.evaluation.position_loss import no_gradients

# {compute dtype: rounding error of a logit, relative to the range of the token's logits}
TOLERANCE = {"float32": 1e-4, "float64": 1e-8, "float16": 1e-2, "bfloat16": 3e-2}


def assert_cached_equals_plain(model, rows, new_tokens=8):
    """Asserts that each token generated with a cache has the best logit of a plain forward pass."""
    checker = Checker(model, rows, new_tokens)
    with checker.greedy() as generate:
        generated = generate(rows)
    checker.compare(rows, generated)


def assert_padding_changes_nothing(model, rows, new_tokens=8):
    """Asserts that padding and other prompts in the batch do not change a prompt's results.

    Compares the logits of plain forward passes with and without padding after the prompt, and the
    tokens generated for each prompt alone and in a batch, with different ids at padding.
    """
    checker = Checker(model, rows, new_tokens)
    batched = checker.logits(rows)
    for i, row in enumerate(rows):
        (alone,) = checker.logits([row])
        difference = np.abs(batched[i] - alone).max(axis=1) / np.ptp(alone, axis=1)
        token = int(difference.argmax())
        if difference[token] > checker.tolerance:
            raise AssertionError(
                f"Padding changes a plain forward pass: after token {token} of row {i} a logit is "
                f"off by {difference[token]:.2g} of the range of logits if other rows are longer; "
                f"{checker.tolerance:.2g} is allowed."
            )
    with checker.greedy() as generate:
        alone = [generate([row])[0] for row in rows]
        for fill in (0, 1):
            generated = generate(rows, fill)
            checker.compare(rows, generated, alone, f" in a batch, padded with {fill},")


def assert_cuts_change_nothing(model, rows, new_tokens=8):
    """Asserts that the position at which a prompt is split does not change the continuation.

    The prompt is passed again with 1, 2, ... of its generated tokens appended. Models of this
    package also continue from a cache of the prompt's first tokens, for every split.
    """
    checker = Checker(model, rows, new_tokens)
    with checker.greedy() as generate:
        whole = generate(rows)
        for count in range(1, new_tokens):
            longer = [row[: len(given) + count] for row, given in zip(whole, rows, strict=True)]
            checker.compare(longer, generate(longer), whole, f" after {count} generated tokens")
        for cut in range(1, max(map(len, rows))) if hasattr(model, "prefill") else ():
            first = [row[:cut] for row in rows]
            cache = model.prefill(**checker.prefill_arguments(first))
            rest = [row[cut:] for row in rows]
            continued = generate(rest, cache=cache)
            generated = [a + b for a, b in zip(first, continued, strict=True)]
            checker.compare(rows, generated, whole, f" from a cache of the first {cut} tokens")
    checker.compare(rows, whole)


class Checker:
    """Comparison of a language model's generated tokens with its plain forward passes."""

    def __init__(self, model, rows, new_tokens):
        self._model, self._length = model, max(map(len, rows)) + new_tokens
        backbone = model.backbone
        dtype = keras.backend.standardize_dtype(backbone.compute_dtype)
        layers = backbone._flatten_layers(include_self=False)
        if any(getattr(layer, "quantization_mode", None) for layer in layers):
            dtype = "bfloat16"
        self.tolerance = TOLERANCE[dtype]

    def logits(self, rows):
        """Returns logits of plain forward passes, float32 [length, vocabulary_size] per row."""
        logits_of_rows = zip(rows, self._forward(self._inputs(rows)), strict=True)
        found = [logits[: len(row)] for row, logits in logits_of_rows]
        for number, logits in enumerate(found):
            if not (finite := np.isfinite(logits).all(axis=1)).all():
                raise AssertionError(
                    f"A plain forward pass of {len(rows)} rows has logits that are not finite, "
                    f"after token {int(finite.argmin())} of row {number}."
                )
        return found

    def _forward(self, inputs):
        with no_gradients():
            logits = self._model(inputs, training=False)
        return keras.ops.convert_to_numpy(keras.ops.cast(logits, "float32"))

    def _inputs(self, rows, length=None, fill=0):
        length = length or max(map(len, rows))
        token_ids = np.full((len(rows), length), fill, "int32")
        for ids, row in zip(token_ids, rows, strict=True):
            ids[: len(row)] = row
        positions = np.arange(length, dtype="int32")
        mask = positions < np.array([len(row) for row in rows])[:, None]
        inputs = {"token_ids": token_ids, "padding_mask": mask.astype("int32")}
        if "position_ids" in self._model.input:
            inputs["position_ids"] = np.tile(positions, (len(rows), 1))
        return inputs

    @contextlib.contextmanager
    def greedy(self):
        """Context manager that yields a function for greedy generation."""
        model = self._model
        before = model.sampler, model.generate_function
        preprocessor = model.preprocessor

        def generate(rows, fill=0, cache=None):
            if cache is None:
                inputs = self._inputs(rows, self._length, fill)
                inputs = keras.tree.map_structure(keras.ops.convert_to_tensor, inputs)
                return model.generate(inputs, stop_token_ids=None)["token_ids"].tolist()
            seen = int(cache.num_tokens.max())
            inputs = self._inputs(rows, self._length - seen)
            generated = model.generate(inputs, stop_token_ids=None, cache=cache)["token_ids"]
            return generated.tolist()

        try:
            model.sampler, model.generate_function = keras_hub.samplers.GreedySampler(), None
            model.preprocessor = None
            yield generate
        finally:
            model.preprocessor = preprocessor
            model.sampler, model.generate_function = before

    def prefill_arguments(self, rows):
        return {"inputs": self._inputs(rows), "max_length": self._length + 1}

    def compare(self, rows, generated, expected=None, where=""):
        """Raises an error if a new token is clearly not the best, or not the expected one."""
        clear = 0
        for i, (logits, tokens, given) in enumerate(
            zip(self.logits(generated), generated, rows, strict=True)
        ):
            for t in range(len(given), len(tokens)):
                before, token = logits[t - 1], tokens[t]
                allowed = 2 * self.tolerance * np.ptp(before)
                second, best = np.sort(before)[-2:]
                clear += bool(best - second > allowed)
                if best - before[token] > allowed:
                    raise AssertionError(
                        f"Token {t} of row {i}{where} is {token}, and must be "
                        f"{int(before.argmax())}: a plain forward pass prefers it by "
                        f"{best - before[token]:.3g}, where {allowed:.3g} may be rounding."
                    )
                if expected and expected[i][t] != token:
                    if best - second > allowed:
                        raise AssertionError(
                            f"Token {t} of row {i}{where} is {token}, as in a plain forward pass, "
                            f"but otherwise {expected[i][t]}, whose logit is lower by "
                            f"{best - before[expected[i][t]]:.3g}, where {allowed:.3g} may be "
                            "rounding."
                        )
                    break  # both are accepted, and the continuations differ
        if not clear:
            raise ValueError(
                "`model`: at none of the new tokens do the two largest logits differ by more than "
                "rounding errors, so the check could not fail. Use larger weights, or other `rows`."
            )


# --- Models ---

VOCABULARY, WINDOW = 61, 4
NEW_TOKENS = 8  # after the longest prompt
RNG = np.random.default_rng(1)
PROMPTS = [RNG.integers(2, VOCABULARY, length).tolist() for length in (11, 7, 2)]
CHECKS = {
    "cached equals plain": assert_cached_equals_plain,
    "padding changes nothing": assert_padding_changes_nothing,
    "cuts change nothing": assert_cuts_change_nothing,
}
FAMILIES: dict = {}  # {name: (prefix of the classes, sizes, name of the argument for the window)}


def add(name, prefix, *sizes, window=None, **options):
    """Adds a family; `sizes` are dictionaries of arguments of the backbone, such as `options`."""
    FAMILIES[name] = prefix, {k: v for s in (*sizes, options) for k, v in s.items()}, window


# Options that change caching are on.
SIZES = {"vocabulary_size": VOCABULARY, "num_layers": 2, "hidden_dim": 16, "intermediate_dim": 24}
HEADS = {**SIZES, "num_heads": 4}
GROUPS = {**SIZES, "num_query_heads": 4, "num_key_value_heads": 2}
EXPERTS = {"num_experts": 4, "top_k": 2}
GEMMA = {**GROUPS, "head_dim": 8}
LOCAL = {"use_sliding_window_attention": True}
GEMMA_2 = {**GEMMA, **LOCAL, "use_post_ffw_norm": True, "use_post_attention_norm": True}
add("GPT-2", "GPT2", HEADS, max_sequence_length=64)
add("GPT-NeoX", "GPTNeoX", HEADS, rotary_percentage=0.5)
add("OPT", "OPT", HEADS, max_sequence_length=64)
add("Bloom", "Bloom", HEADS)
add("Falcon", "Falcon", SIZES, num_attention_heads=4)
add("Llama", "Llama", GROUPS)
FREQUENCIES = {"rope_frequency_adjustment_factor": 8.0, "rope_pretraining_sequence_length": 16}
FREQUENCIES |= {"rope_low_freq_factor": 1.0, "rope_high_freq_factor": 4.0}
add("Llama 3", "Llama3", GROUPS, FREQUENCIES)
add("Mistral", "Mistral", GROUPS, window="sliding_window")
add("Mixtral", "Mixtral", GROUPS, EXPERTS, window="sliding_window")
add("Gemma", "Gemma", GEMMA)
CAPS = {"attention_logit_soft_cap": 50.0, "final_logit_soft_cap": 30.0}
add("Gemma 2", "Gemma", GEMMA_2, CAPS, window="sliding_window_size")
# Every sixth layer has global attention.
IMAGES = {"image_size": 16, "global_rope_scaling_factor": 8.0}
add("Gemma 3", "Gemma3", GEMMA_2, IMAGES, num_layers=6, window="sliding_window_size")
GEMMA_3N = {
    **{"text_vocab_size": VOCABULARY, "text_hidden_size": 16, "num_hidden_layers": 4},
    **{"pad_token_id": 0, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8},
    **{"intermediate_size": [24] * 4, "hidden_activation": "gelu_approximate"},
    **{"layer_types": ["sliding_attention", "full_attention"] * 2, "rope_theta": 10000.0},
    **{"max_position_embeddings": 64, "vocab_size_per_layer_input": VOCABULARY},
    **{"hidden_size_per_layer_input": 4, "altup_num_inputs": 2, "laurel_rank": 4},
    **{"num_kv_shared_layers": 2, "final_logit_soft_cap": 30.0},
}
add("Gemma 3n", "Gemma3n", GEMMA_3N, window="sliding_window")
GEMMA_4 = {
    **{"num_layers": 4, "image_size": 16, "sliding_window_pattern": 2, "global_head_dim": 16},
    **{"num_kv_shared_layers": 2, "hidden_size_per_layer_input": 4},
    **{"vocab_size_per_layer_input": VOCABULARY},
}
add("Gemma 4", "Gemma4", GEMMA, GEMMA_4, window="sliding_window_size")
SU = {"rope_scaling_type": "su", "max_sequence_length": 64}
SU |= {"rope_scaling_short_factor": [1.0, 1.5], "rope_scaling_long_factor": [2.0, 4.0]}
add("Phi-3", "Phi3", GROUPS)
add("Phi-3, `su`, short", "Phi3", GROUPS, SU, pretraining_sequence_length=32)
add("Phi-3, `su`, long", "Phi3", GROUPS, SU, pretraining_sequence_length=16)
MOE = {"moe_intermediate_dim": 12, "shared_expert_intermediate_dim": 12}
add("Qwen", "Qwen", GROUPS)
add("Qwen, window", "Qwen", GROUPS, LOCAL, window="sliding_window_size")
add("Qwen MoE", "QwenMoe", GROUPS, EXPERTS, MOE)
add("Qwen MoE, window", "QwenMoe", GROUPS, EXPERTS, MOE, LOCAL, window="sliding_window_size")
add("Qwen 3", "Qwen3", GEMMA, window="sliding_window_size")
QWEN_3_MOE = {**GEMMA, **EXPERTS, "moe_intermediate_dim": 12}
add("Qwen 3 MoE", "Qwen3Moe", QWEN_3_MOE, window="sliding_window_size")
LINEAR = {
    **{**GEMMA, "layer_types": ["linear_attention", "full_attention"]},
    **{"linear_num_key_heads": 2, "linear_num_value_heads": 4},
    **{"linear_key_head_dim": 8, "linear_value_head_dim": 8},
}
FULL = {"layer_types": ["full_attention"] * 2}
add("Qwen 3.5", "Qwen3_5", LINEAR)
add("Qwen 3.5, attention alone", "Qwen3_5", LINEAR, FULL, window="sliding_window_size")
SHARED = {**QWEN_3_MOE, **LINEAR, "shared_expert_intermediate_size": 12}
del SHARED["intermediate_dim"]
add("Qwen 3.5 MoE", "Qwen3_5Moe", SHARED)
SMOL = {
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "attention_bias": False},
    **{"attention_dropout": 0.0, "rope_layer_enabled_list": [True, False], "mlp_bias": False},
    **{"layer_types": ["attention"] * 2, "layer_norm_epsilon": 1e-5, "rope_theta": 10000.0},
    **{"max_position_embeddings": 64, "partial_rotary_factor": 1.0},
}
add("SmolLM3", "SmolLM3", SIZES, SMOL)
add("GPT-OSS", "GptOss", GEMMA, EXPERTS, window="sliding_window")
GRIFFIN = {
    **{"num_layers": 3, "lru_width": 24, "num_blocks": 4},
    "block_types": ("recurrent", "local_attention", "global_attention"),
}
add("Griffin (ours)", "Griffin", GEMMA, GRIFFIN, window="sliding_window")
add("HGRN2 (ours)", "HGRN2", SIZES, expand_ratio=4)
add("TransNormer (ours)", "TransNormer", HEADS, head_dim=4)


def build(name, window=WINDOW):
    """Builds a model with weights from NumPy, which depend on neither backend nor window."""
    keras.utils.clear_session()  # resets the names of weights
    prefix, sizes, window_name = FAMILIES[name]
    package = models if hasattr(models, f"{prefix}CausalLM") else keras_hub.models
    sizes = {**sizes, window_name: window} if window_name else sizes
    backbone = getattr(package, f"{prefix}Backbone")(**sizes)
    rng = np.random.default_rng(0)
    for weight in sorted(backbone.trainable_weights, key=lambda weight: weight.path):
        noise = rng.normal(size=weight.shape)
        if weight.path.endswith("embeddings"):
            # Small compared with the layers' outputs, so that tokens vary.
            weight.assign(0.2 * noise)
        elif len(weight.shape) > 1:
            weight.assign(noise / np.sqrt(weight.shape[-2]))
        else:
            start = ops.convert_to_numpy(weight)
            # Random initial values, of decays or attention sinks, depend on the backend.
            weight.assign(start + 0.3 * noise if np.ptp(start) == 0 else 2.0 + noise)
    return getattr(package, f"{prefix}CausalLM")(backbone=backbone, preprocessor=None)


def count_wrong(model):
    """Returns the number of generated tokens that a plain forward pass would not choose."""
    checked = Checker(model, PROMPTS, NEW_TOKENS)
    with checked.greedy() as generate:
        generated = generate(PROMPTS)
    wrong = []
    for logits, tokens, prompt in zip(checked.logits(generated), generated, PROMPTS, strict=True):
        for before, token in zip(logits[len(prompt) - 1 :], tokens[len(prompt) :], strict=False):
            allowed = 2 * checked.tolerance * np.ptp(before)
            wrong.append(before.max() - before[token] > allowed)
    return f"{sum(wrong)} of {len(wrong)}"


def outcome(function, *arguments):
    """Returns the result of a function, "right" for a check that passes, or the failure."""
    try:
        found = function(*arguments)
    except AssertionError as error:
        return str(error)
    except Exception as error:  # an error is a result
        return f"{type(error).__name__} on {keras.backend.backend()}"
    return "right" if found is None else found


def last_logits(model):
    return Checker(model, PROMPTS, NEW_TOKENS).logits(PROMPTS[:1])[0][-1]


def measure(name):
    """Returns the results of a family, a dictionary."""
    model = build(name)
    found = {"model": name}
    for kind, check in CHECKS.items():
        found[kind] = outcome(check, model, PROMPTS, NEW_TOKENS)
    found["wrong tokens"] = outcome(count_wrong, model)
    found["window moves logits by"] = ""
    if FAMILIES[name][2]:
        plain, wide = last_logits(model), last_logits(build(name, window=64))
        found["window moves logits by"] = round(
            float(np.abs(wide - plain).max() / np.ptp(plain)), 2
        )
    return found


def main():
    parser = make_parser(__doc__)
    parser.add_argument("families", nargs="*", help=", ".join(FAMILIES))
    families = parser.parse_args().families
    print_header("float32")
    print_results(map(measure, families or FAMILIES))


if __name__ == "__main__":
    main()
