"""Files of text in pieces, each of which can be read without those before it."""

import json
import os
from typing import NamedTuple

# Bytes of a piece. It has all documents that begin in it, and is read to the end of the last.
PIECE = 256 * 1024
JSON_LINES = (".jsonl", ".ndjson")
OTHER_FORMATS = (
    *(".gz", ".bz2", ".xz", ".zst", ".zip", ".tar"),
    *(".parquet", ".arrow", ".arrayrecord", ".tfrecord", ".json", ".csv"),
)


class Piece(NamedTuple):
    """Bytes of a file, from `begin` up to `end`."""

    path: str
    begin: int
    end: int


def pieces_of(paths):
    """The `Piece`s of all files, in order.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: a file of another format.
    """
    found = []
    for path in paths:
        if not os.path.isfile(path):
            raise FileNotFoundError(f"`documents`: there is no file {path!r}.")
        if path.lower().endswith(OTHER_FORMATS):
            raise ValueError(
                f"`documents` must be files of text, a document a line, or `.jsonl`; got {path!r}. "
                "Make text of it, or pass a dataset of grain that yields strings, such as "
                "`grain.MapDataset.source(paths).map(read)`."
            )
        size = os.path.getsize(path)
        found += [Piece(path, begin, min(begin + PIECE, size)) for begin in range(0, size, PIECE)]
    return found


def check_some_text(paths):
    """Raises for files of empty lines alone, in which a reader without end would look for ever.

    Raises:
        ValueError: no file has a line that is not empty.
    """
    for path in paths:
        with open(path, "rb") as file:
            if any(line.strip() for line in file):
                return
    raise ValueError(f"`documents` holds no text: {', '.join(map(repr, paths))}.")


def documents_of(piece):
    """The strings of the lines that begin in a piece, without empty ones.

    Raises:
        ValueError: a line that is not UTF-8, or, in a file of JSON, has no string "text".
    """
    documents = []
    with open(piece.path, "rb") as file:
        if piece.begin:  # the line that begins before belongs to the piece before
            file.seek(piece.begin - 1)
            file.readline()
        while (at := file.tell()) < piece.end:
            line = file.readline()
            if line.strip():
                documents.append(_document(line, piece.path, at))
    return documents


def _document(line, path, at):
    try:
        text = line.decode("utf-8").rstrip("\r\n")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{path!r} is not UTF-8 in the line that begins at byte {at} ({error.reason}). Write "
            "it anew in UTF-8."
        ) from error
    if not path.lower().endswith(JSON_LINES):
        return text
    try:
        content = json.loads(text)
    except ValueError as error:
        raise ValueError(f"{path!r}: the line that begins at byte {at} is not JSON.") from error
    if not isinstance(content, dict) or not isinstance(content.get("text"), str):
        raise ValueError(
            f'{path!r}: the line that begins at byte {at} must be an object with a string "text".'
        )
    return content["text"]
