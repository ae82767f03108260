#!/bin/sh
# Writes docker/requirements-*.lock anew: what pyproject.toml allows, the newest of it, and the hashes of all its files.
#
#   make locks
#
# Needs uv. It asks the package index that UV_DEFAULT_INDEX names, else PyPI; no index is named in a lock.
set -eu
cd "$(dirname "$0")/.."

lock() {
  name=$1 python=$2
  shift 2
  {
    echo "# For Python $python on Linux. Made by docker/locks.sh: make locks"
    uv pip compile --quiet --generate-hashes --no-header --no-annotate --only-binary :all: \
      --python-version "$python" --python-platform x86_64-manylinux_2_28 "$@"
  } >"docker/requirements-$name.lock.partial"
  mv "docker/requirements-$name.lock.partial" "docker/requirements-$name.lock"
}

overridden=$(mktemp)
trap 'rm -f "$overridden"' EXIT

lock cpu 3.11 --extra onnx pyproject.toml

# PyPI's torch brings CUDA. onnxruntime-gpu stands in place of onnxruntime: both are one module.
echo "onnxruntime ; sys_platform == 'none'" >"$overridden"
printf 'torch==2.13.0\nonnxruntime-gpu>=1.23\n' |
  lock cuda 3.11 --extra onnx --extra torch --override "$overridden" pyproject.toml -

# The image has torch, torch-neuronx and the numpy that they were built with.
lock neuron 3.12 --no-emit-package numpy pyproject.toml

# What loadtest's generator on EC2 has beside the first.
echo 'boto3>=1.40' | lock aws 3.11 -

echo 'setuptools>=77' | lock build 3.11 -
echo 'cyclonedx-bom>=7' | lock sbom 3.11 -
