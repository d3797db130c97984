# Makes a virtual environment of the repository's own and installs into it. Sourced by the scripts beside it.
# Usage: make_environment NAME [EXTRA] [INTEGRATION ...]; leaves its bin/ first on PATH. An integration is a folder of
# integrations/, with the extras that are wanted: "agenttrain-verl[verl]".
make_environment() {
  local name=$1 extra=${2:-} python each also=()
  shift $(($# < 2 ? $# : 2))
  for each in "$@"; do also+=(-e "integrations/$each"); done
  python=${AGENTTRAIN_PYTHON:-$(command -v python3.11 || command -v python3.12 || command -v python3)}
  if [ ! -x "$name/bin/python" ]; then
    "$python" -m venv "$name"
  fi
  export PATH="$PWD/$name/bin:$PATH"
  if ! { cat constraints.txt pyproject.toml; echo "$extra $*"; } | cmp -s - "$name/installed" || ! python -c "import agenttrain" 2>/dev/null; then
    echo "Installing into $name (up to 2.3 GB, a few minutes the first time) ..." >&2
    python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch
    python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".$extra" ${also[@]+"${also[@]}"}
    { cat constraints.txt pyproject.toml; echo "$extra $*"; } >"$name/installed"
  fi
}
