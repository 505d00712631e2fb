"""CPU seconds of the tests, child processes included, compared with those in `durations.json`.

`--budget=check` fails a run in which a file takes more than 1.5 times its entry plus 3 seconds.
`--budget=write` makes the entries of the running backend anew. Nightly tests are not counted.
A busy or slower machine takes more CPU seconds for the same work, so they are divided by those of
the collection: an entry holds for a machine whose collection takes as long as the one recorded.
"""

import collections
import json
import os
import pathlib
import resource
import time

import pytest

LEDGER = pathlib.Path(__file__).with_name("durations.json")
FACTOR, SECONDS = 1.5, 3


def cpu_seconds():
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


def excesses(files, entries, scale):
    """Lines on the files whose seconds, times `scale`, exceed what their entries allow."""
    lines = []
    for file, seconds in sorted(files.items()):
        allowed = FACTOR * entries.get(file, 0) + SECONDS
        if seconds * scale > allowed:
            lines.append(
                f"{file}: {seconds * scale:.1f} CPU s, at most {allowed:.1f} are allowed: make its "
                "tests cheaper or nightly, or accept the cost by `make durations`"
            )
    return lines


class Budget:
    """Measures in the processes that run tests; adds up and compares in the one that reports."""

    def __init__(self, config):
        self.config = config
        self.reports = "PYTEST_XDIST_WORKER" not in os.environ
        self.runs_tests = not (self.reports and getattr(config.option, "numprocesses", None))
        self.collection = []
        self.seconds = collections.defaultdict(float)  # of each test
        self.excesses = []

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
        if self.reports and "nightly" not in report.keywords:
            self.seconds[report.nodeid] += report.cpu_seconds
            if self.config.option.budget_tests and report.when == "teardown":
                with open(self.config.option.budget_tests, "a") as file:
                    file.write(f"{self.seconds[report.nodeid]:.3f} {report.nodeid}\n")

    def pytest_sessionfinish(self, session):
        if not self.reports:
            self.config.workeroutput["collection"] = self.collection[0]
            return
        if not self.collection or not self.seconds:
            return  # nothing was run
        self.collection_seconds = sum(self.collection) / len(self.collection)
        files = collections.defaultdict(float)
        for test, seconds in self.seconds.items():
            files[test.partition("::")[0]] += seconds
        backend = os.environ["KERAS_BACKEND"]
        ledger = json.loads(LEDGER.read_text()) if LEDGER.exists() else {}
        if self.config.option.budget == "write":
            ledger[backend] = {
                "collection": round(self.collection_seconds, 1),
                "files": {file: round(seconds, 1) for file, seconds in sorted(files.items())},
            }
            LEDGER.write_text(json.dumps(ledger, indent=1, sort_keys=True) + "\n")
        elif self.config.option.budget == "check":
            row = ledger[backend]
            scale = row["collection"] / self.collection_seconds
            self.excesses = excesses(files, row["files"], scale)
            if self.excesses:
                session.exitstatus = pytest.ExitCode.TESTS_FAILED

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node):
        self.collection.append(node.workeroutput["collection"])

    def pytest_terminal_summary(self, terminalreporter):
        if self.collection and self.seconds:
            terminalreporter.write_line(
                f"CPU seconds: {sum(self.seconds.values()):.0f} in tests that are not nightly, "
                f"{self.collection_seconds:.1f} for the collection in one process"
            )
        for line in self.excesses:
            terminalreporter.write_line(f"over budget: {line}", red=True)


def addoption(parser):
    group = parser.getgroup("budget", "CPU seconds of each test file")
    group.addoption("--budget", choices=("check", "write"), help="compare with, or write, LEDGER")
    group.addoption("--budget-tests", metavar="FILE", help="append the CPU seconds of each test")


def configure(config):
    config.pluginmanager.register(Budget(config), "budget")
