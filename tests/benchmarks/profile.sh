#!/bin/sh
# Measures a latency table of the GPU in this machine: the models that GAC knows, the general sweep and the studies, three
# passes each, and says how long each part took. Run it from the checkout; a second run goes on where the first stopped.
#
#     tests/benchmarks/profile.sh profiles/nvidia-h100-80gb-hbm3.jsonl
#
# The A/A test is a file of its own:  gac profile --aa --model llama-3-8b -o aa.jsonl
set -eu
table=$1

part() {
    begun=$(date +%s)
    python3 -m gac profile -o "$table" "$@"
    echo "$(($(date +%s) - begun)) s: gac profile $*"
}

part --model llama-3-8b
part
studies=$(python3 -c 'from gac.lab.studies import STUDIES; print(*(f"--sweep {name}" for name in STUDIES))')
# shellcheck disable=SC2086  # one word an option
part $studies
part --model llama-3-8b --model smollm2 --model llama-2-7b --model mistral-7b --model qwen3-8b --model gemma-3-4b \
    --model llama-3-70b
python3 -m gac study --all --profile "$table"
