#!/usr/bin/env bash
# Runs scripts with --full in parallel on one GPU, which a single small model does not fill.
#
#     guides/papers/side_by_side.sh SECONDS TEXT [LANE ...]
#
# TEXT is a file of 9 MB or more, for the scripts that read text. Lanes run in parallel: copying_256 copying_1024
# induction ablations extrapolation recall phone_book state_size; the default is all of them.
# Results continue those in build/papers/*.jsonl, or in $RESULTS, and are saved there every 20 s, one line per
# finished run. Runs that have not finished when the time is over are lost; a later call repeats only those.
#
# The script starts the driver's Multi-Process Service (MPS), through which lanes share the GPU at the same time;
# without it they take turns. With MPS and three lanes on an H100, copying_1024 of Hawk took 221 s, ratios 1 and 4
# of state_size 200 s, and recall of 64 pairs at width 256 in 6,000 steps 207 s. Without it, next to five other
# processes, none of them had finished after 550 s.
set -u
seconds=${1:?how many seconds it may take} text=$(realpath "${2:?a file of text}")
shift 2
cd "$(dirname "${BASH_SOURCE[0]}")"
results=$(realpath -m "${RESULTS:-../../build/papers}")
work=$(mktemp -d)
python=$(command -v python || command -v python3)
export KERAS_BACKEND=jax XLA_PYTHON_CLIENT_PREALLOCATE=false MPLBACKEND=agg PYTHONUNBUFFERED=1

start_mps() {
  command -v nvidia-cuda-mps-control > /dev/null || return
  export CUDA_MPS_PIPE_DIRECTORY=$work/mps CUDA_MPS_LOG_DIRECTORY=$work/mps
  mkdir "$work/mps"
  if nvidia-cuda-mps-control -d && timeout 60 "$python" -c "import jax; jax.devices('gpu')" 2> /dev/null; then return; fi
  echo "MPS does not start: lanes take turns" >&2
  stop_mps
  unset CUDA_MPS_PIPE_DIRECTORY CUDA_MPS_LOG_DIRECTORY
} > /dev/null
stop_mps() { [ -z "${CUDA_MPS_PIPE_DIRECTORY-}" ] || echo quit | timeout 10 nvidia-cuda-mps-control; }

guide() { # lane, script, arguments: runs until the time is over
  local lane=$1 name=$2
  shift 2
  [ $((seconds - SECONDS)) -gt 0 ] || return
  mkdir -p "$work/$lane"
  [ -e "$work/$lane/$name.jsonl" ] || cp "$results/$name.jsonl" "$work/$lane/" 2>/dev/null
  timeout -k 5 $((seconds - SECONDS)) "$python" run.py "$name" ${SIZE---full} --output "$work/$lane" "$@" \
    >> "$work/$lane.log" 2>&1
  echo "$lane: $name $* ended with $? after $SECONDS s; its output is $work/$lane.log"
}

copying_256() {
  guide copying_256 synthetic_tasks --only copying --copying-length 256 --copying-window 128
}
copying_1024() { guide copying_1024 synthetic_tasks --only copying; }
induction() { guide induction synthetic_tasks --only induction; }
ablations() { guide ablations lightning_ablations --text "$text"; }
extrapolation() { guide extrapolation extrapolation --text "$text"; }
recall() { guide recall recall; }
phone_book() { guide phone_book phone_book; }
state_size() { guide state_size state_size --text "$text"; }

keep() { # saves every line once, earlier lines first
  mkdir -p "$results"
  local name
  for name in $(cd "$work" && find . -name '*.jsonl' -printf '%f\n' | sort -u); do
    cat "$results/$name" "$work"/*/"$name" 2>/dev/null | awk '!seen[$0]++' > "$work/$name"
    mv "$work/$name" "$results/$name"
  done
}
trap 'kill $(jobs -p) 2>/dev/null; keep; stop_mps' EXIT

[ $# -gt 0 ] || set -- extrapolation recall copying_1024 copying_256 induction ablations \
  phone_book state_size
for lane; do
  [ "$(type -t "$lane")" = function ] || { echo "no lane is called $lane" >&2; exit 2; }
done
start_mps
for lane; do "$lane" & done
while [ "$SECONDS" -lt "$seconds" ] && [ -n "$(jobs -pr)" ]; do
  sleep 5
  [ $((SECONDS % 20)) -ge 5 ] || keep
done
wait
