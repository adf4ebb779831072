#!/usr/bin/env bash
# Stage 1, on any machine: packs for the GPUs of a matrix whose timings are not there.
#   ci/compile.sh engines.yaml OUT [TIMINGS]
set -euo pipefail
if [ $# -lt 2 ]; then echo "error: expected engines.yaml and OUT, see the first lines of $0" >&2; exit 2; fi
matrix=$1 out=$2 timings=${3:-$2/timings}
mkdir -p "$timings"
exec tapeout build --matrix "$matrix" --stage compile --timings "$timings" -o "$out"
