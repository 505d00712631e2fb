"""Engine's process of a server that generates letters, and starts without a framework.

python tests/serving/stub_engine.py SECONDS    (of a step)
"""

import importlib.util
import itertools
import pathlib
import sys
import threading
import time
from types import SimpleNamespace

FOLDER = pathlib.Path(__file__).parents[2] / "keras_recurrent" / "serving"
LIMITS = {"num_slots": 256, "max_queued": 256, "max_length": 10**6, "vocabulary_size": 259}
STATS = {"tokens": 0, "prompt_tokens": 0, "prefix_hits": 0, "prefix_tokens": 0}
LETTERS = [byte + 3 for byte in b"abcdefgh "]


class Letters:
    """Stub of a `Scheduler`."""

    is_closed, error, emit = False, None, staticmethod(lambda results: None)

    def __init__(self, seconds):
        self._seconds, self._active, self._ended = seconds, {}, []

    def send(self, name, *arguments, **options):
        getattr(self, name)(*arguments, **options)

    def submit(self, number, tokens, params, seed, max_new_tokens, stops, **options):
        self._active[number] = max_new_tokens

    def stop(self, number, num_tokens):
        if self._active.pop(number, None) is not None:
            self._ended.append((number, [], [], "stop" if num_tokens else "cancelled", 0, None))

    def close(self):
        self.is_closed = True

    def cancel_all(self):
        self.close()

    def stats(self):
        return STATS

    def run(self):
        """Generates a letter for each request in each step, until `close`."""
        for letter in itertools.cycle(LETTERS):
            if self.is_closed and not self._active:
                break
            time.sleep(self._seconds)
            results, self._ended = self._ended, []
            for number, remaining in list(self._active.items()):
                reason = "length" if remaining == 1 else None
                results.append((number, [letter], [], reason, 0, None))
                self._active[number] = remaining - 1
                if reason:
                    self._active.pop(number)
            self.emit(results)
        self.emit(None)


def main():
    spec = importlib.util.spec_from_file_location("http_process", FOLDER / "http_process.py")
    http_process = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(http_process)
    for name in ("keras_recurrent", "keras_recurrent.tokenizers"):
        http_process.import_parts(name)
    from keras_recurrent.chat.preprocessing import PlainPreprocessor
    from keras_recurrent.serving import processes
    from keras_recurrent.serving.client import Limits
    from keras_recurrent.serving.options import bind
    from keras_recurrent.tokenizers.plain import PlainByteTokenizer

    processes.plain_preprocessor = lambda preprocessor: preprocessor
    with processes.HTTPProcess(bind("127.0.0.1", 0)) as process:
        scheduler = Letters(float(sys.argv[1]))
        engine = SimpleNamespace(
            _scheduler=scheduler,
            preprocessor=PlainPreprocessor(PlainByteTokenizer(), True, None, ()),
            limits=Limits(**LIMITS, state_interval=None),
            close=lambda: None,
        )
        threading.Thread(target=scheduler.run, daemon=True).start()
        options = {"max_connections": 1024, "grace_period": 5}
        sys.exit(process.run(engine, "", {"model_name": "letters"}, options))


if __name__ == "__main__":
    main()
