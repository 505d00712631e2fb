"""CPU seconds of each test file, child processes included, checked against `durations.json`.

`--budget=check` fails the run if a file takes more than twice its entry plus 10 seconds, or all
files together more than 1.3 times their entries. A file alone may take longer by chance: the first
to start a process compiles the bytecode, and the first to call a function its program, that others
share with it. Where only a part of the tests runs, the sum is not checked.
`--budget=write` updates the entries of the files that ran, on the current backend. Nightly tests
are not counted. Times are multiplied by the recorded time of a fixed computation over the measured
one, which compensates for slower or busy machines: it is measured between tests, while other
workers run theirs, since two workers share the units of one core on many machines.
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
FACTOR, SLACK = 2, 10  # of a file; seconds
FACTOR_OF_SUM = 1.3
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


def over_budget(files, entries, scale, complete=False):
    """Messages for files over budget; measured seconds are multiplied by `scale`.

    If `files` are `complete`, their sum is checked, too.
    """
    messages = []
    total, allowed = sum(files.values()) * scale, FACTOR_OF_SUM * sum(entries.values())
    if complete and total > allowed:
        messages.append(
            f"all files: {total:.0f} CPU s (scaled by {scale:.2f}), limit {allowed:.0f}: "
            "make tests cheaper or nightly, or run `make durations`"
        )
    for file, seconds in sorted(files.items()):
        allowed = FACTOR * entries.get(file, 0) + SLACK
        if seconds * scale > allowed:
            messages.append(
                f"{file}: {seconds * scale:.1f} CPU s (scaled by {scale:.2f}), limit "
                f"{allowed:.1f}: make its tests cheaper or nightly, or run `make durations`"
            )
    return messages


def read_durations(backend):
    """The entries of a backend. Raises `pytest.UsageError` if there are none."""
    try:
        return json.loads(DURATIONS.read_text())[backend]
    except (OSError, ValueError, KeyError) as error:
        raise pytest.UsageError(
            f"--budget=check needs the entries of {backend} in {DURATIONS}, which `make durations` "
            f"writes: {error!r}"
        ) from error


class Budget:
    """Measures CPU time in xdist workers; sums and checks it in the controller."""

    def __init__(self, config):
        self.config = config
        self.backend = os.environ["KERAS_BACKEND"]
        self.is_controller = "PYTEST_XDIST_WORKER" not in os.environ
        self.runs_tests = not (self.is_controller and getattr(config.option, "numprocesses", None))
        self.probes, self.last_probe = [], time.monotonic()
        self.seconds = collections.defaultdict(float)  # test id → CPU seconds
        self.messages = []
        if config.option.budget == "check":
            self.row = read_durations(self.backend)

    def pytest_sessionstart(self):
        if self.runs_tests:
            # Or the first test would pay for it.
            importlib.import_module("keras_recurrent")

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item):
        if not self.probes or time.monotonic() - self.last_probe > PROBE_INTERVAL:
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
            self.seconds[report.nodeid] += getattr(report, "cpu_seconds", 0)
            if self.config.option.budget_tests and report.when == "teardown":
                with open(self.config.option.budget_tests, "a") as file:
                    file.write(f"{self.seconds[report.nodeid]:.3f} {report.nodeid}\n")

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node):
        self.probes.extend(getattr(node, "workeroutput", {}).get("probes", ()))

    def pytest_sessionfinish(self, session, exitstatus):
        if not self.is_controller:
            self.config.workeroutput["probes"] = self.probes
            return
        if exitstatus != pytest.ExitCode.OK or not self.probes:
            return  # files may not have run to their ends
        files = collections.defaultdict(float)
        for test, seconds in self.seconds.items():
            files[test.partition("::")[0]] += seconds
        measured = statistics.median(self.probes)
        complete = self.config.args == self.config.getini("testpaths")
        if self.config.option.budget == "write":
            self.write(files, measured, complete)
        elif self.config.option.budget == "check":
            scale = self.row["probe"] / measured
            self.messages = over_budget(files, self.row["files"], scale, complete)
            if self.messages:
                session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def write(self, files, measured, complete):
        """Replace all entries of the backend, or after a part of the tests those of its files."""
        durations = json.loads(DURATIONS.read_text()) if DURATIONS.exists() else {}
        row = durations.setdefault(self.backend, {"probe": measured, "files": {}})
        if complete:
            row.update(probe=round(measured, 4), files={})
        scale = row["probe"] / measured
        row["files"] |= {file: round(seconds * scale, 1) for file, seconds in files.items()}
        DURATIONS.write_text(json.dumps(durations, indent=1, sort_keys=True) + "\n")

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_terminal_summary(self, terminalreporter):
        """Report below the skipped tests, where the end of a long log shows it."""
        yield
        if self.seconds:
            terminalreporter.write_line(
                f"CPU seconds: {sum(self.seconds.values()):.0f} in tests (nightly excluded)"
            )
        for message in self.messages:
            terminalreporter.write_line(f"over budget: {message}", red=True)


def addoption(parser):
    group = parser.getgroup("budget", "CPU seconds of each test file")
    group.addoption(
        "--budget", choices=("check", "write"), help="check against, or update, durations.json"
    )
    group.addoption(
        "--budget-tests", metavar="FILE", help="append the CPU seconds of each test to FILE"
    )


def configure(config):
    config.pluginmanager.register(Budget(config), "budget")
