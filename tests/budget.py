"""CPU seconds of each test file, child processes included, checked against `durations.json`.

`--budget=check` fails the run if a file takes more than 1.5 times its entry plus 3 seconds.
`--budget=write` replaces the entries of the current backend. Nightly tests are not counted. Times
are multiplied by the recorded time of collection over the measured one, which compensates for
slower or busy machines.
"""

import collections
import json
import os
import pathlib
import resource
import time

import pytest

DURATIONS = pathlib.Path(__file__).with_name("durations.json")
FACTOR, SLACK = 1.5, 3


def cpu_seconds():
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


def over_budget(files, entries, scale):
    """Messages for files over budget; measured seconds are multiplied by `scale`."""
    lines = []
    for file, seconds in sorted(files.items()):
        allowed = FACTOR * entries.get(file, 0) + SLACK
        if seconds * scale > allowed:
            lines.append(
                f"{file}: {seconds * scale:.1f} CPU s, limit {allowed:.1f}: make its tests cheaper "
                "or nightly, or run `make durations`"
            )
    return lines


class Budget:
    """Measures CPU time in xdist workers; sums and checks it in the controller."""

    def __init__(self, config):
        self.config = config
        self.is_controller = "PYTEST_XDIST_WORKER" not in os.environ
        self.runs_tests = not (self.is_controller and getattr(config.option, "numprocesses", None))
        self.collection = []
        self.seconds = collections.defaultdict(float)  # test id → CPU seconds
        self.messages = []

    @pytest.hookimpl(wrapper=True)
    def pytest_collection(self):
        before = cpu_seconds()
        result = yield
        if self.runs_tests:
            self.collection.append(cpu_seconds() - before)
        return result

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item):
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
            self.seconds[report.nodeid] += report.cpu_seconds
            if self.config.option.budget_tests and report.when == "teardown":
                with open(self.config.option.budget_tests, "a") as file:
                    file.write(f"{self.seconds[report.nodeid]:.3f} {report.nodeid}\n")

    def pytest_sessionfinish(self, session):
        if not self.is_controller:
            self.config.workeroutput["collection"] = self.collection[0]
            return
        if not self.collection or not self.seconds:
            return  # nothing was run
        self.collection_seconds = sum(self.collection) / len(self.collection)
        files = collections.defaultdict(float)
        for test, seconds in self.seconds.items():
            files[test.partition("::")[0]] += seconds
        backend = os.environ["KERAS_BACKEND"]
        ledger = json.loads(DURATIONS.read_text()) if DURATIONS.exists() else {}
        if self.config.option.budget == "write":
            ledger[backend] = {
                "collection": round(self.collection_seconds, 1),
                "files": {file: round(seconds, 1) for file, seconds in sorted(files.items())},
            }
            DURATIONS.write_text(json.dumps(ledger, indent=1, sort_keys=True) + "\n")
        elif self.config.option.budget == "check":
            row = ledger[backend]
            scale = row["collection"] / self.collection_seconds
            self.messages = over_budget(files, row["files"], scale)
            if self.messages:
                session.exitstatus = pytest.ExitCode.TESTS_FAILED

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node):
        self.collection.append(node.workeroutput["collection"])

    def pytest_terminal_summary(self, terminalreporter):
        if self.collection and self.seconds:
            terminalreporter.write_line(
                f"CPU seconds: {sum(self.seconds.values()):.0f} in tests (nightly excluded), "
                f"{self.collection_seconds:.1f} for collection per worker"
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
