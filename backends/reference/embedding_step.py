"""Token embeddings of a decoding step, with each token's kind and position and the next state.

A row whose segment is negative has seen no token: its token starts a document, segment 0. Otherwise
the token continues its segment.
"""

import numpy as np

from ..constants import CONTINUES, STARTS
from ._common import cast


def embedding_step(table, token_ids, segment=None, position=None, scale=1.0, dtype=np.float64):
    """table: [V, D]; token_ids, segment, position: integers [B]; a negative id counts from the end.

    Returns (scale * embeddings [B, D], token kinds int8 [B], positions, the next segments and
    positions), None for those whose argument is None.
    """
    (table,) = cast(dtype, table)
    kind = next_segment = next_position = None
    if segment is not None:
        kind = np.where(segment < 0, STARTS, CONTINUES).astype(np.int8)
        next_segment = np.maximum(segment, 0)
    if position is not None:
        next_position = position + 1
    return table[token_ids] * scale, kind, position, next_segment, next_position
