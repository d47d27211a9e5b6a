#!/usr/bin/env bash
# Run the GPU tests or benchmarks of this checkout on a machine with an NVIDIA GPU, with $PYTHON or python3:
#
#   tools/gpu_check.sh tests                  the questions, then all tests marked gpu
#   tools/gpu_check.sh --part 1/2 tests       half of the test files, if all take more than nine minutes
#   tools/gpu_check.sh benchmarks             all benchmarks with a GPU section
#   tools/gpu_check.sh --site WHEELS ...      use a folder of wheels for packages that this Python lacks
#   tools/gpu_check.sh --out FOLDER ...       write results there instead of benchmarks/results/gpu-NAME/
#
# It needs no network. If the machine has CUDA builds of PyTorch, CuPy and JAX, it may still lack a few small packages.
# Download their wheels for its Python on a machine with a network:
#   pip download --dest WHEELS --python-version 3.12 --only-binary=:all: optree array-api-compat psutil nvidia-ml-py pytest pytest-timeout
# A run takes at most nine minutes and prints its progress. The summary names frameworks that are missing or find no
# GPU. The exit status is 0 if everything ran and passed, 1 if something failed, and 3 if nothing failed but
# something did not run. A skip does not count as a pass.
set -euo pipefail
cd "$(dirname "$0")/.."
exec "${PYTHON:-python3}" tools/gpu_check_run.py "$@"
