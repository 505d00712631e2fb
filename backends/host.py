"""Facts about the process, set by `keras_recurrent/dispatch.py`: nothing here imports Keras.

`framework` is the name of the Keras backend. `triton_would_crash()` returns True if importing
Triton would end the process.
"""

framework = ""


def triton_would_crash():
    return False


def configure(keras_backend, would_crash):
    """Sets both facts; called before any implementation is imported."""
    global framework, triton_would_crash
    framework, triton_would_crash = keras_backend, would_crash
