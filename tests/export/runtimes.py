"""What runs an exported file, without Keras and without this package: `{name: array}` in."""

import os

# `make test-export` says so: there, a runtime that is missing is a failure.
INSTALLED = os.environ.get("EXPORT_RUNTIMES") == "installed"


def onnx(path, given):
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(path, options)
    return session.run(None, {i.name: given[i.name] for i in session.get_inputs()})


def openvino(path, given, precision="f32"):
    """precision: what the plugin may compute in; None: what it likes."""
    import openvino

    wish = {} if precision is None else {"INFERENCE_PRECISION_HINT": precision}
    compiled = openvino.Core().compile_model(path, "CPU", wish)
    names = [i.get_any_name() for i in compiled.inputs]
    if not given.keys() >= set(names):  # Keras on torch loses the names, not the order
        names = list(given)
    results = compiled([given[name] for name in names])
    return [results[output] for output in compiled.outputs]


def litert(path, given):
    from ai_edge_litert.interpreter import Interpreter

    outputs = Interpreter(model_path=path).get_signature_runner()(**given)
    return [outputs[name] for name in sorted(outputs)]
