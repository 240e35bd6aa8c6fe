"""Comparison of tensor names and shapes with a class of transformers, in a process of its own.

The class is built on the meta device, so parameters take no memory. This file is executed as a
script, and imports nothing of ckptctl. It reads a JSON object from standard input, with the keys
``config`` (parsed config.json) and ``tensors`` (shapes by name, or null if a shape is unknown), and
prints the result as JSON.

:func:`restrict_process` limits memory, processor time and files. ``config`` is data from a
checkpoint, so no name in it may select code or files outside of transformers.

Source: ``conversion_mapping.py``, ``core_model_loading.py`` and ``modeling_utils.py`` of
transformers 5.23.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from copy import deepcopy
from typing import Any

Shape = Sequence[int] | None
Json = Any

MAX_CPU_SECONDS = 60
"""Processor time that building and comparing a model may take."""
MAX_EXTRA_BYTES = 2 << 30
"""Address space that building and comparing a model may add."""
MAX_CONFIG_VALUES = 200_000
MAX_CONFIG_DEPTH = 32
MAX_NUMBER = 1 << 53
MIN_COUNT = 1_024
"""Number of layers or blocks that every configuration may state."""
MIN_PARTS = 20_000
PARTS_PER_TENSOR = 8
"""Numbers of parameters and modules that a model may have, in total and per stored tensor."""
MAX_LISTED = 10_000
MAX_REASON = 300
COUNT_KEY = re.compile(r"(layers?|blocks?|depths?|stages?)$|^n_(layer|block)|^num_hidden")
IGNORED_KEYS = frozenset(
    {
        *("auto_map", "quantization_config", "compression_config", "dtype", "torch_dtype"),
        *("attn_implementation", "experts_implementation", "kernel_config", "use_kernels"),
        *("name_or_path", "transformers_version", "distributed_config", "tp_plan", "pruned_heads"),
    }
)
"""Keys of config.json that name code, files or settings of training, and that no name depends on.

Keys that start with an underscore are ignored as well.
"""
FLOAT_KEY = "__float__"
FLOATS = {"Infinity": float("inf"), "-Infinity": float("-inf"), "NaN": float("nan")}
BACKBONE_KEYS = ("backbone", "use_timm_backbone", "use_pretrained_backbone")
TIMM = "timm"
NUMBERS = re.compile(r"\d+")
SYSTEM_FOLDERS = ("/proc/", "/sys/", "/etc/", "/dev/null", "/dev/urandom", "/usr/share/zoneinfo/")


class UnknownModelError(Exception):
    """The model cannot be built, for the reason in the message."""


def main() -> None:
    """Read the request, compare, and print the result."""
    output = os.dup(1)
    os.dup2(2, 1)  # libraries may print
    request = json.load(sys.stdin)
    try:
        result = run_comparison(request["config"], request["tensors"])
    except UnknownModelError as error:
        result = {"failure": str(error)}
    except BaseException as error:
        lines = str(error).strip().splitlines() or [""]
        result = {"failure": f"transformers cannot build it: {type(error).__name__}: {lines[0]}"}
    if "failure" in result:
        result["failure"] = result["failure"][:MAX_REASON]
    with open(output, "w", encoding="utf-8") as file:  # noqa: PTH123
        json.dump(result, file)


def run_comparison(config: Json, tensors: Mapping[str, Shape]) -> dict[str, Json]:
    """Import transformers, restrict the process, and compare *tensors* with the class."""
    check_config_bounds(config, len(tensors))
    import transformers

    class_name = find_class_name(config)
    restrict_process()
    result = compare_with_class(config, class_name, tensors)
    return {"version": transformers.__version__, "class": class_name, **result}


def check_config_bounds(config: Json, tensor_count: int) -> None:
    """Raise if *config* is not a configuration of a model with about *tensor_count* tensors.

    Every layer has a tensor. The number of experts is not compared, because experts may be stacked.

    Raises:
        UnknownModelError: A count is too high, or the configuration is too large, or another
            package or file would have to define a part of the model.
    """
    values = 0
    stack: list[tuple[str, Json, int]] = [("config.json", config, 0)]
    while stack:
        key, value, depth = stack.pop()
        values += 1
        if values > MAX_CONFIG_VALUES or depth > MAX_CONFIG_DEPTH:
            raise UnknownModelError("config.json is too large to build a model from it")
        if isinstance(value, dict):
            check_backbone(value)
            stack += [(str(name), item, depth + 1) for name, item in value.items()]
        elif isinstance(value, list):
            stack += [(key, item, depth + 1) for item in value]
        elif isinstance(value, int | float) and not isinstance(value, bool):
            is_count = COUNT_KEY.search(key) is not None
            if abs(value) > (max(tensor_count, MIN_COUNT) if is_count else MAX_NUMBER):
                if is_count:
                    raise UnknownModelError(
                        f"config.json states {value:,} for `{key[:64]}`, more than the number "
                        f"of tensors, {tensor_count:,}"
                    )
                if isinstance(value, int):
                    raise UnknownModelError(f"`{key[:64]}` in config.json is too large")


def check_backbone(section: Mapping[str, Json]) -> None:
    """Raise if *section* of a configuration takes a part of the model from elsewhere."""
    named = next((key for key in BACKBONE_KEYS if section.get(key)), None)
    if named is not None:
        raise UnknownModelError(f"`{named}` in config.json takes a part from another model")
    model_type = section.get("model_type")
    if isinstance(model_type, str) and model_type.startswith(TIMM):
        raise UnknownModelError("the package timm defines a part of the model")


def strip_config(config: Json) -> Json:
    """Return *config* without keys that name code, files or settings, also in its sections.

    Floats that JSON does not have are decoded.
    """
    if isinstance(config, list):
        return [strip_config(item) for item in config]
    if not isinstance(config, dict):
        return config
    if config.keys() == {FLOAT_KEY} and config[FLOAT_KEY] in FLOATS:
        return FLOATS[config[FLOAT_KEY]]
    return {
        key: strip_config(value)
        for key, value in config.items()
        if key not in IGNORED_KEYS and not key.startswith("_")
    }


def find_class_name(config: Json) -> str:
    """Return the class of transformers that config.json names, and import its modules.

    Only names in the tables of transformers' auto classes are accepted, and only for the model type
    whose configuration the class takes.
    """
    import transformers
    from transformers.models.auto import modeling_auto
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING, CONFIG_MAPPING_NAMES

    if not isinstance(config, dict):
        raise UnknownModelError("config.json is not an object")
    model_type, names = config.get("model_type"), config.get("architectures")
    if not isinstance(model_type, str):
        raise UnknownModelError("config.json states no `model_type`")
    if model_type not in CONFIG_MAPPING_NAMES:
        raise UnknownModelError(f"transformers has no model type `{model_type[:64]}`")
    if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str):
        raise UnknownModelError("config.json does not name one class in `architectures`")
    known: set[str] = set()
    for table, entries in vars(modeling_auto).items():
        for classes in entries.values() if table.endswith("_MAPPING_NAMES") else ():
            known.update([classes] if isinstance(classes, str) else classes)
    has_class = names[0] in known
    if (
        not has_class
        or getattr(transformers, names[0]).config_class is not CONFIG_MAPPING[model_type]
    ):
        raise UnknownModelError(
            f"transformers has no class `{names[0][:64]}` for model type `{model_type}`"
        )
    return names[0]


def restrict_process() -> None:
    """Limit memory and processor time, and forbid network, processes and other files.

    Limits apply from here on, because imports do not depend on the checkpoint.
    """
    import resource

    with open("/proc/self/statm", encoding="ascii") as file:  # noqa: PTH123
        pages = int(file.read().split()[0])
    address_space = pages * resource.getpagesize() + MAX_EXTRA_BYTES
    usage = resource.getrusage(resource.RUSAGE_SELF)
    seconds = int(usage.ru_utime + usage.ru_stime) + MAX_CPU_SECONDS
    for kind, limit in ((resource.RLIMIT_AS, address_space), (resource.RLIMIT_CPU, seconds)):
        _, hard = resource.getrlimit(kind)
        bound = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
        resource.setrlimit(kind, (bound, bound))
    sys.addaudithook(make_audit_hook())


def make_audit_hook() -> Callable[[str, tuple[Any, ...]], None]:
    """Return a hook that forbids what building a model from a configuration does not need."""
    folders = {os.path.realpath(path) for path in (sys.prefix, sys.base_prefix, *sys.path) if path}
    allowed = (*(f"{folder}{os.sep}" for folder in folders if folder != os.sep), *SYSTEM_FOLDERS)
    forbidden = ("socket.", "subprocess.", "os.system", "os.exec", "os.posix_spawn", "os.fork")
    changes = ("os.remove", "os.rename", "os.rmdir", "os.truncate", "shutil.", "os.symlink")

    def forbid_event(event: str, arguments: tuple[Any, ...]) -> None:
        if event.startswith((*forbidden, *changes)):
            raise PermissionError(f"a model that is built must not use {event}")
        if event != "open" or not isinstance(arguments[0], str | bytes):
            return
        path, mode = os.path.realpath(os.fsdecode(arguments[0])), arguments[1]
        flags = arguments[2] if isinstance(arguments[2], int) else 0
        writes = bool(flags & (os.O_WRONLY | os.O_RDWR)) or bool(set(mode or "") & set("wax+"))
        if (writes and path != os.devnull) or not path.startswith(allowed):
            raise PermissionError(f"a model that is built must not open `{path}`")

    return forbid_event


@contextmanager
def limit_parts(limit: int) -> Iterator[None]:
    """Raise in the block if modules with more than *limit* parameters or modules are built.

    Raises:
        UnknownModelError: The limit is exceeded.
    """
    from torch.nn.modules import module

    counts: dict[str, int] = defaultdict(int)

    def make_hook(kind: str) -> Callable[[Any, str, Any], None]:
        def count_part(_parent: Any, _name: str, _part: Any) -> None:
            counts[kind] += 1
            if counts[kind] > limit:
                raise UnknownModelError(
                    f"config.json describes a model with more than {limit:,} {kind}, which the "
                    "checkpoint does not have"
                )

        return count_part

    with ExitStack() as stack:
        for kind, register in (
            ("parameters", module.register_module_parameter_registration_hook),
            ("buffers", module.register_module_buffer_registration_hook),
            ("modules", module.register_module_module_registration_hook),
        ):
            stack.callback(register(make_hook(kind)).remove)
        yield


def build_model(config: Json, class_name: str, limit: int) -> Any:
    """Build the class on the meta device, with at most *limit* parameters and modules."""
    import torch
    import transformers
    from transformers import initialization
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    parsed = CONFIG_MAPPING[config["model_type"]].from_dict(strip_config(config))
    model_class = getattr(transformers, class_name)
    with (
        limit_parts(limit),
        torch.device("meta"),
        initialization.no_init_weights(),
        initialization.meta_device_safe_creation_ops(),
    ):
        return model_class._from_config(parsed, attn_implementation="eager")


class Renamer:
    """Renaming of stored tensors to the names that a class has in memory, as on load.

    Attributes:
        model: Model on the meta device.
        model_tensors: Tensors of the model, by name in memory.
        converters: Rules that merge or split tensors, by pattern of stored names.
    """

    def __init__(self, model: Any, model_tensors: Mapping[str, Any]) -> None:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, WeightRenaming

        self.model, self.model_tensors = model, model_tensors
        rules = get_model_conversion_mapping(model)
        self._renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
        self._converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
        self.converters = {text: rule for rule in self._converters for text in rule.source_patterns}

    def rename(self, name: str) -> tuple[str, str | None]:
        """Return the name in memory, and the pattern of the rule that merges or splits, or None."""
        from transformers.core_model_loading import rename_source_key

        tail = (self.model.base_model_prefix, self.model_tensors)
        target, pattern = rename_source_key(name, self._renamings, self._converters, *tail)
        if target not in self.model_tensors and name in self.model_tensors:
            target, pattern = rename_source_key(name, [], [], *tail)
        return target, pattern

    def list_targets(self, name: str) -> list[str]:
        """List the names in memory of the tensors that the stored tensor *name* is a part of."""
        target, pattern = self.rename(name)
        if pattern is None:
            return [target]
        first, *others = self.converters[pattern].target_patterns
        return [target, *(target.replace(first, other) for other in others)]


class StoredTensors:
    """Stored tensors, grouped by the tensors in memory that they become.

    Attributes:
        renamed: Stored name of each tensor that is only renamed, by name in memory.
        merged: Stored names of tensors that rules merge or split, by first name in memory.
        unmapped: Stored names that no tensor in memory has.
        names: All names in memory that have stored tensors, even if some parts are missing.
        wrong: Found shapes that differ, by name in memory. An empty shape if the parts do not fit.
        uncompared: First names in memory of merged tensors with parts of unknown shapes.
    """

    def __init__(self, renamer: Renamer, tensors: Mapping[str, Shape]) -> None:
        from transformers.core_model_loading import dot_natural_key

        self.renamed: dict[str, str] = {}
        self.merged: dict[str, list[str]] = defaultdict(list)
        self.unmapped: list[str] = []
        self.names: set[str] = set()
        self.wrong: dict[str, list[int]] = {}
        self.uncompared: list[str] = []
        converters: dict[str, Any] = {}
        for name in sorted(tensors, key=dot_natural_key):
            target, pattern = renamer.rename(name)
            if target not in renamer.model_tensors:
                self.unmapped.append(name)
            elif pattern is None:
                self.renamed[target] = name
                shape = tensors[name]
                if shape is not None and tuple(shape) != tuple(renamer.model_tensors[target].shape):
                    self.wrong[target] = list(shape)
            else:
                self.merged[target].append(name)
                rule = converters.setdefault(target, deepcopy(renamer.converters[pattern]))
                rule.add_tensor(target, name, pattern, _make_meta_tensor(tensors[name]))
        self.names.update(self.renamed)
        for target, rule in converters.items():
            self._convert(renamer, target, rule, tensors)

    def _convert(
        self, renamer: Renamer, target: str, rule: Any, tensors: Mapping[str, Shape]
    ) -> None:
        """Apply *rule* to meta tensors, and compare the resulting shapes."""
        names = self.merged[target]
        first, *others = rule.target_patterns
        self.names.update([target, *(target.replace(first, other) for other in others)])
        if any(tensors[name] is None for name in names):
            self.uncompared.append(target)
            return
        try:
            made = rule.convert(target, model=renamer.model, config=renamer.model.config)
        except Exception:  # operations raise what torch raises if a part is missing
            self.wrong[target] = []
            return
        for name, value in made.items():
            value = value[0] if isinstance(value, list) else value
            if name in renamer.model_tensors and value.shape != renamer.model_tensors[name].shape:
                self.wrong[name] = list(value.shape)


def _make_meta_tensor(shape: Shape) -> Callable[[], Any]:
    import torch

    return lambda: torch.empty(tuple(shape or ()), device="meta")


def compare_with_class(
    config: Json, class_name: str, tensors: Mapping[str, Shape]
) -> dict[str, Json]:
    """Compare *tensors* with those that the class *class_name* requires.

    Returns:
        Missing and unexpected stored names, tensors with other shapes (name, found and expected
        shape), the number of tensors that the class has, and the number of missing names that are
        not listed.
    """
    model = build_model(config, class_name, MIN_PARTS + PARTS_PER_TENSOR * len(tensors))
    model_tensors = model.state_dict(keep_vars=True)
    stored = StoredTensors(Renamer(model, model_tensors), tensors)
    absent = list(find_missing_targets(model, model_tensors, stored.names))
    missing: dict[str, None] = {}
    shapes: list[tuple[str, list[int], list[int]]] = []
    if absent or stored.wrong or stored.uncompared:
        namer = StoredNames(model, model_tensors, stored, tensors)
        for target in absent:
            missing.update(dict.fromkeys(namer.find_missing(target)))
        for target in stored.uncompared:
            missing.update(dict.fromkeys(namer.find_missing_parts(target)))
        for target, stored_shape in stored.wrong.items():
            parts = () if target in stored.renamed else namer.find_missing_parts(target)
            missing.update(dict.fromkeys(parts))
            if not parts:
                shapes.append(
                    (namer.get_stored_name(target), stored_shape, list(model_tensors[target].shape))
                )
    names = list(missing)
    return {
        "missing": names[:MAX_LISTED],
        "more": len(names[MAX_LISTED:]),
        "unexpected": list(iterate_unexpected(model, stored.unmapped))[:MAX_LISTED],
        "unmapped": len(stored.unmapped),
        "shapes": shapes[:MAX_LISTED],
        "required": len(model_tensors),
    }


def find_missing_targets(
    model: Any, model_tensors: Mapping[str, Any], present: Collection[str]
) -> Iterator[str]:
    """Yield the names in memory that require a stored tensor and have none.

    If several names share a tensor, one of them is enough.
    """
    ignored = _compile(model._keys_to_ignore_on_load_missing)
    unsaved = set(model._keys_to_ignore_on_save or ())
    leader = group_shared_names(model, model_tensors)
    satisfied = {leader[name] for name in present if name in leader}
    for name in model_tensors:
        is_ignored = name in unsaved or (ignored is not None and ignored.search(name))
        if leader[name] == name and name not in satisfied and not is_ignored:
            yield name


def group_shared_names(model: Any, model_tensors: Mapping[str, Any]) -> dict[str, str]:
    """Map each name in memory to the first name of its tensor, which is the one that is saved."""
    tied = {
        k: v
        for k, v in model.all_tied_weights_keys.items()
        if k in model_tensors and v in model_tensors
    }
    owners: dict[int, str] = {}
    for name, tensor in model_tensors.items():
        if name not in tied:
            owners.setdefault(id(tensor), name)
    leader: dict[str, str] = {}
    for name in model_tensors:
        source, seen = name, set[str]()
        while source in tied and source not in seen:
            seen.add(source)
            source = tied[source]
        leader[name] = owners.get(id(model_tensors[source]), source)
    return leader


def iterate_unexpected(model: Any, names: Iterable[str]) -> Iterator[str]:
    """Yield *names* without those that the class ignores, such as buffers of older versions."""
    ignored = _compile(model._keys_to_ignore_on_load_unexpected)
    buffers = {name.rpartition(".")[2] for name, _ in model.named_buffers()}
    older = re.compile(r"rotary_emb\.inv_freq|(^|\.)(position_ids)$")
    for name in names:
        is_older = name.rpartition(".")[2] in buffers and older.search(name)
        if not is_older and not (ignored is not None and ignored.search(name)):
            yield name


def _compile(patterns: Collection[str] | None) -> re.Pattern[str] | None:
    return re.compile("|".join(f"({pattern})" for pattern in patterns)) if patterns else None


def list_stored_names(model: Any, model_tensors: Mapping[str, Any]) -> list[str]:
    """List the names that ``save_pretrained`` would give the tensors, or an empty list."""
    from transformers.core_model_loading import revert_weight_conversion

    leader = group_shared_names(model, model_tensors)
    unsaved = set(model._keys_to_ignore_on_save or ())
    saved = {
        name: tensor.detach()
        for name, tensor in model_tensors.items()
        if leader[name] == name and name not in unsaved
    }
    with suppress(Exception):  # not every rule can be reverted
        return list(revert_weight_conversion(model, saved))
    return []


class StoredNames:
    """Names that missing tensors would have in the checkpoint.

    A checkpoint may have names of an older or newer version than ``save_pretrained`` writes. The
    names of its other tensors show which.
    """

    def __init__(
        self,
        model: Any,
        model_tensors: Mapping[str, Any],
        stored: StoredTensors,
        tensors: Collection[str],
    ) -> None:
        self._renamer = renamer = Renamer(model, model_tensors)
        self._stored, self._tensors = stored, tensors
        self._expected: dict[str, list[str]] = defaultdict(list)
        for name in list_stored_names(model, model_tensors):
            for target in renamer.list_targets(name):
                self._expected[target].append(name)
        self._siblings: dict[str, tuple[str, str]] = {}
        self._prefixes: dict[tuple[str, str], None] = {}
        for target, name in stored.renamed.items():
            self._siblings.setdefault(NUMBERS.sub("#", target), (target, name))
            wanted = self._expected.get(target, [])
            if len(wanted) == 1 and wanted[0] != name:
                self._prefixes.setdefault(_strip_common_end(wanted[0], name))

    def get_stored_name(self, target: str) -> str:
        """Return the first stored name of the tensor *target* in memory."""
        merged = self._stored.merged.get(target)
        if merged:
            return merged[0]
        return self._stored.renamed.get(target) or next(iter(self._expected[target]), target)

    def find_missing(self, target: str) -> list[str]:
        """Return the stored names of the tensor *target* in memory, which has none."""
        sibling = self._siblings.get(NUMBERS.sub("#", target))
        if sibling is not None:
            name = _renumber(*sibling, target)
            if name is not None and self._renamer.list_targets(name) == [target]:
                return [name]
        return self.find_missing_parts(target) or [target]

    def find_missing_parts(self, target: str) -> list[str]:
        """Return the stored names that are merged into *target* and missing."""
        names = (self._adapt(name) for name in self._expected.get(target, ()))
        return [name for name in names if name not in self._tensors]

    def _adapt(self, name: str) -> str:
        """Return *name* with the prefix that other tensors of the checkpoint have instead."""
        if name in self._tensors:
            return name
        for expected_prefix, stored_prefix in self._prefixes:
            if name.startswith(expected_prefix):
                adapted = stored_prefix + name.removeprefix(expected_prefix)
                if self._renamer.rename(adapted)[0] == self._renamer.rename(name)[0]:
                    return adapted
        return name


def _strip_common_end(first: str, second: str) -> tuple[str, str]:
    """Remove the longest common end of two dotted names."""
    a, b = first.split("."), second.split(".")
    while a and b and a[-1] == b[-1]:
        a.pop()
        b.pop()
    return "".join(f"{part}." for part in a), "".join(f"{part}." for part in b)


def _renumber(target: str, name: str, other_target: str) -> str | None:
    """Return the stored name of *other_target*, as *name* is that of *target*."""
    numbers = NUMBERS.findall(target)
    if NUMBERS.findall(name) != numbers:
        return name if not numbers else None
    others = iter(NUMBERS.findall(other_target))
    return NUMBERS.sub(lambda _: next(others), name)


if __name__ == "__main__":
    main()
