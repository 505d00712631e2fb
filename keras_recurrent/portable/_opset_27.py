"""Export to ONNX's operators for recurrences, `LinearAttention` and `CausalConvWithState`.

They are part of opset 27, but torch's exporter supports only opset 25. Models are therefore traced
with operators without a body. Each becomes a node of a private domain, and `upgrade` moves these
nodes to ONNX's domain and the model to opset 27. ONNX's operators have no padding: at padding, keys
and the logarithm of the decay are 0; at a document start, the decay is 0.
"""

import contextlib
import contextvars

from keras import ops

OPSET, EXPORTERS_OPSET = 27, 25
_DOMAIN = "keras_recurrent.onnx"
# Operators in use that changed in opset 26 or 27 only by supporting more dtypes.
_WIDENED = {"Range"}
_active = contextvars.ContextVar("opset 27", default=False)


@contextlib.contextmanager
def use_operators():
    """Context manager in which the portable operations use these operators."""
    token = _active.set(True)
    try:
        yield
    finally:
        _active.reset(token)


def is_active():
    return _active.get()


def linear_attention(q, k, v, log_f, state):
    """Computes `_linear_attention.linear_attention`; log_f is `LOG_OF_ZERO` at starts."""
    heads = q.shape[2]
    q, k, v, log_f = (ops.reshape(x, (*ops.shape(x)[:2], -1)) for x in (q, k, v, log_f))
    output, after = _torch_operators().linear_attention(q, k, v, state, log_f, heads)
    return ops.reshape(output, (*ops.shape(output)[:2], heads, state.shape[3])), after


def causal_conv1d(x, kernel, bias, state, activation):
    """x: [B, T, D]; kernel: [W, D], W of at least 2; bias: [D]; state: [B, W - 1, D]."""
    x, state = (ops.transpose(t, (0, 2, 1)) for t in (x, state))
    weight = ops.expand_dims(ops.transpose(kernel), 1)
    y, after = _torch_operators().causal_conv(x, weight, bias, state, activation or "none")
    return ops.transpose(y, (0, 2, 1)), ops.transpose(after, (0, 2, 1))


_library = None


def _torch_operators():
    """Returns the operators without a body, which torch can trace but not run."""
    global _library
    import torch

    if _library is None:
        _library = torch.library.Library("keras_recurrent_onnx", "DEF")
        _library.define(
            "linear_attention(Tensor q, Tensor k, Tensor v, Tensor state, Tensor log_f, int heads)"
            " -> (Tensor, Tensor)"
        )
        _library.define(
            "causal_conv(Tensor x, Tensor weight, Tensor bias, Tensor state, str activation)"
            " -> (Tensor, Tensor)"
        )

        @torch.library.register_fake("keras_recurrent_onnx::linear_attention")
        def _(q, k, v, state, log_f, heads):
            return torch.empty_like(v), torch.empty_like(state)

        @torch.library.register_fake("keras_recurrent_onnx::causal_conv")
        def _(x, weight, bias, state, activation):
            return torch.empty_like(x), torch.empty_like(state)

    return torch.ops.keras_recurrent_onnx


def translations():
    """Returns the `custom_translation_table` of `torch.onnx.export` for these operators."""
    linear, conv = _placeholder("LinearAttention"), _placeholder("CausalConvWithState")

    def linear_attention(q, k, v, state, log_f, heads: int):
        return linear(
            *(q, k, v, state, log_f),
            q_num_heads=heads,
            kv_num_heads=heads,
            scale=1.0,
            update_rule="gated",
        )

    def causal_conv(x, weight, bias, state, activation: str):
        return conv(x, weight, bias, state, activation=activation)

    operators = _torch_operators()
    return {
        operators.linear_attention.default: linear_attention,
        operators.causal_conv.default: causal_conv,
    }


def _placeholder(name):
    """Returns a copy of ONNX's operator `name` in the private domain."""
    import onnx
    from onnxscript import values

    real = onnx.defs.get_schema(name, OPSET)
    schema = onnx.defs.OpSchema(
        name,
        _DOMAIN,
        1,
        inputs=list(real.inputs),
        outputs=list(real.outputs),
        type_constraints=[
            (t.type_param_str, list(t.allowed_type_strs), "") for t in real.type_constraints
        ],
        attributes=list(real.attributes.values()),
    )
    return values.Op(values.Opset(_DOMAIN, 1), name, schema)


def upgrade(model):
    """Upgrades an `onnx_ir.Model` from the exporter's last opset to opset 27, in place."""
    import onnx

    for node in model.graph.all_nodes():
        if node.domain == _DOMAIN:
            node.domain, node.version = "", OPSET
        elif node.domain == "" and node.op_type not in _WIDENED:
            since = onnx.defs.get_schema(node.op_type, OPSET).since_version
            if since > model.opset_imports[""]:
                raise NotImplementedError(
                    f"`opset_version`: {node.op_type} of opset {model.opset_imports['']} has "
                    f"another meaning in {OPSET}. Leave `opset_version` out."
                )
    model.opset_imports.pop(_DOMAIN, None)
    model.opset_imports[""] = OPSET
