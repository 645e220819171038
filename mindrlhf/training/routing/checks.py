"""Where routing replay works, before anything is built."""

from mindrlhf.config.observe import CELL_LEVEL
from mindrlhf.config.schema import GrpoConfig
from mindrlhf.errors import UserError
from mindrlhf.specs import find_spec
from mindrlhf.training.routing.rows import ReplayedExperts
from mindrlhf.weights.hf import read_hf_config


def replayed_experts(config: GrpoConfig) -> ReplayedExperts | None:
    """Return how the choices look that a run replays; None when it replays none."""
    if not config.training.replay_routing:
        return None
    hf_config = read_hf_config(config.model.path)
    return ReplayedExperts.of(find_spec(hf_config).dims(hf_config))


def check_replay(config: GrpoConfig) -> None:
    """Refuse `training.replay_routing` where nothing is routed, or where the choices cannot be had or used.

    Raises:
        UserError: naming the key and its fix.
    """
    if not config.training.replay_routing:
        return
    refused = {
        f"run.device={config.run.device}": (config.run.device != "cpu", "MindFormers' routers for Ascend take none"),
        f"rollout.tensor_parallel={config.rollout.tensor_parallel}": (
            config.rollout.tensor_parallel > 1,
            "experts are recorded in a server of one process",
        ),
        f"rollout.draft_tokens={config.rollout.draft_tokens}": (
            config.rollout.draft_tokens > 0,
            "experts of tokens that are only guessed would be recorded",
        ),
        "rollout.span_tokens": (config.rollout.span_tokens > 0, "a response of several spans has several routings"),
        "tools.names": (bool(config.tools.names), "conversations carry no routing on"),
        f"msprobe.level={CELL_LEVEL}": (
            config.msprobe.enabled and config.msprobe.level == CELL_LEVEL,
            "single cells are run without it",
        ),
    }
    for what, (is_asked, why) in refused.items():
        if is_asked:
            raise UserError(f"'training.replay_routing' is true, but not with {what}: {why}; set it to false")
    if replayed_experts(config) is None:
        raise UserError(
            f"'training.replay_routing' is true, but the model in {config.model.path} has no experts: set it to false"
        )
