#!/usr/bin/env bash
# Pre-train a small ViT with PR-MIM on photographs without labels, and fine-tune it with few labels. Train the same
# model from scratch with these labels, and compare. It takes a few minutes on two CPU cores, after the set-up.
#
#     bash scripts/quickstart.sh
#     OUTPUT_DIR=output/longer bash scripts/quickstart.sh --epochs 32
#
# Arguments are flags of main_pretrain.py and change the pre-training only. Everything is written to output/quickstart,
# or to OUTPUT_DIR. A second call continues where the first one stopped. docs/study.md has what other seeds give.
set -euo pipefail
for argument in "$@"; do
    case $argument in
        -h | --help)
            sed -n '2,/^set/s/^# \{0,1\}//p' "$0"
            exit
            ;;
        --data_* | --ou* | --reci*) # abbreviations, too
            echo "quickstart.sh: error: the script sets ${argument%%=*} itself; OUTPUT_DIR sets the output folder" >&2
            exit 2
            ;;
    esac
done
# A stage that has just finished ignores Ctrl-C and exits with 0. The script then ends itself by SIGINT.
trap 'echo "quickstart.sh: interrupted; the same command continues" >&2; trap - INT; kill -INT $$' INT
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
install requirements.txt requirements-quickstart.txt

output=${OUTPUT_DIR:-$root/output/quickstart}
mkdir -p "$output"
output=$(cd "$output" && pwd)
cd "$root"

# sample FOLDER FLAGS...: cut crops out of the photographs, unless the folder is complete already.
sample() {
    if [ ! -d "$output/$1" ]; then
        echo "Cutting crops out of photographs: $output/$1"
        rm -rf "$output/$1.part" # left by an interrupted call
        python scripts/sample_photos.py "$output/$1.part" --crop_sides 0.25 0.5 "${@:2}" >/dev/null
        mv "$output/$1.part" "$output/$1"
    fi
}
sample unlabelled --num_train 100
sample labelled --num_train 5 --num_val 90

# The gain of seed 1 is one of the two middle ones of the eight in docs/studies/quickstart.csv, which had one thread.
seed=1
export OMP_NUM_THREADS=1
python main_pretrain.py --recipe quickstart --data_path "$output/unlabelled" --seed $seed --output_dir "$output/pretrain" "$@"

# Both arms have the same labels, steps, augmentation and learning rate. Layer decay is for pre-trained layers only.
finetune() {
    python main_finetune.py --recipe quickstart_finetune --data_path "$output/labelled" --eval_every 50 --seed $seed "$@"
}
finetune --finetune "$output/pretrain" --output_dir "$output/finetune"
finetune --layer_decay 1 --output_dir "$output/scratch"

python - "$output" <<'EOF'
import json
import sys
from pathlib import Path

output = Path(sys.argv[1])
num_labels = len(list(output.glob("labelled/train/*/*.jpg")))
num_unlabelled = len(list(output.glob("unlabelled/train/*/*.jpg")))
results = {run: json.loads((output / run / "results.json").read_text())["last"] for run in ("finetune", "scratch")}
print()
num_test = results["scratch"]["val_num_images"]
print(f"{num_labels} labelled crops, {num_unlabelled} crops without labels, {num_test} crops to test on")
print(f"  pre-trained with PR-MIM, then fine-tuned: top-1 {results['finetune']['val_top1']:.1f} %")
print(f"  the same model from scratch:              top-1 {results['scratch']['val_top1']:.1f} %")
EOF
echo "One seed proves little: docs/study.md has the figures of eight, and what they do not show."
echo "Eight crops, their tokens (retained blue, thrown yellow), reconstructions, and features as colours:"
echo "  before training: $output/pretrain/before_training.png"
echo "  after:           $output/pretrain/reconstruction.png"
