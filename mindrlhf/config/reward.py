"""The sections `reward`, `tools` and `sandbox`."""

from dataclasses import dataclass

from mindrlhf.config.keys import RunConfig, key
from mindrlhf.errors import Rules

AUTO_DIALECT = "auto"
REWARD_MODEL_NAME = "reward_model"  # the part of the reward that a reward model gives, beside those of verifiers


@dataclass(frozen=True)
class RewardSection:
    """Scores of a response: verifiers, a reward model, or both."""

    verifier_function: tuple[str, ...] = key(
        (),
        "verifier names, or path/to/file.py:function; a list, or text with commas between; may be empty with a "
        "`model_path`",
    )
    verifier_weight: tuple[float, ...] = key((), "weight of each verifier in the sum; empty means 1 for each")
    model_path: str = key(
        "",
        "Hugging Face directory of a reward model, as `mindrlhf reward-model` makes it; empty means none",
        is_model=True,
    )
    model_weight: float = key(1.0, "weight of the reward model's score in the sum", read_with="reward.model_path")
    num_workers: int | None = key(
        None, "verifier processes of a node; null: up to one for each core", minimum=1, maximum=256
    )
    python: str = key("", "another interpreter for verifiers, Python 3.11 or later")
    timeout_s: float = key(10.0, "seconds that a verifier has for a sample", minimum=0, exclusive_minimum=True)
    failure_value: float = key(
        0.0, "reward of a sample whose verifier timed out, raised, or returned no finite number; these are counted"
    )
    memory_limit_mib: int = key(4096, "memory of a verifier process, in MiB; 0 means no limit", minimum=0)
    by_choice: tuple[str, ...] = key(
        (), "verifiers that score only the prompts whose record names them in its `verifier` field"
    )
    options: dict[str, str] = key(
        {}, "settings of verifiers, as `verifier.option: value`; `mindrlhf rewards show NAME` lists them"
    )


@dataclass(frozen=True)
class ToolSection:
    """Tools that the model may call between its turns; see docs/tools.md."""

    names: tuple[str, ...] = key(
        (), "tools the model may call: python, path/to/file.py:function, mcp:COMMAND; empty means none"
    )
    dialect: str = key(
        AUTO_DIALECT,
        "how the model writes calls: auto takes what its chat template teaches; see docs/tools.md",
        choices=(AUTO_DIALECT, "hermes", "qwen3_coder", "glm", "deepseek", "mistral", "llama3"),
    )
    environment: str = key(
        "",
        "what it acts in, in the place of tools: path/to/file.py:Class; several with commas "
        "between, of which the kept column `environment` chooses",
    )
    agent: str = key(
        "", "a program that talks to an endpoint, in the place of tools: path/to/agent.py:function, or a command line; "
        "see docs/agents.md",
    )
    agent_python: str = key(
        "",
        "another interpreter for the agent, Python 3.10 or later, if a function",
        read_with="tools.agent",
    )
    agent_sees: tuple[str, ...] = key(
        (),
        "answer: the record that the agent gets has it; by default it stays with the verifiers",
        choices=("answer",),
        read_with="tools.agent",
    )
    agent_open: bool = key(
        False,
        "agents have the network, and all files to write, and not only the endpoint",
        read_with="tools.agent",
    )
    agent_timeout_s: float = key(
        300.0,
        "time limit of an agent, the model's part included, in seconds",
        minimum=0,
        exclusive_minimum=True,
        read_with="tools.agent",
    )
    agent_tokens: int = key(
        0, "most tokens generated for one agent, in all its calls; 0: `rollout.max_response_length`",
        minimum=0,
        read_with="tools.agent",
    )
    agents_at_once: int = key(64, "most agents that run at a time", minimum=1, maximum=4096, read_with="tools.agent")
    agent_gather_s: float = key(
        1.0, "longest that calls of the model wait for those of agents that are busy, in seconds", minimum=0
    )
    max_turns: int = key(
        4,
        "most turns of the model in one response, the last included; twice as many calls of tools are answered; of an "
        "agent, calls of the model",
        minimum=2,
    )
    timeout_s: float = key(5.0, "time limit of one call, in seconds", minimum=0, exclusive_minimum=True)
    max_response_tokens: int = key(256, "tokens of one answer of a tool; the rest is truncated", minimum=1)
    num_workers: int = key(1, "tool processes", minimum=1, maximum=256)
    memory_limit_mib: int = key(1024, "memory of a tool process, in MiB", minimum=64)


@dataclass(frozen=True)
class SandboxSection:
    """Isolation of programs that the model writes, for the verifier `code_execution` and the tool `python`."""

    allow_weak: bool = key(False, "run them even with too few of the sandbox's locks, which `mindrlhf doctor` lists")


def reward_rules(reward: RewardSection) -> Rules:
    count, weights = len(reward.verifier_function), len(reward.verifier_weight)
    yield not count and not reward.model_path, (
        "'reward.verifier_function' is empty: name at least one verifier, such as accuracy_reward, or set "
        "reward.model_path to a reward model"
    )
    yield weights and weights != count, (
        f"'reward.verifier_weight' has {weights} values for {count} verifiers: give one weight for each"
    )


def tool_rules(config: RunConfig) -> Rules:
    tools, longest = config.tools, config.rollout.max_response_length
    for first, second in (("environment", "names"), ("agent", "names"), ("agent", "environment")):
        yield getattr(tools, first) and getattr(tools, second), (
            f"'tools.{first}' and tools.{second} are both set: leave one of them out"
        )
    yield (tools.names or tools.environment) and tools.max_response_tokens >= longest, (
        f"'tools.max_response_tokens' is {tools.max_response_tokens}, but rollout.max_response_length = {longest} "
        "holds all turns and answers of a response: lower the one or raise the other"
    )
