"""What is said, and refused, where it is not known which model a checkpoint holds."""

from __future__ import annotations

from ckptctl import families
from ckptctl.errors import (
    ALTERNATIVES,
    HomelessError,
    MappingError,
    either,
    listed,
    nearest,
    possible,
)
from ckptctl.ops.recognition.recognise import Recognition

SHOWN_CANDIDATES = 12


def require_one_model(found: Recognition, where: str) -> None:
    """Refuse a checkpoint of several models of one kind, as a student's beside its teacher's.

    Raises:
        MappingError: Two parts of it are whole models of the same family.
    """
    families_of = [set(names) for _, names in found.inside]
    if any(a & b for n, a in enumerate(families_of) for b in families_of[:n]):
        first = found.inside[0][0].rstrip(".")
        raise MappingError(
            f"the checkpoint holds {len(found.inside)} models",
            where=where,
            why=lying(found),
            hint=f"`--root {first}` takes the first; `--root .` takes all under their names",
        )


def lying(found: Recognition) -> str:
    """Say where in a checkpoint, of which nothing is known at the top, models lie."""
    parts = [f"`{prefix.rstrip('.')}` ({possible(names)})" for prefix, names in found.inside]
    return f"a model lies under {either(parts, 'and')}"


def require_one(found: Recognition, where: str) -> None:
    """Raise MappingError unless family and layout are known without doubt."""
    if not found.candidates:
        raise HomelessError(
            "the model type is not known",
            where=where,
            why=lying(found) if found.inside else _strange(found),
            hint=f"{root_hint(found)}; without mapping, hf, dcp and torch keep the names",
        )
    if found.model_type is None or found.layout is None:
        raise MappingError(
            "several model types or layouts are possible",
            where=where,
            why=_possible(found),
            hint=_decided(found),
        )


def root_hint(found: Recognition) -> str:
    """Return what may make a model known that is not."""
    if found.inside:
        return f"`--root {found.inside[0][0].rstrip('.')}` says where the model lies"
    if found.asked:
        return "`--root PREFIX` says where the model lies"
    return "`--model-type NAME` says which it is, `--root PREFIX` where it lies"


def _decided(found: Recognition) -> str:
    """Return what says which family it is; a configuration states the sizes of axes as well."""
    if found.config or found.params:
        return "`--model-type` says which; `--assets DIR` takes another config.json"
    return (
        "`--assets DIR`, with the config.json of the model that was trained, decides it and states"
        " the sizes of axes; `--model-type` says which"
    )


def _strange(found: Recognition) -> str:
    """Say why no family fits."""
    if found.asked:
        return f"no layout of `{found.asked}` has these keys"
    stated = (found.config or {}).get("model_type")
    signs = (sign for family in families.families().values() for sign in family.config_signs)
    known = [str(sign["model_type"]) for sign in signs if "model_type" in sign]
    if not isinstance(stated, str) or stated in known:
        return "no known family has these keys"
    close = nearest(stated, known)
    near = f" (near: `{close}`)" if close else ""
    return f"config.json says `model_type` `{stated}`, which no known family has{near}"


def _possible(found: Recognition) -> str:
    if len(found.evidence) <= ALTERNATIVES:
        return either(found.evidence, "and")
    described = "tensors and configuration" if found.config or found.params else "the tensors"
    return f"{described} fit {listed(found.candidates, SHOWN_CANDIDATES)}"
