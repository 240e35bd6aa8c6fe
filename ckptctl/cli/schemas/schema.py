"""What ``ckptctl schema --json`` prints."""

from __future__ import annotations

from ckptctl.cli.schemas.words import array, document, record, string

SCHEMA = {
    "name": string("what `ckptctl schema` is asked for: a command, or `error`"),
    "document": string("what the field `schema` of such a document says"),
    "id": string("the `$id` of the schema"),
}
DOCUMENT = document(
    "schema",
    {"schemas": array(record(SCHEMA), "by name")},
    "`ckptctl schema NAME` prints a JSON Schema instead, with `--json` and without.",
)
