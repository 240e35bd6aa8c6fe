"""Extraction of a LoRA adapter: the low-rank part of the change of each linear layer.

Both models are read tensor by tensor, under the names that PEFT uses. At any time, one weight of
each is in memory, with its decomposition.
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
from ckptctl.adapters.expert_stacks import STACKED, count_expert_layers
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
from ckptctl.conversion.destinations import is_replaceable, require_destination
from ckptctl.conversion.recognition.model import ModelRequest, recognize_model, require_known_model
from ckptctl.conversion.sources import open_source
from ckptctl.errors import (
    MappingError,
    RefusedError,
    UsageError,
    quote_names,
    spell_option,
    wrap_os_errors,
)
from ckptctl.formats.peft import CONFIG, WEIGHTS
from ckptctl.installed import require_torch
from ckptctl.notes import Notes
from ckptctl.numerics.quantized import find_quantized
from ckptctl.planner.layouts import HF, Family
from ckptctl.planner.mapping.adapters import PEFT_PREFIX, list_linear_keys
from ckptctl.storage.arithmetic import import_torch
from ckptctl.storage.destinations import Replaceable
from ckptctl.storage.file_system import sync_directory
from ckptctl.storage.paths import parse_path
from ckptctl.storage.publish import stage_output
from ckptctl.storage.safetensors_header import encode_header
from ckptctl.storage.threads import Advance
from ckptctl.tree import TreePath
from ckptctl.units import pluralize
from ckptctl.verbs.extraction.extract_options import OpenOptions
from ckptctl.verbs.extraction.lazy import LazyStateDict, TensorHandle
from ckptctl.verbs.lora_extraction.lora_options import LoraExtractionOptions
from ckptctl.verbs.lora_extraction.lora_result import ExtractedLayer, LoraExtraction

if TYPE_CHECKING:
    from ckptctl.storage.arithmetic import Tensor

ALREADY = "it is not a linear layer"
FRESH = "hf-fresh"
NESTED = ".base_layer"
GENERATING = ("ForCausalLM", "ForConditionalGeneration")


def extract_lora(
    base: str | TreePath,
    tuned: str | TreePath,
    output: str | TreePath,
    options: LoraExtractionOptions,
    progress: Advance | None = None,
) -> LoraExtraction:
    """Write the adapter that turns *base* into *tuned*, as closely as its rank allows.

    Raises:
        MappingError: They are not two versions of one model.
        RefusedError: A tensor outside of linear layers differs, and `others` is ``refuse``.
    """
    return Extraction(base, tuned, output, options).run(progress or (lambda _: None))


class Extraction:
    """One call of :func:`extract_lora` with both models open and compatible."""

    def __init__(
        self,
        base: str | TreePath,
        tuned: str | TreePath,
        output: str | TreePath,
        options: LoraExtractionOptions,
    ) -> None:
        require_torch("extracting an adapter")
        self.options = options
        with families.use_converter_file(options.converter):
            self._open(base, tuned, output)

    def _open(self, base: str | TreePath, tuned: str | TreePath, output: str | TreePath) -> None:
        options = self.options
        sources = [formats.to_existing_path(base), formats.to_existing_path(tuned)]
        may_go = Replaceable(is_replaceable)
        for source in sources:
            self.target = require_destination(source, parse_path(output), options.overwrite, may_go)
        if self.target.upload:
            raise UsageError("cannot write an adapter to a URL", where=str(output))
        options.require_measure()
        self.family, self.layout, self.tied, self.copies = _family(sources[0], options)
        self.base, self.tuned = (self._opened(source) for source in sources)
        self.linear = frozenset(
            key
            for key in list_linear_keys(self.family, self.layout, self.base)
            if not is_unsupported_layer(self.family.name, module_of(key)) and key not in self.copies
        )
        self.stacks = count_expert_layers(self.family, self.base)
        self.siblings = {
            key: [other for other in self.stacks if module_of(other) == module_of(key)]
            for key in self.stacks
        }
        self._require_alike()

    def _opened(self, path: TreePath) -> LazyStateDict:
        is_quantized = bool(find_quantized(open_source(path, OpenOptions())))
        asked = OpenOptions(
            model_type=self.options.model_type or self.family.name,
            layout=self.layout,
            dequantize=self.options.dequantize if is_quantized else None,
        )
        return LazyStateDict(path, asked)

    def _require_alike(self) -> None:
        """Raise if the models have different tensors or shapes."""
        one, other = self.base.keys() - self.tuned.keys(), self.tuned.keys() - self.base.keys()
        differ = [
            (
                f"`{name}` has shape {list(self.base[name].shape)} in the base and "
                f"{list(self.tuned[name].shape)} in the other model"
            )
            for name in self.base.keys() & self.tuned.keys()
            if self.base[name].shape != self.tuned[name].shape
        ]
        problems = {"only in the base:": sorted(one), "only in the other model:": sorted(other)}
        why = [f"{said} {quote_names(names)}" for said, names in problems.items() if names]
        if why or differ:
            raise MappingError(
                "the two checkpoints are not of the same model",
                where=f"{self.base.path} and {self.tuned.path}",
                why="; ".join([*why, *sorted(differ)[:3]]),
            )

    @property
    def nbytes(self) -> int:
        """Bytes of both models."""
        return sum(one.nbytes for state in (self.base, self.tuned) for one in state.values())

    @property
    def statement(self) -> str:
        """Summary of the recognized models in one line."""
        formats_of = " and ".join(dict.fromkeys((self.base.format, self.tuned.format)))
        kept = (
            f"rank {self.options.rank}"
            if self.options.rank
            else (f"energy {self.options.energy:g}")
        )
        return (
            f"{formats_of} → peft · {self.family.name} · {pluralize(len(self.base), 'tensor')} · "
            f"{kept}"
        )

    def run(self, progress: Advance) -> LoraExtraction:
        """Compare, decompose and write, and report the number of compared bytes to *progress*."""
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
        names = [name for key in self.base for name in self._names(key)]
        with stage_output(
            Path(self.target.path),
            overwrite=self.options.overwrite,
            is_checkpoint=Replaceable(is_replaceable),
        ) as stage:
            folder = AdapterFolder(stage.data, names, dtype)
            try:
                low_rank = self.linear | self.stacks.keys()
                for name in [n for n in self.base if n not in low_rank | self.copies]:
                    self._other(name, folder)
                self.whole = outermost(map(module_of, self.saved))
                for name in self.base:
                    if is_inside(name, self.whole) and name not in self.saved:
                        self._save(name, folder)
                    elif name in self.linear:
                        self._take(name, folder, dtype)
                    elif name == self.siblings.get(name, [""])[0]:
                        self._take_stacks(self.siblings[name], folder, dtype)
                self._require_something()
                nbytes = folder.finish(self._config())
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

    def _names(self, key: str) -> Iterator[str]:
        """Yield the names that the adapter may store for a tensor of the model."""
        if key in self.linear:
            yield from (f"{PEFT_PREFIX}{module_of(key)}.lora_{role}.weight" for role in "AB")
        if key in self.stacks:
            inside = PEFT_PREFIX + module_of(key) + NESTED * self.siblings[key][::-1].index(key)
            yield from (f"{inside}.lora_{role}.weight" for role in "AB")
        if self.options.others == "save":
            yield PEFT_PREFIX + key

    def _differing(self, name: str) -> tuple[Tensor, Tensor] | None:
        """Return a tensor of both models, or None if it is equal or not selected."""
        first, second = self.base[name], self.tuned[name]
        one, other = first[...], second[...]
        self.progress(first.nbytes + second.nbytes)
        if are_equal(one, other):
            self.unchanged += 1
            return None
        if not self._chosen(name):
            self.notes.explain("skipped", {name: _not_selected()})
            return None
        return one, other

    def _take(self, name: str, folder: AdapterFolder, dtype: str) -> None:
        """Write the factors of a linear layer that differs."""
        found = self._differing(name)
        if found is None:
            return
        _require_floating(name, self.base[name], self.tuned[name])
        change = subtract_weights(*found)
        del found  # The decomposition needs several times as much memory.
        made = compute_factors(
            name, change, rank=self.options.rank, energy=self.options.energy, dtype=dtype
        )
        self._add(name, module_of(name), made, made.rank, folder)

    def _take_stacks(self, names: Sequence[str], folder: AdapterFolder, dtype: str) -> None:
        """Write the factors of a module's stacks in PEFT's order, the innermost wrapper first."""
        module = module_of(names[0])
        for name in reversed(names):
            made = self._of_stack(name, dtype)
            if made is not None:
                rank = made.rank // self.base[name].shape[0]
                self._add(name, module, made, rank, folder)
                module += NESTED

    def _of_stack(self, name: str, dtype: str) -> Factors | None:
        """Compute the factors of a stack expert by expert, or return None if it has none."""
        first, second = self.base[name], self.tuned[name]
        _require_floating(name, first, second)
        made = StackedFactors(first.shape, self.stacks[name], dtype)
        chosen, differs = self._chosen(name), False
        for expert in range(first.shape[0]):
            one, other = first[expert], second[expert]
            self.progress((first.nbytes + second.nbytes) // first.shape[0])
            if are_equal(one, other):
                made.add_unchanged(one)
                continue
            differs = True
            if chosen:
                change = subtract_weights(one, other)
                del one, other
                made.add_change(name, expert, change, self.options.rank, self.options.energy)
        if not differs:
            self.unchanged += 1
        elif not chosen:
            self.notes.explain("skipped", {name: _not_selected()})
        return made.join_factors

    def _add(self, name: str, module: str, made: Factors, rank: int, folder: AdapterFolder) -> None:
        for role, factor in (("A", made.a), ("B", made.b)):
            kind = str(factor.dtype).removeprefix("torch.")
            folder.add(
                f"{PEFT_PREFIX}{module}.lora_{role}.weight",
                kind,
                tuple(factor.shape),
                iterate_bytes(factor),
            )
        shape = self.base[name].shape
        self.layers.append(ExtractedLayer(name, shape, rank, made.error, made.change))

    def _other(self, name: str, folder: AdapterFolder) -> None:
        """Handle a tensor outside of linear layers that differs, as `others` requires."""
        found = self._differing(name)
        if found is None:
            return
        how = self.options.others
        if how == "refuse":
            raise RefusedError(
                f"`{name}` differs, but {ALREADY}",
                where=self.tuned.path,
                why="low-rank factors can only change linear layers",
                hint=f"pass {spell_option('--others save')} to store such tensors in full "
                f"(`modules_to_save`), or {spell_option('--others leave-out')} to keep those of "
                "the base",
            )
        if how == "leave-out":
            self.notes.explain("skipped", {name: ALREADY})
            return
        require_module(name, self.base, self.linear, self.tied, self.tuned.path)
        self._write(name, self.tuned[name].dtype, found[1], folder)

    def _save(self, name: str, folder: AdapterFolder) -> None:
        """Write a tensor of a module that is saved as a whole."""
        if name in self.linear or name in self.stacks:
            self._differing(name)
        one = (self.tuned if self._chosen(name) else self.base)[name]
        self._write(name, one.dtype, one[...], folder)

    def _write(self, name: str, dtype: str, tensor: Tensor, folder: AdapterFolder) -> None:
        folder.add(PEFT_PREFIX + name, dtype, tuple(tensor.shape), iterate_bytes(tensor))
        self.saved[name] = None

    def _chosen(self, name: str) -> bool:
        include, exclude = self.options.include, self.options.exclude
        wanted = not include or any(fnmatchcase(name, glob) for glob in include)
        return wanted and not any(fnmatchcase(name, glob) for glob in exclude)

    def _require_something(self) -> None:
        """Raise if the adapter has no factors, because nothing would accept it."""
        if not self.layers:
            saved = f", {len(self.saved):,} are not linear layers" if self.saved else ""
            alone = "no linear layer differs, so the adapter would have no factors"
            raise RefusedError(
                alone
                if self.saved
                else ("the models have no difference that an adapter can represent"),
                where=f"{self.base.path} and {self.tuned.path}",
                why=(
                    f"{pluralize(self.unchanged, 'tensor is', 'tensors are')} identical, "
                    f"{len(self.notes.get_reasons('skipped')):,} are skipped"
                )
                + saved,
            )

    def _config(self) -> Mapping[str, object]:
        found = {layer.name: layer.rank for layer in self.layers}
        ranks = {module_of(name): rank for name, rank in found.items() if name in self.linear}
        stacks = {name: rank for name, rank in found.items() if name in self.stacks}
        generates = self.family.architecture.endswith(GENERATING)
        return adapter_config(
            ranks, self.base, self.whole, stacks, experts=bool(self.stacks), generates=generates
        )


def _family(
    path: TreePath, options: LoraExtractionOptions
) -> tuple[Family, str, frozenset[str], frozenset[str]]:
    """Return the model type, PEFT's layout, tensors that others are tied to, and the tied ones.

    PEFT uses the names that transformers has in memory, where experts are stacked.
    """
    catalog = open_source(path, OpenOptions(model_type=options.model_type))
    known = recognize_model(catalog, request=ModelRequest(options.model_type))
    require_known_model(known)
    family = families.family(known.model_type or "")
    layout = STACKED if STACKED in family.layouts else HF
    fresh = family.get_layout(FRESH).leaves.values() if known.layout == FRESH else ()
    if fresh and layout == HF and not any(leaf.spread_axes for leaf in fresh):
        raise RefusedError(
            "PEFT would not find the layers of this model",
            where=catalog.path,
            why=f"in memory, its layers have names of layout {FRESH}; adapters use layout {HF}",
        )
    ties = family.ties if known.is_tied(family) else ()
    leaves = family.get_layout(layout).leaves
    tied = frozenset(leaves[tie.of].key.text for tie in ties if tie.of in leaves)
    copies = frozenset(leaves[tie.tensor].key.text for tie in ties if tie.tensor in leaves)
    return family, layout, tied, copies


def _require_floating(name: str, *handles: TensorHandle) -> None:
    odd = next((one.dtype for one in handles if one.dtype not in FLOAT_DTYPES), None)
    if odd:
        raise RefusedError(
            f"cannot extract from a weight of dtype {odd}",
            where=f"tensor `{name}`",
            hint=f"pass {spell_option('--dequantize bf16')} to dequantize the models",
        )


def _not_selected() -> str:
    return f"not selected ({spell_option('--include')}, {spell_option('--exclude')})"


# ------------------------------------------------------------ files of the adapter

DIGITS = 48
"""Additional characters for the offsets and shape of one tensor in the header."""
_NUMBERED = re.compile(r"\.\d+\.")


class AdapterFolder:
    """Files of an adapter that is being written.

    The header of the weights comes first, so room for all possible names is reserved.
    """

    def __init__(self, folder: Path, names: Collection[str], dtype: str) -> None:
        self._path = folder / WEIGHTS
        self._folder = folder
        empty = [(name, dtype, (0, 0)) for name in names]
        head, _ = encode_header(empty, {"format": "pt"})
        self._room = len(head) + DIGITS * len(empty)
        self._room += -self._room % 8
        self._tensors: list[tuple[str, str, tuple[int, ...]]] = []
        self._end = self._room
        with wrap_os_errors("write", self._path):
            self._file = self._path.open("w+b")

    def add(self, name: str, dtype: str, shape: tuple[int, ...], content: Iterable[bytes]) -> None:
        """Append a tensor."""
        with wrap_os_errors("write", self._path):
            self._file.seek(self._end)
            for piece in content:
                self._file.write(piece)
                self._end += len(piece)
        self._tensors.append((name, dtype, shape))

    def finish(self, config: Mapping[str, object]) -> int:
        """Write the header and the configuration, and return the total bytes."""
        head, _ = encode_header(self._tensors, {"format": "pt"})
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
        """Close the file."""
        self._file.close()


def adapter_config(
    ranks: Mapping[str, int],
    keys: Collection[str],
    saved: Sequence[str],
    stacks: Mapping[str, int],
    *,
    experts: bool,
    generates: bool,
) -> dict[str, object]:
    """Build the adapter_config.json of an adapter whose factors are scaled by 1.

    Args:
        ranks: Ranks by module.
        keys: Names of all tensors of the model.
        saved: Modules that the adapter stores in full.
        stacks: Ranks of parameters that contain stacked experts.
        experts: Whether the model has stacked experts.
        generates: Whether the model generates text.
    """
    single = {module for module in ranks if experts and needs_parameter_target(module)}
    parameters = {**{module + WEIGHT: ranks[module] for module in single}, **stacks}
    modules = {module: rank for module, rank in ranks.items() if module not in single}
    of_all = {**modules, **parameters}
    main = Counter(of_all.values()).most_common(1)[0][0] if of_all else 1
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM" if generates else None,
        "base_model_name_or_path": None,
        "r": main,
        "lora_alpha": main,
        **build_patterns({name: (rank, rank) for name, rank in of_all.items()}, (main, main)),
        "target_modules": build_target_modules(modules, keys),
        **({TARGET_PARAMETERS: sorted(parameters)} if parameters else {}),
        "modules_to_save": list(saved) or None,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "lora_dropout": 0.0,
        "use_dora": False,
        "use_rslora": False,
    }


# ------------------------------------------------------- modules that PEFT saves as a whole
#
# PEFT requires every tensor of such a module in the adapter, including nested modules
# (``AuxiliaryTrainingWrapper.adapter_state_dict_load_map``).


def module_of(key: str) -> str:
    """Return the module of a parameter."""
    return key.rpartition(".")[0]


def outermost(modules: Iterable[str]) -> tuple[str, ...]:
    """Return those of *modules* that are not inside another."""
    found = dict.fromkeys(modules)
    return tuple(one for one in found if not is_inside(one, found))


def is_inside(key: str, modules: Collection[str]) -> bool:
    """Return whether a tensor or module is inside one of *modules*."""
    steps = key.split(".")
    return any(".".join(steps[:end]) in modules for end in range(1, len(steps)))


def require_module(
    name: str, names: Iterable[str], linear: Collection[str], tied: Collection[str], where: str
) -> None:
    """Raise if PEFT cannot save the tensor, because no module can be saved as a whole."""
    module = module_of(name)
    what = f"`{name}` differs, but PEFT can only save whole modules"
    hint = f"pass {spell_option('--others leave-out')} to keep the tensor of the base"
    if name in tied:
        what = f"`{name}` differs, and other tensors are tied to it"
        why = "PEFT unties them when it saves one, and the others keep the values of the base"
        hint = f"convert both models with {spell_option('--untie')} first, or {hint}"
    elif not module:
        why = "it belongs to the model itself, not to a module"
    elif f"{module}.weight" in linear:
        why = f"`{module}.weight` of the same module has factors"
    elif any(
        _NUMBERED.search(one.removeprefix(module)) for one in names if is_inside(one, {module})
    ):
        why = f"`{module}` contains whole layers"
    else:
        return
    raise RefusedError(what, where=where, why=why, hint=hint)
