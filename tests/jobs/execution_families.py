"""What is executed on CPU ranks, by families: one kind of training and model, in several layouts, beside one process.

The plain process uses the product's cells for the CPU, which share no code with the Ascend cells, and knows nothing of
parallelism: whole logits, nothing recomputed, every expert sees every token, prompts are repeated, not shared.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import execution_cases as cases
import numpy as np
from engines import accumulate, whole_engine
from execution_cases import IS_LAST, KL_COEFFICIENT, MODEL, NOT_FINITE, NUM_ROWS, ROW_LENGTH, UNCUT_MODEL, VOCABULARY
from graph_on_cpu.run import SEED
from slow_tests import RUNS_SLOW_TESTS
from tiny_models import LLAMA3_ROPE, tiny_model
from tiny_vl import IMAGE, VISION_END, VISION_START, TinyVl, config_of

from mindrlhf.algorithms.losses import POLICY_INPUTS
from mindrlhf.algorithms.value_loss import VALUE_INPUTS
from mindrlhf.config.training import SHARED_PROMPTS
from mindrlhf.data.packing import PackedRows, TokenSequence
from mindrlhf.dryrun.compile.request import LOGPROBS, PAIR_UPDATE, SUPERVISED_UPDATE, UPDATE, VALUE_UPDATE, VALUES
from mindrlhf.specs import find_spec, scorer_config
from mindrlhf.training.batch import Batch, RowOptions, make_batch
from mindrlhf.training.routing import rows as routing
from mindrlhf.training.vision.image_rows import ImageTokens

CLIP_RANGE = 0.2


@dataclass(frozen=True)
class Given:
    """What is trained on, for each call.

    Attributes:
        inputs: those of the graph of an update, whole.
        parts: for the plain process, micro-batches and the token arrays that the loss reads of each.
        images: in the order in which the rows count theirs.
        batches, plain_batches: where results are compared by sample, whose samples they are.
    """

    inputs: list[list[np.ndarray]]
    parts: list[list[tuple[PackedRows, list[np.ndarray]]]]
    images: list[list[np.ndarray]] = field(default_factory=list)
    batches: list[Batch] = field(default_factory=list)
    plain_batches: list[Batch] = field(default_factory=list)


@dataclass(frozen=True)
class Family:
    """One kind of training.

    Attributes:
        model: its config.json.
        layouts: by number of ranks, name -> parallel_config.
        cells: the update, and the graph of outputs without gradients.
        token_inputs: names of the token arrays that the update takes.
        given: makes what is trained on.
        engine: makes what trains the network in one process.
        computed: that of the token arrays which the ranks compute under the initial weights; empty: all are given.
        options: of :func:`execution_jobs.compile_and_execute`.
        spoils: the loss of call NOT_FINITE is not finite, and its update is withheld.
        outputs: what the ranks' outputs are in one process, by kind; see :class:`Plain`.
        least_output: outputs are that large somewhere.
        tolerance: by which losses, outputs and weights may differ.
        checks: what else of it is tested.
    """

    model: dict
    layouts: dict[int, dict[str, dict]]
    cells: tuple[str, str]
    token_inputs: tuple[str, ...]
    given: Callable[["Family"], Given]
    engine: Callable
    computed: str = ""
    options: dict = field(default_factory=dict)
    spoils: bool = True
    outputs: dict[str, str] = field(default_factory=lambda: {"reference": "initial"})
    least_output: float = 4.0
    tolerance: float = 1e-5
    checks: frozenset[str] = frozenset()

    @property
    def names(self) -> list[str]:
        """Of its layouts."""
        return [name for layouts in self.layouts.values() for name in layouts]


@dataclass(frozen=True)
class Plain:
    """What one process computes.

    Attributes:
        losses: of each call.
        statistics, norms: of each update.
        outputs: log-probabilities (or values, or scores) of each call, an array for each micro-batch: under the
            "initial" weights, those that the step or the update of the call "started" with, those that the update
            "updated", and the "trained" ones.
        begun, weights: what is trained (and a frozen tower), before and after.
        network: the trained model.
    """

    losses: list[float]
    statistics: list[np.ndarray]
    norms: list[float]
    outputs: dict[str, list[list[np.ndarray]]]
    begun: dict[str, np.ndarray]
    weights: dict[str, np.ndarray]
    network: object


def train_plainly(family: Family, log_dir: Path) -> Plain:
    """Train in one process: two updates, and where a loss is spoiled one between them that is withheld."""
    from networks import attach_lora

    from mindrlhf.specs.lora import LoraOptions

    given = family.given(family)
    image_rows = NUM_ROWS * ROW_LENGTH if given.images else 0
    network = cases.plain_network(log_dir, family.model, image_rows, given.inputs[0][1].shape[1])
    if lora := family.options.get("lora"):
        attach_lora(network, LoraOptions(**lora), SEED, "base")
    trained = network.trainable_params() if lora else network.get_parameters()
    names = {one.name for one in trained} if lora else cases.mf_weights(family.model).keys()
    parameters = {one.name: one for one in trained if one.name in names}
    begun = {name: parameter.asnumpy().copy() for name, parameter in parameters.items()}
    engine = family.engine(network)
    if given.images:
        network.images.see([image for batch in given.batches for image in batch.images.values()])

    def outputs() -> list[list[np.ndarray]]:
        return [[engine.model.logprobs(rows) for rows, _ in parts] for parts in given.parts]

    initial = current = outputs()
    statistics, norms, started = [], [], []
    for call, parts in enumerate(given.parts):
        started.append(current[call])
        computed = []
        for (rows, values), first in zip(parts, initial[call]):
            if family.computed:
                values[family.token_inputs.index(family.computed)] = first
            computed.append(accumulate(engine, rows, values, float(given.inputs[call][-1][0, 1]), KL_COEFFICIENT)[0])
        statistics.append(sum(computed))
        if IS_LAST[call]:
            norms.append(engine.apply(cases.LEARNING_RATE))
            assert np.isfinite(norms[-1]) == (not family.spoils or call != NOT_FINITE + 1)
            current = outputs()
    if family.computed == "values" and family.spoils:
        assert statistics[-1][1] > 0, "the clip was never active"
    ends = [call + 1 for call, is_last in enumerate(IS_LAST) if is_last]
    return Plain(
        losses=[one[0] for one in statistics],
        statistics=[sum(part) for part in np.split(np.array(statistics), ends[:-1])],
        norms=norms,
        outputs={
            "initial": initial,
            "started": initial if family.computed else started,
            "updated": started,
            "trained": current,
        },
        begun=begun,
        weights={name: parameter.asnumpy() for name, parameter in parameters.items()},
        network=network,
    )


# What is trained on: arrays that are made up, or batches of samples.


def given_arrays(family: Family) -> Given:
    """The batches of policies and critics of :mod:`execution_cases`."""
    is_policy = family.token_inputs == POLICY_INPUTS
    inputs = cases.batches() if is_policy else cases.critic_batches()
    return Given(inputs, [[(PackedRows(*one[:4], tokens={}), one[4:-1])] for one in inputs])


def given_chunks(family: Family) -> Given:
    """Batches of policies in rows of a chunk of linear attention and a half; a sample ends in the second of two."""
    segments = np.ones((NUM_ROWS, 3 * ROW_LENGTH), np.int32)
    segments[:, 80:] = 2
    segments[1, 88:] = 0
    calls = []
    for one in cases.batches():
        ids, _, labels, *tokens = (np.tile(array, (1, 3)) for array in one[:-1])
        calls.append([ids, segments, labels, *(np.where(segments > 0, array, 0) for array in tokens)])
    inputs = cases.with_scalars(calls)
    return Given(inputs, [[(PackedRows(*one[:4], tokens={}), one[4:-1])] for one in inputs])


def given_experts(family: Family) -> Given:
    """The batches of policies, with experts that no router would choose, and here and there none."""
    inputs, parts = cases.batches(), []
    dims = find_spec(family.model).dims(family.model)
    for call, one in enumerate(inputs):
        random = np.random.default_rng(call)
        order = random.permuted(np.tile(np.arange(dims.experts.num_experts), (*one[0].shape, 1, 1)), axis=-1)
        chosen = np.where(random.random((*one[0].shape, 1, 1)) < 0.2, 255, order[..., : dims.experts.num_active])
        rows = PackedRows(*one[:4], tokens={}, context={routing.EXPERTS: chosen.astype(np.uint8)})
        parts.append([(rows, one[4:-1])])
        one[0] = routing.tokens_and_experts(rows, dims)
    return Given(inputs, parts)


def given_fixed_data(family: Family) -> Given:
    """Rows and mask, and coefficients but for supervised fine-tuning."""
    inputs = []
    for *rows, mask, _, returns, scalars in cases.critic_batches():
        mask = mask.copy()
        mask[:, -1] = 0  # the last position of a row predicts nothing
        inputs.append([*rows, mask, *([returns] if family.token_inputs else []), scalars])
    return Given(inputs, [[(PackedRows(*one[:4], tokens={}), one[4:-1])] for one in inputs])


def given_batches(family: Family) -> Given:
    """Samples of one prompt or several, some with images, which the plain process has in rows of their own."""
    dims = find_spec(family.model).dims(family.model)
    plain = RowOptions((ROW_LENGTH,), NUM_ROWS, 1, True, image_tokens=ImageTokens.of(dims))
    options = plain
    if family.options.get("shared_prompts"):
        options = replace(plain, packing=SHARED_PROMPTS, in_step=True)
    made = _seen_sequences(plain.image_tokens.geometry.token_side) if plain.image_tokens else _sequences()
    batches, plain_batches = ([make_batch(samples, one) for samples in made] for one in (options, plain))
    num_tokens = [sum(len(sample.response_ids) for sample in samples) for samples in made]
    ends = [0, *(call + 1 for call, is_last in enumerate(IS_LAST) if is_last)]
    of_update = [sum(num_tokens[first:end]) for first, end in zip(ends, ends[1:]) for _ in range(first, end)]
    inputs, parts = [], []
    for call, (batch, plain_batch) in enumerate(zip(batches, plain_batches)):
        (rows,) = batch.micro_batches
        scalars = np.tile(np.array([[KL_COEFFICIENT, of_update[call]]], np.float32), (NUM_ROWS, 1))
        arrays = (rows.model_inputs, rows.segment_ids, rows.labels, rows.mask)
        inputs.append([*arrays, *_tokens(family, call, rows), scalars])
        parts.append([(one, _tokens(family, call, one)) for one in plain_batch.micro_batches])
    images = [[batch.images[digest] for digest in batch.micro_batches[0].images] for batch in batches]
    return Given(inputs, parts, images if plain.image_tokens else [], batches, plain_batches)


def _tokens(family: Family, call: int, rows: PackedRows) -> list[np.ndarray]:
    if family.token_inputs == POLICY_INPUTS:
        return [rows.tokens[name] for name in POLICY_INPUTS]
    returns = np.random.default_rng(call).standard_normal(rows.mask.shape).astype(np.float32) * rows.mask
    return [rows.mask * 0, returns]


# Prompt length -> response lengths: they fill four rows, a group over two of them.
_GROUPS = ((9, (6, 5, 3, 2)), (12, (7, 8, 4, 9, 6)), (4, (5, 1)), (1, (6,)), (7, (8, 9)))
# For each prompt the sizes of its images in tokens, and the lengths of its responses; two to a row, and padding.
_SEEN_GROUPS = (([(2, 3)], (5, 4)), ([], (9,)), ([(2, 2), (1, 3)], (7, 6)), ([(3, 1)], (8, 3, 5)))


def _sequences() -> list[list[TokenSequence]]:
    made = []
    for call in range(len(IS_LAST)):
        random, found = np.random.default_rng(call), []
        for prompt_length, response_lengths in _GROUPS:
            prompt = random.integers(1, VOCABULARY, prompt_length).astype(np.int32)
            for length in response_lengths:
                values = _values(random, length, -4.85)
                found.append(TokenSequence(prompt, random.integers(1, VOCABULARY, length).astype(np.int32), values))
        made.append(found)
    return made


def _seen_sequences(side: int) -> list[list[TokenSequence]]:
    """Samples with images; an image token is of ``side`` x ``side`` pixels."""
    made = []
    for call in range(len(IS_LAST)):
        random, found = np.random.default_rng(call), []
        for sizes, response_lengths in _SEEN_GROUPS:
            prompt = [40 + call]
            for rows, columns in sizes:
                prompt += [VISION_START, *[IMAGE] * (rows * columns), VISION_END]
            images = tuple(random.integers(0, 255, (high * side, wide * side, 3), np.uint8) for high, wide in sizes)
            for length in response_lengths:
                values = _values(random, length, -5.6)
                response = random.integers(1, 250, length).astype(np.int32)
                found.append(TokenSequence(np.array([*prompt, 33], np.int32), response, values, images=images))
        made.append(found)
    return made


def _values(random: np.random.Generator, length: int, logprob: float) -> dict[str, np.ndarray]:
    values = {
        "advantages": np.full(length, random.standard_normal(), np.float32),
        "weights": np.ones(length, np.float32),
    }
    for name in POLICY_INPUTS[2:]:
        values[name] = (logprob + 0.2 * random.standard_normal(length)).astype(np.float32)
    return values


# Who trains in one process.


def _engine(loss):
    from mindrlhf.config.training import OptimizerSection

    return whole_engine(loss, OptimizerSection(epsilon=cases.EPSILON))


def critic_engine(network):
    from mindrlhf.algorithms.scores import TokenScores
    from mindrlhf.algorithms.value_loss import ValueLoss

    return _engine(ValueLoss(TokenScores(network, after_token=False), CLIP_RANGE))


def supervised_engine(network):
    from mindrlhf.algorithms.logprobs import PolicyLogProbs
    from mindrlhf.algorithms.losses import SupervisedLoss

    return _engine(SupervisedLoss(PolicyLogProbs(network, 1.0, "cpu")))


def preference_engine(network):
    from mindrlhf.algorithms.logprobs import PolicyLogProbs
    from mindrlhf.algorithms.losses import CoefficientLoss

    return _engine(CoefficientLoss(PolicyLogProbs(network, 1.0, "cpu")))


def scoring_engine(network):
    from mindrlhf.algorithms.losses import CoefficientLoss
    from mindrlhf.algorithms.scores import TokenScores

    return _engine(CoefficientLoss(TokenScores(network, after_token=True)))


# The families.

LORA = {"rank": 4, "alpha": 8.0}
EXPERTS = tiny_model("qwen3_moe", MODEL, num_hidden_layers=1)
GLM4_MOE_MODEL = tiny_model("glm4_moe", MODEL)
# YaRN that is felt within a row: half the context, most channels slowed.
YARN_MODEL = {**MODEL, "rope_scaling": {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 32}}
LLAMA3_MODEL = tiny_model("llama", MODEL, rope_scaling=LLAMA3_ROPE)
GLM4_MODEL = tiny_model("glm4", MODEL)
# The window is shorter than most samples.
GEMMA3_MODEL = tiny_model("gemma3_text", MODEL)
# Qwen3.5: a layer with linear attention, and one with softmax attention and a gate; half of each head rotated.
QWEN3_5_MODEL = tiny_model(
    "qwen3_5_text", MODEL, head_dim=32, max_position_embeddings=128, partial_rotary_factor=0.5,
    layer_types=["linear_attention", "full_attention"], linear_key_head_dim=16, linear_value_head_dim=32,
)  # fmt: skip
# In Qwen3-VL two layers of the decoder are given rows of images too.
QWEN2_5_VL = config_of(TinyVl(is_tied=False))
QWEN3_VL = config_of(TinyVl(family="qwen3_vl", vision_depth=3, layers=3, is_tied=False))
_OPTIMIZER, _PIPELINE, _SEQUENCE = cases.OPTIMIZER, cases.PIPELINE, cases.SEQUENCE
_SPLIT_WORDS = {**_SEQUENCE, "vocab_emb_dp": False}
_REPLICAS = {"data_parallel": 2, "model_parallel": 2, "vocab_emb_dp": False}
_ADAPTED_REPLICAS = {**_OPTIMIZER, "model_parallel": 2, "vocab_emb_dp": True}
_RESUMES = frozenset({"resumed"})
_ALL_OUTPUTS = {"first": "started", "updates": "updated", "reference": "initial", "synchronised": "trained"}


def _chosen(is_computed: bool) -> dict[int, dict[str, dict]]:
    """Layouts of policies whose ranks compute the old log-probabilities of a step, or are given them."""
    return {
        size: {name: one for name, one in layouts.items() if (name in cases.WITH_LOGPROBS) == is_computed}
        for size, layouts in cases.ALL_LAYOUTS.items()
    }


_POLICY = Family(
    MODEL,
    _chosen(False),
    (UPDATE, LOGPROBS),
    POLICY_INPUTS,
    given_arrays,
    cases.plain_engine,
    outputs=_ALL_OUTPUTS,
    checks=_RESUMES | {"norms", "statistics", "moved", "exported", "published", "shared work"},
)
_OTHER = replace(  # a policy of another model or optimizer, whose ranks compute the old log-probabilities of a step
    _POLICY,
    outputs={"first": "initial", "updates": "updated", "reference": "initial"},
    checks=_RESUMES | {"norms", "exported", "published"},
    computed="old_logprobs",
)
_MUON = replace(_OTHER, engine=partial(cases.plain_engine, optimizer="muon"), options={"optimizer": "muon"})
_WITHOUT_UPDATES = {"first": "initial", "reference": "initial"}
_EXPERTS = {"data_parallel": 2, "expert_parallel": 2}
_ADAPTERS = {"options": {"lora": LORA}, "checks": _RESUMES | {"norms", "adapters"}}
_CRITIC = Family(
    cases.CRITIC,
    cases.CRITIC_LAYOUTS,
    (VALUE_UPDATE, VALUES),
    VALUE_INPUTS,
    given_arrays,
    critic_engine,
    computed="values",
    outputs={"first": "started"},
    least_output=0.1,
    checks=_RESUMES | {"exported"},
)
_SEES = replace(
    _POLICY, given=given_batches, spoils=False, outputs={"reference": "initial"}, checks=_RESUMES | {"names"}
)
_MEMORY = replace(_POLICY, outputs={"reference": "initial"}, checks=frozenset({"norms"}))
_FIXED = replace(_POLICY, given=given_fixed_data, outputs={"first": "started"}, least_output=0.1, checks=_RESUMES)


def _memory(name: str, model: dict = MODEL, parallel: dict = _SPLIT_WORDS, **memory) -> Family:
    return replace(_MEMORY, model=model, layouts={2: {name: parallel}}, options={"memory": memory})


FAMILIES = {
    "policy": _POLICY,
    "policy_computing": replace(_POLICY, layouts=_chosen(True), computed="old_logprobs"),
    "critic": _CRITIC,
    "adapters": replace(
        _OTHER, model=UNCUT_MODEL, layouts={2: {"pp2": _PIPELINE}, 4: {"dp2_tp2": _ADAPTED_REPLICAS}}, **_ADAPTERS
    ),
    "experts": replace(
        _OTHER,
        model=EXPERTS,
        layouts={2: {"ep2_dp2": _EXPERTS}},
        options={"gradients": RUNS_SLOW_TESTS},  # by day that graph is executed of the dense model
        outputs=_ALL_OUTPUTS,
        checks=_RESUMES | {"norms", "statistics", "published", "experts"},
    ),
    "replay": replace(
        _OTHER,
        model=EXPERTS,
        layouts={2: {"replay_dp2": {**_OPTIMIZER, "expert_parallel": 2}}},
        given=given_experts,
        options={"replays_routing": True},
        outputs={"first": "initial", "updates": "updated"},
        checks=_RESUMES | {"norms", "statistics"},
    ),
    # Tiles that do not divide the positions of a micro-batch, 4 x 32.
    "tiles": _memory("tiles_tp2", logit_tile=48),
    "recomputing": _memory(
        "recompute_tp2", recompute_layers="1", recompute_operators=("attention", "norms", "activation")
    ),
    "yarn": _memory("yarn_tp2", YARN_MODEL),
    "llama": replace(
        _OTHER,
        model=LLAMA3_MODEL,
        layouts={2: {"llama_tp2": _SEQUENCE, "llama_pp2": _PIPELINE, "llama_dp2": _OPTIMIZER}},
    ),
    "glm": replace(_OTHER, model=GLM4_MOE_MODEL, layouts={2: {"glm_ep2_dp2": _EXPERTS, "glm_tp2": _SPLIT_WORDS}}),
    "glm4": replace(
        _OTHER,
        model=GLM4_MODEL,
        layouts={2: {"glm4_tp2": _SPLIT_WORDS, "glm4_dp2": _OPTIMIZER}},
        outputs=_WITHOUT_UPDATES,
    ),
    "gemma3": replace(
        _OTHER,
        model=GEMMA3_MODEL,
        layouts={2: {"gemma3_tp2": _SPLIT_WORDS, "gemma3_dp2": _OPTIMIZER}},
        outputs=_WITHOUT_UPDATES,
    ),
    "qwen3_5": replace(
        _OTHER,
        model=QWEN3_5_MODEL,
        layouts={
            2: {
                "qwen3_5_tp2": {"data_parallel": 1, "model_parallel": 2, "vocab_emb_dp": False},
                "qwen3_5_dp2": _OPTIMIZER,
                "qwen3_5_pp2": _PIPELINE,
            },
        },
        given=given_chunks,
        tolerance=1e-4,  # log-probabilities of 8 differ by 3.4e-5 after two updates: unit queries make much of little
    ),
    "swapped_tp2": _memory("swapped_tp2", swap_moments=True),
    "swapped_pp2": _memory("swapped_pp2", parallel=_PIPELINE, swap_moments=True),
    # The ranks that share a matrix do not follow each other as its shards do.
    "muon": replace(_MUON, layouts={2: {"muon_pp2": _PIPELINE}, 4: {"muon_tp2_dp2": _ADAPTED_REPLICAS}}),
    "muon_experts": replace(
        _MUON,
        model=EXPERTS,
        layouts={2: {"muon_experts_ep2_dp2": {**_OPTIMIZER, "expert_parallel": 2}}},
        checks=_RESUMES | {"norms"},
    ),
    "muon_adapters": replace(
        _MUON,
        model=UNCUT_MODEL,
        layouts={2: {"muon_adapters_tp2": _SPLIT_WORDS}},
        options={"lora": LORA, "optimizer": "muon"},
        checks=_RESUMES | {"norms", "adapters"},
    ),
    "muon_swapped_dp2": replace(
        _MEMORY,
        layouts={2: {"muon_swapped_dp2": _OPTIMIZER}},
        engine=_MUON.engine,
        options={"memory": {"swap_moments": True}, "optimizer": "muon"},
    ),
    # Two replicas, whose rows have positions of their own; each holds half of the optimizer state.
    "shared_prompts": replace(
        _SEES,
        model=UNCUT_MODEL,
        layouts={2: {"dp2_shared": _OPTIMIZER}},
        options={"shared_prompts": True},
        checks=frozenset({"scatters"}),
    ),
    "qwen2_5_vl": replace(
        _SEES,
        model=QWEN2_5_VL,
        layouts={2: {"dp2_optimizer_parallel": _OPTIMIZER, "pp2": _PIPELINE}, 4: {"tp2_dp2": _REPLICAS}},
    ),
    "qwen3_vl": replace(
        _SEES, model=QWEN3_VL, layouts={2: {"tp2_sequence_parallel": _SEQUENCE}, 4: {"tp2_dp2": _REPLICAS}}
    ),
    "vision_critic": replace(
        _CRITIC,
        model=scorer_config(QWEN2_5_VL),
        layouts={2: {"critic_sees_tp2": _SEQUENCE}},
        given=given_batches,
        spoils=False,
    ),
}
FAMILIES["qwen3_5_adapters"] = replace(
    FAMILIES["qwen3_5"], layouts={2: {"qwen3_5_adapters_tp2": _SPLIT_WORDS}}, **_ADAPTERS
)
FAMILIES["qwen3_5_muon"] = replace(
    FAMILIES["qwen3_5"], layouts={2: {"qwen3_5_muon_dp2": _OPTIMIZER}}, engine=_MUON.engine, options=_MUON.options
)
for _kind, _model, _cells, _inputs, _made_by, _whole, _of_adapters in (
    ("sft", MODEL, (SUPERVISED_UPDATE, LOGPROBS), (), supervised_engine, _SEQUENCE, _PIPELINE),
    ("dpo", MODEL, (PAIR_UPDATE, LOGPROBS), ("coefficients",), preference_engine, _PIPELINE, _SEQUENCE),
    ("reward_model", cases.CRITIC, (PAIR_UPDATE, VALUES), ("coefficients",), scoring_engine, _PIPELINE, _SEQUENCE),
):
    # Nothing that sft is given can make a loss infinite.
    _one = replace(
        _FIXED,
        model=_model,
        cells=_cells,
        token_inputs=_inputs,
        engine=_made_by,
        spoils=_kind != "sft",
        layouts={2: {_kind: _whole}},
        options={"after_token": _kind == "reward_model"},
    )
    _adapted = {"layouts": {2: {f"{_kind}_adapters": _of_adapters}}, "options": {**_one.options, "lora": LORA}}
    FAMILIES |= {_kind: _one, f"{_kind}_adapters": replace(_one, **_adapted)}
# Executed every day; tests/training and tests/models compute with the others, and they are compiled every day.
OF_EVERY_DAY = {"policy_computing": ["pp2"], "experts": ["ep2_dp2"]}


def executed_layouts(name: str) -> dict[int, dict[str, dict]]:
    """Return those of a family's layouts that are executed, by number of ranks: a few every day, all at night."""
    chosen = FAMILIES[name].names if RUNS_SLOW_TESTS else OF_EVERY_DAY.get(name, FAMILIES[name].names)
    layouts = FAMILIES[name].layouts.items()
    found = {size: {one: given for one, given in by_name.items() if one in chosen} for size, by_name in layouts}
    return {size: by_name for size, by_name in found.items() if by_name}
