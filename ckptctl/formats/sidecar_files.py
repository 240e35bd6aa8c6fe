"""Find the sidecar files next to the weights, and decide which are copied with the model.

A file that matches no glob in :data:`GLOBS_BY_KIND` is listed but not copied, because it may
contain an API key or private notes.

Sources: the names in ``transformers/utils/__init__.py`` and the ``VOCAB_FILES_NAMES`` of its
tokenizers; ``get_relative_imports`` in its ``dynamic_module_utils.py`` for model
code; sentence-transformers' ``modules.json``.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

from ckptctl.catalog import MANIFEST, Catalog
from ckptctl.errors import CkptError, format_option, quote_names
from ckptctl.formats.shared.tags import LATEST, LATEST_UNIVERSAL
from ckptctl.planner.config_facts import get_model_params
from ckptctl.storage.files import source_files
from ckptctl.storage.json_reader import read_json, read_json_object
from ckptctl.storage.paths import leads_outside
from ckptctl.storage.schema import read_nested_or_none
from ckptctl.tree import TreePath

MAX_SIDECAR_BYTES = 100_000_000
CONFIG_FILES = ("config.json", "params.json")
ADAPTER_CONFIG = "adapter_config.json"
HF_CONFIG_FOLDER = "huggingface"
"""Subfolder in which verl stores the config and tokenizer of the model."""
QUANTIZATION_CONFIGS = (
    "hf_quant_config.json",
    "quant_config.json",
    "quantization_config.json",
    "quantize_config.json",
)
TRAINER_FILES = re.compile(
    r"(optimizer|scheduler|scaler|rng_state|random_states|training_args)(_\d+)*\.(pt|pth|bin|pkl)",
    re.ASCII,
)
"""File names that transformers' Trainer and accelerate write by ``torch.save`` next to a model."""
GLOBS_BY_KIND: Mapping[str, tuple[str, ...]] = {
    "configuration": (
        *("config.json", "configuration.json", *QUANTIZATION_CONFIGS, "recipe.yaml"),
        *("config_sentence_transformers.json", "sentence_*_config.json", "modules.json"),
    ),
    "generation": ("generation_config.json",),
    "tokenizer": (
        *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"),
        *("added_tokens.json", "tokenizer.model", "tokenizer.model.v*", "tekken.json"),
        *("*.tiktoken", "tiktoken.model", "vocab.json", "vocab.txt", "vocab.bpe", "merges.txt"),
        *("encoder.json", "bpe.codes", "dict.txt", "normalizer.json", "spiece.model"),
        *("spm.model", "spm_char.model", "sentencepiece.model", "sentencepiece.bpe.model"),
        *("source.spm", "target.spm", "target_vocab.json", "vocab-src.json", "vocab-tgt.json"),
        *("ice_text.model", "prophetnet.tokenizer", "byte_maps.json", "emoji.json"),
        *("entity_vocab.json", "word_pronunciation.json", "word_shape.json"),
    ),
    "processor": (
        *("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json"),
        "audio_tokenizer_config.json",
    ),
    "chat template": (
        *("chat_template.jinja", "chat_template.json", "additional_chat_templates/*.jinja"),
        *("SYSTEM_PROMPT.txt", "CHAT_SYSTEM_PROMPT.txt"),
    ),
    "model card": ("README.md", "MODEL_CARD.md", "model_card.md", "modelcard.json"),
    "license": tuple(
        f"{name}{end}"
        for name in (
            *("LICENSE", "LICENCE", "License", "license", "MODEL_LICENSE", "COPYING", "NOTICE"),
            *("LICENSE-CODE", "LICENSE-MODEL", "LICENSE_CODE", "LICENSE_MODEL", "Notice"),
            *("THIRD_PARTY_NOTICES", "USE_POLICY", "USAGE_POLICY", "ACCEPTABLE_USE_POLICY"),
        )
        for end in ("", ".txt", ".md", ".pdf")
    ),
}
"""Globs for file names in a model folder, by kind of file, such as ``license``."""
WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".th", ".ckpt")
"""File name suffixes of weight files in any format."""
_INDEX_SUFFIXES = (".safetensors.index.json", ".bin.index.json", ".distcp")
UNKNOWN_KIND, SUBFOLDER, NOT_MODEL_FOLDER = (
    "unknown kind of file",
    "folder",
    "not in a model folder",
)
OUTSIDE_LINK = "link that points outside the folder"
_HOUSEKEEPING_PREFIXES = (
    ".metadata",
    ".snapshot_metadata",
    ".ckptctl",
    ".git",
    ".nfs",
    ".cache",
    ".DS_",
)
"""Name prefixes of hidden files next to weights that are neither copied nor listed."""
RUN_FILE = "ckptctl.run.json"
"""File in which the checkpoint manager records metadata of a checkpoint."""
_WEIGHT_SPECIFIC_FILES = {
    *(MANIFEST, RUN_FILE, "SHA256SUMS", "checklist.chk", "params.json"),
    *(LATEST, LATEST_UNIVERSAL),
}
"""Files that are not copied because they are wrong for converted weights, such as checksums."""
_CODE_CONFIG_FILES = (
    *("config.json", "tokenizer_config.json", "processor_config.json", "preprocessor_config.json"),
    *("video_preprocessor_config.json", "modules.json"),
)
_RELATIVE_IMPORT = re.compile(
    r"^[^\S\n]*+(?:import\s++\.(\S++)[^\S\n]*+$|from\s++\.(\S++)\s++import)", re.MULTILINE
)
_MAX_CODE_BYTES = 1_000_000


@dataclass(frozen=True, slots=True)
class SidecarFiles:
    """Files in the folder of a checkpoint that do not contain weights.

    Attributes:
        assets: Sizes in bytes of the files that are copied with the model, by name.
        others: Reasons why files or folders are not copied, by name. Folder names end in a slash.
        documents: Parsed ``config.json`` and ``params.json``, by name.
    """

    assets: Mapping[str, int]
    others: Mapping[str, str]
    documents: Mapping[str, Mapping[str, object]]

    def start_catalog(self, root: TreePath, format: str) -> Catalog:
        """Return a catalog with these files and no tensors, to which readers add the tensors."""
        return Catalog(
            root=root,
            path=root,
            format=format,
            files={},
            tensors={},
            assets=self.assets,
            others=self.others,
            documents=self.documents,
        )


def scan_sidecar_files(
    root: TreePath,
    weight_files: Collection[str] | None = None,
    *,
    is_single_file: bool = False,
    read_configs: bool = True,
) -> SidecarFiles:
    """List the sidecar files in *root*, and decide which are copied with the model.

    Args:
        root: Folder of the checkpoint.
        weight_files: Names of weight files, index files and folders of weights, or None to
            recognize them by suffix.
        is_single_file: Whether the user named a weight file instead of the folder. If the folder
            then has no ``config.json`` or similar file, no file in it is copied.
        read_configs: Whether to read ``config.json`` and ``params.json``.

    Raises:
        UnsupportedError: ``config.json`` or ``params.json`` is not a JSON object.
    """
    items = {item.name: item for item in sorted(root.iterdir())}
    if weight_files is None:
        weight_files = [
            name for name in items if name.endswith((*WEIGHT_SUFFIXES, *_INDEX_SUFFIXES))
        ]
    for name in weight_files:
        items.pop(name.partition("/")[0], None)
    is_not_model_folder = is_single_file and not any(
        (root / name).is_file() for name in (*CONFIG_FILES, ADAPTER_CONFIG)
    )
    module_configs, code_files = set[str](), set[str]()
    if "modules.json" in items and not is_not_model_folder:
        module_configs = code_files = _list_module_configs(root, items)
    if any(name.endswith(".py") for name in items) and not is_not_model_folder:
        code_files = module_configs | _list_code_files(root, items)
    assets: dict[str, int] = {}
    others: dict[str, str] = {}
    for name, item in _iterate_visible_files(
        items, {name.partition("/")[0] for name in module_configs}
    ):
        size = item.stat().st_size if item.is_file() else 0
        why = (
            NOT_MODEL_FOLDER
            if is_not_model_folder
            else _find_skip_reason(root, name, size, code_files)
        )
        if why is None:
            assets[name] = size
        else:
            others[name] = why
    return SidecarFiles(assets, others, read_config_files(root) if read_configs else {})


def scan_root_and_subfolder(
    root: TreePath, folder: str, weight_files: Collection[str] = ()
) -> SidecarFiles:
    """List the sidecar files in *root* and in its subfolder *folder*, which has the same model."""
    outer = scan_sidecar_files(root, {*weight_files, folder})
    if not (root / folder).is_dir():
        return outer
    inner = scan_sidecar_files(root / folder)
    return SidecarFiles(
        {**outer.assets, **{f"{folder}/{name}": size for name, size in inner.assets.items()}},
        {**outer.others, **{f"{folder}/{name}": why for name, why in inner.others.items()}},
        {**inner.documents, **outer.documents},
    )


def list_trainer_files(folder: TreePath) -> list[TreePath]:
    """List the files in *folder* with training state that a trainer saved apart from the model."""
    return [
        item
        for item in sorted(folder.iterdir())
        if TRAINER_FILES.fullmatch(item.name) and item.is_file()
    ]


def find_file_kind(name: str) -> str | None:
    """Return the kind of a file, such as ``license``, or None if no glob matches.

    *name* is the path of the file relative to the model folder.
    """
    for kind, globs in GLOBS_BY_KIND.items():
        if name in globs or any(fnmatchcase(name, glob) for glob in globs if "*" in glob):
            return kind
    return None


def may_be_sidecar_file(name: str) -> bool:
    """Return whether the file *name* is neither hidden, nor weights, nor specific to weights.

    *name* is the path of the file relative to the model folder.
    """
    return not (
        any(part.startswith(".") for part in name.split("/"))
        or name.endswith((*WEIGHT_SUFFIXES, *_INDEX_SUFFIXES))
        or name in _WEIGHT_SPECIFIC_FILES - {*CONFIG_FILES}
    )


def select_skipped_files(others: Mapping[str, str]) -> dict[str, str]:
    """Return *others* without folders next to a single weight file.

    Those do not belong to the model.
    """
    return {
        name: why
        for name, why in others.items()
        if why != NOT_MODEL_FOLDER or not name.endswith("/")
    }


def list_skipped_file_notes(others: Mapping[str, str]) -> Iterator[str]:
    """Yield one note for each reason in *others*, with the files that are not copied for it."""
    skipped = select_skipped_files(others)
    for why in dict.fromkeys(skipped.values()):
        names = [name for name, reason in skipped.items() if reason == why]
        more = "" if why == OUTSIDE_LINK else f"; pass {format_option('--carry GLOB')} to copy them"
        yield f"not copied ({why}): {quote_names(names)}{more}"


def replace_model_param(
    params: Mapping[str, object], name: str, value: object
) -> dict[str, object]:
    """Return a copy of *params*, a ``params.json``, with the model parameter *name* replaced."""
    model_params = get_model_params(params)
    changed = {**model_params, name: value}
    return changed if model_params is params else {**params, "model": changed}


def read_config_files(root: TreePath) -> dict[str, Mapping[str, object]]:
    """Parse ``config.json`` and ``params.json`` in *root*, and return them by name.

    A file that does not exist is omitted. ``Infinity`` and ``NaN`` are accepted, because the
    ``time_step_limit`` of Mamba-2 has them.
    """
    parsed: dict[str, Mapping[str, object]] = {}
    with source_files(root) as files:
        for name in CONFIG_FILES:
            if (root / name).is_file():
                parsed[name] = read_json_object(files, name)
    return parsed


def _find_skip_reason(
    root: TreePath, name: str, size: int, code_files: Collection[str]
) -> str | None:
    """Return the reason why the file *name* in *root* is not copied, or None if it is copied."""
    if name.endswith("/"):
        return SUBFOLDER
    if leads_outside(root / name, root):
        return OUTSIDE_LINK
    if not (root / name).is_file() or not (find_file_kind(name) or name in code_files):
        return UNKNOWN_KIND
    return f"larger than {MAX_SIDECAR_BYTES // 1_000_000} MB" if size > MAX_SIDECAR_BYTES else None


def _iterate_visible_files(
    items: Mapping[str, TreePath], modules: Collection[str]
) -> Iterator[tuple[str, TreePath]]:
    """Yield the name and path of each file that is not hidden or specific to the weights.

    For known subfolders, the files in them are yielded. Other folders are yielded with a slash
    after the name.
    """
    known_subfolders = {
        *modules,
        *(glob.partition("/")[0] for globs in GLOBS_BY_KIND.values() for glob in globs),
    }
    for name, item in items.items():
        if name in _WEIGHT_SPECIFIC_FILES or name.startswith(_HOUSEKEEPING_PREFIXES):
            continue
        if not item.is_dir():
            yield name, item
        elif name in known_subfolders:
            for inner in sorted(item.iterdir()):
                yield f"{name}/{inner.name}{'/' * inner.is_dir()}", inner
        else:
            yield f"{name}/", item


def _list_module_configs(root: TreePath, items: Collection[str]) -> set[str]:
    """Return the ``config.json`` path in each subfolder that ``modules.json`` lists."""
    modules = read_nested_or_none(list[object], _read_json_or_none(root, "modules.json")) or []
    paths = {
        path for module in modules if (path := read_nested_or_none(str, module, "path")) in items
    }
    return {f"{path}/config.json" for path in paths}


def _list_code_files(root: TreePath, items: Collection[str]) -> set[str]:
    """Return the Python files that config files refer to, and the files that these import.

    No code is executed. As in transformers, only relative imports from the same folder count.
    """
    existing = {name for name in items if name.endswith(".py")}
    code_files: set[str] = set()
    pending = {
        name
        for file in _CODE_CONFIG_FILES
        if file in items
        for name in _list_class_files(_read_json_or_none(root, file))
    }
    with source_files(root) as files:
        while pending := (pending & existing) - code_files:
            code_files |= pending
            sizes = {name: files.size(name) for name in pending}
            texts = [files.read(n, 0, size) for n, size in sizes.items() if size <= _MAX_CODE_BYTES]
            pending = {
                f"{match[1] or match[2]}.py" for text in texts for match in _find_imports(text)
            }
    return code_files


def _find_imports(code: bytes) -> Iterator[re.Match[str]]:
    return _RELATIVE_IMPORT.finditer(code.decode(errors="replace"))


def _list_class_files(content: object) -> Iterator[str]:
    """Yield the name of each Python file that a config refers to as ``module.Class``."""
    if isinstance(content, list):
        values: list[object] = [
            record.get("type") for record in content if isinstance(record, dict)
        ]
    elif isinstance(content, dict):
        automatic, pipelines = content.get("auto_map"), content.get("custom_pipelines")
        values = list(automatic.values()) if isinstance(automatic, dict) else [automatic]
        if isinstance(pipelines, dict):
            values += [
                record.get("impl") for record in pipelines.values() if isinstance(record, dict)
            ]
    else:
        return
    for value in values:
        for name in value if isinstance(value, list) else [value]:
            if isinstance(name, str) and "--" not in name:
                yield f"{name.partition('.')[0]}.py"


def _read_json_or_none(root: TreePath, name: str) -> object:
    """Parse the JSON file *name* in *root*, or return None if it cannot be read or parsed."""
    with source_files(root) as files:
        try:
            return read_json(files, name, allow_nan=True)
        except CkptError:
            return None
