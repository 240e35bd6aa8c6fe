"""What ``ckptctl map --json`` prints."""

from __future__ import annotations

from ckptctl.cli.schemas.words import array, boolean, document, integer, mapping, record, string

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
DOCUMENT = document(
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
