"""TransNormerLLM."""

from keras_recurrent.models.transnormer import transnormer_presets

transnormer_presets.register()
