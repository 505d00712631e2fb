"""Chat templates: rendering of messages into prompts, and tokenization of these prompts.

Templates come with checkpoints and are not trusted. `worker.py` renders them in a separate process,
which `rendering.py` starts and ends.
"""

# Roles of messages. Special tokens may contain a role, such as `<|user|>`, so others are errors.
ROLES = ("system", "developer", "user", "assistant", "tool")
