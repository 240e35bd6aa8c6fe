"""What ``ckptctl models --json`` prints."""

from __future__ import annotations

from ckptctl.cli.schemas.words import array, boolean, document, integer, mapping, record, string

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
DOCUMENT = document(
    "models",
    {"models": array(record(MODEL), "by name")},
    "The fields from `tables` on are there where a family was named.",
)
