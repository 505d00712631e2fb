#!/usr/bin/env bash
# Times generation in several processes that compile in parallel and are timed one after the other.
#
#     benchmarks/writing_in_turns.sh SECONDS "torch hgrn2 1" "jax hgrn2 1" "torch hgrn2 1 int8" ...
#
# A lane is a backend and the arguments of benchmarks/writing.py. A line of JSON is printed for each; its log is
# kept, and named if the lane fails. First calls take longer than alone, since other processes compile.
# SECONDS bounds compilation: lanes that are not ready then are ended.
set -u
seconds=${1:?how many seconds lanes may compile}
shift
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=$(command -v python || command -v python3)
work=$(mktemp -d)
export XLA_PYTHON_CLIENT_PREALLOCATE=false PYTHONUNBUFFERED=1
trap 'kill $(jobs -p) 2>/dev/null' EXIT

lanes=("$@") processes=()
for i in "${!lanes[@]}"; do
  mkdir "$work/$i"
  read -r backend rest <<< "${lanes[i]}"
  # shellcheck disable=SC2086
  KERAS_BACKEND=$backend "$python" -m benchmarks.writing $rest --turn "$work/$i" \
    > "$work/$i/out" 2> "$work/$i/log" &
  processes+=($!)
done
waiting() { # whether a lane still compiles
  for i in "${!lanes[@]}"; do
    [ -e "$work/$i/ready" ] || ! kill -0 "${processes[i]}" 2>/dev/null || return 0
  done
  return 1
}
while [ "$SECONDS" -lt "$seconds" ] && waiting; do sleep 0.5; done
failed=0
for i in "${!lanes[@]}"; do
  [ -e "$work/$i/ready" ] || kill "${processes[i]}" 2>/dev/null
done
for i in "${!lanes[@]}"; do
  touch "$work/$i/go"
  if wait "${processes[i]}"; then
    cat "$work/$i/out"
  else
    echo "${lanes[i]}: failed or was not ready, see $work/$i/log" >&2
    failed=1
  fi
done
exit $failed
