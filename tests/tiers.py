"""Deselects nightly tests unless requested, and runs tests marked `once` on one backend.

`--nightly=PATHS` adds the nightly tests of files and folders; naming a test as `file::name` also
runs it. Failures of a run with `--nightly` are saved for `selection.py --unselected`.
"""

import json
import os


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
        self.config = config
        self.backend = os.environ["KERAS_BACKEND"]
        self.once = once
        self.chosen = [path.rstrip("/") for path in config.option.nightly.split(",") if path]
        self.failed = {}  # test id → True if nightly

    def runs(self, item):
        if item.get_closest_marker("once") and self.backend != self.once:
            return False
        if not item.get_closest_marker("nightly"):
            return True
        file = item.nodeid.partition("::")[0]
        named = [argument for argument in self.config.args if "::" in argument]
        return any(file == path or file.startswith(f"{path}/") for path in self.chosen) or any(
            item.nodeid.startswith(name) for name in named
        )

    def pytest_collection_modifyitems(self, items):
        deselected = [item for item in items if not self.runs(item)]
        if deselected:
            self.config.hook.pytest_deselected(items=deselected)
            items[:] = [item for item in items if self.runs(item)]

    def pytest_runtest_logreport(self, report):
        if report.failed:
            self.failed[report.nodeid] = "nightly" in report.keywords

    def pytest_sessionfinish(self):
        if self.chosen and "PYTEST_XDIST_WORKER" not in os.environ:
            folder = self.config.rootpath / ".pytest_cache"
            folder.mkdir(exist_ok=True)
            (folder / f"failed_{self.backend}.json").write_text(json.dumps(self.failed))


def configure(config, once):
    config.pluginmanager.register(Tiers(config, once), "tiers")
