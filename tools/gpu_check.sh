#!/usr/bin/env bash
# All that a machine with an NVIDIA card can tell of this checkout, with the Python there (PYTHON, else python3):
#
#   tools/gpu_check.sh tests                  first questions, then every test marked gpu
#   tools/gpu_check.sh --part 1/2 tests       every other file of them, where all take longer than nine minutes
#   tools/gpu_check.sh benchmarks             every benchmark with a card section
#   tools/gpu_check.sh --site WHEELS ...      with the packages that this Python lacks, from a folder of their wheels
#   tools/gpu_check.sh --out FOLDER ...       results go there, and not to benchmarks/results/card-NAME/
#
# No network is needed. A server with CUDA builds of torch, CuPy and JAX lacks a few small packages. Fill WHEELS for
# its Python where there is a network:
#   pip download --dest WHEELS --python-version 3.12 --only-binary=:all: optree array-api-compat psutil nvidia-ml-py pytest pytest-timeout
# A run takes at most nine minutes and tells what it does as it goes. Frameworks that are missing, or see no card, are
# named. The exit code is 0 where all ran and passed, 1 where something failed, and 3 where nothing failed and
# something did not run: a skip is no pass.
set -euo pipefail
cd "$(dirname "$0")/.."
exec "${PYTHON:-python3}" tools/gpu_check_run.py "$@"
