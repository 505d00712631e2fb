"""Under lm-evaluation-harness, where it is installed: tasks of local text."""

import importlib
import importlib.util
import json
import sys

import numpy as np
import pytest

from tests.test_continuations import byte_model, expected_score

INSTALLED = importlib.util.find_spec("lm_eval") is not None
# Its packages warn of each other; what this package warns of is an error in all other tests.
pytestmark = [pytest.mark.once, pytest.mark.filterwarnings("ignore")]
needs_harness = pytest.mark.skipif(not INSTALLED, reason="lm_eval is not installed")

SENTENCES = ["All happy families are alike.", "Call me Ishmael.", "It was the best of times."]


def test_import_without_the_harness_names_the_missing_package(monkeypatch):
    for module in "keras_recurrent", "keras_recurrent.evaluation":
        monkeypatch.delitem(sys.modules, f"{module}.lm_evaluation_harness", raising=False)
    for module in [name for name in sys.modules if name.partition(".")[0] == "lm_eval"]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, "lm_eval", None)  # what is None cannot be imported
    with pytest.raises(ImportError, match="needs lm-evaluation-harness: `pip install"):
        importlib.import_module("keras_recurrent.lm_evaluation_harness")


@pytest.fixture(scope="module")
def model():
    model = byte_model(num_layers=1)
    model.compile(sampler="greedy")
    return model


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    """Three tasks on the sentences: to choose their ends, to score them and to write on."""
    import datasets

    folder = tmp_path_factory.mktemp("harness")
    rows = [
        {"begin": text[:4], "ends": [text[4:], text[4:].upper(), "xx"], "whole": text}
        for text in SENTENCES
    ]
    file = folder / "sentences.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)))
    shared = {
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(file)}},
        "test_split": "test",
        "doc_to_text": "{{begin}}",
        "target_delimiter": "",
    }
    choose = {
        "task": "choose",
        "output_type": "multiple_choice",
        "doc_to_choice": "ends",
        "doc_to_target": 0,
        "metric_list": [{"metric": "acc"}],
    }
    score = {
        "task": "score",
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{whole}}",
        "metric_list": [{"metric": "bits_per_byte"}],
    }
    write = {
        "task": "write",
        "output_type": "generate_until",
        "doc_to_target": "{{whole}}",
        "generation_kwargs": {"until": ["e"], "max_gen_toks": 8, "do_sample": False},
        "metric_list": [{"metric": "exact_match"}],
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(datasets.config, "HF_DATASETS_CACHE", folder / "cache")
        yield [{**shared, **task} for task in (choose, score, write)]


@pytest.fixture(scope="module")
def evaluated(model, tasks):
    """Results and samples of the tasks."""
    import lm_eval

    from keras_recurrent.lm_evaluation_harness import HarnessLM

    return lm_eval.simple_evaluate(HarnessLM(model, batch_size=4), tasks=tasks, bootstrap_iters=0)


def text_score(model, context, continuation):
    ids = [[1, *model.preprocessor.tokenizer(context)], model.preprocessor.tokenizer(continuation)]
    return expected_score(model, *ids)


@needs_harness
def test_evaluation_of_local_tasks_has_the_scores_of_the_model(model, evaluated):
    right, results = 0, evaluated["results"]
    for text, sample in zip(SENTENCES, evaluated["samples"]["choose"], strict=True):
        # The harness counts a space at the end of a question to its answers.
        begin, space = text[:4].rstrip(), text[len(text[:4].rstrip()) : 4]
        ends = [text[4:], text[4:].upper(), "xx"]
        wanted = [text_score(model, begin, space + end)[0] for end in ends]
        scores = [response[0][0] for response in sample["resps"]]
        np.testing.assert_allclose(scores, wanted, rtol=1e-5)
        right += np.argmax(wanted) == 0
    assert results["choose"]["acc,none"] == pytest.approx(right / 3)
    bits = -sum(text_score(model, "", text)[0] for text in SENTENCES) / np.log(2)
    assert results["score"]["bits_per_byte,none"] == pytest.approx(
        bits / sum(map(len, SENTENCES)), rel=1e-5
    )
    for text, sample in zip(SENTENCES, evaluated["samples"]["write"], strict=True):
        wanted = model.generate(text[:4], max_length=5 + 8, strip_prompt=True).partition("e")[0]
        assert sample["resps"] == [[wanted]]


@needs_harness
def test_evaluation_through_the_server_has_the_scores_of_the_model(model, tasks, evaluated):
    """Log probabilities of prompts differ through the server, or the harness rejects its bodies."""
    pytest.importorskip("fastapi")
    import lm_eval
    from lm_eval.models.openai_completions import LocalCompletionsAPI

    from keras_recurrent.lm_evaluation_harness import HarnessLM
    from keras_recurrent.serving import Engine
    from tests.serving.test_server import running

    harness = HarnessLM(model, batch_size=4)

    class ServerLM(LocalCompletionsAPI):
        """Client of the server with the tokenizer of the model in this process."""

        prefix_token_id = harness.prefix_token_id
        _adds_start: bool | None = None

        def tok_encode(self, string, add_special_tokens=None, **kwargs):
            if not isinstance(string, str):
                return [self.tok_encode(each) for each in string]
            return harness.tok_encode(string, self._adds_start)

        def loglikelihood_rolling(self, *arguments, **options):
            self._adds_start = False
            found = super().loglikelihood_rolling(*arguments, **options)
            self._adds_start = None
            return found

    with Engine(model, num_slots=4, max_length=200) as engine, running(engine) as server:
        url = f"{server.url}/v1/completions"
        options = {"tokenizer_backend": None, "max_length": 100, "batch_size": 3}
        client = ServerLM(model="tiny", base_url=url, **options)
        client.tokenizer, client.tokenized_requests = harness, True
        found = lm_eval.simple_evaluate(client, tasks=tasks, bootstrap_iters=0)
    for name, samples in evaluated["samples"].items():
        pair = ([sample["resps"] for sample in each] for each in (samples, found["samples"][name]))
        if name == "write":
            assert next(pair) == next(pair)
        else:
            np.testing.assert_allclose(*map(np.ravel, pair), rtol=1e-6)


@needs_harness
def test_loglikelihood_rolling_scores_long_texts_in_windows(model):
    from lm_eval.api.instance import Instance

    from keras_recurrent.lm_evaluation_harness import HarnessLM

    instances = [Instance("loglikelihood_rolling", {}, (text,), 0) for text in ["abcdefghij", ""]]
    found = HarnessLM(model, max_length=4).loglikelihood_rolling(instances)
    tokens = model.preprocessor.tokenizer("abcdefghij")
    # Four tokens follow the start token, four follow the last of these, and two follow three more.
    windows = [([1], tokens[:4]), (tokens[3:4], tokens[4:8]), (tokens[5:8], tokens[8:])]
    wanted = sum(expected_score(model, *window)[0] for window in windows)
    np.testing.assert_allclose(found, [wanted, 0.0], rtol=1e-5)


@needs_harness
def test_command_line_finds_a_model_by_name(model, tmp_path):
    from keras_recurrent.lm_evaluation_harness import HarnessLM

    model.save_to_preset(tmp_path / "preset")
    arguments = f"pretrained={tmp_path / 'preset'},dtype=bfloat16,max_length=64"
    adapter = HarnessLM.create_from_arg_string(arguments, {"batch_size": "2", "device": "cuda:0"})
    assert (adapter.batch_size, adapter.max_length, adapter.eot_token_id) == (2, 64, 2)
    assert adapter.tok_encode("a") == [1, 100]
    assert adapter.tok_encode("a", add_special_tokens=False) == [100]


@needs_harness
def test_language_model_wrong_arguments_raise(model):
    from lm_eval.api.instance import Instance

    from keras_recurrent.lm_evaluation_harness import HarnessLM
    from tests.models.tiny import tiny_causal_lm

    for arguments, match in [
        ({"batch_size": "auto"}, "`batch_size` must be an integer, at least 1; got 'auto'"),
        ({"dtype": "bfloat16"}, "`dtype` is an argument of `from_preset`"),
    ]:
        with pytest.raises(ValueError, match=match):
            HarnessLM(model, **arguments)
    with pytest.raises(ValueError, match="`pretrained` must have a preprocessor"):
        HarnessLM(tiny_causal_lm(family="hgrn2"))
    for options, match in [
        ({"do_sample": True, "temperature": 0.7}, "generates greedily"),
        ({"num_beams": 4}, "options \\['num_beams'\\]"),
    ]:
        with pytest.raises(ValueError, match=match):
            HarnessLM(model).generate_until([Instance("generate_until", {}, ("a", options), 0)])
