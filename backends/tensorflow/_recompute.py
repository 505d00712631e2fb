"""What recomputing in the backward pass needs on TensorFlow: an order of reads and updates."""

import tensorflow as tf


@tf.custom_gradient
def gradients_after(*outputs):
    """The outputs of a recomputed layer, as a list. Gradients wait until all of them are there.

    A weight must be trained after all reads of it. TensorFlow says so in the graph, but without XLA
    its optimizer of graphs (Grappler) drops an order that a longer path implies, also a path from
    one input of an `IdentityN` to another's output, and then takes the `IdentityN` apart and such
    a path with it. All gradients go through one. So a weight that is read once more, only for the
    gradients of others, could be trained first. Here its own gradient waits for that read too.
    """

    def gradient(*gradients):
        with tf.control_dependencies(outputs):
            return [tf.identity(each) for each in gradients]

    return list(outputs), gradient
