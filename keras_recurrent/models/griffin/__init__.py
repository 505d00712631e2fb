"""Hawk and Griffin."""

from keras_recurrent.models.griffin import griffin_presets

griffin_presets.register()
