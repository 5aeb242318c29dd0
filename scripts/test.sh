#!/usr/bin/env bash
# Set-up, then the tests. Arguments go to pytest: `bash scripts/test.sh -k sampling`.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
install requirements.txt requirements-quickstart.txt
install requirements-dev.txt requirements.txt
cd "$root"
ruff check .
ruff format --check .
mypy
# Three workers, because many tests wait for other processes. Slow files come first (tests/conftest.py).
python -m pytest -q -n 3 --dist loadfile --no-loadscope-reorder "$@"
