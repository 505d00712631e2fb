"""Chunks of prompts, processed between the steps of a batch."""

import time

import numpy as np

from keras_recurrent.generation.batch import is_on_cpu
from keras_recurrent.generation.prompts import pad_prompts
from keras_recurrent.generation.sampling import Features, Logprobs
from keras_recurrent.generation.sampling_params import token_logprobs

MIN_CHUNK = 32  # tokens
MAX_DELAY = 0.43  # of a step by chunks, on average, as a fraction of the step time
TIMED_RUNS = 3
# A program of chunks has one prompt for each `SLOTS_PER_PROMPT` slots. More prompts reduce the time
# per token, but a request waits for the whole program. On CPUs, they do not reduce the time per
# token.
SLOTS_PER_PROMPT, MAX_PROMPTS = 16, 8


class PromptChunks:
    """Chunks of the prompts of sequences that wait for a slot, and their costs.

    Args:
        batch: a `Batch` after `prepare_slots`.
        max_chunk: integer, maximum number of tokens of a chunk.
        is_timed: boolean, True measures costs, which compiles programs before the first request.
            False estimates costs from lengths, as on CPUs, where compilation would take too long.

    Attributes:
        num_prompts: integer, maximum number of prompts in one call of `process`.
    """

    def __init__(self, batch, max_chunk, is_timed):
        self._batch, self.max_chunk, self.num_prompts = batch, max_chunk, batch.num_prompts
        # The chunks of prompts that share a program are padded to one size.
        self._sizes = [max_chunk] if self.num_prompts > 1 else chunk_sizes(max_chunk)
        # The cost of one part, as a share of the bound on delays.
        self._costs = {size: max(size / max_chunk, 1 / 2) for size in self._sizes}
        if is_timed:
            self._time_programs()

    def warm_up(self):
        """Runs a program of chunks of each size, which compiles it."""
        for size in self._sizes:
            self._run_example(size)

    def _time_programs(self):
        """Compiles chunks and a greedy step, so that no request waits for them, and times them."""
        self._batch.warm_up()
        for size in self._sizes:
            self._time_step(size)  # compiles
        step = min(self._time_step() for _ in range(TIMED_RUNS))[0]
        for size in self._sizes:
            seconds, num_parts = min(self._time_step(size) for _ in range(TIMED_RUNS))
            token_seconds = step / self._batch.tokens_per_step
            cost = (seconds - step) / num_parts / (MAX_DELAY * token_seconds)
            self._costs[size] = max(cost, 1 / num_parts)  # a measured time may be too short

    def _time_step(self, chunk_size=None):
        """Runs a program of chunks if their size is given, then a greedy step, without sequences.

        Returns:
            The time in seconds, and the number of parts of the program.
        """
        start = time.perf_counter()
        num_parts = 0 if chunk_size is None else self._run_example(chunk_size)
        self._batch.run_empty_step(Features())
        return time.perf_counter() - start, num_parts

    def _run_example(self, size):
        """Processes chunks of as many prompts as fit into a program; returns the part count."""
        states, shape = [self._batch.initial_state] * self.num_prompts, (self.num_prompts, size)
        parts = self._batch.process(states, np.ones(shape, "int32"), np.ones(shape, bool))
        return 1 + sum(1 for _ in parts)

    def _padded_size(self, num_tokens):
        """Returns the number of tokens to which a chunk is padded."""
        return min(size for size in self._sizes if size >= num_tokens)

    def cost(self, num_tokens):
        """Returns the cost of a part of a program of chunks, as a share of the bound on delays."""
        return self._costs[self._padded_size(num_tokens)]

    def process(self, sequences, stops):
        """Generator that processes a chunk of each prompt, one part each time it is resumed.

        Chunks end before the positions in `stops`. No other call may begin before the generator has
        returned. A sequence with `num_top` must be the only sequence.
        """
        if sequences[0].num_top is not None:
            self._score(*sequences, *stops)
            return
        parts = [s.prompt[s.num_processed : e] for s, e in zip(sequences, stops, strict=True)]
        size = self._padded_size(max(map(len, parts)))
        tokens = np.zeros((self.num_prompts, size), "int32")
        mask = np.zeros(tokens.shape, bool)
        for i, part in enumerate(parts):
            tokens[i, : len(part)], mask[i, : len(part)] = part, True
        states = [self._batch.initial_state if s.state is None else s.state for s in sequences]
        after = yield from self._batch.process(states, tokens, mask)
        for sequence, stop, state in zip(sequences, stops, after, strict=True):
            sequence.state, sequence.num_processed = state, stop

    def _score(self, sequence, stop):
        """Processes a chunk of a prompt, and adds the log probabilities of its tokens."""
        part = sequence.prompt[sequence.num_processed : stop + 1]
        size = self._padded_size(len(part) - 1)
        arrays = pad_prompts([part[:-1]], size), pad_prompts([part[1:]], size)
        tokens, targets = (array["token_ids"] for array in arrays)
        state = self._batch.initial_state if sequence.state is None else sequence.state
        mask, number = arrays[0]["padding_mask"], sequence.num_top
        logprobs, sequence.state = self._batch.score(tokens, targets, mask, state, number)
        for token, row in zip(part[1:].tolist(), zip(*logprobs, strict=True), strict=False):
            found = token_logprobs(number, token, Logprobs(*row))
            sequence.prompt_logprobs.append(found)
        sequence.num_processed = stop


def chunk_sizes(max_chunk):
    """Returns the sizes to which chunks are padded, in ascending order."""
    sizes = [MIN_CHUNK << n for n in range(max_chunk.bit_length()) if MIN_CHUNK << n < max_chunk]
    if max_chunk >= 4 * MIN_CHUNK:
        sizes = sorted({*sizes, 3 * max_chunk // 4})
    return [*sizes, max_chunk]


def num_prompts_of(model, num_slots):
    """Returns the number of prompts of a program of chunks."""
    return 1 if is_on_cpu(model) else min(max(num_slots // SLOTS_PER_PROMPT, 1), MAX_PROMPTS)
