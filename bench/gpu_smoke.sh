#!/usr/bin/env bash
# What only a GPU shows, in one go, from a bare checkout on a machine with an NVIDIA driver:
#   bench/gpu_smoke.sh             installs into .venv, runs the tests marked gpu and the offline benchmark
#   bench/gpu_smoke.sh PYTHON      with an interpreter that has everything already
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=${1:-}
if [ -z "$python" ]; then
    make install || exit 1
    .venv/bin/python -m pip install -q -c constraints.txt pytest pytest-asyncio hypothesis httpx psutil || exit 1
    python=.venv/bin/python
fi
export JAX_PLATFORMS=cuda
failed=0
"$python" -m pytest -q -m gpu tests || failed=1
"$python" bench/offline.py --model 8B --mixed || failed=1
exit "$failed"
