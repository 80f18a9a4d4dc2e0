#!/usr/bin/env bash
# Every kernel under compute-sanitizer, by hand on a machine with a GPU: bad addresses, then races
# in shared memory. Without torch's caching allocator each tensor is an allocation of its own.
set -euo pipefail
cd "$(dirname "$0")/.."
tests="bit_for_bit or planes_are_exact or matmul or each_expert"
for tool in memcheck racecheck; do
    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool "$tool" --error-exitcode 1 \
        python3 -m pytest -q -m gpu -p no:cacheprovider tests/test_kernels.py -k "$tests"
done
