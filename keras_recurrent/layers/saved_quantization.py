"""Quantized sublayers in the configuration of a layer or backbone."""

import re

from keras.dtype_policies import DTypePolicy, DTypePolicyMap, deserialize
from keras.saving import deserialize_keras_object, serialize_keras_object


class SavedQuantization:
    """Mixin of layers and backbones whose configuration tells how sublayers are quantized.

    Keras restores the quantization of layers that are saved themselves, but not of the sublayers of
    another layer. KerasHub restores the dtype policies of a backbone's sublayers, but not the
    quantizers of their inputs, nor the policy of the backbone.
    """

    _dtype_policy: DTypePolicy
    _saved_quantizers: dict | None = None  # {path of a sublayer: quantizer of its inputs, or None}

    def get_config(self):
        own = self._dtype_policy
        layers = [layer for layer in _sublayers(self) if layer.quantization_mode is not None]
        if not layers:
            return super().get_config()  # type: ignore[misc]
        if not isinstance(own, DTypePolicyMap):
            # Not a default policy of None, with which Keras erases the dtypes of the live policies.
            policies = {self._policy_key(layer): layer.dtype_policy for layer in layers}
            self._dtype_policy = DTypePolicyMap(own.name, policies)
        try:
            config = super().get_config()  # type: ignore[misc]
        finally:
            self._dtype_policy = own
        config["activation_quantizers"] = {
            self._path_inside(layer): serialize_keras_object(layer.inputs_quantizer)
            for layer in layers
            if hasattr(layer, "inputs_quantizer")
        }
        return config

    @classmethod
    def from_config(cls, config):
        config = dict(config)
        quantizers = config.pop("activation_quantizers", {})
        policy = config.get("dtype")
        policy = deserialize(policy) if isinstance(policy, dict) else policy
        if isinstance(policy, DTypePolicyMap):
            config["dtype"] = policy
        layer = super().from_config(config)  # type: ignore[misc]
        if isinstance(policy, DTypePolicyMap) and any(p.quantization_mode for p in policy.values()):
            layer._saved_quantizers = {
                path: deserialize_keras_object(quantizer) for path, quantizer in quantizers.items()
            }
            layer._restore_quantization()
        return layer

    def _post_build(self):
        super()._post_build()  # type: ignore[misc]
        self._restore_quantization()

    def _restore_quantization(self):
        """Gives each sublayer the policy and quantizer that it had, once it is built."""
        quantizers = self._saved_quantizers
        if quantizers is None or not self.built:  # type: ignore[attr-defined]
            return
        for layer in (self, *_sublayers(self)):
            policy = layer._dtype_policy
            # Keras cannot save a layer whose quantized policy is in a map.
            if isinstance(policy, DTypePolicyMap):
                layer._dtype_policy = policy[layer.path or ""]
            path = self._path_inside(layer)
            if path in quantizers:
                layer.inputs_quantizer = quantizers[path]

    def _path_inside(self, layer):
        """Returns the path of a sublayer without the path of the model around this layer.

        The sublayers of a backbone are built before it, so their paths do not contain its path.
        """
        outer = self.path or ""  # type: ignore[attr-defined]
        is_inside = layer.path is not None and layer.path.startswith(f"{outer}/")
        return layer.path[outer.rfind("/") + 1 :] if is_inside else layer.path

    def _policy_key(self, layer):
        """Returns the key of a sublayer in the `DTypePolicyMap`, a regular expression.

        Inside a `Sequential`, paths begin with the model's name, except while a file is loaded.
        """
        inside = self._path_inside(layer)
        return inside if inside == layer.path else f"(.*/)?{re.escape(inside)}"


def _sublayers(layer):
    return layer._flatten_layers(include_self=False)
