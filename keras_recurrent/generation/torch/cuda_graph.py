"""A step of generation as a CUDA graph: the host launches all its kernels at once.

A graph reads and writes at fixed addresses. So it has a token and a cache of its own, into which a
call of `generate` copies where it begins, and it belongs to one call at a time.
"""

import collections
import queue
import threading

import torch

_capturing = threading.Lock()  # torch aborts where two threads capture at once

ALIGNED = 16  # bytes, for kernels that load as many at once
# Tokens of a row that a graph keeps, for whoever replays to fetch at once: a power of 2.
RECENT = 16
# Caches and logits of graphs that wait for a call take at most this part of their device's memory,
# those of the last shapes aside. What a step holds in between comes on top.
KEPT_PART = 16


class Captured:
    """A step, captured.

    Args:
        run: a function of `prepared`, a token [B, 1], with `rows` a mask [B, 1], and the tensors of
            a cache, to logits [B, vocabulary], hidden states [B, hidden_dim] and the tensors of the
            next cache.
        weights: the tensors of the model's weights.
        prepared: tensors that depend on weights alone; some of them may be weights.
        token, cache: example inputs.
        choice: the `sampling.Choice` that makes the next token; None: whoever replays.
        rows: the `loop.Rows` that say which rows go on; None: all do.
    """

    def __init__(self, run, weights, prepared, token, cache, choice, rows):
        self.chooses, self.generator = choice is not None, choice and choice.generator
        self.rows = rows and rows.copy()
        self._run, self._prepared = run, list(prepared)
        self.token = token.clone()
        self.cache, self._joined = side_by_side(cache)
        # A copy between two replays takes three times as long as one more launch in the graph.
        keeps = self.chooses and self.rows is None
        self.recent = token.new_zeros(len(token), RECENT) if keeps else None
        with _capturing, torch.cuda.device(token.device), torch.no_grad():
            # Kernels are compiled and loaded before, which cannot be part of a graph.
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                self._step(choice)
            torch.cuda.current_stream().wait_stream(side)
            self._graph = torch.cuda.CUDAGraph()
            if self.generator is not None:
                self._graph.register_generator_state(self.generator)
            # Other threads may go on with work of their own meanwhile.
            with torch.cuda.graph(self._graph, capture_error_mode="thread_local"):
                self.logits, self.hidden = self._step(choice)
        of_weights = {t.untyped_storage().data_ptr() for t in weights}
        own = [t for t in self._prepared if t.untyped_storage().data_ptr() not in of_weights]
        self.bytes = sum(t.nbytes for t in (*own, *self.cache, self.logits, self.hidden))

    def _step(self, choice):
        """One token; the next cache becomes the cache, and the next token the token."""
        mask = (self.rows.active,) if self.rows else ()
        logits, hidden, *after = self._run(*self._prepared, self.token, *mask, *self.cache)
        tensors, after = list(self.cache), list(after)
        # Tokens are chosen before the copies: what chooses follows on a kernel and may begin before
        # that has ended.
        written = self.recent is not None and choice.writes(logits, self.token, self.recent)
        if choice is not None and not written:
            token = self._next(choice(logits))
            tensors.append(self.token)
            after.append(token)
            if self.recent is not None:
                tensors.append(self.recent)
                after.append(torch.cat((self.recent[:, 1:], token), dim=1))
        write_over(tensors, after, self._joined)
        return logits, hidden

    def set_token(self, chosen):
        """Makes what was chosen, [B], the next token, in rows that go on."""
        self.token.copy_(self._next(chosen))

    def _next(self, chosen):
        chosen = chosen.to(self.token.dtype)[:, None]
        return self.rows.advance(self.token, chosen) if self.rows else chosen

    def begin(self, prepared, token, cache, rows):
        """Sets where a call begins, and the weights as they are now."""
        for own, given in zip(self._prepared, prepared, strict=True):
            if own.data_ptr() != given.data_ptr():
                own.copy_(given)
        self._place(token, cache)
        if rows is not None:
            self.rows.set(rows)

    def _place(self, token, cache):
        self.token.copy_(token)
        for own, given in zip(self.cache, cache, strict=True):
            own.copy_(given)

    def replay(self):
        """One token on from where the graph is."""
        self._graph.replay()

    def copies(self, token, cache):
        """What the step returns for such a token and cache, as tensors that stay as they are."""
        self._place(token, cache)
        self.replay()
        return [t.clone() for t in (self.logits, self.hidden, *self.cache)]


def side_by_side(tensors):
    """Copies of tensors, and, of those that are alike, their places and the tensor they are in.

    One launch writes over all that are alike, by as many programs as their size asks for.
    """
    alike: dict = {}
    for place, t in enumerate(tensors):
        alike.setdefault((t.shape, t.dtype), []).append(place)
    copies, joined = {}, []
    for places in alike.values():
        of_kind = [tensors[place] for place in places]
        if len(places) > 1 and of_kind[0].nbytes % ALIGNED == 0:
            whole = torch.stack(of_kind)
            joined.append((places, whole))
            of_kind = [whole[i] for i in range(len(places))]
        else:
            of_kind = [t.clone() for t in of_kind]
        copies.update(zip(places, of_kind, strict=True))
    return [copies[place] for place in range(len(tensors))], joined


def write_over(tensors, after, joined=()):
    """Writes new values, of which some may be parts of the tensors, over the tensors.

    joined: as `side_by_side` gives it.
    """
    own = {t.untyped_storage().data_ptr() for t in tensors}
    moved = {}
    for place, (t, new) in enumerate(zip(tensors, after, strict=True)):
        # What a step has written over is there already. What else is a part of the tensors is read
        # before any of these is overwritten.
        if new is not t:
            moved[place] = new.clone() if new.untyped_storage().data_ptr() in own else new
    for places, whole in joined:
        if moved.keys() >= set(places):
            torch.stack([moved.pop(place) for place in places], out=whole)
    of_dtype: dict = {}
    for place, new in moved.items():
        to, values = of_dtype.setdefault(new.dtype, ([], []))
        to.append(tensors[place])
        values.append(new)
    for to, values in of_dtype.values():
        torch._foreach_copy_(to, values)  # one launch for all of them


class Graphs:
    """The graphs of a model that wait for the next call.

    A call takes one out and gives it back at its end. One that a call left with an exception, or
    that another thread uses, is not here, so no two calls ever share buffers.
    """

    def __init__(self):
        self._waiting: collections.OrderedDict = collections.OrderedDict()
        self._lock = threading.Lock()
        # A stream that is collected gives its graph back at any moment, also while this thread
        # holds the lock. So graphs come through a queue that may be filled at any moment.
        self._given_back: queue.SimpleQueue = queue.SimpleQueue()

    def take(self, key):
        """A graph that was captured for this key, or None."""
        with self._lock:
            self._keep_what_came_back()
            graphs = self._waiting.get(key)
            return graphs.pop() if graphs else None

    def forget(self, step):
        """Drops the graphs whose keys begin with a step that will not be taken again."""
        with self._lock:
            self._keep_what_came_back()
            for key in [key for key in self._waiting if key[0] is step]:
                del self._waiting[key]

    def give(self, key, graph):
        self._given_back.put((key, graph))
        if self._lock.acquire(blocking=False):
            try:
                self._keep_what_came_back()
            finally:
                self._lock.release()

    def _keep_what_came_back(self):
        while not self._given_back.empty():
            key, graph = self._given_back.get()
            device = torch.cuda.get_device_properties(graph.token.device)
            self._waiting.setdefault(key, []).append(graph)
            self._waiting.move_to_end(key)
            while self._bytes() > device.total_memory // KEPT_PART and len(self._waiting) > 1:
                self._waiting.popitem(last=False)

    def _bytes(self):
        return sum(graph.bytes for graphs in self._waiting.values() for graph in graphs)
