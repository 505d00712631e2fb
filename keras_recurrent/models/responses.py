"""Documents of prompts with responses and of conversations, and their tokens in the loss."""

import warnings

import numpy as np


def pair_documents(prompts, responses, start, end, limit=None):
    """Concatenates prompts and responses; the loss includes responses and end tokens.

    Args:
        prompts, responses: lists of as many integer arrays, the tokens of each.
        start, end: lists of integers, the special tokens before and after each document, or none.
        limit: integer, the largest number of tokens in a document. Longer ones keep their beginning
            and the end token, which is not in the loss if no token of the response is left.
            None: no limit.

    Returns:
        A list of documents, int32 arrays `[length]`, and a list of boolean arrays, True at tokens
        in the loss.
    """
    documents, in_loss = [], []
    for prompt, response in zip(prompts, responses, strict=True):
        content = np.concatenate([prompt, response])
        if limit is not None:
            content = content[: limit - len(start) - len(end)]
        first = len(start) + len(prompt)
        tokens = np.concatenate([start, content, end]).astype("int32")
        is_cut = len(content) < len(prompt) + min(len(response), 1)
        documents.append(tokens)
        in_loss.append((np.arange(len(tokens)) >= first) & (not is_cut))
    return documents, in_loss


def conversation_documents(conversations, render, tokenize, start, stop_token_ids, limit=None):
    """Renders and tokenizes conversations; the loss includes the turns of the assistant.

    Args:
        conversations: a list of lists of messages.
        render: function of `(messages, add_generation_prompt)` that returns a `ChatPrompt`.
        tokenize: function of a `ChatPrompt` that returns its tokens.
        start: list of integers, the special token before documents whose template writes none.
        stop_token_ids: integers, tokens that end a turn. The loss leaves out what the template
            writes after the last one of a turn, such as a newline.
        limit: as in `pair_documents`. Longer documents are cut off.

    Returns:
        As `pair_documents`.
    """
    documents, in_loss = [], []
    for number, messages in enumerate(conversations):
        pieces = split_turns(messages, render, number)
        tokens = [np.asarray(tokenize(text), "int32") for text, _ in pieces]
        mask = [
            _through_last(ids, stop_token_ids) if is_response else np.zeros(len(ids), "bool")
            for ids, (_, is_response) in zip(tokens, pieces, strict=True)
        ]
        if start and tokens[0][:1].tolist() != start:
            tokens, mask = [np.asarray(start), *tokens], [np.zeros(1, "bool"), *mask]
        documents.append(np.concatenate(tokens).astype("int32")[:limit])
        in_loss.append(np.concatenate(mask).astype("bool")[:limit])
    return documents, in_loss


def _through_last(ids, stop_token_ids):
    """Returns True up to the last of `stop_token_ids`, or everywhere if there is none."""
    (stops,) = np.nonzero(np.isin(ids, stop_token_ids))
    return np.arange(len(ids)) <= (stops[-1] if len(stops) else len(ids))


def split_turns(messages, render, number=0):
    """Splits the text of a conversation at the beginning and end of each turn of the assistant.

    A turn begins after the generation prompt of the messages before it, and ends where the text of
    the messages up to it does. Messages after the last turn of the assistant are left out.

    Args:
        messages: a list of messages, one of the assistant at least.
        render: as in `conversation_documents`.
        number: integer, the conversation in an error.

    Returns:
        A list of `(text, is_response)`, a response after each other text.

    Raises:
        ValueError: the template is not prefix-preserving: the text of some messages does not begin
            with that of fewer.
    """
    pieces, before = [], ""
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        for end, is_response in ((index, False), (index + 1, True)):
            text = render(messages[:end], add_generation_prompt=not is_response)
            if not text.startswith(before):
                raise ValueError(_not_prefix_preserving(number, end, before, text))
            pieces.append((text[len(before) :], is_response))
            before = text
    return pieces


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
