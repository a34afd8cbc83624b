#!/usr/bin/env bash
# Run a command inside .venv, with what its MPI needs: scripts/run.sh mpirun -np 2 python examples/pytorch_digits.py
. "$(dirname "$0")/step.sh"

# Ranks may outnumber cores, and each has a thread of Horovod's beside its own, which must not wait for messages at
# the expense of the work; containers often run as root and forbid one process to read another's memory.
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
export OMPI_MCA_rmaps_base_oversubscribe=1 OMPI_MCA_mpi_yield_when_idle=1 OMPI_MCA_btl_vader_single_copy_mechanism=none
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} PYTHONUNBUFFERED=1
exec "$@"
