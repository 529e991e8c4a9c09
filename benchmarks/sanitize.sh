#!/usr/bin/env bash
# compute-sanitizer over every kernel of a bundle on small problems: benchmarks/sanitize.sh BUNDLE [GLOB] [TOOL...]
#
# TOOL: memcheck racecheck (default) initcheck synccheck. Needs a GPU and compute-sanitizer (of the CUDA toolkit, or
# COMPUTE_SANITIZER=/path/to/it). Prints each tool's verdict; logs go to SANITIZE_LOGS (a temporary folder by default).
# Exit code 1 if a tool reports an error or a result is wrong.
set -euo pipefail

if [[ $# -lt 1 ]]; then
    sed -n '2,6s/^# \{0,1\}//p' "$0"
    exit 2
fi
bundle=$1
pattern=${2:-*}
tools=("${@:3}")
[[ ${#tools[@]} -gt 0 ]] || tools=(memcheck racecheck)
sanitizer=${COMPUTE_SANITIZER:-$(command -v compute-sanitizer || true)}
if [[ -z $sanitizer ]]; then
    echo "compute-sanitizer: not found; it is part of the CUDA toolkit; set COMPUTE_SANITIZER to its path" >&2
    exit 2
fi
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
logs=${SANITIZE_LOGS:-$(mktemp -d)}
mkdir -p "$logs"
failed=0
for tool in "${tools[@]}"; do
    options=()
    [[ $tool == memcheck ]] && options+=(--leak-check no --report-api-errors no)
    [[ $tool == racecheck ]] && options+=(--racecheck-report all)
    log=$logs/$tool.log
    echo "== $tool (log: $log)"
    code=0
    "$sanitizer" --tool "$tool" --error-exitcode 9 --print-limit 20 "${options[@]}" \
        "${PYTHON:-python3}" "$here/sanitize.py" "$bundle" "$pattern" >"$log" 2>&1 || code=$?
    grep -E '^(ok|WRONG)|ERROR SUMMARY|RACECHECK SUMMARY|Invalid|Race reported|Error:' "$log" | head -60 || true
    if [[ $code -ne 0 ]]; then
        echo "== $tool: FAILED (exit code $code)"
        failed=1
    else
        echo "== $tool: clean"
    fi
done
exit $failed
