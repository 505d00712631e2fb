"""Runtimes of exported files, without Keras and without this package.

Each function has `{name: array}` as inputs and returns a list of arrays. A file is loaded once.
"""

import functools
import os

# Set by `make test-export`, where a missing runtime is a failure.
INSTALLED = os.environ.get("EXPORT_RUNTIMES") == "installed"


@functools.cache
def onnx_session(path):
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    return onnxruntime.InferenceSession(path, options)


def onnx(path, inputs):
    session = onnx_session(path)
    return session.run(None, {i.name: inputs[i.name] for i in session.get_inputs()})


@functools.cache
def openvino_model(path):
    import openvino

    return openvino.Core().compile_model(path, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})


def openvino(path, inputs):
    compiled = openvino_model(path)
    names = [i.get_any_name() for i in compiled.inputs]
    if not inputs.keys() >= set(names):  # Keras on torch loses the names, not the order
        names = list(inputs)
    results = compiled([inputs[name] for name in names])
    return [results[output] for output in compiled.outputs]


def litert(path, inputs):
    from ai_edge_litert.interpreter import Interpreter

    outputs = Interpreter(model_path=path).get_signature_runner()(**inputs)
    return [outputs[name] for name in sorted(outputs, key=lambda name: (len(name), name))]
