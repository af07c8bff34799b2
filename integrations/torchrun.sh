#!/bin/bash
# Trains on the GPUs of this machine under torchrun, which starts all ranks again if one fails.
export SPARSE24_SECRET=${SPARSE24_SECRET:-$(openssl rand -hex 16)}
torchrun --standalone --nproc-per-node "${RANKS:-8}" --max-restarts 100 --no-python \
    sparse24 train --resume-or-start "$@"
