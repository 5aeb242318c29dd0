#!/usr/bin/env bash
# What a step costs on this machine's GPU, in less than 8 minutes after the set-up: the tests that need one, then the paper's
# cost tables of ViT-B and ViT-L. The tables are left in output/benchmark_gpu (OUTPUT_DIR moves them); BATCH_BASE,
# BATCH_LARGE (images, 256 and 128: for 80 GB) and ROUNDS (20) change what is measured. With your own environment that
# has the requirements: PRMIM_SETUP=0.
set -euo pipefail
if ! command -v nvidia-smi >/dev/null || ! nvidia-smi --list-gpus | grep -q GPU; then
    echo "benchmark_gpu.sh: error: no NVIDIA GPU here (nvidia-smi lists none)" >&2
    exit 1
fi
if [ "${PRMIM_SETUP:-1}" = 0 ]; then
    root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
else
    source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
    install requirements.txt requirements-quickstart.txt
    install requirements-dev.txt requirements.txt
fi
output=$(mkdir -p "${OUTPUT_DIR:-$root/output/benchmark_gpu}" && cd "${OUTPUT_DIR:-$root/output/benchmark_gpu}" && pwd)
cd "$root"

{
    date -u +%Y-%m-%d
    nvidia-smi --query-gpu=name,driver_version,memory.total,power.limit,clocks.max.sm --format=csv
    python -c "import torch, timm; print('torch', torch.__version__, 'cuda', torch.version.cuda, 'timm', timm.__version__)"
} >"$output/environment.txt"
cat "$output/environment.txt"

status=0
profile() { # profile TABLE BATCH NAME
    timeout 120 python scripts/profile_pretrain.py --table "$1" --batch_size "$2" --rounds "${ROUNDS:-20}" --device cuda \
        --csv "$output/$3.csv" --markdown "$output/$3.md" || { echo "the cost table $3 failed" >&2 && status=1; }
}
timeout 200 python -m pytest -q -m gpu -p no:cacheprovider 2>&1 | tee "$output/tests.txt" || status=1
profile ablation "${BATCH_BASE:-256}" cost_base
profile large "${BATCH_LARGE:-128}" cost_large
echo "In $output: environment.txt, tests.txt, cost_base.md and .csv, cost_large.md and .csv"
exit $status
