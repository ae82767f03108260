#!/bin/sh
# Makes the Python environment of an image: install.sh DIRECTORY LOCK WHEEL [OPTION OF venv ...]
#
# Nothing comes in but the wheel, and what the lock names with its hash. Everything is compiled here: the image's user cannot
# write there, and would compile it anew at every start.
set -eu
directory=$1 lock=$2 wheel=$3
shift 3
python3 -m venv "$@" "$directory"
pip() {
  "$directory/bin/python" -m pip --disable-pip-version-check --no-input "$@"
}
pip uninstall --yes --quiet setuptools  # which venv brings with older Pythons, an old one; nothing here needs it
pip install --no-cache-dir --no-compile --no-deps --only-binary :all: --require-hashes --requirement "$lock"
pip install --no-cache-dir --no-compile --no-deps --no-index "$wheel"
rm -f "$directory"/lib/python3.*/site-packages/*.dist-info/direct_url.json  # where the wheel was: of no use to anybody else
"$directory/bin/python" -m compileall -q -j 0 --invalidation-mode unchecked-hash "$directory/lib" || true  # some are templates
