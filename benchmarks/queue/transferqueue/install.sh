#!/bin/sh
# Make the environment that the package TransferQueue is measured in: install.sh DIRECTORY [PYTHON]
# PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu spares a machine without a GPU the CUDA build of torch.
set -eu
here=$(dirname "$0")
"${2:-python3}" -m venv "$1"
"$1/bin/python" -m pip install --quiet -r "$here/requirements.txt"
