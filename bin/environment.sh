# Sourced by the scripts of this folder: creates the virtual environment that they share and puts it on PATH.
#
#   . environment.sh [EXTRAS ["$@"]]
#
# EXTRAS       extras of pyproject.toml that the script needs, separated by commas (default: all); with the arguments of the script
#              --help prints its first comment where there is no environment yet
# DYNMO_VENV   path of the environment (default: .venv in the project)
# PYTHON       interpreter that creates it (default: python3), 3.11 to 3.13
# DYNMO_SETUP  "no": use the active environment as it is

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
if [ "${DYNMO_SETUP:-yes}" = no ]; then
  return 0
fi
extras=${1:-all}
venv=${DYNMO_VENV:-$root/.venv}
python=${PYTHON:-python3}

# Help needs no installation: without an environment it is the comment at the top of the script.
for word in "${@:2}"; do
  if [ "$word" = --help ] && [ ! -x "$venv/bin/python" ]; then
    sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0"
    exit 0
  fi
done

if ! "$python" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' 2>/dev/null; then
  echo "$0: needs Python 3.11 to 3.13; set PYTHON to one (found: $("$python" --version 2>&1))" >&2
  exit 2
fi

# One line per installed extra.
stamp=$venv/.dynmo-installed
missing=$extras
if [ -f "$stamp" ]; then
  installed=$(cat "$stamp")
  if [ "$root/pyproject.toml" -nt "$stamp" ] || [ "$root/constraints.txt" -nt "$stamp" ]; then
    missing=$(printf '%s\n' "$installed" "${extras//,/$'\n'}" | sed '/^$/d' | sort -u | paste -sd, -)
  else
    missing=$(comm -13 <(sort -u "$stamp") <(printf '%s\n' "${extras//,/$'\n'}" | sort -u) | paste -sd, -)
  fi
fi
if [ -n "$missing" ]; then
  echo "Installing $missing in $venv (torch is the largest part)"
  if [ ! -x "$venv/bin/python" ]; then
    "$python" -m venv "$venv"
  fi
  pip() { "$venv/bin/python" -m pip "$@" --quiet --disable-pip-version-check; }
  # Until 0.1.0 the distribution was named "dynmo"; both names would own the same commands.
  if [ -n "$(find "$venv" -maxdepth 5 -iname 'dynmo-*.dist-info' -print -quit)" ]; then
    pip uninstall --yes dynmo
  fi
  # Half of an ordinary installation is spent on compiling all of torch, transformers and scipy to bytecode; Python compiles the few
  # modules that it loads by itself. An isolated build would install a second setuptools in a temporary environment.
  pip install --no-compile --constraint "$root/constraints.txt" setuptools
  pip install --no-compile --no-build-isolation --constraint "$root/constraints.txt" --editable "$root[$missing]"
  printf '%s\n' "${missing//,/$'\n'}" >> "$stamp"
  touch "$stamp"
fi
export PATH="$venv/bin:$PATH"
