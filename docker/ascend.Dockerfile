# MindRLHF on Ascend: both environments on one CANN.
#   docker build -f docker/ascend.Dockerfile -t mindrlhf:ascend .
# The images of CANN are Huawei's; name another for other devices: --build-arg CANN=...
# How to start it, with devices and driver: docs/install.md. Not built or run by us: no NPU is at hand.
ARG CANN=ascendai/cann:9.1.0-910b-ubuntu22.04-py3.12

# The driver is the host's, mounted at /usr/local/Ascend/driver.
FROM ${CANN}

RUN apt-get update && apt-get install -y --no-install-recommends iproute2 procps libnuma1 git \
    && rm -rf /var/lib/apt/lists/* && useradd --create-home trainer

# The environments before the code, so that a change of code makes them not anew. pip gives up on an index within a minute.
WORKDIR /workspace/mindrlhf
RUN chown trainer /workspace/mindrlhf
USER trainer
ENV PIP_DEFAULT_TIMEOUT=15 PIP_RETRIES=1 PIP_NO_CACHE_DIR=1
COPY --chown=trainer setup.py ./
COPY --chown=trainer mindrlhf/__init__.py mindrlhf/
RUN python3 -m venv .venv \
    && .venv/bin/python -m pip install -e '.[ascend-train]' \
    && .venv/bin/python -m pip install --no-deps 'mindformers==2.0.0' \
    # What the wheel holds for CUDA, 1.3 GB.
    && rm -rf .venv/lib/python3*/site-packages/mindspore/lib/plugin/*gpu*
RUN python3 -m venv .venv-rollout \
    # Built without device code: the wheel of vllm asks for another torch than vllm-ascend does.
    && VLLM_TARGET_DEVICE=empty .venv-rollout/bin/python -m pip install --no-binary vllm 'vllm==0.23.0' \
    && .venv-rollout/bin/python -m pip install 'vllm-ascend==0.23.0'
COPY --chown=trainer . .

ENV PATH=/workspace/mindrlhf/.venv/bin:$PATH
# CANN's own place since 9.0 and before, and NNAL, whose libatb.so vLLM-Ascend loads.
ENTRYPOINT ["bash", "-c", "for part in cann ascend-toolkit nnal/atb; do file=/usr/local/Ascend/$part/set_env.sh; [ -f $file ] && source $file; done; exec \"$@\"", "mindrlhf"]
CMD ["mindrlhf", "doctor"]
