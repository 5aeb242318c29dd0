#!/usr/bin/env bash
# Runs the tests with the lowest or with the newest libraries that the requirement files allow:
#
#     bash tools/test_libraries.sh lowest [pytest arguments]
#     bash tools/test_libraries.sh newest [pytest arguments]
#
# Each has its own virtual environment (5 GB): .venv-lowest or .venv-newest, or the folder that PRMIM_VENV names.
# "lowest" turns each `>=X` into `==X`. It needs Python 3.10 to 3.12, because those versions have no wheels for later
# ones; PYTHON names the interpreter. "newest" updates all libraries with every call. ruff and mypy are left out.
set -euo pipefail
unset CDPATH # with it, cd may print another folder
which=${1:-}
if [ "$which" != lowest ] && [ "$which" != newest ]; then
    echo "test_libraries.sh: error: the first argument must be lowest or newest, got '$which'" >&2
    exit 2
fi
shift
here=$(cd "$(dirname "$0")" && pwd)
PRMIM_VENV=${PRMIM_VENV:-$here/../.venv-$which}
source "$here/../scripts/setup.sh"
echo '*' >"$venv/.gitignore" # git and ruff ignore it

# All requirements, one per line: no comments, no `-r` lines, no linters.
list=$venv/requirements.txt
(cd "$root" && sed -E 's/[[:space:]]*#.*//; /^(-r|ruff|mypy|$)/d' requirements{,-quickstart,-dev}.txt) >"$list"
options=(--upgrade --upgrade-strategy eager)
if [ "$which" = lowest ]; then
    if ! "$venv/bin/python" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info < (3, 13))'; then
        echo "test_libraries.sh: error: lowest needs Python 3.10 to 3.12; remove $venv, and set PYTHON" >&2
        exit 2
    fi
    sed -i -E 's/^([A-Za-z0-9_.-]+)>=/\1==/' "$list"
    options=()
fi
echo "Installing the $which libraries into $venv (torch is large: a few minutes on the first run) ..."
"$venv/bin/python" -m pip install --quiet --disable-pip-version-check --only-binary :all: "${options[@]}" -r "$list"
"$venv/bin/python" -m pip check
"$venv/bin/python" --version
names=$(sed -E 's/[^A-Za-z0-9_.-].*//' "$list" | paste -sd '|')
"$venv/bin/python" -m pip list --disable-pip-version-check | grep -iE "^($names) "
cd "$root"
"$venv/bin/python" -m pytest -q "$@"
