"""`mindrlhf strategy`: read, check, compile, summarise."""

import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from mindrlhf.config.load import load_layout_config
from mindrlhf.dryrun.compile.collectives import summarize
from mindrlhf.dryrun.compile.strategy import ALL_LAYERS, ROLLOUT_NAME, CompiledStrategy, compile_strategy
from mindrlhf.layout.layout import Layout
from mindrlhf.specs import has_linear_attention
from mindrlhf.system.sizes import format_size
from mindrlhf.weights.hf import read_hf_config


@dataclass(frozen=True)
class StrategyReport:
    """Result of `mindrlhf strategy`."""

    compiled: CompiledStrategy
    layout: Layout
    directory: Path

    def lines(self) -> Iterator[str]:
        """Yield the summary."""
        directory = self.directory
        compiler = "MindSpore, CANN simulated" if self.compiled.reports[0].simulated else "MindSpore with CANN"
        yield f"strategy of {self.layout} ({self.layout.world_size} ranks): {directory}"
        yield f"  {directory}/merged.ckpt      all stages, for transform_checkpoints and load_distributed_checkpoint"
        yield f"  {directory}/stages           one file per stage, for merge_pipeline_strategys"
        yield f"  {directory}/{ROLLOUT_NAME}          the same for one rollout server"
        yield f"compiled with {compiler}; {self.compiled.extent}"
        for report in self.compiled.reports:
            yield (
                f"stage {report.stage}: {len(report.parameters)} parameters and states, "
                f"{report.seconds:.0f} s, {format_size(report.peak_rss_bytes)} of memory; "
                + ("per update it communicates" if report.collectives is not None else "its collectives were not read")
            )
            for kind, size, count, total_bytes in summarize(report.collectives or ()):
                yield f"    {kind:<14}{size:>5} ranks {count:>6} x, {format_size(total_bytes)} in all"

    def plain(self) -> dict[str, Any]:
        """Return JSON values; sizes are bytes."""
        return {
            "directory": str(self.directory),
            "layout": str(self.layout),
            "num_ranks": self.layout.world_size,
            "is_simulated": self.compiled.reports[0].simulated,
            "extent": self.compiled.extent,
            "stages": [
                {
                    "stage": report.stage,
                    "num_parameters": len(report.parameters),
                    "seconds": report.seconds,
                    "peak_rss_bytes": report.peak_rss_bytes,
                    "collectives": None if report.collectives is None else _plain_collectives(report.collectives),
                }
                for report in self.compiled.reports
            ],
        }


def report_strategy(
    config_path: str | Path,
    overrides: Iterable[str],
    *,
    world_size: int,
    directory: str | Path,
    layers_per_stage: int | str,
) -> StrategyReport:
    """Compile a config's strategy files into ``directory`` and return a summary.

    Args:
        layers_per_stage: a number, "all", or "auto": one layer of each kind.

    Raises:
        UserError: the config, the model or the world size does not fit; names the fix.
        RunFailure: a compilation failed.
    """
    config = load_layout_config(config_path, overrides)
    layout = Layout.from_config(config.parallel_config, world_size)
    hf_config = read_hf_config(config.model.path)
    # A model whose first layers are dense and the others not needs two to show both kinds; so does linear attention.
    one_of_each = 2 if hf_config.get("first_k_dense_replace") or has_linear_attention(hf_config) else 1
    per_stage = {"all": ALL_LAYERS, "auto": one_of_each}.get(layers_per_stage, layers_per_stage)
    directory = Path(directory)
    tell = partial(print, file=sys.stderr, flush=True)
    compiled = compile_strategy(config, hf_config, layout, directory, layers_per_stage=per_stage, on_progress=tell)
    return StrategyReport(compiled, layout, directory)


def _plain_collectives(collectives: Iterable[Any]) -> list[dict[str, Any]]:
    names = ("kind", "num_ranks", "count", "total_bytes")
    return [dict(zip(names, row, strict=True)) for row in summarize(collectives)]
