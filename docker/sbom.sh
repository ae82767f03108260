#!/bin/sh
# Writes what is installed in a Python environment as CycloneDX 1.6 in JSON: sbom.sh PYTHON FILE. The same environment gives the
# same bytes. Needs cyclonedx-py, in an environment of its own: docker/requirements-sbom.lock.
set -eu
exec cyclonedx-py environment --output-reproducible --spec-version 1.6 --output-format JSON --output-file "$2" "$1"
