# Sourced by the other scripts: what every set-up step needs.
#   step TITLE COMMAND...   say what runs, keep its output in a log, say how long it took
#   fail WHAT HOW           stop: what is missing, how to get it
#   wheel_cache PACKAGE...  the user's cache folder for a wheel compiled against this MPI and these packages' versions
set -euo pipefail

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
VENV=${VENV:-$ROOT/.venv}
[ "${VENV:0:1}" = / ] || VENV=$PWD/$VENV
PYTHON=${PYTHON:-python3}
MPI=${MPI:-wheel}
CACHE=${HVD_SPARSE_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/hvd_sparse}
LOGS=$ROOT/build/logs
BUILD=$ROOT/build/extension  # where CMake keeps the objects of the extension
[ "$VENV" = "$ROOT/.venv" ] || BUILD=$BUILD$(basename "$VENV")
export PATH="$VENV/bin:$PATH"
# The MPI of the wheel is relocated: its own commands must be told where it lies.
[ "$MPI" = wheel ] && export OPAL_PREFIX="$VENV"

fail() {
    printf '\nhvd_sparse set-up stopped: %s\n  -> %s\n' "$1" "$2" >&2
    exit 1
}

step() {
    local title=$1 log start=$SECONDS
    shift
    mkdir -p "$LOGS"
    log=$LOGS/$(printf '%s' "$title" | tr -cs 'A-Za-z0-9.' '-').log
    printf '==> %s ... ' "$title"
    if ! "$@" >"$log" 2>&1; then
        printf 'failed after %d s; the end of %s:\n' $((SECONDS - start)) "${log#"$ROOT"/}"
        tail -n 30 "$log"
        return 1
    fi
    printf '%d s\n' $((SECONDS - start))
}

wheel_cache() {
    python - "$CACHE" "$MPI" "$(mpirun --version)" "${HOROVOD_GPU_OPERATIONS:-${HOROVOD_GPU:-}}" "$@" <<'PY'
import re, sys, sysconfig
from importlib.metadata import packages_distributions, version
cache, mpi, mpirun, gpu, *packages = sys.argv[1:]
mpi += "" if "Open MPI" in mpirun or "OpenRTE" in mpirun else ".other"
parts = [sys.implementation.cache_tag, sysconfig.get_platform(), f"mpi.{mpi}.{re.search(r'[0-9][0-9.]*', mpirun)[0]}"]
parts += [f"gpu.{gpu}"] if gpu else []
providers = packages_distributions()  # of tensorflow: the package of that name, or tensorflow-cpu, for example
versions = [name + version(providers.get(name, [name])[0]) for name in packages]
print("/".join([cache, "-".join(parts + versions)]))
PY
}
