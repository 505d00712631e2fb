"""Trains several models of one shape in parallel, such as the seeds of one model."""

import keras
import numpy as np
from keras import ops
from runs import PASSES, text_batches

from keras_recurrent import exclude_from_weight_decay
from keras_recurrent.evaluation.position_loss import no_gradients
from keras_recurrent.ops import token_crossentropy


def train(models, optimizer, batches, logits=None, every=None, watch=None):
    """Trains models of one shape on tokens, each on its own batches.

    JAX on a GPU trains several models in one program, because a single small model leaves most of
    the GPU idle. On a CPU, where batched products of small matrices are slow, and on other
    backends, the models train one after another within each step.

    Args:
        models: language models of this package that differ in their weights; other models need
            `logits`.
        optimizer: a Keras optimizer; each model gets a copy.
        batches: an iterable of tuples of arrays `[models, B, T]`: tokens, labels and, optionally,
            sample weights.
        logits: a function of a model and tokens that returns logits; None uses those of a
            language model.
        every, watch: `watch(step)` is called after each `every` steps and after the last one, with
            the current weights in the models. Training ends when it returns True.

    Returns:
        The mean loss of each model over the last tenth of the batches, a list of floats.
    """
    optimizers = [type(optimizer).from_config(optimizer.get_config()) for _ in models]
    for model, own in zip(models, optimizers, strict=True):
        exclude_from_weight_decay(own, model)
        own.build(model.trainable_variables)
    start = _compile_steps if keras.config.backend() == "jax" else _keras_steps
    step, finish = start(models, optimizers, logits)
    losses = []
    for batch in batches:
        losses.append(step(*batch))
        if watch and len(losses) % every == 0:
            finish()
            if watch(len(losses)):
                break
    finish()
    if watch and len(losses) % every:
        watch(len(losses))
    last = losses[-max(1, len(losses) // 10) :]
    return np.mean([[float(loss) for loss in step] for step in last], axis=0).tolist()


def train_on_text(models, seeds, text, size, length, logits=None):
    """Trains models on bytes of text. Returns a dict of results for each; see `train`.

    size: has `tokens` per step, `steps` (at most two passes are made), and `learning_rate`.
    """
    steps = min(size.steps, PASSES * len(text) // size.tokens)
    rows = text_batches(text, seeds, steps, length, size.tokens)
    optimizer = adamw(size.learning_rate, steps // 10, steps, end=0.1)
    lines = results_of(models, train(models, optimizer, rows, logits))
    return [{**line, "steps": steps, "bytes": steps * size.tokens} for line in lines]


def results_of(models, losses):
    """Returns a dict of results for each model: its parameters and training loss."""
    return [
        {"parameters": model.count_params(), "training_loss": round(loss, 4)}
        for model, loss in zip(models, losses, strict=True)
    ]


def adamw(rate, warmup, decay=1, end=1.0):
    """Returns AdamW with linear warmup, then cosine decay to `end * rate` over `decay` steps."""
    return keras.optimizers.AdamW(
        keras.optimizers.schedules.CosineDecay(
            0.0, decay, alpha=end, warmup_target=rate, warmup_steps=warmup
        ),
        weight_decay=0.01,
        global_clipnorm=1.0,
    )


def predictor(first, logits=None, batch_size=64):
    """Returns a function of a model and tokens `[N, T]` that predicts the most likely next tokens.

    The models must have the shape of `first`.
    """
    logits = logits or language_model_logits
    return _for_any_model(first, lambda model, x: ops.argmax(logits(model, x), axis=-1), batch_size)


def token_losses(first, logits=None, batch_size=64):
    """Returns a function of a model and tokens `[N, T]` that gives losses `[N, T - 1]`.

    The first token of a sequence has no loss. The models must have the shape of `first`.
    """
    logits = logits or language_model_logits
    return _for_any_model(
        first, lambda model, x: token_crossentropy(logits(model, x[:, :-1]), x[:, 1:]), batch_size
    )


def _for_any_model(first, function, batch_size):
    """Returns a function that applies `function` in batches; models share a program on JAX."""
    program = function
    if keras.config.backend() == "jax":
        import jax

        @jax.jit
        def stateless(weights, tokens):
            with keras.StatelessScope(list(zip(first.variables, weights, strict=True))):
                return function(first, tokens)

        def program(model, tokens):
            return stateless([v.value for v in model.variables], tokens)

    def compute(model, tokens):
        starts = range(0, len(tokens), batch_size)
        with no_gradients():
            found = [program(model, tokens[i : i + batch_size]) for i in starts]
        return np.concatenate([ops.convert_to_numpy(part) for part in found])

    return compute


def apply(model, tokens):
    """Returns the logits of a functional model."""
    return model(tokens)


def language_model_logits(model, tokens):
    hidden_states, _ = model.backbone.hidden_states(tokens)
    return model.backbone.token_embedding(hidden_states, reverse=True)


def _compile_steps(models, optimizers, logits=None, side_by_side=None):
    import jax

    model, optimizer = models[0], optimizers[0]
    logits = logits or language_model_logits
    if side_by_side is None:
        side_by_side = len(models) > 1 and jax.default_backend() != "cpu"

    def loss(weights, tokens, following, counts=1.0):
        with keras.StatelessScope(list(zip(model.trainable_variables, weights, strict=True))):
            return ops.mean(token_crossentropy(logits(model, tokens), following) * counts)

    def program(state, *batch):
        weights, memory = state
        value, gradients = jax.value_and_grad(loss)(weights, *batch)
        return tuple(optimizer.stateless_apply(memory, gradients, weights)), value

    # The state is donated to the program, so it must not share memory with the variables.
    def copy(tree):
        return jax.tree.map(lambda v: jax.numpy.array(v, copy=True), tree)

    states = [
        copy(tuple([v.value for v in variables] for variables in pair))
        for pair in zip(
            (model.trainable_variables for model in models),
            (own.variables for own in optimizers),
            strict=True,
        )
    ]
    if side_by_side:
        states = [jax.tree.map(lambda *same: jax.numpy.stack(same), *states)]
        program = jax.vmap(program)
    program = jax.jit(program, donate_argnums=0)

    def step(*batch):
        values = []
        for i, part in enumerate([batch] if side_by_side else zip(*batch, strict=True)):
            states[i], value = program(states[i], *part)
            values.append(value)
        return values[0] if side_by_side else values

    def finish():
        for i, model in enumerate(models):
            weights = [v[i] for v in states[0][0]] if side_by_side else copy(states[i][0])
            for variable, value in zip(model.trainable_variables, weights, strict=True):
                variable.assign(value)

    return step, finish


def _keras_steps(models, optimizers, logits=None):
    for model, own in zip(models, optimizers, strict=True):
        if logits is None:
            model.compile(own, model.loss)
        else:
            model.compile(own, keras.losses.SparseCategoricalCrossentropy(from_logits=True))

    def step(*batch):
        losses = []
        for model, x, *rest in zip(models, *batch, strict=True):
            if logits is None:
                x = {"token_ids": x, "padding_mask": np.ones_like(x)}
            losses.append(model.train_on_batch(x, *rest, return_dict=True)["loss"])
        return losses

    return step, lambda: None
