# Sourced by the scripts of this folder: sets up the virtual environment that they share, once, and puts it on PATH.
#
# DYNMO_VENV   where the environment lies (default: .venv in the project)
# PYTHON       the interpreter that makes it (default: python3), 3.11 to 3.13
# DYNMO_SETUP  "no" takes the environment that is active instead, as it is

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
if [ "${DYNMO_SETUP:-yes}" = no ]; then
  return 0
fi
venv=${DYNMO_VENV:-$root/.venv}
python=${PYTHON:-python3}

if ! "$python" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' 2>/dev/null; then
  echo "$0: needs Python 3.11 to 3.13; set PYTHON to one (found: $("$python" --version 2>&1))" >&2
  exit 2
fi

stamp=$venv/.dynmo-installed
if [ ! -f "$stamp" ] || [ "$root/pyproject.toml" -nt "$stamp" ] || [ "$root/constraints.txt" -nt "$stamp" ]; then
  echo "setting up the virtual environment in $venv (once; torch is the largest part)"
  "$python" -m venv "$venv"
  # Until 0.1.0 the distribution was named "dynmo"; both names would own the same commands.
  if [ -n "$(find "$venv" -maxdepth 5 -iname 'dynmo-*.dist-info' -print -quit)" ]; then
    "$venv/bin/python" -m pip uninstall --quiet --disable-pip-version-check --yes dynmo
  fi
  "$venv/bin/python" -m pip install --quiet --disable-pip-version-check \
    --constraint "$root/constraints.txt" --editable "$root[all,dev]"
  touch "$stamp"
fi
export PATH="$venv/bin:$PATH"
