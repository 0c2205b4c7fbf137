#!/bin/sh
# Prints a Python that the newest JAX takes: PYTHON if it is 3.12 or newer, or the first that is found.
# The shims of pyenv refuse versions that are not activated, so its own folder is searched too.
for python in "${PYTHON:-python3}" python3.13 python3.12 "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.1[23].*/bin/python; do
    if "$python" -c 'import sys, ensurepip, venv; sys.exit(sys.version_info < (3, 12))' 2>/dev/null; then
        echo "$python"
        exit
    fi
done
echo "Python 3.12 or newer with venv is needed, and none was found; install one, or set PYTHON to its path" >&2
exit 1
