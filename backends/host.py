"""Facts about the process that `keras_recurrent/dispatch.py` hands in: nothing here imports Keras.

`framework` is the name of the Keras backend. `triton_would_crash()` returns True if importing
Triton would end the process.
"""

framework = ""


def triton_would_crash():
    return False


def configure(keras_backend, would_crash):
    """Sets both, before a folder of an implementation is imported."""
    global framework, triton_would_crash
    framework, triton_would_crash = keras_backend, would_crash
