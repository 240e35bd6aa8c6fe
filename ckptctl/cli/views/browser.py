"""Browser of one or two checkpoints.

The list shows the entries of one module, as in ncdu. The panel next to it shows the highlighted
entry. Only the index is read until the user asks for values, which a thread reads.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import ClassVar

from textual.app import App, ComposeResult
from textual.binding import Binding
from textual.containers import Horizontal, VerticalScroll
from textual.content import Content
from textual.screen import ModalScreen
from textual.widgets import Input, Static
from textual.worker import get_current_worker

from ckptctl.catalog import TensorEntry
from ckptctl.cli.listing import format_bar, format_histogram, shorten_dtype
from ckptctl.cli.views.entry_list import EntryList
from ckptctl.errors import CkptError
from ckptctl.units import escape_unprintable, format_bytes, format_count, pluralize
from ckptctl.verbs.browsing import (
    MAX_SHOWN_EXTENTS,
    BrowsedCheckpoint,
    Node,
    Order,
    build_tree,
    find_tensors,
    locate_extents,
    measure,
)
from ckptctl.verbs.statistics import Statistics, UnneededResultError

KEYS = (
    ("up, down, k, j", "highlight another entry"),
    ("page up, page down, b, space", "move by a page"),
    ("home, end, g, G", "first and last entry"),
    ("right, enter, l", "open a module, or locate the bytes of a tensor"),
    ("left, backspace, h", "close the module"),
    ("s", "sort by size or by name"),
    ("/", "search for tensors"),
    ("n, N", "next and previous match"),
    ("v", "read a tensor and show statistics of its values"),
    ("escape", "stop reading"),
    ("?", "show these keys"),
    ("q", "quit"),
)
LETTERS = "AB"
MARKS = {"": " ", "=": "=", "!": "≠", "<": "A", ">": "B"}
BAR_CELLS = 8
MIN_PANEL_COLUMNS = 30
"""Width from which the panel is shown. In a narrow one, the scroll bar would appear and disappear
in turns."""
READS = 2
"""Number of times that statistics read a tensor."""
Line = tuple[str, str]
"""Text and style of a line of the panel."""


class Help(ModalScreen[None]):
    """List of the keys."""

    BINDINGS: ClassVar = [Binding("escape,q,question_mark,enter", "dismiss", "Close")]

    def compose(self) -> ComposeResult:
        """Show one line for each key."""
        width = max(len(keys) for keys, _ in KEYS)
        text = "\n".join(f"{keys:{width}}  {meaning}" for keys, meaning in KEYS)
        yield Static(text, id="keys", markup=False)


class Browser(App[None]):
    """Browser of one or two checkpoints."""

    CSS = """
    Screen { layout: vertical; }
    #head, #place, #status { height: 1; padding: 0 1; }
    #head { text-style: bold; }
    #place, #status { color: $text-muted; }
    EntryList { width: 3fr; }
    #panel { width: 2fr; border-left: solid $surface-lighten-2; padding: 0 1; }
    .narrow #panel { display: none; }
    #details { height: auto; }
    #search { height: 1; border: none; padding: 0 1; display: none; }
    #search.shown { display: block; }
    Help { align: center middle; }
    #keys { width: auto; height: auto; padding: 1 2; background: $surface; border: round $primary; }
    """
    ENABLE_COMMAND_PALETTE = False
    BINDINGS: ClassVar = [
        Binding("right,enter,l", "open", "Open"),
        Binding("left,backspace,h", "close", "Back"),
        Binding("s", "sort", "Sort"),
        Binding("slash", "search", "Search"),
        Binding("n", "match(1)", "Next"),
        Binding("N", "match(-1)", "Previous"),
        Binding("v", "values", "Values"),
        Binding("escape", "stop", "Stop", show=False),
        Binding("question_mark", "help", "Keys"),
        Binding("q", "quit", "Quit"),
    ]

    def __init__(self, checkpoints: Sequence[BrowsedCheckpoint]) -> None:
        """Create a browser of one checkpoint, or of two to compare."""
        super().__init__()
        self.HORIZONTAL_BREAKPOINTS = [(0, "narrow"), (MIN_PANEL_COLUMNS, "wide")]
        self.checkpoints = checkpoints
        self.root_node = self.module = build_tree(checkpoints)
        self.order: Order = "size"
        self.largest_bytes = 1
        self.matches: list[Node] = []
        self.match_position = -1
        self.statistics: dict[tuple[int, str], Statistics | CkptError | None] = {}
        self.extents: dict[tuple[int, str], list[str]] = {}
        self.status = ""
        self.entry_list = EntryList(self._render_node)

    def compose(self) -> ComposeResult:
        """Lay out the head, the list, the panel and the status line."""
        yield Static(id="head", markup=False)
        yield Static(id="place", markup=False)
        with Horizontal():
            yield self.entry_list
            with VerticalScroll(id="panel", can_focus=False):
                yield Static(id="details", markup=False)
        yield Input(id="search", placeholder="part of a name")
        yield Static(id="status", markup=False)

    def on_mount(self) -> None:
        """Show the top level."""
        self.query_one("#head", Static).update(" · ".join(self._list_headline()))
        self._show_module(self.root_node)
        self.entry_list.focus()

    # ------------------------------------------------------------------------------ actions

    def action_open(self) -> None:
        """Open the highlighted module, or locate the bytes of the highlighted tensor."""
        node = self.entry_list.highlighted
        if node is None:
            return
        if node.children:
            self._show_module(node)
        else:
            self.run_worker(lambda: self._locate(node), thread=True, exclusive=True)

    def action_close(self) -> None:
        """Show the module that contains the current one."""
        if self.module.parent is not None:
            self._show_module(self.module.parent, self.module)

    def action_sort(self) -> None:
        """Sort by name instead of size, or the other way."""
        self.order = "name" if self.order == "size" else "size"
        self._show_module(self.module, self.entry_list.highlighted)

    def action_search(self) -> None:
        """Ask for a part of a name."""
        field = self.query_one("#search", Input)
        field.value = ""
        field.add_class("shown")
        field.focus()

    def on_input_submitted(self, event: Input.Submitted) -> None:
        """Go to the first tensor whose name contains the text."""
        self._hide_search()
        self.matches = find_tensors(self.root_node, event.value) if event.value else []
        self.match_position = -1
        if self.matches:
            self.action_match(1)
        else:
            self._set_status(f"no tensor contains `{event.value}`" if event.value else "")

    def action_match(self, direction: int) -> None:
        """Go to the next or the previous match of the search."""
        if not self.matches:
            self._set_status("no search: press / first")
            return
        start = 0 if self.match_position < 0 and direction < 0 else self.match_position
        self.match_position = (start + direction) % len(self.matches)
        node = self.matches[self.match_position]
        self._show_module(node.parent or self.root_node, node)
        self._set_status(f"match {self.match_position + 1:,} of {len(self.matches):,}")

    def action_values(self) -> None:
        """Read the highlighted tensor in a thread, and show statistics."""
        node = self.entry_list.highlighted
        if node is None or not node.is_tensor:
            self._set_status("highlight a tensor to read its values")
            return
        self.run_worker(lambda: self._measure(node), thread=True, exclusive=True)

    def action_stop(self) -> None:
        """Stop the search or the reading of values."""
        self._hide_search()
        self.workers.cancel_all()
        self._set_status("")

    def action_help(self) -> None:
        """Show the keys."""
        self.push_screen(Help())

    def on_entry_list_highlighted(self) -> None:
        """Show the details of the highlighted entry."""
        self._show_details()

    # ------------------------------------------------------------------------------- values

    def _measure(self, node: Node) -> None:
        """Read the tensor of each checkpoint. Runs in a thread."""
        worker = get_current_worker()
        for side, entry in enumerate(node.entries):
            if entry is None or (side, entry.name) in self.statistics:
                continue
            total, read = max(1, READS * entry.nbytes), 0
            percent = -1

            def advance(nbytes: int, total: int = total) -> None:
                nonlocal read, percent
                if worker.is_cancelled:
                    raise UnneededResultError
                read += nbytes
                if 100 * read // total > percent:
                    percent = 100 * read // total
                    self.call_from_thread(self._set_status, f"reading values: {percent} %")

            result: Statistics | CkptError | None
            try:
                result = measure(self.checkpoints[side], entry, advance)
            except UnneededResultError:
                return
            except CkptError as error:
                result = error
            self.statistics[side, entry.name] = result
        if not worker.is_cancelled:
            self.call_from_thread(self._finish_reading)

    def _finish_reading(self, status: str = "") -> None:
        self._set_status(status)
        self._show_details()

    def _locate(self, node: Node) -> None:
        """Locate the bytes of a tensor, which may read headers in its files. Runs in a thread."""
        status = ""
        for side, entry in enumerate(node.entries):
            if entry is None or entry.unsupported:
                continue
            try:
                extents = locate_extents(self.checkpoints[side], entry)
            except CkptError as error:
                status = error.what
                continue
            self.extents[side, entry.name] = [
                f"{extent.file} bytes {extent.offset:,}-{extent.offset + extent.nbytes:,}"
                for extent in extents[:MAX_SHOWN_EXTENTS]
            ]
        if not get_current_worker().is_cancelled:
            self.call_from_thread(self._finish_reading, status)

    # ------------------------------------------------------------------------------ display

    def _list_headline(self) -> Iterator[str]:
        for letter, checkpoint in zip(LETTERS, self.checkpoints, strict=False):
            inspection = checkpoint.inspection
            side = f"{letter}: " if len(self.checkpoints) > 1 else ""
            yield side + escape_unprintable(inspection.path)
            yield inspection.format
            yield inspection.model_type or "unknown model type"
            yield f"{format_count(inspection.parameters)} params"
            yield format_bytes(inspection.nbytes)
            yield "structure complete" if inspection.complete is None else str(inspection.verdict)

    def _show_module(self, module: Node, highlighted: Node | None = None) -> None:
        self.module = module
        place = escape_unprintable(module.full_name) or "/"
        sizes = " | ".join(
            f"{format_bytes(nbytes)}, {pluralize(count, 'tensor')}"
            for nbytes, count in zip(module.nbytes, module.tensors, strict=True)
        )
        self.query_one("#place", Static).update(f"{place}   {sizes}   by {self.order}")
        sizes_of_children = (max(child.nbytes) for child in module.children.values())
        self.largest_bytes = max(1, max(sizes_of_children, default=0))
        self.entry_list.show_nodes(module.sort_children(self.order), highlighted)
        self._set_status("")

    def _set_status(self, text: str) -> None:
        self.status = text
        shown = escape_unprintable(text) or "? keys  / search  v values  s sort  q quit"
        self.query_one("#status", Static).update(shown)

    def _hide_search(self) -> None:
        self.query_one("#search", Input).remove_class("shown")
        self.entry_list.focus()

    def _render_node(self, node: Node, width: int) -> list[tuple[str, str]]:
        """Render an entry: sizes, a bar, the comparison, and the name with dtype and shape."""
        from rich.cells import cell_len, set_cell_size

        sizes = [f"{format_bytes(nbytes):>10} " for nbytes in node.nbytes]
        bar = format_bar(max(node.nbytes), self.largest_bytes, BAR_CELLS)
        parts = [("".join(sizes), ""), (f"{bar:{BAR_CELLS}} ", "cyan")]
        if node.mark:
            parts.append((f"{MARKS[node.mark]} ", "dim" if node.mark == "=" else "bold yellow"))
        name = escape_unprintable(node.name) + ("." if node.children else "")
        about = self._describe_briefly(node)
        room = width - sum(cell_len(text) for text, _ in parts) - cell_len(about) - 2
        if cell_len(name) > max(room, 8):
            name = set_cell_size(name, max(room, 8) - 1) + "…"
        parts += [(name, "bold" if node.children else ""), (f"  {about}", "dim")]
        return parts

    def _describe_briefly(self, node: Node) -> str:
        entry = next((entry for entry in node.entries if entry), None)
        if node.children or entry is None:
            return pluralize(max(node.tensors), "tensor")
        return f"{shorten_dtype(entry.dtype)} {list(entry.shape)}"

    def _show_details(self) -> None:
        node = self.entry_list.highlighted
        lines = self._list_details(node) if node else ()
        parts = [(escape_unprintable(line) + "\n", style) for line, style in lines]
        self.query_one("#details", Static).update(Content.assemble(*parts))
        self.query_one("#panel", VerticalScroll).scroll_home(animate=False)

    def _list_details(self, node: Node) -> Iterator[Line]:
        yield node.full_name, "bold"
        for side, entry in enumerate(node.entries):
            if len(node.entries) > 1:
                yield "", ""
                yield f"in {LETTERS[side]}", "underline"
            if entry is not None:
                yield from self._list_tensor(side, entry)
            elif node.tensors[side]:
                size = format_bytes(node.nbytes[side])
                yield f"{pluralize(node.tensors[side], 'tensor')}, {size}", ""
            else:
                yield "absent", "yellow"
        if node.mark == "=":
            yield "", ""
            yield "same dtypes and shapes; values not compared", "dim"

    def _list_tensor(self, side: int, entry: TensorEntry) -> Iterator[Line]:
        yield f"dtype   {entry.dtype}", ""
        yield f"shape   {list(entry.shape)}", ""
        yield f"bytes   {entry.nbytes:,}", ""
        if entry.alias_of:
            yield f"shares the memory of {entry.alias_of}", ""
        if entry.unsupported:
            yield f"cannot be read: {entry.unsupported}", "yellow"
        count = len(entry.extents)
        located = self.extents.get((side, entry.name))
        yield "", ""
        yield f"stored in {pluralize(count, 'box', 'boxes')}", "underline"
        for number, extent in enumerate(entry.extents[:MAX_SHOWN_EXTENTS]):
            ranges = zip(extent.box.offsets, extent.box.sizes, strict=True)
            box = ", ".join(f"{start}:{start + size}" for start, size in ranges)
            yield f"[{box}]", ""
            is_known = located is not None and number < len(located)
            yield "  " + (located[number] if located and is_known else extent.file), "dim"
        if count > MAX_SHOWN_EXTENTS:
            yield f"and {count - MAX_SHOWN_EXTENTS:,} more", "dim"
        if located is None and count:
            yield "enter: byte ranges   v: values", "dim"
        if (side, entry.name) in self.statistics:
            yield "", ""
            yield "values", "underline"
            yield from _list_statistics(self.statistics[side, entry.name])


def _list_statistics(result: Statistics | CkptError | None) -> Iterator[Line]:
    if result is None:
        yield "the dtype is not numeric", "dim"
        return
    if isinstance(result, CkptError):
        yield result.what, "yellow"
        return
    yield f"count   {result.count:,}", ""
    for name, value in (
        ("min", result.minimum),
        ("max", result.maximum),
        ("mean", result.mean),
        ("std", result.std),
    ):
        yield f"{name:7} " + ("-" if value is None else f"{value:.6g}"), ""
    style = "yellow" if result.nan or result.inf else ""
    yield f"NaN     {result.nan:,}", style
    yield f"Inf     {result.inf:,}", style
    if result.histogram:
        yield format_histogram(result.histogram), "cyan"
        yield "from min to max", "dim"


def run_browser(checkpoints: Sequence[BrowsedCheckpoint]) -> None:
    """Run the browser until the user quits."""
    Browser(checkpoints).run()
