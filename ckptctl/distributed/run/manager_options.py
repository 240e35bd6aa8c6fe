"""Options and results of a checkpoint manager."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

from ckptctl import option_checks as checks
from ckptctl import shared_options as opt
from ckptctl.conversion.conversion_options import ConversionOptions, WriteOptions
from ckptctl.distributed.background.async_save import Mode, WhenBusy
from ckptctl.distributed.group import ProcessGroup
from ckptctl.distributed.run.keeper import PublishHook
from ckptctl.distributed.run.preemption import PreemptionOptions
from ckptctl.distributed.run.schedule import SaveRules
from ckptctl.distributed.saving.save_options import SaveOptions
from ckptctl.errors import RefusedError, UsageError
from ckptctl.options import Option, list_options
from ckptctl.planner.retention import Policy, Retainable
from ckptctl.run_options import KeepOptions
from ckptctl.save_load.loading.load_options import LoadReport
from ckptctl.tree import TreePath

KeepPredicate = Callable[[Retainable], object]
MAX_FAILURES = 2
REQUIRED_OPTIONS = {
    "fast": ("fast_keep", "copy_every", "copy_rate"),
    "async_": ("mode", "when_busy", "max_failures"),
}
"""Options that only apply if another option is set, by the name of that option."""


@dataclass(frozen=True, slots=True)
class Resumed:
    """Checkpoint from which training resumes.

    Attributes:
        path: Path of the loaded checkpoint.
        step: Number in its name: its step or epoch.
        skipped: Names of newer checkpoints that are incomplete or damaged, with reasons.
        report: Report of the load.
        doubts: Warnings that the highest step may not be the latest save, and which was loaded.
    """

    path: TreePath
    step: int
    skipped: Mapping[str, str]
    report: LoadReport
    doubts: tuple[str, ...] = ()


def check_path(path: str | TreePath) -> str | TreePath:
    """Return *path*, or raise if it is not a path."""
    checks.check_path(path)
    return path


def check_hooks(value: Any) -> tuple[PublishHook, ...]:
    """Convert one hook or a list of them to a tuple, or raise."""
    hooks = (value,) if callable(value) else value
    if not isinstance(hooks, Sequence) or not all(map(callable, hooks)):
        raise UsageError(f"{value!r} is neither a function nor a list of them")
    return tuple(hooks)


@dataclass(frozen=True, kw_only=True)
class ManagerOptions(PreemptionOptions, opt.ModelOptions, SaveOptions, KeepOptions, SaveRules):
    """Options of a :class:`CheckpointManager`."""

    keep_last: Annotated[
        int | None,
        Option(
            "Number of newest checkpoints to keep. With 0, all are kept until "
            ":meth:`save_final` has published the model, and none afterwards. With None and no "
            "other rule, all are kept.",
            check=checks.build_minimum_check(0),
        ),
    ] = None
    keep_if: Annotated[
        KeepPredicate | None,
        Option(
            "Function called on rank 0 with each complete checkpoint, which is kept if "
            "the result is true. Checkpoints have ``name``, ``step``, ``time`` (seconds "
            "since the epoch) and ``metrics``. An exception is logged, and nothing is "
            "removed."
        ),
    ] = None
    final_format: Annotated[
        str | None,
        Option(
            "Format of :meth:`save_final`. None uses ``hf``.", check=checks.check_writable_format
        ),
    ] = None
    model_type: Annotated[
        str | None, Option("Model type for :meth:`save_final`. Detected if None.")
    ] = None
    async_: Annotated[
        bool,
        Option("Return from :meth:`save` after the state is copied, and write in the background."),
    ] = True
    mode: Annotated[Mode, Option("Mode of background saves. See :class:`AsyncSaver`.")] = "thread"
    when_busy: Annotated[
        WhenBusy, Option("Action if the previous save is still running. See :class:`AsyncSaver`.")
    ] = "wait"
    max_failures: Annotated[
        int,
        Option(
            "Number of consecutive background saves that may fail. Each failure is "
            "logged as an error, and training continues. A further failure is raised "
            "after the next save has started.",
            check=checks.build_minimum_check(0),
        ),
    ] = MAX_FAILURES
    make_room: Annotated[
        Literal["after", "before"],
        Option(
            "Time to remove checkpoints that no rule keeps: after a newer one is published, "
            "or also before it is written. The latter is for disks with room for only "
            "``keep_last`` checkpoints. The newest complete one is always kept."
        ),
    ] = "after"
    fast: Annotated[
        str | TreePath | None,
        Option(
            "Folder of the run on a local disk of this machine. Each rank saves its part "
            "there first, and some saves are copied to the run in the background.",
            check=check_path,
        ),
    ] = None
    fast_keep: Annotated[
        int,
        Option(
            "Number of saves to keep in *fast*: the newest ones that are complete on all ranks.",
            check=checks.build_minimum_check(1),
        ),
    ] = 2
    copy_every: Annotated[
        int,
        Option(
            "Copy the first save in *fast* after each start of the run, and every Nth "
            "save after it. If a save is due during a copy, the next save is copied "
            "instead.",
            check=checks.build_minimum_check(1),
        ),
    ] = 1
    copy_rate: Annotated[
        int | None,
        Option(
            "Maximum bytes per second at which each rank copies from *fast*. None sets "
            "no limit. The limit does not apply while training waits for a copy.",
            check=checks.build_minimum_check(1),
        ),
    ] = None
    process_group: ProcessGroup = None
    on_published: Annotated[
        PublishHook | Sequence[PublishHook],
        Option(
            "Functions called on rank 0 with the path of each published checkpoint, e.g. "
            "for uploads and logs. A checkpoint is not removed while they run. Their "
            "exceptions are logged.",
            check=check_hooks,
        ),
    ] = ()

    def __post_init__(self) -> None:
        """Check all values, that every option has an effect, and that every rule keeps something.

        Raises:
            UsageError: An option is invalid or has no effect.
        """
        super().__post_init__()
        self._require_effect()
        if self.fast and self.when_busy == "skip":
            raise UsageError(
                "`when_busy='skip'` conflicts with `fast`",
                why="each rank would skip different saves, and none would be complete",
            )
        policy = replace(self.policy(), last=self.keep_last or None)
        try:
            if not policy.is_empty:
                policy.require_rules()
        except RefusedError as error:
            raise UsageError(error.what, hint=error.hint) from error
        if self.make_room == "before" and (self.policy().is_empty or self.keep_last == 0):
            raise UsageError(
                "`make_room='before'` requires a keep rule",
                hint="pass a rule, for example `keep_last=2`",
            )

    def _require_effect(self) -> None:
        """Raise if an option has no effect because the option that it depends on is not set."""
        for needed, others in REQUIRED_OPTIONS.items():
            set_options = [
                option for option in list_options(ManagerOptions) if option.name in others
            ]
            set_options = [
                option for option in set_options if getattr(self, option.name) != option.default
            ]
            if set_options and not getattr(self, needed):
                where = f"without `{needed}`" if needed == "fast" else f"with `{needed}=False`"
                names = ", ".join(f"`{option.name}`" for option in set_options)
                does = "does" if len(set_options) == 1 else "do"
                raise UsageError(f"{names} {does} not apply {where}")

    def policy(self) -> Policy:
        """Return the retention policy."""
        return replace(super().build_policy(), keep_if=self.keep_if)

    def build_conversion_options(self, options: FinalOptions) -> ConversionOptions:
        """Return the conversion options for the trained model.

        Options of the manager are used as defaults.
        """
        return options.with_target_format(
            options.to or self.final_format or "hf",
            model_type=options.model_type or self.model_type,
            converter=options.converter or self.converter,
        )


@dataclass(frozen=True, kw_only=True)
class FinalOptions(WriteOptions):
    """Options for saving the trained model."""

    to: Annotated[
        str | None, opt.target_format_option("Format to write. None uses the manager's format.")
    ] = None


SOURCE_OPTIONS = ("from_format", "weights", "tag", "rules", "ranks", "verify_replicas", "resume")
"""Conversion options that concern reading the source.

They do not apply to a state in memory.
"""
