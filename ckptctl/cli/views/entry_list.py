"""List that renders only its visible lines, however long it is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar

from textual.binding import Binding
from textual.geometry import Region, Size
from textual.message import Message
from textual.scroll_view import ScrollView
from textual.strip import Strip

from ckptctl.verbs.browsing import Node

RenderNode = Callable[[Node, int], list[tuple[str, str]]]
"""Function that renders a node in a number of cells, as pairs of text and style."""


class EntryList(ScrollView, can_focus=True):
    """Entries of one module, one of which is highlighted."""

    BINDINGS: ClassVar = [
        Binding("down,j", "move(1)", "Down", show=False),
        Binding("up,k", "move(-1)", "Up", show=False),
        Binding("pagedown,space,ctrl+f", "page(1)", "Page down", show=False),
        Binding("pageup,b,ctrl+b", "page(-1)", "Page up", show=False),
        Binding("home,g", "jump(0)", "First", show=False),
        Binding("end,G", "jump(-1)", "Last", show=False),
    ]

    class Highlighted(Message):
        """Message that another entry is highlighted."""

    def __init__(self, render: RenderNode) -> None:
        """Create an empty list, whose entries *render* draws."""
        super().__init__()
        self._render_node = render
        self.nodes: Sequence[Node] = ()
        self.cursor = 0

    @property
    def highlighted(self) -> Node | None:
        """Highlighted entry, or None if the list is empty."""
        return self.nodes[self.cursor] if self.nodes else None

    def show_nodes(self, nodes: Sequence[Node], highlighted: Node | None = None) -> None:
        """Show *nodes*, and highlight one of them, or the first."""
        self.nodes = nodes
        positions = (n for n, node in enumerate(nodes) if node is highlighted)
        self.cursor = next(positions, 0)
        self.virtual_size = Size(self.size.width, len(nodes))
        self._show_cursor()

    def action_move(self, distance: int) -> None:
        """Highlight the entry *distance* lines below."""
        self._set_cursor(self.cursor + distance)

    def action_page(self, direction: int) -> None:
        """Highlight the entry a page below or above."""
        self._set_cursor(self.cursor + direction * max(1, self.size.height - 1))

    def action_jump(self, position: int) -> None:
        """Highlight the first or the last entry."""
        self._set_cursor(position if position >= 0 else len(self.nodes) - 1)

    def on_resize(self) -> None:
        """Keep the highlighted entry visible."""
        self.virtual_size = Size(self.size.width, len(self.nodes))
        self._show_cursor()

    def _set_cursor(self, position: int) -> None:
        self.cursor = max(0, min(position, len(self.nodes) - 1))
        self._show_cursor()

    def _show_cursor(self) -> None:
        region = Region(0, self.cursor, max(1, self.size.width), 1)
        self.scroll_to_region(region, animate=False, force=True)
        self.refresh()
        self.post_message(self.Highlighted())

    def render_line(self, y: int) -> Strip:
        """Render the line at *y* of the visible part."""
        from rich.segment import Segment
        from rich.style import Style

        position = self.scroll_offset.y + y
        width = self.size.width
        base = self.rich_style
        if position >= len(self.nodes):
            return Strip.blank(width, base)
        if position == self.cursor:
            base += Style(reverse=True)
        parts = self._render_node(self.nodes[position], width)
        segments = [Segment(text, base + Style.parse(style)) for text, style in parts]
        return Strip(segments).adjust_cell_length(width, base)
