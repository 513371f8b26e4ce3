#!/bin/sh
# Builds kvt's C++ tests under the address (with leak), undefined-behaviour and thread sanitizers and
# runs them; the first failure ends it. About ten minutes on two cores from nothing.
#
#   tools/sanitize.sh [address] [undefined] [thread]    default: all three
#   BUILD_DIR    where to build (build/sanitize)
#   TEST_FILTER  a regular expression of test names (all)
set -eu
cd "$(dirname "$0")/.."
build=${BUILD_DIR:-build/sanitize}
[ $# -gt 0 ] || set -- address undefined thread

# A report is a failure, wherever it comes from.
export ASAN_OPTIONS="detect_leaks=1:strict_string_checks=1:check_initialization_order=1"
export UBSAN_OPTIONS="print_stacktrace=1:halt_on_error=1"
export TSAN_OPTIONS="halt_on_error=1:second_deadlock_stack=1"
export KVT_STRESS_STEPS="${KVT_STRESS_STEPS:-60}"

for sanitizer in "$@"; do
  dir=$build/$sanitizer
  printf 'sanitize: %s\n' "$sanitizer"
  mkdir -p "$dir"
  # -O1 keeps stacks readable and the build short; one pass over everything is what matters here.
  if ! { cmake -S kvt_bindings/cpp -B "$dir" -G Ninja -DCMAKE_BUILD_TYPE=Debug \
           -DCMAKE_CXX_FLAGS_DEBUG="-O1 -g1" -DKVT_TESTS=ON -DKVT_SANITIZE="$sanitizer" &&
         cmake --build "$dir"; } >"$dir/build.log" 2>&1; then
    tail -n 40 "$dir/build.log"
    exit 1
  fi
  ctest --test-dir "$dir" --output-on-failure --no-tests=error ${TEST_FILTER:+-R "$TEST_FILTER"}
done
