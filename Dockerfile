# The four commands with CUDA and PyTorch, for a cluster:
#
#   docker build -t megatron-training .
#   docker run --rm --gpus all --ipc host -v /fsx:/fsx megatron-training dynmo-train launch local --nproc 8 -- pretrain gpt ...
#
# BASE    an image with Python 3.11 to 3.13 and torch 2.11 to 2.13 for CUDA, whose torch is kept. Where the network has a
#         fabric of its own (EFA, InfiniBand), one that carries NCCL's plugin for it.
ARG BASE=pytorch/pytorch:2.11.0-cuda12.8-cudnn9-devel
FROM ${BASE}

ENV PIP_BREAK_SYSTEM_PACKAGES=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1 PIP_ROOT_USER_ACTION=ignore
# curl for bin/download_*.sh, ssh for `launch hostfile`; of the versions that the base's distribution has.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends curl openssh-client \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /opt/dynmo
COPY pyproject.toml constraints.txt LICENSE README.md ./
COPY dynmo_tools dynmo_tools
COPY dynmo_train dynmo_train
COPY dynmo_balance dynmo_balance
COPY dynmo_ckpt dynmo_ckpt
# torch and numpy of the base stay as they are; what the base lacks gets the version that the tests run with.
RUN python3 -m pip list --format freeze > /tmp/base.txt \
    && awk -F== 'function key(name) { name = tolower(name); gsub(/[-_.]+/, "-", name); return name } \
       NR == FNR { base[key($1)] = 1; if ($1 == "torch" || $1 == "numpy") print; next } \
       !(key($1) in base)' /tmp/base.txt constraints.txt > /tmp/constraints.txt \
    && python3 -m pip install --constraint /tmp/constraints.txt '.[all]' \
    && rm /tmp/base.txt /tmp/constraints.txt
COPY bin bin
COPY tests/benchmarks/train_lowrank.py tests/benchmarks/

# The scripts of bin/ take this environment as it is.
ENV DYNMO_SETUP=no PATH=/opt/dynmo/bin:$PATH
WORKDIR /workspace
CMD ["dynmo-train", "--help"]
