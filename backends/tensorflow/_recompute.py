"""Ordering of reads and updates of weights for rematerialized layers on TensorFlow."""

import tensorflow as tf


@tf.custom_gradient
def gradients_after(*outputs):
    """Outputs of a recomputed layer, as a list, whose gradients wait for all outputs.

    A weight must be updated after every read of it. The graph of TensorFlow has control edges for
    this. Without XLA its graph optimizer (Grappler) first drops an edge that a longer path implies,
    even a path from one input of an `IdentityN` to another output of it, and then splits the
    `IdentityN` and thereby cuts this path. All gradients pass through one `IdentityN`. So a weight
    that is read again, only to recompute the gradients of other weights, could be updated before
    that read. With this function, the gradient of the weight, and thus its update, waits for the
    read.
    """

    def gradient(*gradients):
        with tf.control_dependencies(outputs):
            return [tf.identity(each) for each in gradients]

    return list(outputs), gradient
