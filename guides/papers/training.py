"""Trains several models of one shape in parallel, such as the seeds of one model."""

import time

import keras
import numpy as np
from keras import ops
from runs import PASSES, text_batches

from keras_recurrent import exclude_from_weight_decay
from keras_recurrent.evaluation.position_loss import no_gradients
from keras_recurrent.ops import token_crossentropy


def train(models, optimizer, batches, every=None, watch=None):
    """Trains models of one shape on tokens, each on its own batches.

    JAX on a GPU trains several models at the same time, because a single small model leaves most
    of the GPU idle. On a CPU, where batched products of small matrices are slow, and on other
    backends, the models train one after another within each step.

    Args:
        models: language models of this package, or functional models that return logits; they
            differ in their weights.
        optimizer: a Keras optimizer; each model gets a copy.
        batches: an iterable of tuples of arrays `[models, B, T]`: tokens, labels and, optionally,
            sample weights.
        every, watch: `watch(step)` is called after each `every` steps and after the last one, with
            the current weights in the models. Training ends when it returns True.

    Returns:
        A dict for each model: its parameters, and its mean loss in the last tenth of the batches.
    """
    optimizers = [type(optimizer).from_config(optimizer.get_config()) for _ in models]
    for model, own in zip(models, optimizers, strict=True):
        exclude_from_weight_decay(own, model)
        own.build(model.trainable_variables)
    start = _compile_steps if keras.config.backend() == "jax" else _keras_steps
    step, finish = start(models, optimizers)
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
    means = np.mean([[float(loss) for loss in step] for step in last], axis=0).tolist()
    return [
        {"parameters": model.count_params(), "training_loss": round(loss, 4)}
        for model, loss in zip(models, means, strict=True)
    ]


def train_on_text(models, seeds, data, length, steps, tokens, rate, batch_size=64):
    """Trains models on bytes of text, in at most two passes, and tests them.

    Args:
        models: one model for each of `seeds`; see `train`.
        data: training text, and windows of held-out text `[N, T]`.
        length: bytes of a training sequence.
        steps, tokens, rate: number of steps, bytes of a step, and maximum learning rate.
        batch_size: number of windows of a test.

    Yields:
        For each model, a dict of results, and its losses by position of the windows `[T - 1]`.
    """
    text, windows, *_ = data
    steps = min(steps, PASSES * len(text) // tokens)
    start = time.perf_counter()
    optimizer = adamw(rate, steps // 10, steps)
    lines = train(models, optimizer, text_batches(text, seeds, steps, length, tokens))
    seconds = round(time.perf_counter() - start, 1)
    test = for_all_models(
        models[0],
        lambda model, x: token_crossentropy(logits_of(model, x[:, :-1]), x[:, 1:]),
        batch_size,
    )
    for line, model in zip(lines, models, strict=True):
        losses = test(model, windows).astype("float64").mean(axis=0)
        line |= {"steps": steps, "bytes": steps * tokens, "seconds": seconds}
        yield {**line, "loss": round(float(losses.mean()), 5)}, losses


def adamw(rate, warmup, steps):
    """Returns AdamW with linear warmup, then cosine decay to a tenth of the rate over `steps`."""
    return keras.optimizers.AdamW(
        keras.optimizers.schedules.CosineDecay(
            0.0, steps, alpha=0.1, warmup_target=rate, warmup_steps=warmup
        ),
        weight_decay=0.01,
        global_clipnorm=1.0,
    )


def predictor(first, batch_size=64):
    """Returns a function of a model and tokens `[N, T]` that predicts the most likely next tokens.

    The models must have the shape of `first`.
    """
    return for_all_models(
        first, lambda model, x: ops.argmax(logits_of(model, x), axis=-1), batch_size
    )


def for_all_models(first, function, batch_size):
    """Returns `function`, of a model and tokens, in batches; models share a program on JAX."""
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


def logits_of(model, tokens):
    """Returns the logits of a language model of this package, or of a functional model."""
    if not hasattr(model, "backbone"):
        return model(tokens)
    hidden_states, _ = model.backbone.hidden_states(tokens)
    return model.backbone.token_embedding(hidden_states, reverse=True)


def _compile_steps(models, optimizers, side_by_side=None):
    import jax

    model, optimizer = models[0], optimizers[0]
    if side_by_side is None:
        side_by_side = len(models) > 1 and jax.default_backend() != "cpu"

    def loss(weights, tokens, following, counts=1.0):
        with keras.StatelessScope(list(zip(model.trainable_variables, weights, strict=True))):
            return ops.mean(token_crossentropy(logits_of(model, tokens), following) * counts)

    def train_one(state, batch):
        weights, memory = state
        value, gradients = jax.value_and_grad(loss)(weights, *batch)
        return tuple(optimizer.stateless_apply(memory, gradients, weights)), value

    def train_all(*arguments):
        if side_by_side:
            return jax.vmap(train_one)(*arguments)
        return jax.lax.map(lambda pair: train_one(*pair), arguments)

    def stack(groups):
        """Returns the weights of all models, stacked."""
        return [jax.numpy.stack([v.value for v in same]) for same in zip(*groups, strict=True)]

    state = (
        stack(model.trainable_variables for model in models),
        stack(own.variables for own in optimizers),
    )
    program = jax.jit(train_all, donate_argnums=0)

    def step(*batch):
        nonlocal state
        state, losses = program(state, batch)
        return losses

    def finish():
        for i, model in enumerate(models):
            for variable, values in zip(model.trainable_variables, state[0], strict=True):
                variable.assign(values[i])

    return step, finish


def _keras_steps(models, optimizers):
    is_functional = not hasattr(models[0], "backbone")
    for model, own in zip(models, optimizers, strict=True):
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(own, loss if is_functional else model.loss)

    def step(*batch):
        losses = []
        for model, x, *rest in zip(models, *batch, strict=True):
            if not is_functional:
                x = {"token_ids": x, "padding_mask": np.ones_like(x)}
            losses.append(model.train_on_batch(x, *rest, return_dict=True)["loss"])
        return losses

    return step, lambda: None
