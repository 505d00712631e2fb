"""Learning rate schedules of the papers that Keras does not have."""

from keras_recurrent.training.inverse_square_root import InverseSquareRoot

__all__ = ["InverseSquareRoot"]
