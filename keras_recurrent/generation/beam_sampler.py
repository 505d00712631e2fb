"""The sampler of beam search."""

import keras
import keras_hub

from keras_recurrent.checks.arguments import (
    check_boolean,
    check_positive_integer,
    is_finite_number,
)


@keras.saving.register_keras_serializable(package="keras_recurrent")
class BeamSampler(keras_hub.samplers.Sampler):
    """Beam search: approximates the most probable sequence by keeping the best candidates.

    Each step extends the `num_beams` active beams of a prompt by one token and ranks the
    candidates. A candidate among the best `num_beams` that ends, at a stop token or at the maximum
    length, is finished and stored with its score. The best unfinished candidates become the new
    beams. The search returns the finished sequence with the highest score. Each prompt of a batch
    gets the result that it gets alone, whatever the lengths of the others.

    The score of a sequence is `sum(log p) / n ** length_penalty`, in float32, where the sum is over
    its n new tokens including the stop token. Scores and the end of a search are those of beam
    search in transformers.

    `compile(sampler="beam")` uses this class with its defaults, and KerasHub's `BeamSampler` is
    converted to it.

    Args:
        num_beams: integer, number of sequences that are kept for each prompt. Time and memory of a
            step are those of a batch `num_beams` times as large.
        length_penalty: number. Above 0, longer sequences get higher scores, since logarithms of
            probabilities are negative; below 0, shorter ones. 0: the scores are `sum(log p)`.
        early_stopping: stopping rule, once `num_beams` sequences are finished. True: stop at once.
            False: stop when the current score of the best active beam is at most the lowest
            finished score. `"never"`: stop when no active beam can exceed it at any length.
        return_all_beams: boolean, True makes `generate` return a `GenerationOutput` of all
            finished sequences of each prompt with their `scores`, the best first: `num_beams`, or
            fewer if there are no more.

    Raises:
        ValueError: an argument is out of range.

    Example: the two best continuations.

    >>> from keras_recurrent.models import GriffinCausalLM
    >>> from keras_recurrent.samplers import BeamSampler
    >>> model = GriffinCausalLM.from_preset("hawk_tiny", num_layers=1)
    >>> model.compile(sampler=BeamSampler(num_beams=2, return_all_beams=True))
    >>> output = model.generate(["All happy", "To be"], max_new_tokens=4)
    >>> [len(texts) for texts in output.texts], output.scores[0][0] > output.scores[0][1]
    ([2, 2], True)
    """

    def __init__(
        self, num_beams=5, *, length_penalty=1.0, early_stopping=False, return_all_beams=False
    ):
        super().__init__()
        check_positive_integer("num_beams", num_beams)
        if not is_finite_number(length_penalty):
            raise ValueError(f"`length_penalty` must be a finite number; got {length_penalty!r}.")
        if not isinstance(early_stopping, bool) and early_stopping != "never":
            raise ValueError(
                f'`early_stopping` must be True, False or "never"; got {early_stopping!r}.'
            )
        check_boolean("return_all_beams", return_all_beams)
        self.num_beams, self.length_penalty = int(num_beams), float(length_penalty)
        self.early_stopping, self.return_all_beams = early_stopping, bool(return_all_beams)

    def __call__(self, *args, **kwargs):
        raise ValueError(
            "`keras_recurrent.samplers.BeamSampler` works in `generate` of the language models of "
            "keras_recurrent. For other models, use `keras_hub.samplers.BeamSampler`."
        )

    def get_config(self):
        names = "num_beams", "length_penalty", "early_stopping", "return_all_beams"
        return {name: getattr(self, name) for name in names}


def convert_beam_sampler(sampler):
    """Returns KerasHub's `BeamSampler` as a `BeamSampler`, and other samplers unchanged.

    Raises:
        ValueError: the sampler has a `temperature`, or is of a subclass.
    """
    if not isinstance(sampler, keras_hub.samplers.BeamSampler):
        return sampler
    if type(sampler) is not keras_hub.samplers.BeamSampler:
        raise ValueError(
            f"`sampler` must not be of a subclass of KerasHub's BeamSampler; got a "
            f"{type(sampler).__name__}. Use `keras_recurrent.samplers.BeamSampler`."
        )
    if sampler.temperature != 1:
        raise ValueError(
            "`sampler`: `temperature` of BeamSampler must be 1, since beam search compares the "
            f"probabilities of the model; got {sampler.temperature!r}. Leave it out."
        )
    return BeamSampler(sampler.num_beams, return_all_beams=sampler.return_all_beams)
