"""Loss of a language model as a function of the position in the text."""

from keras_recurrent.evaluation.position_loss import LossByPosition, loss_by_position

__all__ = ["LossByPosition", "loss_by_position"]
