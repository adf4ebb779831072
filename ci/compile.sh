#!/usr/bin/env bash
# Stage 1, on any machine: packs for the GPUs of a matrix whose timings are not there.
#   ci/compile.sh engines.yaml OUT [TIMINGS]
set -euo pipefail
matrix=$1 out=$2 timings=${3:-$2/timings}
mkdir -p "$timings"
exec tapeout build --matrix "$matrix" --stage compile --timings "$timings" -o "$out"
