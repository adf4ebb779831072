#!/usr/bin/env bash
# Stage 3, on any machine: the engines, by the timings that there are. What did not change is kept.
#   ci/finish.sh engines.yaml OUT [TIMINGS]
set -euo pipefail
if [ $# -lt 2 ]; then echo "error: expected engines.yaml and OUT, see the first lines of $0" >&2; exit 2; fi
matrix=$1 out=$2 timings=${3:-$2/timings}
mkdir -p "$timings"
code=0
tapeout build --matrix "$matrix" --timings "$timings" -o "$out" || code=$?
# GitHub shows this file on the run's page; elsewhere there is none.
if [ -n "${GITHUB_STEP_SUMMARY:-}" ] && [ -f "$out/summary.md" ]; then cat "$out/summary.md" >>"$GITHUB_STEP_SUMMARY"; fi
exit "$code"
