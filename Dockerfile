# README's commands in a container. Without a GPU:
#
#   docker build -t samebits . && docker run samebits
#
# With GPUs, on a host that has NVIDIA's container toolkit:
#
#   docker build -t samebits --build-arg BASE=nvidia/cuda:13.0.1-devel-ubuntu24.04 \
#       --build-arg PROGRAM=train_gpt2cu .
#   docker run --gpus all --shm-size 1g -it -v "$PWD/runs:/samebits/runs" samebits bash
ARG BASE=debian:12
FROM ${BASE}
ARG PROGRAM=train_gpt2cpu
RUN apt-get update && apt-get install -y --no-install-recommends \
        ca-certificates g++ git libopenblas-dev make python3 python3-venv
WORKDIR /samebits
COPY . .
RUN scripts/setup.sh && make -s ${PROGRAM} tokenize stories bigram
CMD ["make", "quickstart"]
