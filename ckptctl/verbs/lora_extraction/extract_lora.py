"""Extraction of a LoRA adapter, which approximates weight changes by low-rank factors.

Both models are read tensor by tensor, under the names that PEFT uses. Only one weight of each model
and its decomposition are in memory at a time.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING

from ckptctl import families, formats
from ckptctl.adapters.expert_stacks import count_expert_layers
from ckptctl.adapters.low_rank import (
    Factors,
    StackedFactors,
    are_equal,
    compute_factors,
    iterate_bytes,
    subtract_weights,
)
from ckptctl.adapters.peft import (
    FLOAT_DTYPES,
    TARGET_PARAMETERS,
    WEIGHT,
    build_patterns,
    build_target_modules,
    is_unsupported_layer,
    needs_parameter_target,
)
from ckptctl.catalog import Catalog
from ckptctl.conversion.destinations import is_replaceable, require_destination
from ckptctl.conversion.recognition.model import ModelRequest, recognize_model, require_known_model
from ckptctl.conversion.sources import open_source
from ckptctl.errors import (
    MappingError,
    RefusedError,
    UsageError,
    format_option,
    quote_names,
    wrap_os_errors,
)
from ckptctl.formats.peft import CONFIG, WEIGHTS
from ckptctl.installed import require_torch
from ckptctl.notes import Notes
from ckptctl.numerics.quantized import (
    dequantize_hint_on_error,
    dequantize_if_quantized,
    find_quantized_tensors,
    require_same_quantization,
)
from ckptctl.planner.layouts import HF, Family
from ckptctl.planner.mapping.adapters import PEFT_PREFIX, STACKED, list_linear_keys
from ckptctl.storage.arithmetic import import_torch
from ckptctl.storage.compute_device import list_compute_devices
from ckptctl.storage.destinations import Replaceable
from ckptctl.storage.file_system import sync_directory
from ckptctl.storage.paths import parse_path
from ckptctl.storage.publish import stage_output
from ckptctl.storage.safetensors_header import encode_safetensors_header
from ckptctl.storage.threads import Advance
from ckptctl.tree import TreePath
from ckptctl.units import pluralize
from ckptctl.verbs.extraction.extract_options import OpenOptions
from ckptctl.verbs.extraction.lazy import LazyStateDict, TensorHandle
from ckptctl.verbs.lora_extraction.lora_options import LoraExtractionOptions
from ckptctl.verbs.lora_extraction.lora_result import ExtractedLayer, LoraExtraction

if TYPE_CHECKING:
    from ckptctl.storage.arithmetic import Tensor

NOT_LINEAR = "it is not a linear layer"
FRESH_LAYOUT = "hf-fresh"
NESTED_SUFFIX = ".base_layer"
GENERATIVE_SUFFIXES = ("ForCausalLM", "ForConditionalGeneration")


def extract_lora(
    base: str | TreePath,
    tuned: str | TreePath,
    output: str | TreePath,
    options: LoraExtractionOptions,
    progress: Advance | None = None,
) -> LoraExtraction:
    """Write the adapter that turns *base* into *tuned*, as closely as its rank allows.

    Raises:
        MappingError: The checkpoints are not two versions of one model.
        RefusedError: A tensor outside of linear layers differs, and `others` is ``refuse``.
    """
    return LoraExtractor(base, tuned, output, options).run(progress or (lambda _: None))


class LoraExtractor:
    """Extractor of a LoRA adapter from two open models with equal tensor names and shapes."""

    def __init__(
        self,
        base: str | TreePath,
        tuned: str | TreePath,
        output: str | TreePath,
        options: LoraExtractionOptions,
    ) -> None:
        require_torch("extracting an adapter")
        self.options = options
        self.device = next(iter(list_compute_devices(options.device)), None)
        with families.use_converter_file(options.converter):
            self._open_models(base, tuned, output)

    def _open_models(
        self, base: str | TreePath, tuned: str | TreePath, output: str | TreePath
    ) -> None:
        options = self.options
        sources = [formats.to_existing_path(base), formats.to_existing_path(tuned)]
        replaceable_adapter = Replaceable(is_replaceable)
        for source in sources:
            self.target = require_destination(
                source, parse_path(output), options.overwrite, replaceable_adapter
            )
        if self.target.is_upload:
            raise UsageError("cannot write an adapter to a URL", where=str(output))
        options.require_rank_or_energy()
        open_options = OpenOptions(model_type=options.model_type)
        base_catalog, tuned_catalog = (open_source(source, open_options) for source in sources)
        if options.dequantize is None:
            hint = f"pass {format_option('--dequantize bf16')} to dequantize it"
            require_same_quantization(base_catalog, tuned_catalog, hint)
        self.family, self.layout, self.tied, self.copies = _recognize_family(base_catalog, options)
        self.base, self.tuned = map(self._open_model, sources, (base_catalog, tuned_catalog))
        self.linear = frozenset(
            key
            for key in list_linear_keys(self.family, self.layout, self.base)
            if not is_unsupported_layer(self.family.name, get_module_name(key))
            and key not in self.copies
        )
        self.stacks = count_expert_layers(self.family, self.base)
        self.siblings = {
            key: [other for other in self.stacks if get_module_name(other) == get_module_name(key)]
            for key in self.stacks
        }
        self._require_same_model()

    def _open_model(self, path: TreePath, catalog: Catalog) -> LazyStateDict:
        is_quantized = bool(find_quantized_tensors(catalog))
        open_options = OpenOptions(
            model_type=self.options.model_type or self.family.name,
            layout=self.layout,
            dequantize=self.options.dequantize if is_quantized else None,
        )
        return LazyStateDict(path, open_options)

    def _require_same_model(self) -> None:
        """Raise if the two models differ in tensor names or shapes."""
        only_base, only_tuned = (
            self.base.keys() - self.tuned.keys(),
            self.tuned.keys() - self.base.keys(),
        )
        shape_differences = [
            (
                f"`{name}` has shape {list(self.base[name].shape)} in the base and "
                f"{list(self.tuned[name].shape)} in the other model"
            )
            for name in self.base.keys() & self.tuned.keys()
            if self.base[name].shape != self.tuned[name].shape
        ]
        problems = {
            "only in the base:": sorted(only_base),
            "only in the other model:": sorted(only_tuned),
        }
        why = [f"{label} {quote_names(names)}" for label, names in problems.items() if names]
        if why or shape_differences:
            raise MappingError(
                "the two checkpoints are not of the same model",
                where=f"{self.base.path} and {self.tuned.path}",
                why="; ".join([*why, *sorted(shape_differences)[:3]]),
            )

    @property
    def nbytes(self) -> int:
        """Total size of both models in bytes."""
        return sum(handle.nbytes for state in (self.base, self.tuned) for handle in state.values())

    @property
    def statement(self) -> str:
        """One-line summary of the recognized models."""
        formats_of = " and ".join(dict.fromkeys((self.base.format, self.tuned.format)))
        rank_text = (
            f"rank {self.options.rank}"
            if self.options.rank
            else (f"energy {self.options.energy:g}")
        )
        return (
            f"{formats_of} → peft · {self.family.name} · {pluralize(len(self.base), 'tensor')} · "
            f"{rank_text}"
        )

    def run(self, progress: Advance) -> LoraExtraction:
        """Compare all tensors, decompose the changes and write the adapter.

        *progress* receives the number of compared bytes.
        """
        start = time.monotonic()
        import_torch()
        self.progress = progress
        self.layers: list[ExtractedLayer] = []
        self.unchanged = 0
        self.saved: dict[str, None] = {}
        self.notes = Notes()
        self.notes.add(*self.base.notes, *self.tuned.notes)
        self.whole: tuple[str, ...] = ()
        dtype = self.options.dtype or "float32"
        names = [name for key in self.base for name in self._list_adapter_names(key)]
        with stage_output(
            Path(self.target.path),
            overwrite=self.options.overwrite,
            is_checkpoint=Replaceable(is_replaceable),
        ) as stage:
            folder = AdapterWriter(stage.data, names, dtype)
            try:
                low_rank = self.linear | self.stacks.keys()
                for name in [n for n in self.base if n not in low_rank | self.copies]:
                    self._handle_other(name, folder)
                self.whole = select_outermost_modules(map(get_module_name, self.saved))
                for name in self.base:
                    if is_inside(name, self.whole) and name not in self.saved:
                        self._save_in_full(name, folder)
                    elif name in self.linear:
                        self._extract_layer(name, folder, dtype)
                    elif name == self.siblings.get(name, [""])[0]:
                        self._extract_stacks(self.siblings[name], folder, dtype)
                self._require_factors()
                nbytes = folder.finish(self._build_config())
            finally:
                folder.close()
            stage.publish()
        self.notes.add(*stage.notes)
        return LoraExtraction(
            self.base.path,
            self.tuned.path,
            str(self.target.path),
            self.family.name,
            tuple(self.layers),
            self.unchanged,
            tuple(self.saved),
            self.notes.get_reasons("skipped"),
            nbytes,
            time.monotonic() - start,
            self.notes.get_texts(),
        )

    def _list_adapter_names(self, key: str) -> Iterator[str]:
        """Yield the names under which the adapter may store the factors or a copy of *key*."""
        if key in self.linear:
            yield from (f"{PEFT_PREFIX}{get_module_name(key)}.lora_{role}.weight" for role in "AB")
        if key in self.stacks:
            module_prefix = (
                PEFT_PREFIX
                + get_module_name(key)
                + NESTED_SUFFIX * self.siblings[key][::-1].index(key)
            )
            yield from (f"{module_prefix}.lora_{role}.weight" for role in "AB")
        if self.options.others == "save":
            yield PEFT_PREFIX + key

    def _read_if_different(self, name: str) -> tuple[Tensor, Tensor] | None:
        """Read a tensor of both models, or return None if it is equal or not selected.

        Equal tensors are counted. Different tensors that are not selected are noted as skipped.
        """
        first, second = self.base[name], self.tuned[name]
        base_tensor, tuned_tensor = first[...], second[...]
        self.progress(first.nbytes + second.nbytes)
        if are_equal(base_tensor, tuned_tensor):
            self.unchanged += 1
            return None
        if not self._is_selected(name):
            self.notes.explain("skipped", {name: _explain_not_selected()})
            return None
        return base_tensor, tuned_tensor

    def _extract_layer(self, name: str, folder: AdapterWriter, dtype: str) -> None:
        """Decompose the change of a linear layer's weight, and write the two factors."""
        tensors = self._read_if_different(name)
        if tensors is None:
            return
        _require_float_dtypes(name, self.base[name], self.tuned[name])
        change = subtract_weights(*tensors, self.device)
        del tensors  # The decomposition needs several times as much memory.
        layer_factors = compute_factors(
            name, change, rank=self.options.rank, energy=self.options.energy, dtype=dtype
        )
        self._add_factors(name, get_module_name(name), layer_factors, layer_factors.rank, folder)

    def _extract_stacks(self, names: Sequence[str], folder: AdapterWriter, dtype: str) -> None:
        """Write the factors of a module's stacked experts, in PEFT's nesting order."""
        module = get_module_name(names[0])
        for name in reversed(names):
            stack_factors = self._compute_stack_factors(name, dtype)
            if stack_factors is not None:
                rank = stack_factors.rank // self.base[name].shape[0]
                self._add_factors(name, module, stack_factors, rank, folder)
                module += NESTED_SUFFIX

    def _compute_stack_factors(self, name: str, dtype: str) -> Factors | None:
        """Compute the LoRA factors of a stacked expert weight, or return None if it has none."""
        first, second = self.base[name], self.tuned[name]
        _require_float_dtypes(name, first, second)
        stacking = StackedFactors(first.shape, self.stacks[name], dtype)
        is_selected, differs = self._is_selected(name), False
        for expert in range(first.shape[0]):
            base_tensor, tuned_tensor = first[expert], second[expert]
            self.progress((first.nbytes + second.nbytes) // first.shape[0])
            if are_equal(base_tensor, tuned_tensor):
                stacking.add_unchanged(base_tensor)
                continue
            differs = True
            if is_selected:
                change = subtract_weights(base_tensor, tuned_tensor, self.device)
                del base_tensor, tuned_tensor
                stacking.add_change(name, expert, change, self.options.rank, self.options.energy)
        if not differs:
            self.unchanged += 1
        elif not is_selected:
            self.notes.explain("skipped", {name: _explain_not_selected()})
        return stacking.joined_factors

    def _add_factors(
        self, name: str, module: str, layer_factors: Factors, rank: int, folder: AdapterWriter
    ) -> None:
        for role, factor in (("A", layer_factors.a), ("B", layer_factors.b)):
            kind = str(factor.dtype).removeprefix("torch.")
            folder.add_tensor(
                f"{PEFT_PREFIX}{module}.lora_{role}.weight",
                kind,
                tuple(factor.shape),
                iterate_bytes(factor),
            )
        shape = self.base[name].shape
        self.layers.append(
            ExtractedLayer(
                name, shape, rank, layer_factors.relative_error, layer_factors.relative_change
            )
        )

    def _handle_other(self, name: str, folder: AdapterWriter) -> None:
        """Store, skip or refuse a changed tensor that is not a linear weight, as `others` says."""
        tensors = self._read_if_different(name)
        if tensors is None:
            return
        mode = self.options.others
        if mode == "refuse":
            raise RefusedError(
                f"`{name}` differs, but {NOT_LINEAR}",
                where=self.tuned.path,
                why="low-rank factors can only change linear layers",
                hint=f"pass {format_option('--others save')} to store such tensors in full "
                f"(`modules_to_save`), or {format_option('--others leave-out')} to keep those of "
                "the base",
            )
        if mode == "leave-out":
            self.notes.explain("skipped", {name: NOT_LINEAR})
            return
        require_savable_module(name, self.base, self.linear, self.tied, self.tuned.path)
        self._write_tensor(name, self.tuned[name].dtype, tensors[1], folder)

    def _save_in_full(self, name: str, folder: AdapterWriter) -> None:
        """Write a complete tensor, for a module in ``modules_to_save``.

        The fine-tuned tensor is written if it is selected, otherwise the base tensor.
        """
        if name in self.linear or name in self.stacks:
            self._read_if_different(name)
        handle = (self.tuned if self._is_selected(name) else self.base)[name]
        self._write_tensor(name, handle.dtype, handle[...], folder)

    def _write_tensor(self, name: str, dtype: str, tensor: Tensor, folder: AdapterWriter) -> None:
        folder.add_tensor(PEFT_PREFIX + name, dtype, tuple(tensor.shape), iterate_bytes(tensor))
        self.saved[name] = None

    def _is_selected(self, name: str) -> bool:
        include, exclude = self.options.include, self.options.exclude
        is_included = not include or any(fnmatchcase(name, glob) for glob in include)
        return is_included and not any(fnmatchcase(name, glob) for glob in exclude)

    def _require_factors(self) -> None:
        """Raise if the adapter contains no factors, because no program loads such an adapter."""
        if not self.layers:
            saved = f", {len(self.saved):,} are not linear layers" if self.saved else ""
            message = "no linear layer differs, so the adapter would have no factors"
            raise RefusedError(
                message
                if self.saved
                else ("the models have no difference that an adapter can represent"),
                where=f"{self.base.path} and {self.tuned.path}",
                why=(
                    f"{pluralize(self.unchanged, 'tensor is', 'tensors are')} identical, "
                    f"{len(self.notes.get_reasons('skipped')):,} are skipped"
                )
                + saved,
            )

    def _build_config(self) -> Mapping[str, object]:
        ranks_by_name = {layer.name: layer.rank for layer in self.layers}
        ranks = {
            get_module_name(name): rank
            for name, rank in ranks_by_name.items()
            if name in self.linear
        }
        stacks = {name: rank for name, rank in ranks_by_name.items() if name in self.stacks}
        generates = self.family.architecture.endswith(GENERATIVE_SUFFIXES)
        return build_adapter_config(
            ranks, self.base, self.whole, stacks, experts=bool(self.stacks), generates=generates
        )


def _recognize_family(
    catalog: Catalog, options: LoraExtractionOptions
) -> tuple[Family, str, frozenset[str], frozenset[str]]:
    """Recognize the model in *catalog*, and find the layout whose names PEFT uses.

    PEFT uses the parameter names that transformers has in memory, where experts are stacked.

    Returns:
        The model type, the layout, the names of tensors that others are tied to, and the names of
        the tied tensors.
    """
    catalog = dequantize_if_quantized(catalog, options.dequantize)
    model = recognize_model(catalog, request=ModelRequest(options.model_type))
    with dequantize_hint_on_error(model):
        require_known_model(model)
    family = families.family(model.model_type or "")
    layout = STACKED if STACKED in family.layouts else HF
    fresh = family.get_layout(FRESH_LAYOUT).leaves.values() if model.layout == FRESH_LAYOUT else ()
    if fresh and layout == HF and not any(leaf.spread_axes for leaf in fresh):
        raise RefusedError(
            "PEFT would not find the layers of this model",
            where=catalog.path,
            why=f"in memory, its layers have names of layout {FRESH_LAYOUT}; adapters use "
            f"layout {HF}",
        )
    ties = family.ties if model.is_tied(family) else ()
    leaves = family.get_layout(layout).leaves
    tied = frozenset(leaves[tie.of].key.text for tie in ties if tie.of in leaves)
    copies = frozenset(leaves[tie.tensor].key.text for tie in ties if tie.tensor in leaves)
    return family, layout, tied, copies


def _require_float_dtypes(name: str, *handles: TensorHandle) -> None:
    unsupported_dtype = next(
        (handle.dtype for handle in handles if handle.dtype not in FLOAT_DTYPES), None
    )
    if unsupported_dtype:
        raise RefusedError(
            f"cannot extract from a weight of dtype {unsupported_dtype}",
            where=f"tensor `{name}`",
            hint=f"pass {format_option('--dequantize bf16')} to dequantize the models",
        )


def _explain_not_selected() -> str:
    return f"not selected ({format_option('--include')}, {format_option('--exclude')})"


# ------------------------------------------------------------ files of the adapter

HEADER_CHARS_PER_TENSOR = 48
"""Characters reserved in the safetensors header for the offsets and shape of one tensor."""
_NUMBERED = re.compile(r"\.\d+\.")


class AdapterWriter:
    """Writer of an adapter's ``adapter_model.safetensors`` and ``adapter_config.json``.

    The header precedes the weights in the file, so space for all possible names is reserved.
    """

    def __init__(self, folder: Path, names: Collection[str], dtype: str) -> None:
        self._path = folder / WEIGHTS
        self._folder = folder
        empty = [(name, dtype, (0, 0)) for name in names]
        head, _ = encode_safetensors_header(empty, {"format": "pt"})
        self._room = len(head) + HEADER_CHARS_PER_TENSOR * len(empty)
        self._room += -self._room % 8
        self._tensors: list[tuple[str, str, tuple[int, ...]]] = []
        self._end = self._room
        with wrap_os_errors("write", self._path):
            self._file = self._path.open("w+b")

    def add_tensor(
        self, name: str, dtype: str, shape: tuple[int, ...], content: Iterable[bytes]
    ) -> None:
        """Append a tensor with the bytes *content* to the weights file."""
        with wrap_os_errors("write", self._path):
            self._file.seek(self._end)
            for piece in content:
                self._file.write(piece)
                self._end += len(piece)
        self._tensors.append((name, dtype, shape))

    def finish(self, config: Mapping[str, object]) -> int:
        """Write the header and the adapter config, and return the total size in bytes."""
        head, _ = encode_safetensors_header(self._tensors, {"format": "pt"})
        text = head[8:].ljust(self._room - 8)
        with wrap_os_errors("write", self._path), self._file as file:
            file.seek(0)
            file.write(len(text).to_bytes(8, "little") + text)
            file.flush()
            os.fsync(file.fileno())
        content = (json.dumps(config, indent=2) + "\n").encode()
        path = self._folder / CONFIG
        with wrap_os_errors("write", path), path.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        sync_directory(self._folder)
        return self._end + len(content)

    def close(self) -> None:
        """Close the weights file."""
        self._file.close()


def build_adapter_config(
    ranks: Mapping[str, int],
    keys: Collection[str],
    saved_modules: Sequence[str],
    stacks: Mapping[str, int],
    *,
    experts: bool,
    generates: bool,
) -> dict[str, object]:
    """Build the adapter_config.json of an adapter whose factors are scaled by 1.

    Args:
        ranks: LoRA rank of each module, by module name.
        keys: Names of all tensors in the model.
        saved_modules: Modules that the adapter stores in full.
        stacks: LoRA rank of each parameter that contains stacked experts, by parameter name.
        experts: Whether the model has experts that transformers stacks in one tensor.
        generates: Whether the model generates text.
    """
    single = {module for module in ranks if experts and needs_parameter_target(module)}
    parameters = {**{module + WEIGHT: ranks[module] for module in single}, **stacks}
    modules = {module: rank for module, rank in ranks.items() if module not in single}
    all_ranks = {**modules, **parameters}
    default_rank = Counter(all_ranks.values()).most_common(1)[0][0] if all_ranks else 1
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM" if generates else None,
        "base_model_name_or_path": None,
        "r": default_rank,
        "lora_alpha": default_rank,
        **build_patterns(
            {name: (rank, rank) for name, rank in all_ranks.items()}, (default_rank, default_rank)
        ),
        "target_modules": build_target_modules(modules, keys),
        **({TARGET_PARAMETERS: sorted(parameters)} if parameters else {}),
        "modules_to_save": list(saved_modules) or None,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "lora_dropout": 0.0,
        "use_dora": False,
        "use_rslora": False,
    }


# ------------------------------------------------------- modules that PEFT saves in full
#
# PEFT requires every tensor of such a module in the adapter, including nested modules
# (``AuxiliaryTrainingWrapper.adapter_state_dict_load_map``).


def get_module_name(key: str) -> str:
    """Return the name of the module that contains the parameter *key*."""
    return key.rpartition(".")[0]


def select_outermost_modules(modules: Iterable[str]) -> tuple[str, ...]:
    """Return those of *modules* that are not submodules of another of them."""
    unique_modules = dict.fromkeys(modules)
    return tuple(module for module in unique_modules if not is_inside(module, unique_modules))


def is_inside(key: str, modules: Collection[str]) -> bool:
    """Return whether the tensor or module *key* is inside one of *modules*."""
    steps = key.split(".")
    return any(".".join(steps[:end]) in modules for end in range(1, len(steps)))


def require_savable_module(
    name: str, names: Iterable[str], linear: Collection[str], tied: Collection[str], where: str
) -> None:
    """Raise if PEFT cannot store the module of tensor *name* in full (``modules_to_save``)."""
    module = get_module_name(name)
    message = f"`{name}` differs, but PEFT can only save whole modules"
    hint = f"pass {format_option('--others leave-out')} to keep the tensor of the base"
    if name in tied:
        message = f"`{name}` differs, and other tensors are tied to it"
        why = "PEFT unties them when it saves one, and the others keep the values of the base"
        hint = f"convert both models with {format_option('--untie')} first, or {hint}"
    elif not module:
        why = "it belongs to the model itself, not to a module"
    elif f"{module}.weight" in linear:
        why = f"`{module}.weight` of the same module has factors"
    elif any(
        _NUMBERED.search(other_name.removeprefix(module))
        for other_name in names
        if is_inside(other_name, {module})
    ):
        why = f"`{module}` contains whole layers"
    else:
        return
    raise RefusedError(message, where=where, why=why, hint=hint)
