"""RecurrentGemma's checkpoint, compared with DeepMind's program and with transformers."""

import numpy as np
import pytest

from keras_recurrent.models.griffin.checkpoint import RecurrentGemma
from tests.checkpoints import golden

# Two float32 programs that sum in different orders; a wrong constant shows at 1e-4 and above.
ROUNDING = 3e-6


@pytest.fixture(scope="module")
def model():
    return golden.model()


@pytest.fixture(scope="module")
def expected():
    return golden.arrays()


def test_logits_of_packed_documents_match_the_original(model, expected):
    """A packed document reads the state or the keys of another."""
    segment_ids = np.cumsum(expected["packed_positions"] == 0, axis=1, dtype="int32")
    logits = golden.logits(model, expected["token_ids"], segment_ids=segment_ids)
    assert golden.relative_error(logits, expected["packed_logits"]) < ROUNDING


@pytest.mark.once
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_export_loaded_by_transformers_matches_the_original(model, tmp_path, expected):
    """transformers computes other logits from an export, for example beyond the window."""
    torch = pytest.importorskip("torch")
    # Releases before 5 ignore the window in a forward pass.
    transformers = pytest.importorskip("transformers", minversion="5.0")
    model.export_to_transformers(tmp_path / "export")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "export")
    token_ids = torch.tensor(expected["token_ids"], dtype=torch.long)
    with torch.no_grad():
        logits = loaded(token_ids, use_cache=False).logits
    assert golden.relative_error(logits.numpy(), expected["logits"]) < 10 * ROUNDING


@pytest.mark.once
def test_config_without_meaning_of_the_window_warns_and_reads_as_published(model, tmp_path):
    """An export has the `attention_window_size` of published files, which is one less.

    In transformers the window includes the current token; published files, and the golden one,
    count only the tokens before it.
    """
    model.export_to_transformers(tmp_path / "export")
    config = golden.read_config(tmp_path / "export")
    read = RecurrentGemma().backbone_arguments
    assert config["attention_window_size"] == golden.read_config()["attention_window_size"] + 1
    assert read(config, "export")["sliding_window"] == model.backbone.sliding_window == 17
    assert config.pop("window_includes_current_token") is True
    with pytest.warns(UserWarning, match=r"without does not say .*'window_includes_current_token'"):
        assert read(config, "without")["sliding_window"] == 18
    read({**config, "block_types": ["recurrent"]}, "a config without attention")  # does not warn
    with pytest.raises(ValueError, match=r"'window_includes_current_token' is 1 .*true or false"):
        read({**config, "window_includes_current_token": 1}, "config.json")
