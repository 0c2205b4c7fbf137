#!/bin/sh
# Prints a Python of 3.12 or newer, which the newest JAX needs: NEWER_PYTHON, or the first that is found.
# The shims of pyenv refuse versions that are not activated, so its own folder is searched too.
for python in ${NEWER_PYTHON:-python3 python3.13 python3.12 "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.1[23].*/bin/python}; do
    if "$python" -c 'import sys; sys.exit(sys.version_info < (3, 12))' 2>/dev/null; then
        echo "$python"
        exit
    fi
done
echo "Python 3.12 or newer is needed, and none was found; install one, or set NEWER_PYTHON to its path" >&2
exit 1
