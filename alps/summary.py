"""The last table on the terminal: what the base could do, what the tuned model can, and what it took."""

from __future__ import annotations

from alps.result import RunResult

_TITLES = {
    "response_loss": "held-out response loss (nats a token; lower is better)",
    "exact_match": "exact match, zero-shot",
    "few_shot_last_number": "last number right, with solved examples (base only)",
    "general_text_loss": "loss on general text (nats a token; forgetting if it rises)",
}
_TOO_FEW = 30


def summarise(result: RunResult) -> str:
    """The table as text. A change is marked as such only beyond two standard errors, and never on fewer than 30 items."""
    run, train, evaluation = result.run_info, result.train_info, result.eval_info
    lines = [f"{'':<60}{'base':>17}{'tuned':>17}{'change':>19}      n"]
    for name, title in _TITLES.items():
        base, tuned, change = (part.get(name) for part in (evaluation.base, evaluation.tuned, evaluation.change))
        if base is None and tuned is None:
            continue
        n = int((base or tuned or {})["n"])
        verdict = "" if change is None else _verdict(change)
        lines.append(f"{title:<60}{_cell(base):>17}{_cell(tuned):>17}{_cell(change, sign=True):>19}{n:>7}  {verdict}")
    lines += [f"{_TITLES.get(name, name)}: not measured, {why}" for name, why in evaluation.skipped.items()]
    lines.append("values with their standard errors; changes are paired by item")
    lines.append("")
    kind = {"rows": "their rows only", "lora": "through low-rank adapters beside them", "full": "everything"}[train.tuner]
    lines.append(
        f"trained: {train.chosen_heads} of {train.total_heads} heads by {train.selector} ({kind}"
        + (", and all outside Q/K/V" if train.also_train == "rest" and train.tuner == "rows" else "")
        + f"), {train.trained_parameters:,} of {train.total_parameters:,} parameters"
        f" ({train.trained_parameters / max(1, train.total_parameters):.2%})"
        + ("" if train.tuner == "lora" else f", {train.qkv_share:.2%} of Q/K/V")
    )
    if train.moved_with_group:
        lines.append(f"moved along: {train.moved_with_group} unselected heads share the key/value head of a chosen one")
    if train.frozen_bit_identical is not None:
        cast = f" cast to {train.frozen_compared_as}" if train.frozen_compared_as else ""
        lines.append(f"frozen weights bit-identical to the base{cast}: {'yes' if train.frozen_bit_identical else 'NO'}")
    lines.append(f"speed: {train.tokens_per_s:,.0f} tokens/s over {train.num_steps} steps")
    lines.append("time and peak memory by stage:")
    for name, seconds in run.stage_seconds.items():
        parts = ", ".join(f"{part} {value:.1f} s" for part, value in run.stage_parts.get(name, {}).items())
        memory = run.stage_peak_memory_bytes.get(name, 0) / 2**30
        lines.append(f"  {name:<16}{seconds:>8.1f} s{memory:>8.2f} GiB" + (f"   ({parts})" if parts else ""))
    lines.append(
        f"  {'whole run':<16}{run.wall_seconds:>8.1f} s{max(run.stage_peak_memory_bytes.values(), default=0) / 2**30:>8.2f} GiB"
    )
    if evaluation.suites_not_run:
        lines.append(f"benchmark suites named but not run by this version: {', '.join(evaluation.suites_not_run)}")
    return "\n".join(lines)


def _cell(metric: dict[str, float] | None, sign: bool = False) -> str:
    if metric is None:
        return "-"
    return f"{metric['value']:{'+' if sign else ''}.3f} ± {metric['stderr']:.3f}"


def _verdict(change: dict[str, float]) -> str:
    if change["n"] < _TOO_FEW:
        return "too few items to say"
    return "" if abs(change["value"]) > 2 * change["stderr"] else "within the noise"
