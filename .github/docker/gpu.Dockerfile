# For NVIDIA GPUs. It has set two of the package versions (Python 3.12).
# docker build --file .github/docker/gpu.Dockerfile --tag grpo-mega:gpu .
# Not yet run: no machine with a GPU has built or started it. It keeps the compiler, because SGLang calls it at startup.
FROM nvidia/cuda:13.0.2-cudnn-devel-ubuntu24.04
RUN apt-get update && \
    DEBIAN_FRONTEND=noninteractive apt-get install --yes --no-install-recommends \
    git numactl python3 python3-dev python3-venv rdma-core libibverbs1 && \
    rm -rf /var/lib/apt/lists/*
WORKDIR /grpo_mega
COPY . .
ENV CUDA_HOME=/usr/local/cuda
RUN tools/install_gpu.sh
ENV PATH=/grpo_mega/.venv/bin:$PATH
CMD ["grpo-mega", "--help"]
