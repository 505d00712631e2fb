"""Text files in chunks that can be read independently of each other."""

import json
import os
from typing import NamedTuple

# Size of a chunk. Reading it yields the documents that begin in it, the last one to its end.
CHUNK_BYTES = 256 * 1024
JSON_LINES = (".jsonl", ".ndjson")
OTHER_FORMATS = (
    *(".gz", ".bz2", ".xz", ".zst", ".zip", ".tar"),
    *(".parquet", ".arrow", ".arrayrecord", ".tfrecord", ".json", ".csv"),
)


class Chunk(NamedTuple):
    """Bytes of a file, from `begin` up to `end`."""

    path: str
    begin: int
    end: int


def split_files(paths):
    """Returns the `Chunk`s of all files, in order.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: a file has another format.
    """
    chunks = []
    for path in paths:
        if not os.path.isfile(path):
            raise FileNotFoundError(f"`documents`: there is no file {path!r}.")
        if path.lower().endswith(OTHER_FORMATS):
            raise ValueError(
                f"`documents` must be files of text, a document a line, or `.jsonl`; got {path!r}. "
                "Convert it to text, or pass a dataset of grain that yields strings, such as "
                "`grain.MapDataset.source(paths).map(read)`."
            )
        size = os.path.getsize(path)
        chunks += [
            Chunk(path, begin, min(begin + CHUNK_BYTES, size))
            for begin in range(0, size, CHUNK_BYTES)
        ]
    return chunks


def check_not_empty(paths):
    """Raises an error for files without text, on which an endless reader would never return.

    Raises:
        ValueError: no file has a line that is not empty.
    """
    for path in paths:
        with open(path, "rb") as file:
            if any(line.strip() for line in file):
                return
    raise ValueError(f"`documents` holds no text: {', '.join(map(repr, paths))}.")


def read_documents(chunk):
    """Returns the lines that begin in a chunk as strings, without empty ones.

    Raises:
        ValueError: a line is not UTF-8, or, in a JSON Lines file, has no string "text".
    """
    documents = []
    with open(chunk.path, "rb") as file:
        if chunk.begin:  # skip the line that begins in the previous chunk
            file.seek(chunk.begin - 1)
            file.readline()
        while (at := file.tell()) < chunk.end:
            line = file.readline()
            if line.strip():
                documents.append(_document(line, chunk.path, at))
    return documents


def _document(line, path, at):
    try:
        text = line.decode("utf-8").rstrip("\r\n")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{path!r} is not UTF-8 in the line that begins at byte {at} ({error.reason}). Save "
            "it as UTF-8."
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
