"""What a conversion will do, or did, in print."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from ckptctl.cli.output import Output
from ckptctl.cli.tables import counted
from ckptctl.errors import SHOWN, listed
from ckptctl.storage.out_of_range import OutOfRange, worst
from ckptctl.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from ckptctl.ops.conversion.convert import ConversionPlan, ConversionResult


@dataclass(frozen=True, slots=True)
class Published:
    """What ``--json`` prints.

    Attributes:
        schema: Its schema.
        more: Fields beside those of the conversion.
    """

    schema: str
    more: Mapping[str, object] = field(default_factory=dict)


def print_plan(output: Output, plan: ConversionPlan, dst: Path, published: Published) -> None:
    """Print what a conversion would do.

    Args:
        output: Where to print, and how.
        plan: What would be done.
        dst: The destination as it was typed.
        published: What ``--json`` prints.
    """
    if output.mode == "json":
        output.document(published.schema, {"dry_run": True, **plan.to_json(), **published.more})
    elif output.mode == "quiet":
        output.line(str(dst))
    elif output.mode == "plain":
        output.fields(_plan_fields(plan, dst))
        output.table([("file", path, str(nbytes)) for path, nbytes in plan.files])
        output.table([("dropped", key, why) for key, why in plan.dropped.items()])
        output.table([("left_out", key, why) for key, why in plan.left_out.items()])
        output.table([("missing", key, why) for key, why in plan.missing.items()])
        output.table([("not_carried", key, why) for key, why in plan.not_carried.items()])
    else:
        _show_plan(output, plan, dst)


def _plan_fields(plan: ConversionPlan, dst: Path) -> Iterator[tuple[str, object]]:
    yield "target", dst
    yield "tensors", plan.tensors
    yield "mapped", plan.mapped
    yield "bytes", plan.nbytes
    yield "free_bytes", plan.free_bytes
    yield "memory_bytes", plan.memory_bytes
    yield "arithmetic", "yes" if plan.arithmetic else "no"


def _show_plan(output: Output, plan: ConversionPlan, dst: Path) -> None:
    total = format_bytes(plan.nbytes)
    output.line(f"would write {counted(len(plan.files), 'file')} ({total}) to {dst}", "bold")
    output.table([(f"  {path}", format_bytes(nbytes)) for path, nbytes in plan.files], right=[1])
    output.line(
        f"{plan.tensors:,} tensors · {plan.mapped:,} renamed or reordered"
        f" · {len(plan.dropped):,} dropped · {len(plan.left_out):,} left out"
        + (f" · {len(plan.missing):,} missing" if plan.missing else "")
    )
    reasons = {"dropped": plan.dropped, "left out": plan.left_out, "missing": plan.missing}
    for title, keys in reasons.items():
        _show_reasons(output, title, keys)
    memory = format_bytes(plan.memory_bytes)
    output.line(
        f"needs {total} of disk ({format_bytes(plan.free_bytes)} free), peak memory about {memory}"
        + (", arithmetic with torch" if plan.arithmetic else "")
    )


def by_reason(keys: Mapping[str, str]) -> Iterable[tuple[str, list[str]]]:
    """Return every reason with the names that it is given for."""
    by_reason: dict[str, list[str]] = {}
    for key, reason in keys.items():
        by_reason.setdefault(reason, []).append(key)
    return by_reason.items()


def in_short(names: Sequence[str]) -> str:
    """Return the names, or where there are many what they begin with."""
    if len(names) <= SHOWN:
        return listed(names)
    heads = list(dict.fromkeys(name.partition(".")[0] for name in names))
    return f"{listed(heads)} ({len(names):,} in all)"


def _show_reasons(output: Output, title: str, keys: Mapping[str, str]) -> None:
    for reason, names in by_reason(keys):
        output.line(f"{title}: {reason}")
        for name in names[:SHOWN]:
            output.line(f"  {name}")
        if len(names) > SHOWN:
            output.line(f"  and {len(names) - SHOWN:,} more")


def warn_out_of_range(output: Output, found: Mapping[str, OutOfRange]) -> None:
    """Say what was published although it became infinite, NaN or saturated, if anything was."""
    if found:
        output.warning(f"published out of range: {worst(found)}")


def print_result(output: Output, result: ConversionResult, dst: Path, published: Published) -> None:
    """Print what a conversion did; see :func:`print_plan`."""
    if output.mode == "json":
        output.document(published.schema, {"dry_run": False, **result.to_json(), **published.more})
        return
    for note in result.notes:
        output.note(note)
    warn_out_of_range(output, result.out_of_range)
    if output.mode == "quiet":
        output.line(str(dst))
    elif output.mode == "plain":
        output.fields(
            (
                ("target", dst),
                ("files", len(result.plan.files)),
                ("bytes", result.nbytes),
                ("resumed_bytes", result.resumed_bytes),
                ("seconds", f"{result.seconds:.3f}"),
                ("verified", "yes" if result.verified else "no"),
            )
        )
        output.table([("missing", key, why) for key, why in result.plan.missing.items()])
        output.table([("out_of_range", key, str(n)) for key, n in result.out_of_range.items()])
    else:
        output.line(_summary(result, dst), "bold")
        _show_reasons(output, "missing", result.plan.missing)


def _summary(result: ConversionResult, dst: Path) -> str:
    moved = result.nbytes - result.resumed_bytes
    parts = [
        f"wrote {dst}: {counted(len(result.plan.files), 'file')}",
        f"{format_bytes(result.nbytes)} in {format_seconds(result.seconds)}",
    ]
    if result.seconds > 0.5:
        parts.append(f"{format_bytes(int(moved / result.seconds))}/s")
    if result.resumed_bytes:
        parts.append(f"{format_bytes(result.resumed_bytes)} were there already")
    if result.verified:
        parts.append("verified")
    return ", ".join(parts)
