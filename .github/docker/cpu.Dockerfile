# The CI environment, for machines without a GPU. It has set one of the package versions (Python 3.11).
# docker build --file .github/docker/cpu.Dockerfile --tag grpo-mega:cpu .
# docker run grpo-mega:cpu examples/quickstart.sh --out /tmp/quickstart    (or tests/run.sh)
FROM python:3.11-bookworm
WORKDIR /grpo_mega
COPY pyproject.toml README.md LICENSE ./
COPY tests/debian-packages.txt tests/
RUN apt-get update && \
    sed 's/#.*//' tests/debian-packages.txt | DEBIAN_FRONTEND=noninteractive xargs apt-get install --yes --no-install-recommends && \
    rm -rf /var/lib/apt/lists/*
COPY . .
RUN bash -c 'set -e; source examples/env.sh; ensure_env dev; ensure_sglang; ensure_te'
CMD ["examples/quickstart.sh", "--out", "/tmp/quickstart"]
