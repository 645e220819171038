# MindRLHF on CPUs: both environments, as scripts/setup.sh makes them.
#   docker build -f docker/cpu.Dockerfile -t mindrlhf:cpu .
#   docker run --rm -it --shm-size=8g mindrlhf:cpu bash scripts/quickstart.sh
FROM python:3.12-slim-bookworm

# msrun looks at ports and processes; vLLM's CPU kernels need libnuma and OpenMP, MindSpore OpenMP.
RUN apt-get update && apt-get install -y --no-install-recommends iproute2 procps libgomp1 libnuma1 git \
    && rm -rf /var/lib/apt/lists/* && useradd --create-home trainer

# The environments before the code, so that a change of code makes them not anew.
WORKDIR /workspace/mindrlhf
RUN chown trainer /workspace/mindrlhf
USER trainer
ENV PIP_DEFAULT_TIMEOUT=15 PIP_RETRIES=1 PIP_NO_CACHE_DIR=1
COPY --chown=trainer setup.py ./
COPY --chown=trainer scripts/setup.sh scripts/
COPY --chown=trainer mindrlhf/__init__.py mindrlhf/
# Without what the wheels hold for CUDA (1.3 GB), for their own tests and for compilers (0.5 GB), which are not here.
RUN EXTRAS=cpu bash scripts/setup.sh \
    && cd .venv/lib/python3*/site-packages/mindspore && rm -rf include lib/plugin/*gpu* && cd - \
    && cd .venv-rollout/lib/python3*/site-packages/torch && rm -rf include test bin/protoc* bin/test_* && cd - \
    && find .venv* -name tests -type d -prune -exec rm -r {} +
COPY --chown=trainer . .
# EXTRAS: so that the quickstart, which looks at the environments again, finds them as they are.
ENV PATH=/workspace/mindrlhf/.venv/bin:$PATH EXTRAS=cpu
CMD ["mindrlhf", "doctor"]
