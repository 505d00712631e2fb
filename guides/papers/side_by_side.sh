#!/usr/bin/env bash
# Guides of papers with --full, side by side on one GPU, which small models do not fill.
#
#     guides/papers/side_by_side.sh SECONDS TEXT [LANE ...]
#
# TEXT is a file of some 9 MB or more, for the guides that read text. Lanes run at the same time: copying_256
# copying_1024 induction ablations extrapolation recall phone_book state_size; without any, all of them.
# Results go on from build/papers/*.jsonl, or from those in $RESULTS, and are kept there every 20 s, a line for
# each run that is done: what is still running when the time is over is lost, and a later sitting runs what
# is missing alone.
#
# On an H100 five lanes took 29 ms for a step of copying_256, where one alone was thought to take 3; on an H200
# four took as long for each run as three did, and a quarter more.
set -u
seconds=${1:?how many seconds it may take} text=$(realpath "${2:?a file of text}")
shift 2
cd "$(dirname "${BASH_SOURCE[0]}")"
results=$(realpath -m "${RESULTS:-../../build/papers}")
work=$(mktemp -d)
python=$(command -v python || command -v python3)
export KERAS_BACKEND=jax XLA_PYTHON_CLIENT_PREALLOCATE=false MPLBACKEND=agg PYTHONUNBUFFERED=1

guide() { # lane, guide, arguments: until the time is over
  local lane=$1 name=$2
  shift 2
  [ $((seconds - SECONDS)) -gt 0 ] || return
  mkdir -p "$work/$lane"
  [ -e "$work/$lane/$name.jsonl" ] || cp "$results/$name.jsonl" "$work/$lane/" 2>/dev/null
  timeout -k 5 $((seconds - SECONDS)) "$python" "$name.py" ${SIZE---full} --output "$work/$lane" "$@" \
    >> "$work/$lane.log" 2>&1
  echo "$lane: $name $* ended with $? after $SECONDS s; its output is $work/$lane.log"
}

copying_256() {
  guide copying_256 synthetic_tasks --tasks copying --copying-length 256 --copying-window 128
}
copying_1024() { guide copying_1024 synthetic_tasks --tasks copying; }
induction() { guide induction synthetic_tasks --tasks induction; }
ablations() { guide ablations lightning_ablations --text "$text"; }
extrapolation() { guide extrapolation extrapolation --text "$text"; }
recall() { guide recall associative_recall; }
phone_book() { guide phone_book phone_book; }
state_size() { # heads of one channel, of ratio 1, take longest
  guide state_size state_size --text "$text" --models HGRN
  guide state_size state_size --text "$text" --ratios 128 16
  guide state_size state_size --text "$text" --ratios 64 256 4
  guide state_size state_size --text "$text"
}

keep() { # every line once, those of before first
  mkdir -p "$results"
  local name
  for name in $(cd "$work" && find . -name '*.jsonl' -printf '%f\n' | sort -u); do
    cat "$results/$name" "$work"/*/"$name" 2>/dev/null | awk '!seen[$0]++' > "$work/$name"
    mv "$work/$name" "$results/$name"
  done
}
trap 'kill $(jobs -p) 2>/dev/null; keep' EXIT

[ $# -gt 0 ] || set -- extrapolation recall copying_1024 copying_256 induction ablations \
  phone_book state_size
for lane; do
  [ "$(type -t "$lane")" = function ] || { echo "no lane is called $lane" >&2; exit 2; }
done
for lane; do "$lane" & done
while [ "$SECONDS" -lt "$seconds" ] && [ -n "$(jobs -pr)" ]; do
  sleep 5
  [ $((SECONDS % 20)) -ge 5 ] || keep
done
wait
