"""CPU seconds of the tests, child processes included, checked against `durations.json`.

`--budget=check` fails a run of all tests if their sum is more than 1.3 times its entry, and names
the files that grew most. A single file has no limit: the first one that uses a program compiles it
for the others, and the order changes. `--budget=write` updates the entries of the files that ran.

Nightly tests are not counted. A fixed computation, measured between tests, takes longer than its
recorded time on a slower or busier machine; times are scaled down by that ratio. They are never
scaled up: a machine that runs this computation faster need not compile faster.
"""

import collections
import importlib
import json
import os
import pathlib
import resource
import statistics
import time

import pytest

DURATIONS = pathlib.Path(__file__).with_name("durations.json")
ALL = "all files"
FACTOR = 1.3
NO_ENTRY = 10  # seconds of a file; cheaper files have no entry
PROBE_INTERVAL = 20  # seconds between two probes of a worker


def cpu_seconds():
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


def probe():
    """CPU seconds of a computation in Python, the least of three times."""

    def measure():
        before = time.process_time()
        table = {str(i): i for i in range(100_000)}
        sum(table[key] for key in sorted(table, reverse=True))
        return time.process_time() - before

    return min(measure() for _ in range(3))


def over_budget(seconds, entries):
    """Returns a message if the sum of `{file: scaled CPU seconds}` exceeds its limit, or None."""
    total, limit = sum(seconds.values()), FACTOR * entries[ALL]
    if total <= limit:
        return None
    growth = collections.Counter(seconds)
    growth.subtract({file: entries.get(file, NO_ENTRY) for file in seconds})
    grown = ", ".join(f"{file} ({value:+.1f} s)" for file, value in growth.most_common(5))
    return (
        f"{total:.0f} CPU s, limit {limit:.0f}; most above their entries: {grown}. "
        "Make tests cheaper or nightly, or run `make durations`"
    )


class Budget:
    """Measures CPU time in xdist workers; sums and checks it in the controller."""

    def __init__(self, config):
        self.config = config
        self.backend = os.environ["KERAS_BACKEND"]
        self.is_controller = "PYTEST_XDIST_WORKER" not in os.environ
        self.probes, self.last_probe = [], time.monotonic()
        self.seconds = collections.Counter()  # file → CPU seconds
        self.message = None
        self.durations = json.loads(DURATIONS.read_text())  # {file: {backend: seconds}}
        rows = self.durations.items()
        self.entries = {file: row[self.backend] for file, row in rows if self.backend in row}

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item):
        if not self.probes or time.monotonic() - self.last_probe > PROBE_INTERVAL:
            importlib.import_module("keras_recurrent")  # or the first test would pay for it
            self.probes.append(probe())
            self.last_probe = time.monotonic()
        self.before = cpu_seconds()
        return (yield)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_makereport(self, item):
        """Add the CPU seconds since the last phase to the report, which xdist sends on."""
        report = yield
        now = cpu_seconds()
        report.cpu_seconds, self.before = now - self.before, now
        return report

    def pytest_runtest_logreport(self, report):
        if self.is_controller and "nightly" not in report.keywords:
            # A report on a worker that crashed has no seconds.
            self.seconds[report.nodeid.partition("::")[0]] += getattr(report, "cpu_seconds", 0)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node):
        self.probes.extend(getattr(node, "workeroutput", {}).get("probes", ()))

    def pytest_sessionfinish(self, session, exitstatus):
        if not self.is_controller:
            self.config.workeroutput["probes"] = self.probes
        elif exitstatus == pytest.ExitCode.OK and self.probes:  # else files may be incomplete
            measured = statistics.median(self.probes)
            complete = self.config.args == self.config.getini("testpaths")
            if self.config.option.budget == "write":
                self.write(measured, complete)
                return
            if not complete:
                return
            scale = min(1, self.entries["probe"] / measured)
            seconds = {file: scale * value for file, value in self.seconds.items()}
            self.message = over_budget(seconds, self.entries)
            if self.message:
                session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def write(self, measured, complete):
        """Replace all entries of the backend, or after a part of the tests those of its files."""
        if complete:
            self.entries = {"probe": round(measured, 4), ALL: round(sum(self.seconds.values()), 1)}
            for row in self.durations.values():
                row.pop(self.backend, None)
        scale = self.entries["probe"] / measured
        for file, seconds in {**self.entries, **self.seconds}.items():
            value = round(seconds * scale, 1) if file in self.seconds else seconds
            if value > NO_ENTRY or file == "probe":
                self.durations.setdefault(file, {})[self.backend] = value
        rows = [
            f" {json.dumps(file)}: {json.dumps(row)}"
            for file, row in sorted(self.durations.items())
            if row
        ]
        DURATIONS.write_text("{\n" + ",\n".join(rows) + "\n}\n")

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_terminal_summary(self, terminalreporter):
        """Report below the skipped tests, where the end of a long log shows it."""
        yield
        seconds = sum(self.seconds.values())
        terminalreporter.write_line(f"CPU seconds: {seconds:.0f} in tests (nightly excluded)")
        if self.message:
            terminalreporter.write_line(f"over budget: {self.message}", red=True)
