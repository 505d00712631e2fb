"""Compares training steps of small recurrent layers by sequence length, on one backend.

Prints JSON; `python benchmarks/cpu.py` runs it for every backend and makes a table.
"""

import json

import keras

from benchmarks.training_step import medians, training_step
from keras_recurrent.layers import HGRN2, RGLRU, RecurrentBlock

BATCH, WIDTH = 16, 32
LENGTHS = (8, 20, 64, 256, 1024, 4096)


def layers():
    return {
        "RecurrentBlock": RecurrentBlock(WIDTH),
        "RGLRU": RGLRU(),
        "HGRN2": HGRN2(expand_ratio=8),
        "GRU": keras.layers.GRU(WIDTH, return_sequences=True),
        "LSTM": keras.layers.LSTM(WIDTH, return_sequences=True),
    }


def main():
    rows = []
    for length in LENGTHS:
        steps = {
            name: training_step(layer, (BATCH, length, WIDTH)) for name, layer in layers().items()
        }
        rows.append({"length": length, **medians(steps, budget=2, least=3)})
    print(json.dumps({"backend": keras.backend.backend(), "rows": rows}))


if __name__ == "__main__":
    main()
