"""What ``ckptctl formats --json`` prints."""

from __future__ import annotations

from ckptctl.cli.schemas.words import (
    array,
    boolean,
    document,
    record,
    string,
)

DOCUMENT = document(
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
