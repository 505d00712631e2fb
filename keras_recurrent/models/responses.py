"""Documents of prompts with responses and of conversations, and their tokens in the loss."""

import itertools
import warnings

import numpy as np


def pair_documents(pairs, tokenize, start, end, limit=None):
    """Tokenizes prompts with their responses; the loss includes responses and end tokens.

    Args:
        pairs: a list of `(prompt, response)`, two strings each.
        tokenize: function of the parts of a text and positions in it; see `tokenize_parts`.
        start, end: lists of integers, the special tokens before and after each document, or none.
        limit: integer, the largest number of tokens in a document. Longer ones keep their beginning
            and the end token, which is not in the loss if no token of the response is left.
            None: no limit.

    Returns:
        A list of documents, int32 arrays `[length]`, and a list of boolean arrays, True at tokens
        in the loss.
    """
    documents, in_loss = [], []
    for prompt, response in pairs:
        ids, (first,) = tokenize([prompt + response], [len(prompt)])
        last = len(ids)
        if limit is not None:
            ids = ids[: limit - len(start) - len(end)]
        documents.append(np.array([*start, *ids, *end], "int32"))
        is_cut = len(ids) <= first < last
        mask = np.arange(len(documents[-1])) >= len(start) + first
        in_loss.append(mask & (not is_cut))
    return documents, in_loss


def conversation_documents(conversations, render, tokenize, start, stop_token_ids, limit=None):
    """Renders and tokenizes conversations; the loss includes the turns of the assistant.

    Args:
        conversations: a list of lists of messages.
        render: function of messages and `ends` that returns texts; see `apply_template`.
        tokenize: as in `pair_documents`.
        start: list of integers, the special token before documents whose template writes none.
        stop_token_ids: integers, tokens that end a turn. The loss leaves out what the template
            writes after the last one of a turn, such as a newline.
        limit: as in `pair_documents`. Longer documents are cut off.

    Returns:
        As `pair_documents`.
    """
    documents, in_loss = [], []
    for number, messages in enumerate(conversations):
        prompt, positions = find_turns(messages, render, number)
        ids, indices = tokenize(prompt.parts, positions)
        mask = np.zeros(len(ids), "bool")
        for first, last in zip(indices[::2], indices[1::2], strict=True):
            (stops,) = np.nonzero(np.isin(ids[first:last], stop_token_ids))
            mask[first : first + stops[-1] + 1 if len(stops) else last] = True
        if start and ids[:1] != start:
            ids, mask = [*start, *ids], np.insert(mask, 0, False)
        documents.append(np.array(ids, "int32")[:limit])
        in_loss.append(mask[:limit])
    return documents, in_loss


def find_turns(messages, render, number=0):
    """Renders a conversation, and finds the beginning and end of each turn of the assistant.

    A turn begins after the generation prompt of the messages before it, and ends where the text of
    the messages up to it does. Messages after the last turn of the assistant are left out.

    Args:
        messages: a list of messages, one of the assistant at least.
        render: as in `conversation_documents`.
        number: integer, the conversation in an error.

    Returns:
        The text, a `ChatPrompt`, and a list of positions, the beginning and end of each turn.

    Raises:
        ValueError: the template is not prefix-preserving: the text of some messages does not begin
            with that of fewer.
    """
    ends = [
        (index + is_response, not is_response)
        for index, message in enumerate(messages)
        if message["role"] == "assistant"
        for is_response in (False, True)
    ]
    texts = render(messages, ends)
    for (before, text), (end, _) in zip(itertools.pairwise(texts), ends[1:], strict=True):
        if not text.startswith(before):
            raise ValueError(_not_prefix_preserving(number, end, before, text))
    return texts[-1], list(map(len, texts))


def _not_prefix_preserving(number, end, before, text):
    at = next((i for i, (a, b) in enumerate(zip(before, text, strict=False)) if a != b), len(text))
    here = slice(max(0, at - 20), at + 20)
    return (
        "The chat template must be prefix-preserving, or the turns of the assistant are not known: "
        f"with {end} messages of conversation {number}, the text of earlier ones changes from "
        f"{before[here]!r} to {text[here]!r}. Train on a dictionary of `prompts` and "
        "`responses`, or use a template that only adds text for each message."
    )


def warn_without_responses(in_loss, sequence_length):
    """Warns if a document has no label in the loss."""
    if any(not mask[1:].any() for mask in in_loss):
        # A constant text, which Python shows once.
        warnings.warn(
            "Some samples have no token of a response in the first tokens that fit into "
            f"`sequence_length={sequence_length}`, so they add nothing to the loss. Use a larger "
            "`sequence_length`, or a preprocessor with `packed=True`.",
            stacklevel=2,
        )
