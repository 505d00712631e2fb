"""Deselects nightly tests unless requested, and runs tests marked `once` on one backend.

`--nightly=PATHS` adds the nightly tests of files and folders; naming a test as `file::name` also
runs it. Failures of a run with `--nightly` are saved for `selection.py --unselected`.
"""

import json
import os

import pytest


def addoption(parser):
    parser.getgroup("tiers", "test tiers").addoption(
        "--nightly",
        default="",
        metavar="PATHS",
        help="also run nightly tests in these comma-separated files and folders",
    )


class Tiers:
    def __init__(self, config, once):
        """once: the backend on which tests marked `once` run."""
        self.backend = os.environ["KERAS_BACKEND"]
        self.once = once
        here = config.invocation_params.dir
        paths = [path.strip() for path in config.option.nightly.split(",")]
        self.chosen = [(here / path).resolve() for path in paths if path]
        for path in self.chosen:
            if not path.exists():
                raise pytest.UsageError(f"--nightly must name files and folders; {path} is neither")
        named = [argument.partition("::") for argument in config.args if "::" in argument]
        self.named = [((here / path).resolve(), name) for path, _, name in named]
        self.cache = config.rootpath / ".pytest_cache"
        self.failed = {}  # test id → True if nightly

    def runs(self, item):
        if item.get_closest_marker("once") and self.backend != self.once:
            return False
        if not item.get_closest_marker("nightly"):
            return True
        name = item.nodeid.partition("::")[2]
        return any(item.path.is_relative_to(path) for path in self.chosen) or any(
            item.path == path and name.startswith(start) for path, start in self.named
        )

    def pytest_collection_modifyitems(self, config, items):
        deselected = [item for item in items if not self.runs(item)]
        if deselected:
            config.hook.pytest_deselected(items=deselected)
            items[:] = [item for item in items if self.runs(item)]

    def pytest_runtest_logreport(self, report):
        if report.failed:
            self.failed[report.nodeid] = "nightly" in report.keywords

    def pytest_sessionfinish(self):
        if self.chosen and "PYTEST_XDIST_WORKER" not in os.environ:
            self.cache.mkdir(exist_ok=True)
            (self.cache / f"failed_{self.backend}.json").write_text(json.dumps(self.failed))


def configure(config, once):
    config.pluginmanager.register(Tiers(config, once), "tiers")
