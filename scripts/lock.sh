#!/bin/sh
# Writes requirements/*.txt: every version in constraints.txt that an install needs, with the hashes of
# all files of that release. On a GPU, the versions in constraints-gpu.txt replace those of the same
# packages. The files name no registry. UV is the uv command.
set -eu
cd "$(dirname "$0")/.."
merged=$(mktemp)
trap 'rm -f "$merged"' EXIT
sed -E 's/^(.*)==.*/^\1==/' constraints-gpu.txt | grep -vf - constraints.txt | cat - constraints-gpu.txt > "$merged"

lock() {
    python=$1 constraints=$2 name=$3
    shift 3
    "${UV:-uv}" pip compile --quiet --constraint "$constraints" --generate-hashes \
        --no-emit-index-url --no-header --no-annotate --python-version "$python" \
        --python-platform x86_64-manylinux_2_28 --upgrade \
        --output-file "requirements/$name.txt" "$@"
}

for extra in server engine demo; do
    lock 3.11.3 constraints.txt "$extra" pyproject.toml --extra "$extra"
done
for extra in cuda cuda13; do
    lock 3.12.0 "$merged" "$extra" pyproject.toml --extra "$extra"
done
# The right torch for a machine (CPU or CUDA) depends on its registry, and so does the hash. Only tests
# import torch, as a reference.
grep -Ev '^torch' constraints.txt | lock 3.11.3 constraints.txt dev --no-deps -
# The compiler for a GPU, without CUDA's libraries.
grep -E '^jax-cuda12-' constraints-gpu.txt | lock 3.12.0 "$merged" gpu-compile pyproject.toml --extra engine -
# An editable install makes hatchling ask for editables.
printf 'hatchling\neditables\n' | lock 3.11.3 constraints.txt build -
# Helm as a library and the schemas of Kubernetes, for `make check-deploy` alone.
printf 'helm-python-sdk==0.2.2\nkubernetes-validate==1.37.0\n' | lock 3.11.3 constraints.txt ../scripts/check_deploy -
