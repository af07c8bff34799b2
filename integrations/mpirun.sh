#!/bin/bash
# Trains on this machine under Open MPI. On several: --host a:8,b:8 -x MASTER_ADDR=a
export SPARSE24_SECRET=${SPARSE24_SECRET:-$(openssl rand -hex 16)}
mpirun -n "${RANKS:-8}" -x SPARSE24_SECRET sparse24 train --resume-or-start "$@"
