#!/usr/bin/env bash
# Speed on one GPU, under six minutes: a 0.5 B and a 1.5 B random model, then the tests that need a GPU.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python}
timeout 120 "$python" benches/bench_gpu.py --size 0.5b
timeout 120 "$python" benches/bench_gpu.py --size 1.5b --prompts 16
timeout 100 "$python" -m pytest -q -m gpu tests/gpu
