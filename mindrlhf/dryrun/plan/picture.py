"""The plan as an SVG picture: which rank holds which layers, and how full it gets."""

from html import escape

from mindrlhf.algorithms.optimizers import OPTIMIZERS
from mindrlhf.dryrun.plan.memory import PhaseMemory
from mindrlhf.dryrun.plan.plan import Plan
from mindrlhf.observe.axes import round_ticks
from mindrlhf.system.sizes import format_size

WIDTH = 1100
LEFT, RIGHT, TOP = 118, 1076, 96
BARS_HEIGHT = 190
_GAP = 66
_LAYERS_HEIGHT = 430
MAX_RANKS_NUMBERED = 64
_LEGEND_COLUMNS = 4
_FONT = "font-family='system-ui, -apple-system, Segoe UI, sans-serif'"
_INK, _FAINT, _GRID = "#1f2933", "#616e7c", "#d9dee4"
# Hues of the tensor-parallel shards; replicas of a shard are the same colour.
_SHARD_HUES = ("#2a6fb0", "#e08a2e", "#3f9b6c", "#c2534f", "#7d68b0", "#8a6a50", "#c96ba6", "#77848f")
_PARTS = {
    "parameters": "#2a6fb0",
    **{f"{one.title} moments": "#7d68b0" for one in OPTIMIZERS.values()},
    "gradients": "#3f9b6c",
    "reference model": "#8a6a50",
    "teachers": "#8a6a50",
    "activations and logits": "#e08a2e",
    "rollout weights": "#c2534f",
    "KV cache": "#e7a9a6",
    "runtime and the rest": "#9aa5b1",
}
_PART_OF_ITEM = {
    "gradient sums": "gradients",
    "gradient accumulators": "gradients",
    "rollout workspace": "runtime and the rest",
    "runtime and HCCL": "runtime and the rest",
    "attention mask": "runtime and the rest",
}


def render_picture(plan: Plan) -> str:
    """Return a standalone SVG document: above ranks x layers, below the memory of each rank's fullest moment."""
    num_rows = plan.model.dims.num_layers + 2
    row = max(5.0, min(16.0, _LAYERS_HEIGHT / num_rows))
    bottom = TOP + row * num_rows
    bars_top = bottom + _GAP
    legend_top = bars_top + BARS_HEIGHT + 58
    parts = [
        *_title(plan),
        *_layer_axis(plan, row),
        *_blocks(plan, row),
        *_node_axis(plan, bottom),
        *_bars(plan, bars_top),
        *_legend(plan, legend_top),
    ]
    height = legend_top + 44
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:.0f}" width="{WIDTH}" '
        f'height="{height:.0f}" role="img" aria-label="{escape(_headline(plan))}" {_FONT}>'
        f'<rect width="{WIDTH}" height="{height:.0f}" fill="#ffffff"/>{"".join(parts)}</svg>\n'
    )


def memory_parts(phase: PhaseMemory) -> dict[str, int]:
    """Return the bytes of a phase by the parts that the picture draws, in drawing order; parts of 0 are left out."""
    sizes = dict.fromkeys(_PARTS, 0)
    for item in phase.items:
        part = item.name if item.name in sizes else _PART_OF_ITEM.get(item.name, "activations and logits")
        sizes[part] += item.size_bytes
    return {part: size for part, size in sizes.items() if size}


def _headline(plan: Plan) -> str:
    return f"{plan.model.name} on {plan.machine.world_size} devices of {format_size(plan.machine.device_bytes)}"


def _title(plan: Plan) -> list[str]:
    layout = plan.layout
    words = f"data {layout.data_parallel} x model {layout.model_parallel} x pipeline {layout.pipeline_stage}"
    words += f" x context {layout.context_parallel}, expert {layout.expert_parallel}"
    words += ", sequence parallel" if layout.use_seq_parallel else ""
    words += ", parallel optimizer" if layout.optimizer_shard != 1 else ""
    return [
        _text(LEFT, 34, _headline(plan), size=19, weight=600),
        _text(LEFT, 56, f"{plan.num_parameters / 1e9:.2f}B parameters; {words}", colour=_FAINT, size=13),
        _text(LEFT, TOP - 12, "Layers that each rank holds; a colour is a tensor-parallel shard", size=13, weight=600),
    ]


def _x(plan: Plan, rank: float) -> float:
    return LEFT + (RIGHT - LEFT) * rank / plan.machine.world_size


def _layer_axis(plan: Plan, row: float) -> list[str]:
    num_layers = plan.model.dims.num_layers
    stride = max(1, round(14 / row))
    labels = {0: "embedding", num_layers + 1: "norm, head"}
    labels |= {layer + 1: f"layer {layer}" for layer in range(0, num_layers - 1, stride)}
    if num_layers > 1:
        labels[num_layers] = f"layer {num_layers - 1}"
    parts, last = [], -100.0
    for index in sorted(labels):
        y = TOP + row * (index + 0.5) + 4
        if y - last >= 11 or index == num_layers + 1:
            if y - last < 11:
                parts.pop()
            parts.append(_text(LEFT - 8, y, labels[index], colour=_FAINT, size=11, anchor="end"))
            last = y
    return parts


def _blocks(plan: Plan, row: float) -> list[str]:
    """One column per rank, one cell per layer, drawn as a bar with lines between its layers."""
    layout, num_layers = plan.layout, plan.model.dims.num_layers
    width = (RIGHT - LEFT) / plan.machine.world_size
    gap = 1.0 if width > 5 else 0.0
    parts = []
    for rank in range(plan.machine.world_size):
        place = layout.coordinates(rank)
        first, count = _rows_of_stage(plan, place.stage)
        x, y = _x(plan, rank), TOP + row * first
        colour = _SHARD_HUES[place.model % len(_SHARD_HUES)]
        parts.append(
            f'<rect x="{x + gap / 2:.2f}" y="{y:.1f}" width="{width - gap:.2f}" height="{row * count - 1:.1f}" '
            f'fill="{colour}"><title>rank {rank}: data {place.data}, context {place.context}, model {place.model}'
            f"</title></rect>"
        )
    lines = [f"M{LEFT} {TOP + row * index - 0.5:.1f}H{RIGHT}" for index in range(1, num_layers + 2)]
    parts.append(f'<path d="{"".join(lines)}" stroke="#ffffff" stroke-opacity="0.55" stroke-width="1"/>')
    for stage in range(layout.pipeline_stage):
        parts += _stage_label(plan, stage, row)
    return parts


def _rows_of_stage(plan: Plan, stage: int) -> tuple[int, int]:
    """First row and number of rows of a stage: row 0 is the embedding, the last row norm and head."""
    layers = [layer for layer, place in enumerate(plan.layer_stages) if place == stage]
    first, last = layers[0] + 1, layers[-1] + 1
    if stage == 0:
        first = 0
    if stage == plan.layout.pipeline_stage - 1:
        last += 1
    return first, last - first + 1


def _stage_label(plan: Plan, stage: int, row: float) -> list[str]:
    num_stages, size = plan.layout.pipeline_stage, plan.layout.stage_size
    if num_stages == 1:
        return []
    first, count = _rows_of_stage(plan, stage)
    left, right = _x(plan, stage * size), _x(plan, (stage + 1) * size)
    words = f"stage {stage}" if right - left > 60 or num_stages <= 8 else str(stage)
    middle = TOP + row * (first + count / 2) + 4
    # Beside the block, where there is room: on its right, but for the last third.
    at_left = right > LEFT + (RIGHT - LEFT) * 0.7
    return [_text(left - 6 if at_left else right + 6, middle, words, size=12, anchor="end" if at_left else "start")]


def _node_axis(plan: Plan, bottom: float) -> list[str]:
    machine = plan.machine
    num_nodes = machine.num_nodes
    stride = max(1, -(-num_nodes // 16))
    marks = "".join(
        f"M{_x(plan, min(node * machine.node_size, machine.world_size)):.1f} {bottom + 2:.1f}v8"
        for node in range(num_nodes + 1)
    )
    parts = [f'<path d="{marks}" stroke="{_FAINT}" stroke-width="1"/>']
    if machine.world_size <= MAX_RANKS_NUMBERED:
        for rank in range(machine.world_size):
            parts.append(_text(_x(plan, rank + 0.5), bottom + 13, str(rank), colour=_FAINT, size=11, anchor="middle"))
    for node in range(0, num_nodes, stride):
        last = min((node + 1) * machine.node_size, machine.world_size) - 1
        words = f"node {node}: ranks {node * machine.node_size}-{last}" if num_nodes <= 6 else f"node {node}"
        middle = (_x(plan, node * machine.node_size) + _x(plan, last + 1)) / 2
        parts.append(_text(middle, bottom + 28, words, colour=_FAINT, size=11, anchor="middle"))
    return parts


def _bars(plan: Plan, top: float) -> list[str]:
    """The memory of each rank in the fullest moment of its stage, stacked by part, against the device's."""
    device, bottom = plan.machine.device_bytes, top + BARS_HEIGHT
    fullest = _fullest_phases(plan)
    high = max(device, plan.peak.total) * 1.06
    width = (RIGHT - LEFT) / plan.machine.world_size
    gap = 1.0 if width > 5 else 0.0
    parts = [_text(LEFT, top - 10, "Memory of each rank in its fullest moment", size=13, weight=600)]
    for tick in round_ticks(0, high / 1e9, 5):
        y = bottom - BARS_HEIGHT * tick * 1e9 / high
        parts.append(f'<path d="M{LEFT} {y:.1f}H{RIGHT}" stroke="{_GRID}"/>')
        parts.append(_text(LEFT - 8, y + 4, f"{tick:g} GB", colour=_FAINT, size=11, anchor="end"))
    for stage, phase in fullest.items():
        y, first = bottom, stage * plan.layout.stage_size
        # Bars too thin to be told apart are drawn as one.
        bars = plan.layout.stage_size if gap else 1
        bar_width = width * plan.layout.stage_size / bars
        for part, size in memory_parts(phase).items():
            height = BARS_HEIGHT * size / high
            y -= height
            for bar in range(bars):
                parts.append(
                    f'<rect x="{_x(plan, first + bar) + gap / 2:.2f}" y="{y:.1f}" width="{bar_width - gap:.2f}" '
                    f'height="{height:.1f}" fill="{_PARTS[part]}"/>'
                )
    limit = bottom - BARS_HEIGHT * device / high
    parts.append(f'<path d="M{LEFT} {limit:.1f}H{RIGHT}" stroke="{_INK}" stroke-width="1.5" stroke-dasharray="6 4"/>')
    parts.append(_text(RIGHT, limit - 5, f"device: {format_size(device)}", size=11, anchor="end"))
    phases = " and ".join(dict.fromkeys(phase.phase for phase in fullest.values()))
    words = f"fullest moment: {phases}; peak {format_size(plan.peak.total)}, " + ("fits" if plan.fits else "too much")
    parts.append(_text(LEFT, bottom + 20, words, colour=_FAINT, size=12))
    return parts


def _fullest_phases(plan: Plan) -> dict[int, PhaseMemory]:
    """The fullest moment of each pipeline stage."""
    return {
        stage: max((one for one in plan.memory if one.stage == stage), key=lambda one: one.total)
        for stage in range(plan.layout.pipeline_stage)
    }


def _legend(plan: Plan, top: float) -> list[str]:
    drawn = {part for phase in _fullest_phases(plan).values() for part in memory_parts(phase)}
    parts = []
    for index, part in enumerate(part for part in _PARTS if part in drawn):
        row, column = divmod(index, _LEGEND_COLUMNS)
        x, y = LEFT + column * (RIGHT - LEFT) / _LEGEND_COLUMNS, top + 22 * row
        parts.append(f'<rect x="{x:.0f}" y="{y - 10:.0f}" width="12" height="12" rx="2" fill="{_PARTS[part]}"/>')
        parts.append(_text(x + 18, y, part, size=12))
    return parts


def _text(
    x: float, y: float, words: str, *, size: int, colour: str = _INK, anchor: str = "start", weight: int = 400
) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" font-weight="{weight}" fill="{colour}" '
        f'text-anchor="{anchor}">{escape(words)}</text>'
    )
