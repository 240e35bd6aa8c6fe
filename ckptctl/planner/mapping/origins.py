"""What each logical tensor is read from, and what is left out: ties and tensors that repeat."""

from __future__ import annotations

from ckptctl.planner.families.tables import Tensor
from ckptctl.planner.layouts import Layout, Tie
from ckptctl.planner.mapping.source import Origin, Source


class Origins:
    """Where the tensors of a target come from.

    Args:
        source: What is there.
        target: The layout to produce.
        untie: Keep both of two tied tensors, whatever they hold.
        partial: A part of the model was chosen: nothing else is made.

    Attributes:
        dropped: Source keys that are left out, and why.
        must_equal: Pairs of source keys, kept and dropped, whose bytes have to be the same.
    """

    def __init__(self, source: Source, target: Layout, *, untie: bool, partial: bool) -> None:
        self._source, self._target = source, target
        self._untie, self._partial = untie, partial
        self.dropped: dict[str, str] = {}
        self.must_equal: list[tuple[str, str]] = []

    def of(self, tensor: Tensor, values: tuple[int, ...]) -> Origin | None:
        """Return the keys that a logical tensor is read from and what is stored there.

        Args:
            tensor: The logical tensor.
            values: Its indices.

        Returns:
            None where it is not there, or the target does without it.
        """
        keys = self._source.matched.keys.get((tensor.name, values))
        for tie in self._source.ties:
            if tensor.name == tie.of and keys is None:
                alone = self._partial and self._untie
                return None if alone else self._source.found(tie.tensor)
            if tensor.name == tie.tensor:
                if self._partial and not keys and self._source.layout.name in tie.stored_in:
                    return None
                return self._of_tied(tie, (keys or {}).get(()))
        return (tensor, keys) if keys else None

    def _of_tied(self, tie: Tie, key: str | None) -> Origin | None:
        """Return what the second of two tied tensors is read from; None: the target omits it."""
        kept = self._source.found(tie.of)
        if self._untie:
            return self._source.found(tie.tensor) or kept
        if kept and key:
            self.must_equal.append((kept[1][()], key))
            self.dropped[key] = f"tied: the same as `{kept[1][()]}`"
        if self._target.name not in tie.stored_in:
            return None
        return kept or self._source.found(tie.tensor)

    def drop(self) -> None:
        """Note the keys without information, and what those that repeat a tensor have to equal."""
        for key, rule in self._source.matched.dropped.items():
            self.dropped[key] = rule.reason
            kept = self._source.found(rule.same_as)
            kept = kept or self._source.found(self._tied_to(rule.same_as))
            if kept:
                self.must_equal.append((kept[1][()], key))

    def _tied_to(self, name: str) -> str:
        return next((tie.of for tie in self._source.ties if tie.tensor == name), "")
