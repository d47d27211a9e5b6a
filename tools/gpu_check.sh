#!/usr/bin/env bash
# Check this checkout on a machine with an NVIDIA GPU in at most ten minutes, with $PYTHON or python3:
#
#   tools/gpu_check.sh                   everything: environment, smoke tests, questions, tests, ratios
#   tools/gpu_check.sh --frameworks      first install the frameworks of tools/gpu_requirements.txt (6 GB)
#   tools/gpu_check.sh --only ratios     one part: smoke, questions, tests or ratios (also several, by commas)
#   tools/gpu_check.sh --part 1/2        half of the test files, if not all of them run within the time
#   tools/gpu_check.sh --minutes 20      another limit
#   tools/gpu_check.sh --site WHEELS     use a folder of wheels for packages that this Python lacks
#   tools/gpu_check.sh --out FOLDER      write results there instead of benchmarks/results/gpu-check/
#
# Small packages that are missing are installed with one pip command, which needs a package index. Offline, download
# their wheels on another machine, and pass their folder:
#   pip download --dest WHEELS --python-version 3.12 --only-binary=:all: optree array-api-compat psutil nvidia-ml-py pytest pytest-timeout
# The folder of the results has everything that is needed to explain a failure: environment.json, the output of each
# process, the message and the last lines of each failure (failures.txt), and summary.txt. The exit status is 0 if
# everything ran and passed, 1 if something failed, and 3 if nothing failed but something did not run. A skip does not
# count as a pass. Tests that need two GPUs are not applicable to a machine with one.
set -euo pipefail
cd "$(dirname "$0")/.."
exec "${PYTHON:-python3}" tools/gpu_check_run.py "$@"
