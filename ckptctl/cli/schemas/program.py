"""What commands about the program itself print with ``--json``, and what every error does."""

from __future__ import annotations

from ckptctl.cli.schemas.words import array, boolean, document, integer, mapping, record, string

FORMATS = document(
    "formats",
    {
        "formats": array(
            record(
                {
                    "name": string("the [format](formats.md)"),
                    "title": string("what it is, for people"),
                    "package": string(
                        "the installed package that adds it; null: it is built in", null=True
                    ),
                    "layout": string("the layout of its tensors; null: any", null=True),
                    "other_layouts": boolean("whether they may have another one than that"),
                    "adapters": boolean("whether it holds adapters and no models"),
                    "recognised": string(
                        "what it is recognised by, for people; null: its package does not say",
                        null=True,
                    ),
                    "wholeness": string(
                        "what tells a whole one from one with missing parts, for people", null=True
                    ),
                    "proof": string(
                        "other people's programs that it was compared with, and the tests that do "
                        "so",
                        null=True,
                    ),
                    "choices": array(
                        record(
                            {
                                "option": string("as on the command line"),
                                "meaning": string("for people"),
                            }
                        ),
                        "what can be chosen when it is read",
                    ),
                    "written": record(
                        {
                            "directory": boolean("whether it is a directory; else it is one file"),
                            "leaves": boolean("whether leaves that are not tensors are kept"),
                            "ties": string("what becomes of tensors that share memory, for people"),
                            "cut_by": array(string(), "options that say how it is cut into files"),
                            "side_files": boolean(
                                "whether configuration, tokenizer and the like are carried"
                            ),
                            "lacks": array(string(), "dtypes that it cannot hold"),
                        },
                        "what a written one is like; null: it is only read",
                        null=True,
                    ),
                }
            ),
            "by name, those of other packages last; only one where one was named",
        ),
    },
)
ROW = {
    "tensor": string("logical name"),
    "key": string("template of the stored name"),
    "axes": string("order of its axes, in einops notation"),
    "part": integer("its place in a concatenated tensor", null=True),
    "parts": array(string(), "what that is made of"),
    "along": integer("the dimension of the concatenation"),
    "spread": array(string(), "axes with a stored tensor for each entry"),
    "split": string("the axis that model-parallel ranks divide", null=True),
    "optional": boolean("whether a model may do without it"),
    "variant": string("the kind of layers that has it", null=True),
}
TABLE = {
    "name": string("the layout"),
    "same_as": string("an earlier layout that keeps every tensor alike", null=True),
    "rows": array(record(ROW), "one per logical tensor; empty with `same_as`"),
    "own_keys": array(string(), "up to three templates that no other family has"),
    "dropped": mapping(string("why nothing is lost"), "templates of tensors without information"),
}
TIE = {
    "tensor": string("the one that is left out"),
    "of": string("the one that is kept"),
    "stored_in": array(string(), "layouts that store both all the same"),
}
SIZE = {
    "axis": string("its name in the tables"),
    "config": string("in `config.json`", null=True),
    "params": string("in `params.json`", null=True),
}
LAYOUT = {
    "name": string("as on the command line"),
    "proof": string("what its logits were compared with; null: not proven", null=True),
}
MODEL = {
    "name": string("the [model type](models.md)"),
    "title": string("for people"),
    "aliases": array(string(), "other names that `--model-type` takes"),
    "architecture": string("class name in `config.json`"),
    "refines": string("the family that this one is a special case of", null=True),
    "recognised": array(string(), "how a configuration shows it, in words"),
    "layouts": array(record(LAYOUT), "of two that are alike the first one is preferred"),
    "tables": array(record(TABLE), "one per layout", optional=True),
    "ties": array(record(TIE), "tensors that may be one", optional=True),
    "tied": boolean("whether they are one unless a configuration says otherwise", optional=True),
    "variants": array(
        array(string()), "kinds of layers, of which each layer is exactly one", optional=True
    ),
    "sizes": array(record(SIZE), "what the sizes of axes are called", optional=True),
    "constants": mapping(integer(), "sizes that never vary", optional=True),
    "composite": mapping(array(string()), "axes that are made of others", optional=True),
    "pinned": array(string(), "tensors that are never cast", optional=True),
}
MODELS = document(
    "models",
    {"models": array(record(MODEL), "by name")},
    "The fields from `tables` on are there where a family was named.",
)
SLICE = {
    "formula": string("`:`, `h*e : h*e + k*e`, ..."),
    "start": integer("null: not known", null=True),
    "stop": integer("null: not known", null=True),
}
PIECE = {
    "key": string("a source tensor; `{x}` in it: one for each `x`"),
    "logical": string("what it is in the model: `q`, `w1`, ..."),
    "asked": boolean("whether it is the key that was asked for"),
    "source_axes": string("order of its axes"),
    "target_axes": string("the same in the target"),
    "reordered": boolean("whether they differ in more than grouping"),
    "source_slice": array(record(SLICE), "for each dimension, which part of the source is taken"),
    "target_slice": array(record(SLICE), "which part of the target it fills"),
}
TARGET = {
    "key": string("its name; `{x}` in it: there is one for each `x`"),
    "shape": array(string(), "as formulas"),
    "numbers": array(integer(null=True), "the same; null: not known"),
    "each": mapping(integer("how many there are", null=True), "axes that are left in the key"),
    "variant": string(
        "the kind of layers in which the key goes there, where that matters", null=True
    ),
    "pieces": array(record(PIECE), "what the tensor is made of"),
}
MAP = document(
    "map",
    {
        "key": string("as asked"),
        "template": string("the key template that it matches"),
        "model_type": string("[model type](models.md)"),
        "from_layout": string("the layout of the key"),
        "to_layout": string("where it goes to"),
        "sizes": mapping(integer(), "what is known, by axis"),
        "tied": boolean("whether tied tensors are taken for one"),
        "targets": array(
            record(TARGET), "the tensors that the key is, or is a part of; none: it is dropped"
        ),
        "dropped": string("why the key is left out", null=True),
        "notes": array(string(), "what else one should know"),
    },
    "Sizes are given twice: as formulas in axis names, and as numbers where all sizes in them are "
    "known.",
)
LISTED_SCHEMA = {
    "name": string("what `ckptctl schema` is asked for: a command, or `error`"),
    "document": string("what the field `schema` of such a document says"),
    "id": string("the `$id` of the schema"),
}
SCHEMA = document(
    "schema",
    {"schemas": array(record(LISTED_SCHEMA), "by name")},
    "`ckptctl schema NAME` prints a JSON Schema instead, with `--json` and without.",
)
CHECK = {
    "group": string(
        "what it belongs to: `installation`, `plug-ins`, `file system`, `surroundings`"
    ),
    "name": string("what was looked at"),
    "status": string(
        "`ok`; `warn`: slower, or something cannot be done; `fail`: broken",
        among=("ok", "warn", "fail"),
    ),
    "found": string("what there is, for people"),
    "hint": string("what to do about it", null=True),
}
DOCTOR = document(
    "doctor",
    {
        "directory": string("as it was named"),
        "healthy": boolean("whether nothing is broken; the exit code is 0, else 1"),
        "warnings": integer("how many there are"),
        "failures": integer("how many things are broken"),
        "checks": array(record(CHECK), "all that was looked at"),
    },
)
ERROR = {
    "code": string("[error code](exit-codes.md)"),
    "exit_code": integer("what the program ends with"),
    "message": string("what went wrong"),
    "where": string("the file, tensor or option concerned", null=True),
    "why": string("the evidence", null=True),
    "hint": string("the next step", null=True),
}
ERROR_DOCUMENT = document(
    "error",
    {
        "error": record(
            {**ERROR, "traceback": string("with `--debug` only", optional=True)},
        )
    },
    "On stderr; stdout is empty, unless the exit code is 7, or 6 of `prune` for want of `--yes`.",
)
