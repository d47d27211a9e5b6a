#!/usr/bin/env bash
# All that a machine with an NVIDIA card can tell of this checkout, without a network:
#
#   tools/card.sh WHEELS tests         first questions, then every test marked gpu: at most nine minutes
#   tools/card.sh WHEELS benchmarks    every benchmark with a card section: at most nine minutes
#   tools/card.sh --here tests         as above, with the Python that is there (PYTHON, else python3)
#
# WHEELS is a folder with wheels for the Python there. Fill it where there is a network, from the checkout, with
#   pip download --dest WHEELS "torch>=2.11" hatchling ".[test,nvml]" "cupy-cuda13x[ctk]" "jax[cuda13]" "numba-cuda[cu13]"
# torch comes first: it takes one version alone of CUDA's libraries, and pip else tries one old torch after the other.
# With its CUDA build all of it is 3.4 GB; an index that prefers torch's CPU build gives one that sees no card.
# Results go to benchmarks/results/card-NAME/, with a summary of at most ten lines. Frameworks that are missing, or see no
# card, are named. The exit code is 0 where all was run and passed, 1 where something failed, and 3 where nothing failed
# and something was not run: a skip is no pass.
set -euo pipefail
cd "$(dirname "$0")/.."
usage() { sed -n '2,14s/^# \{0,1\}//p' "$0"; exit 2; }
[ $# -ge 2 ] || usage
wheels=$1 part=$2
shift 2
case $part in tests | benchmarks) ;; *) usage ;; esac
python=${PYTHON:-python3}
if [ "$wheels" != --here ]; then
    "$python" -m venv .venv-card
    python=.venv-card/bin/python
    offline=(-m pip install --quiet --no-index --find-links "$wheels")
    "$python" "${offline[@]}" hatchling
    "$python" "${offline[@]}" --no-build-isolation ".[test,nvml]"
    # Each by itself, so that one that does not fit leaves the others; without CUDA's wheels that of the system serves.
    for package in "cupy-cuda13x[ctk]" torch "jax[cuda13]" "numba-cuda[cu13]"; do
        "$python" "${offline[@]}" "$package" || "$python" "${offline[@]}" "${package%%[*}" ||
            echo "no wheel of $package fits in $wheels"
    done
fi
# What the installation took counts towards the nine minutes.
exec "$python" tools/card_run.py "$part" --spent "$SECONDS" "$@"
