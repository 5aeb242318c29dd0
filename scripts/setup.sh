# To be sourced: makes the project's virtual environment, if it is missing, and puts it on PATH.
# PRMIM_VENV names its folder (.venv), PYTHON the interpreter that makes it.
unset CDPATH # with it, cd may print another folder
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv=${PRMIM_VENV:-$root/.venv}

find_python() {
    local candidate candidates=(python3 python3.13 python3.12 python3.11 python3.10 python3.14)
    if [ -n "${PYTHON:-}" ]; then candidates=("$PYTHON"); fi # its path may hold spaces
    for candidate in "${candidates[@]}"; do
        if "$candidate" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
    echo "no Python >= 3.10 with the venv module (Debian, Ubuntu: apt install python3-venv); or set PYTHON" >&2
    return 1
}

# install FILE...: installs the requirement files with pip, unless their present content is installed already.
install() {
    local wanted stamp="$venv/.installed-$(basename "$1")"
    wanted=$(cd "$root" && cat "$@" | cksum)
    if [ "$(cat "$stamp" 2>/dev/null)" != "$wanted" ]; then
        echo "Installing $* into $venv (torch is large: a few minutes on the first run) ..."
        local file arguments=()
        for file in "$@"; do arguments+=(-r "$root/$file"); done
        "$venv/bin/python" -m pip install --quiet --disable-pip-version-check "${arguments[@]}"
        echo "$wanted" >"$stamp"
    fi
}

unset PYTHONPATH PYTHONHOME
if ! "$venv/bin/python" -m pip --version >/dev/null 2>&1; then # missing, or incomplete after an interruption
    python=$(find_python)
    "$python" -m venv --clear "$venv"
fi
venv=$(cd "$venv" && pwd)
export PATH="$venv/bin:$PATH"
