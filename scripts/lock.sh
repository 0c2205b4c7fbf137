#!/bin/sh
# Writes requirements/*.txt: every version in constraints.txt that an install needs, with the hashes of
# all files of that release. The files name no registry. UV is the uv command.
set -eu
cd "$(dirname "$0")/.."

lock() {
    name=$1
    shift
    "${UV:-uv}" pip compile --quiet --constraint constraints.txt --generate-hashes \
        --no-emit-index-url --no-header --no-annotate --python-version 3.11.3 \
        --python-platform x86_64-manylinux_2_28 --upgrade \
        --output-file "requirements/$name.txt" "$@"
}

for extra in server engine cuda demo; do
    lock "$extra" pyproject.toml --extra "$extra"
done
# The right torch for a machine (CPU or CUDA) depends on its registry, and so does the hash. Only tests
# import torch, as a reference.
grep -Ev '^(torch|jax-cuda12-|nvidia-)' constraints.txt | lock dev --no-deps -
grep -E '^jax-cuda12-' constraints.txt | lock gpu-compile --no-deps -
# An editable install makes hatchling ask for editables.
printf 'hatchling\neditables\n' | lock build -
