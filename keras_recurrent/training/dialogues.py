"""Training samples of prompts with responses, and of conversations, in memory."""

from keras_recurrent.training.samples import Texts, as_texts, describe, is_tokens

PARTS = ("prompts", "responses")


class PromptsWithResponses(Texts):
    """A list of pairs `(prompt, response)`, two strings each."""

    def as_inputs(self):
        return {part: [pair[i] for pair in self] for i, part in enumerate(PARTS)}


class Conversations(Texts):
    """A list of conversations, a list of messages each."""


def has_responses(x):
    """Returns True for prompts with responses, and for a list of conversations in memory."""
    return is_prompts_with_responses(x) or is_conversations(x)


def is_prompts_with_responses(x):
    """Returns True for a dictionary of prompts or responses, with or without an axis."""
    return isinstance(x, dict) and not is_tokens(x) and not x.keys().isdisjoint(PARTS)


def is_conversation(x):
    """Returns True for the messages of one conversation, a list of dictionaries with a role."""
    return (
        isinstance(x, (list, tuple))
        and len(x) > 0
        and all(isinstance(message, dict) and "role" in message for message in x)
    )


def is_conversations(x):
    """Returns True for a list of conversations in memory."""
    if isinstance(x, Conversations):
        return True
    return isinstance(x, (list, tuple)) and len(x) > 0 and all(map(is_conversation, x))


def as_dialogues(x, name="x"):
    """Converts prompts with responses, or conversations, in memory. Returns others unchanged.

    Args:
        x: a dictionary of `prompts` and `responses`, several strings each; a list of conversations;
            or anything else.
        name: string, the argument.

    Raises:
        ValueError: the dictionary has other keys, or values other than as many strings; or a
            conversation has no message of the assistant, or begins with one.
    """
    if is_prompts_with_responses(x):
        return _as_pairs(x, name)
    if is_conversations(x) and not isinstance(x, Conversations):
        for number, messages in enumerate(x):
            if all(message["role"] != "assistant" for message in messages):
                raise ValueError(
                    f"`{name}`: conversation {number} has no message of the role 'assistant', "
                    "on whose text the loss is computed. Add one, or leave out the conversation."
                )
            if messages[0]["role"] == "assistant":
                raise ValueError(
                    f"`{name}`: conversation {number} begins with a message of the role "
                    "'assistant', which answers nothing. Begin with the message that it answers."
                )
        return Conversations(x)
    return x


def check_keys(x, name="x"):
    """Raises an error for a dictionary of other keys than `prompts` and `responses`."""
    if x.keys() != set(PARTS):
        raise ValueError(
            f"`{name}` must have the keys 'prompts' and 'responses', several strings each; got "
            f"{sorted(map(str, x))}."
        )


def _as_pairs(x, name):
    check_keys(x, name)
    prompts, responses = (as_texts(x[part]) for part in PARTS)
    for part, texts in zip(PARTS, (prompts, responses), strict=True):
        if not isinstance(texts, Texts):
            raise ValueError(
                f"`{name}[{part!r}]` must be several strings; got {describe(x[part])}."
            )
    if len(prompts) != len(responses):
        raise ValueError(
            f"`{name}` must have a response for each prompt; got {len(prompts)} prompts and "
            f"{len(responses)} responses."
        )
    return PromptsWithResponses(zip(prompts, responses, strict=True))
