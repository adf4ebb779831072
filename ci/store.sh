#!/usr/bin/env bash
# Sets from a store and back; each model has a place of its own below URL.
#   ci/store.sh pull engines.yaml OUT URL     what was published last, so that it need not be built again
#   ci/store.sh push OUT URL                  every set below OUT
set -euo pipefail
usage() {
  echo "error: expected pull or push with its arguments, see the first lines of $0" >&2
  exit 2
}
case ${1:-} in
  pull)
    [ $# = 4 ] || usage
    matrix=$2 out=$3 url=$4
    models=$(tapeout build --matrix "$matrix" -o "$out" --dry-run --json |
      python3 -c 'import json, sys; print(*dict.fromkeys(r["model"] for r in json.load(sys.stdin)["results"]))')
    mkdir -p "$out"
    for model in $models; do
      # The first time there is none; then everything is built, which is what an unreadable store comes to as well.
      tapeout pull "$url/$model" -o "$out/$model" --all || echo "$model: nothing fetched, all of it is built"
    done
    ;;
  push)
    [ $# = 3 ] || usage
    out=$2 url=$3 found=no
    for index in "$out"/*/index.json; do
      [ -e "$index" ] || continue
      found=yes
      set=$(dirname "$index")
      tapeout push "$set" "$url/$(basename "$set")"
    done
    if [ "$found" = no ]; then echo "error: $out holds no engine set" >&2; exit 2; fi
    ;;
  *) usage ;;
esac
