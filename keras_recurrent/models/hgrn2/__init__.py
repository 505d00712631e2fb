"""HGRN2."""

from keras_recurrent.models.hgrn2 import hgrn2_presets

hgrn2_presets.register()
