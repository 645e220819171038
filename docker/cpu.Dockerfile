# MindRLHF on CPUs: both environments, as scripts/setup.sh makes them.
#   docker build -f docker/cpu.Dockerfile -t mindrlhf:cpu .
#   docker run --rm -it --shm-size=8g mindrlhf:cpu bash scripts/quickstart.sh
FROM python:3.11-slim-bookworm

# msrun looks at ports and processes; vLLM's CPU kernels need libnuma and OpenMP, MindSpore OpenMP.
RUN apt-get update && apt-get install -y --no-install-recommends iproute2 procps libgomp1 libnuma1 git \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /workspace/mindrlhf
COPY . .
RUN bash scripts/setup.sh && rm -rf ~/.cache/pip
ENV PATH=/workspace/mindrlhf/.venv/bin:$PATH
CMD ["mindrlhf", "doctor"]
