#!/usr/bin/env bash
# Measures the cost of a step on this machine's GPU, in at most 14 minutes after the set-up: MAE by timm's blocks, by
# Transformers and by this project, and PR-MIM, eager and compiled, with the same attention; this project's two with
# attention for short sequences, and also as CUDA graphs; the paper's cost tables of ViT-B and ViT-L; and the tests that
# need a GPU. If a part fails, the others still run, and the exit code is 1. CSV files are written after every recipe
# and every round: a part that is cut by its limit, or by the end of a job, leaves the rounds so far. Five steps are
# timed together, so that the host runs ahead as in training.
# These variables change what is measured:
#
#     OUTPUT_DIR               folder of the tables (output/benchmark_gpu): a new one, or that of an earlier run
#     BATCH_BASE, BATCH_LARGE  images per step (512 and 256, for a GPU with 80 GB)
#     ROUNDS                   number of times that each step is timed (10)
#     IMAGES                   folders of JPEGs or packed shards: PR-MIM also trains from them, 4 minutes for two (none)
#     PRMIM_SETUP=0            use the current environment instead of making one
set -euo pipefail
unset CDPATH # with it, cd may print another folder
if ! command -v nvidia-smi >/dev/null || ! nvidia-smi --list-gpus | grep GPU >/dev/null; then
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
# Without this check, all tests that need a GPU would be skipped, and the run would pass.
if ! python -c "import sys, torch; sys.exit(not torch.cuda.is_available())"; then
    echo "benchmark_gpu.sh: error: there is a GPU, but PyTorch cannot use it: the driver is too old, this build of" \
        "PyTorch is without CUDA, or CUDA_VISIBLE_DEVICES hides the GPU" >&2
    exit 1
fi
output=$(mkdir -p "${OUTPUT_DIR:-$root/output/benchmark_gpu}" && cd "${OUTPUT_DIR:-$root/output/benchmark_gpu}" && pwd)
cd "$root"
if [ -n "$(ls -A "$output")" ] && [ ! -f "$output/environment.txt" ]; then
    echo "benchmark_gpu.sh: error: OUTPUT_DIR=$output holds other files: give a new or empty folder" >&2
    exit 1
fi
# Remove the files of an earlier run.
(cd "$output" && rm -rf environment.txt tests.txt cost_{fair,short,graph,base,large}.{md,csv})

{
    date -u +%Y-%m-%d
    git describe --always --dirty 2>/dev/null || true # a download is no git repository
    nvidia-smi --query-gpu=name,driver_version,memory.total,power.limit,clocks.max.sm --format=csv || true
    python -c "import torch; print('CUDA of torch', torch.version.cuda)"
    python -m pip list 2>/dev/null | grep -E '^(torch|torchvision|triton|timm|transformers) ' || true
} >"$output/environment.txt"
cat "$output/environment.txt"

status=0
profile() { # profile NAME SECONDS BATCH [flags]
    timeout -k 5 "$2" python scripts/profile_pretrain.py "${@:4}" --batch_size "$3" --rounds "${ROUNDS:-10}" \
        --steps 5 --device cuda --csv "$output/$1.csv" | tee "$output/$1.md" ||
        { echo "the cost table $1 failed" >&2 && status=1; }
}
# The row that is wanted most comes first. A shape of blocks compiles for up to 90 s, the first time on a machine.
profile cost_fair 300 "${BATCH_BASE:-512}" {prmim50,mae}_vit_base_100ep timm transformers --code eager compiled \
    --attention flash --precision bf16
short_seconds=120
if [ -n "${IMAGES:-}" ]; then short_seconds=380; fi # with all cores; 400 steps for each folder and R = 2, 1 and 4
profile cost_short $short_seconds "${BATCH_BASE:-512}" {prmim50,mae}_vit_base_100ep --code compiled --attention short \
    --data_path ${IMAGES:-}
profile cost_graph 70 "${BATCH_BASE:-512}" {prmim50,mae}_vit_base_100ep --code compiled --attention short --cuda_graph
profile cost_base 60 "${BATCH_BASE:-512}" mae_vit_base_100ep {plain,prmim}{25,50,65}_vit_base_100ep
profile cost_large 80 "${BATCH_LARGE:-256}" {mae,plain50,prmim50}_vit_large_100ep
timeout -k 5 195 python -m pytest -q -m gpu -p no:cacheprovider 2>&1 | tee "$output/tests.txt" || status=1
echo "Tables and logs in $output:" && ls "$output"
exit $status
