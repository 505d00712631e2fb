"""Documents as sequences: padded, or several packed into one."""

import numpy as np

# Older rows have little room left; the limit keeps packing linear in time.
OPEN_ROWS = 32


def pack_documents(documents, sequence_length, pad_token_id, in_loss=None):
    """Packs documents by first-fit, each into the first sequence with room.

    A document longer than a sequence is split into chunks. The label of the last token of a chunk
    is the first token of the next one, so each token except a document's first is a label once.

    Args:
        documents: a list of integer arrays `[length]`.
        sequence_length: integer, tokens in a sequence.
        pad_token_id: integer, the token at padding.
        in_loss: a list of boolean arrays `[length]`, False at tokens that are excluded from the
            loss. None: all are included.

    Returns:
        Arrays `[rows, sequence_length]`, at least one row: token ids (int32), True at tokens
        (bool), the number of the document in its row, from 1, and 0 at padding (int32), the next
        token of the document (int32), and True where the loss includes it (bool).
    """
    chunks = []
    for tokens, mask in zip(documents, in_loss or map(_all_true, documents), strict=True):
        # A remaining last token is a label already and needs no chunk.
        for begin in range(0, max(len(tokens) - 1, min(len(tokens), 1)), sequence_length):
            chunks.append(_chunk(tokens, mask, begin, sequence_length))

    rows, open_rows = [[]], {0: sequence_length}
    for inputs, labels, has_label in chunks:
        row = next((r for r, room in open_rows.items() if room >= len(inputs)), None)
        if row is None:
            row = len(rows)
            rows.append([])
            open_rows[row] = sequence_length
            if len(open_rows) > OPEN_ROWS:
                del open_rows[min(open_rows)]
        rows[row].append((inputs, labels, has_label))
        open_rows[row] -= len(inputs)
        if open_rows[row] == 0:
            del open_rows[row]

    return _as_arrays(rows, sequence_length, pad_token_id)


def pad_documents(documents, sequence_length, pad_token_id, in_loss):
    """Pads documents to a sequence each, and truncates them after `sequence_length + 1` tokens.

    Arguments and results are those of `pack_documents`.
    """
    rows = [
        [_chunk(tokens, mask, 0, sequence_length)]
        for tokens, mask in zip(documents, in_loss, strict=True)
    ]
    return _as_arrays(rows, sequence_length, pad_token_id)


def _all_true(tokens):
    return np.ones(len(tokens), "bool")


def _chunk(tokens, in_loss, begin, length):
    """Returns a chunk of a document as tokens, their labels, and True at labels in the loss."""
    end = begin + length
    return tokens[begin:end], tokens[begin + 1 : end + 1], in_loss[begin + 1 : end + 1]


def _as_arrays(rows, sequence_length, pad_token_id):
    """Concatenates the chunks of each row; see `pack_documents`."""
    shape = (len(rows), sequence_length)
    token_ids = np.full(shape, pad_token_id, "int32")
    label_ids = token_ids.copy()
    segment_ids, has_label = np.zeros(shape, "int32"), np.zeros(shape, "bool")
    for row, row_chunks in enumerate(rows):
        offset = 0
        for segment, (inputs, labels, in_loss) in enumerate(row_chunks, start=1):
            token_ids[row, offset : offset + len(inputs)] = inputs
            segment_ids[row, offset : offset + len(inputs)] = segment
            label_ids[row, offset : offset + len(labels)] = labels
            has_label[row, offset : offset + len(labels)] = in_loss
            offset += len(inputs)
    return token_ids, segment_ids > 0, segment_ids, label_ids, has_label
