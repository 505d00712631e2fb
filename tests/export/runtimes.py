"""Runtimes of exported files, without Keras and without this package.

Each function has `{name: array}` as inputs and returns a list of arrays.
"""

import os

# Set by `make test-export`, where a missing runtime is a failure.
INSTALLED = os.environ.get("EXPORT_RUNTIMES") == "installed"


def onnx(path, inputs):
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(path, options)
    return session.run(None, {i.name: inputs[i.name] for i in session.get_inputs()})


def openvino(path, inputs, precision="f32"):
    """precision: dtype of the computation. If None, the plugin chooses."""
    import openvino

    options = {} if precision is None else {"INFERENCE_PRECISION_HINT": precision}
    compiled = openvino.Core().compile_model(path, "CPU", options)
    names = [i.get_any_name() for i in compiled.inputs]
    if not inputs.keys() >= set(names):  # Keras on torch loses the names, not the order
        names = list(inputs)
    results = compiled([inputs[name] for name in names])
    return [results[output] for output in compiled.outputs]


def litert(path, inputs):
    from ai_edge_litert.interpreter import Interpreter

    outputs = Interpreter(model_path=path).get_signature_runner()(**inputs)
    return [outputs[name] for name in sorted(outputs, key=lambda name: (len(name), name))]
