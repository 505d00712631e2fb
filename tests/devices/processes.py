"""Fresh processes of Python for tests that need several devices or several processes.

The programs that they run contain the assertions: a process that fails fails its test.
"""

import os
import pathlib
import subprocess
import sys
import time

from tests.processes import ROOT, printed, run_python


def run_script(*arguments, **options):
    """Runs a script that imports this checkout; returns the completed process."""
    path = os.pathsep.join([str(ROOT), *sys.path])
    # Several processes share the cores.
    return run_python(*arguments, **{"PYTHONPATH": path, "OMP_NUM_THREADS": "1", **options})


def run_on_simulated_devices(count, module, *arguments, flags="", **environment):
    """Runs a module of this folder in a process with so many devices of XLA."""
    device_flag = f"--xla_force_host_platform_device_count={count}"
    printed(
        *("-m", f"tests.devices.{module}", *map(str, arguments)),
        XLA_FLAGS=f"{os.environ['XLA_FLAGS']} {device_flag} {flags}",
        JAX_PLATFORMS="cpu",
        OMP_NUM_THREADS="1",
        **environment,
    )


def run_processes(count, folder, module, *arguments, **environment):
    """Runs a module of this folder in several processes at once; returns what each prints.

    The first arguments are the number of the process and `folder`. If a process fails, the others
    are killed, because they would wait for it.
    """
    commands = [
        ["-m", f"tests.devices.{module}", str(i), str(folder), *arguments] for i in range(count)
    ]
    codes, texts = run_until_failure(commands, folder, [environment] * count)
    assert codes == [0] * count, "\n".join(texts)
    return texts


def run_until_failure(commands, folder, environments, cwd=ROOT):
    """Runs commands of Python at once; if one fails, the others are killed.

    Returns:
        Lists of exit codes and of outputs, which are written to `folder`.
    """
    outputs = [pathlib.Path(folder, f"output_{i}") for i in range(len(commands))]
    processes = []
    try:
        for command, environment, path in zip(commands, environments, outputs, strict=True):
            with path.open("w") as file:
                options = {"cwd": cwd, "stdout": file, "stderr": file}
                options["env"] = {**os.environ, **environment}
                processes.append(subprocess.Popen([sys.executable, *command], **options))
        codes = [None]
        while None in codes and not any(codes):
            time.sleep(0.1)
            codes = [process.poll() for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return codes, [path.read_text() for path in outputs]
