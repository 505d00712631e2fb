"""# Test the TPU kernels, and send a report

This notebook tests and times the kernels for TPUs, and writes a [report](../../docs/tpu.md) to
attach to an issue. Run it in a checkout on a machine with a TPU; on Colab, `%cd` to the checkout
first. Do not import JAX here: only one process can use a TPU.
"""

# %%
import os
import pathlib
import subprocess
import sys

FOLDERS = (pathlib.Path.cwd(), *pathlib.Path.cwd().parents)
os.chdir(next(folder for folder in FOLDERS if (folder / "constraints.txt").exists()))
INSTALL = "-m pip install --quiet --constraint constraints.txt --editable .[jax] jax[tpu] pytest"
subprocess.run([sys.executable, *INSTALL.split()], check=True)
subprocess.run([sys.executable, "-m", "benchmarks.tpu_report"], check=True)
print(pathlib.Path("build/tpu_report.md").read_text())
